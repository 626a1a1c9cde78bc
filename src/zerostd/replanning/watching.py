"""Observations of steps: how long they take and where, how often they clip, and what groups keep."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from zerostd.engine.runtime import Runtime
from zerostd.measuring.model import untried_profile
from zerostd.monitoring.events import LoopPhase
from zerostd.optimizers.updater import NUM_FACTORS
from zerostd.parameters.blueprints import ROOT
from zerostd.planning import ModelProfile, Plan
from zerostd.planning.solution import ObservedStep
from zerostd.policy import Tier
from zerostd.tiers import Transfer

NUM_WATCHED = 3  # steps that rates and seconds are taken from
EVERY = 10  # steps between two looks at memory, at clipping and at how long steps take
SLOWER = 1.3  # times as long as before: worth looking for another plan
WORSE = 1.05  # times as long as under the plan before: that one comes back
NUM_JUDGED = 5  # steps by which a plan is judged
NUM_USUAL = 10  # steps in a row that were clipped, or were not: so will the next ones be


@dataclass(frozen=True)
class RankReport:
    """Memory and step times of one rank when they are checked."""

    room: Mapping[Tier, int]  # bytes of a tier that are ours or free
    seen: ObservedStep
    why_short: str = ""  # the device's allocator had to search for memory, ran out of it or passed the budget
    is_slow: bool = False
    is_worse: bool = False  # steps take longer than under the plan before
    why_grown: str = ""  # a batch needs more room than the plan has


def worst_of(reports: Sequence[RankReport]) -> RankReport:
    """Return the least room, the slowest steps and the largest activations of all ranks."""
    slowest = max((report.seen for report in reports), key=lambda seen: seen.step_s)
    profiles = [report.seen.profile for report in reports if report.seen.profile is not None]
    largest = max(profiles, key=lambda profile: sum(group.kept_bytes for group in profile.groups), default=None)
    return RankReport(
        {tier: min(report.room[tier] for report in reports) for tier in reports[0].room},
        replace(slowest, profile=largest, late_bytes=max(report.seen.late_bytes for report in reports)),
        max((report.why_short for report in reports), key=len),
        any(report.is_slow for report in reports),
        any(report.is_worse for report in reports),
        max((report.why_grown for report in reports), key=len),
    )


class StepWatch:
    """Watches a few steps, from a given one on."""

    def __init__(self, runtime: Runtime, step: int, reason: str) -> None:
        self.reason = reason  # they are watched
        self._runtime = runtime
        self._first = step
        runtime.finish_updates()
        self._before = self._busy()
        runtime.gatherer.timer.start()

    def is_over(self, step: int) -> bool:
        """Return whether enough steps were seen when `step` begins."""
        is_over = step >= self._first + NUM_WATCHED
        if not is_over:
            self._runtime.gatherer.timer.cut()
        return is_over

    def end(self, activation_bytes: int | None) -> ObservedStep:
        """Return the times of the steps."""
        spent = self._runtime.gatherer.timer.stop()
        self._runtime.finish_updates()
        num_passes = self._runtime.backward.passes.num_before
        busy = {name: (seconds - self._before.get(name, 0.0)) / NUM_WATCHED for name, seconds in self._busy().items()}
        return ObservedStep(
            step_s=median(sum(step.values()) for step in spent),
            forward_s=median(step[LoopPhase.FORWARD] + step[LoopPhase.OUTSIDE] for step in spent) / num_passes,
            backward_s=median(step[LoopPhase.BACKWARD] for step in spent) / num_passes,
            num_passes=num_passes,
            busy=busy,
            activation_bytes=activation_bytes,
        )

    def _busy(self) -> dict[str, float]:
        optimizer = self._runtime.optimizer
        return {} if optimizer is None or optimizer.updater.offload is None else optimizer.updater.offload.busy()


class Pace:
    """How long steps take, and when to look for a faster plan again. Each round of trials doubles the time to the next,
    so that plans do not alternate."""

    def __init__(self, step: int) -> None:
        self.step = step  # that has begun
        self.next_search = EVERY  # the first step at which slow steps are searched for again
        self.num_rounds = 0  # of trials
        self.usual_s: float | None = None  # of a step under this plan
        self.replaced: tuple[Plan, float] | None = None  # the plan before the last trials, and its seconds
        self._begun = time.perf_counter()  # that step
        self._times: list[float] = []  # seconds of the steps since the last check

    def begin(self, step: int) -> None:
        """Note that a step begins."""
        now = time.perf_counter()
        self._times.append(now - self._begun)
        self.step = step
        self._begun = now

    def begin_round(self) -> None:
        """Note that trials begin."""
        self.num_rounds += 1
        self.next_search = self.step + 2**self.num_rounds * EVERY

    def restart(self) -> None:
        """Begin to watch another plan: earlier steps do not count for it."""
        self.usual_s = None
        self._times = []
        self._begun = time.perf_counter()

    def clear(self) -> None:
        """Note that a check was made: a plan that was not slower stays."""
        if len(self._times) >= NUM_JUDGED:
            self.replaced = None
        self._times = []

    @property
    def median_s(self) -> float:
        """Seconds of a step since the last check."""
        return median(self._times) if self._times else 0.0

    def is_slower(self) -> bool:
        """Return whether steps take longer than they did under this plan at first."""
        if self.usual_s is None:
            self.usual_s = self.median_s
            return False
        return self.step >= self.next_search and self.median_s > SLOWER * self.usual_s

    @property
    def is_worse(self) -> bool:
        """Whether steps take longer than under the plan that the last trials replaced."""
        is_judged = self.replaced is not None and len(self._times) >= NUM_JUDGED
        return is_judged and self.replaced is not None and self.median_s > WORSE * self.replaced[1]


class ClipCounter:
    """Knows which of the last steps were clipped, without waiting for the device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._unread: deque[tuple[torch.Tensor, Transfer]] = deque()  # factors that may not have arrived
        self._clipped: deque[bool] = deque(maxlen=NUM_USUAL)
        self.reason = ""  # why another plan may be better

    def note(self) -> None:
        """Note that a step was taken."""
        optimizer = self._runtime.optimizer
        offload = None if optimizer is None else optimizer.updater.offload
        if offload is not None and offload.last_factor is not None:
            self._unread.append(offload.last_factor)
            offload.last_factor = None
        while self._unread and self._unread[0][1].has_arrived():
            self._clipped.append(self._unread.popleft()[0].item() < 1.0)
        while len(self._unread) >= NUM_FACTORS - 1:
            self._unread.popleft()  # its memory is used again

    @property
    def are_usual(self) -> bool:
        """Whether all of the last steps were clipped."""
        return len(self._clipped) == NUM_USUAL and all(self._clipped)

    def has_changed(self, may_speculate: bool, *, speculates: bool) -> bool:
        """Return whether speculation stopped being useful, or would be useful again."""
        if not may_speculate or len(self._clipped) < NUM_USUAL:
            return False
        if speculates and all(self._clipped):
            self.reason = f"the last {NUM_USUAL} steps were clipped"
            return True
        if not speculates and self.reason and not any(self._clipped):
            self.reason = f"the last {NUM_USUAL} steps were not clipped"
            return True
        return False


def counted_profile(runtime: Runtime) -> ModelProfile | None:
    """Return the model with the activations of each group in the last counted pass; None: nothing was counted."""
    counted = runtime.backward.activations.counter.groups
    if not counted:
        return None
    settings = runtime.settings
    profile = untried_profile(runtime.blueprints, settings.precision, settings.states)
    groups = []
    for group in profile.groups:
        size = counted.get(group.name)
        if size is not None:
            boundary = min(size.boundary or size.kept, size.kept)
            group = replace(group, kept_bytes=float(size.kept), boundary_bytes=float(boundary))
        groups.append(replace(group, stays=group.name == ROOT or size is None))
    return replace(profile, groups=tuple(groups), samples=1)
