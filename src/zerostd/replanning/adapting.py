"""Observes training and revises its plan where another one is better.

    after the first steps    the profile is fitted to what was observed, and the plan is made again, once
    afterwards               when steps take longer, others took memory, or the device ran out of it

Everything happens between two steps, before the next forward, when there are no gradients. All ranks observe the same
steps and obey one plan. A change must bring enough to be made, and each search for a faster plan doubles the time to
the next, also one that ends with nothing: a plan does not go back and forth.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch

from zerostd.engine.runtime import Runtime
from zerostd.errors import PrepareError
from zerostd.measuring import load_or_measure
from zerostd.measuring.identity import free_bytes
from zerostd.monitoring.events import LoopPhase
from zerostd.monitoring.texts import size_text
from zerostd.optimizers.updater import OffloadUpdater
from zerostd.parameters.observing import StepObserver
from zerostd.planning import MachineProfile, Plan
from zerostd.planning.request import MARGIN
from zerostd.planning.solution import ObservedStep
from zerostd.policy import Kind, Tier
from zerostd.preparing.proposing import PlanSearch
from zerostd.replanning.moving import move

NUM_FIRST = 2  # steps that are not looked at: the first ones are slower
NUM_WATCHED = 3  # steps that rates are taken from
EVERY = 10  # steps between two looks at memory and at how long steps take
SLOWER = 1.3  # times as long as before: worth looking for another plan
GAIN = 0.1  # of a step, and
LEAST_GAIN_S = 0.002  # seconds of a step, for a faster plan to be worth moving to
MORE_ROOM = 0.1  # of the device, for activations, when it ran out of memory

log = logging.getLogger("zerostd")


@dataclass(frozen=True)
class Revision:
    """A change of plan."""

    step: int  # after which it was made
    reason: str
    moved: tuple[str, ...]  # groups
    plan: Plan


@dataclass(frozen=True)
class RankReport:
    """Memory and step times of one rank when they are checked."""

    room: Mapping[Tier, int]  # bytes of a tier that are ours or free
    is_short: bool = False  # the device's allocator had to search for memory, or ran out of it
    is_slow: bool = False
    seen: ObservedStep | None = None


def adapt(runtime: Runtime) -> None:
    """Revise the plan of a model while it trains, if that is allowed: a plan with limits that is not frozen."""
    plan = runtime.settings.plan
    if plan is not None and plan.adaptive and plan.limits:
        runtime.observers.append(Adapter(runtime))


class Adapter(StepObserver):
    """Revises the plan of one prepared model."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.revisions: list[Revision] = []
        self._step = 0  # that has begun
        self._begun = time.perf_counter()  # that step
        self._times: list[float] = []  # seconds of the steps since the last check
        self._usual: float | None = None  # seconds of a step under this plan
        self._pause = 1  # checks between two searches for another plan; doubles each time
        self._next = {"room": 0, "speed": EVERY}  # the first step at which to search again
        self._watching: tuple[int, dict[str, float], str] | None = None  # first step, busy before, reason
        self._seen: ObservedStep | None = None  # when it was watched last
        self._num_short = _times_short(runtime.world.device)
        _forget_peak(runtime.world.device)

    def before_forward(self) -> None:
        """A forward of training begins."""
        passes = self.runtime.backward.passes
        if passes.num_steps == self._step:
            if passes.num_done == 0 and self.runtime.world.size == 1:  # the last forward may have come to nothing
                self._check(only_short=True)
            return
        now = time.perf_counter()
        self._times.append(now - self._begun)
        self._step = passes.num_steps
        self._begun = now
        if self._watching is not None:
            if self._step == self._watching[0] + NUM_WATCHED:
                self._end_watching()
            self.runtime.gatherer.timer.cut()
        elif self._step == NUM_FIRST and self._offload is not None:
            self._watch("after the first steps")
        elif self._step % EVERY == 0:
            self._check()

    @property
    def _offload(self) -> OffloadUpdater | None:
        return None if self.runtime.optimizer is None else self.runtime.optimizer.updater.offload

    # Observing

    def _watch(self, reason: str) -> None:
        self.runtime.finish_updates()
        self._watching = (self._step, self._busy(), reason)
        self.runtime.gatherer.timer.start()

    def _busy(self) -> dict[str, float]:
        return {} if self._offload is None else self._offload.busy()

    def _end_watching(self) -> None:
        assert self._watching is not None
        _, before, reason = self._watching
        self._watching = None
        spent = self.runtime.gatherer.timer.stop()
        self.runtime.finish_updates()
        num_passes = self.runtime.backward.passes.num_before
        self._seen = ObservedStep(
            step_s=median(sum(step.values()) for step in spent),
            forward_s=median(step[LoopPhase.FORWARD] + step[LoopPhase.OUTSIDE] for step in spent) / num_passes,
            backward_s=median(step[LoopPhase.BACKWARD] for step in spent) / num_passes,
            num_passes=num_passes,
            busy={name: (seconds - before.get(name, 0.0)) / NUM_WATCHED for name, seconds in self._busy().items()},
            activation_bytes=self._activation_bytes(),
        )
        self._revise(reason, self._collect(RankReport(self._room(), seen=self._seen)))

    def _check(self, *, only_short: bool = False) -> None:
        """Check memory and how long steps take. All ranks call it together."""
        if self.runtime.optimizer is None:
            return
        num_short = _times_short(self.runtime.world.device)
        is_short = num_short > self._num_short
        self._num_short = num_short
        if only_short and not is_short:
            return
        is_slow = not only_short and self._is_slower()
        report = self._collect(RankReport(self._room(), is_short, is_slow, self._seen))
        taken: list[Tier] = []
        if not only_short and self._step >= self._next["room"]:
            taken = [tier for tier, room in report.room.items() if self._needs(tier) > (1 - MARGIN / 2) * room]
        num_revisions = len(self.revisions)
        if report.is_short:
            self._revise("the device ran out of memory", report)
        elif taken:
            room = ", ".join(f"{size_text(report.room[tier])} of the {tier.value}" for tier in taken)
            self._revise(f"memory was taken by others, which leaves us {room}", report)
        elif report.is_slow:
            self._watch(f"steps take {median(self._times):.3g} s and took {self._usual or 0.0:.3g} s before")
        if (report.is_short or taken) and len(self.revisions) == num_revisions:
            self._next["room"] = self._next["speed"]  # nothing could be done about it
        self._times = []

    def _is_slower(self) -> bool:
        """Return whether steps take longer than they did under this plan at first."""
        if self._usual is None:
            self._usual = median(self._times)
            return False
        may_search = self._offload is not None and self._step >= self._next["speed"]
        return may_search and median(self._times) > SLOWER * self._usual

    def _collect(self, report: RankReport) -> RankReport:
        """Return the worst of all ranks."""
        reports: list[RankReport] = self.runtime.gatherer.control.collect(report)
        steps = [report.seen for report in reports if report.seen is not None]
        return RankReport(
            {tier: min(report.room[tier] for report in reports) for tier in report.room},
            any(report.is_short for report in reports),
            any(report.is_slow for report in reports),
            max(steps, key=lambda step: step.step_s) if len(steps) == len(reports) else None,
        )

    def _room(self) -> dict[Tier, int]:
        """Return the bytes that are ours or free. Where the device is the CPU, its memory is the host's."""
        world = self.runtime.world
        free = free_bytes(world.device, None)
        held = sum(size for (tier, _), size in self.runtime.ledger.now.items() if tier is Tier.HOST)
        room = {Tier.HOST: held + free["host"] // world.local_size}
        if world.device.type != "cpu":
            room[Tier.DEVICE] = free["device"] + torch.accelerator.memory_allocated(world.device)
        return room

    def _needs(self, tier: Tier) -> int:
        """Return the bytes planned for a tier or held there; on an accelerator also what is not of the model."""
        plan = self.runtime.settings.plan
        device = self.runtime.world.device
        assert plan is not None
        held = sum(size for (where, _), size in self.runtime.ledger.now.items() if where is tier)
        if tier is Tier.DEVICE and device.type != "cpu":
            held = torch.accelerator.memory_allocated(device)
        return max(held, plan.predicted.total(tier))

    def _activation_bytes(self) -> int | None:
        """The most that the device held beside what the plan knows of."""
        device = self.runtime.world.device
        plan = self.runtime.settings.plan
        if device.type == "cpu" or plan is None:
            return None
        known = sum(
            size for kind, size in plan.predicted.bytes.get(Tier.DEVICE, {}).items() if kind != Kind.ACTIVATIONS
        )
        return max(0, torch.accelerator.max_memory_allocated(device) - known)

    # Revising

    def _revise(self, reason: str, report: RankReport) -> None:
        """Make the plan again, and obey it if that pays or must be."""
        if any(trained.parameter.grad is not None for trained in self.runtime.backward.trained):
            return  # gradients are kept over the step: nothing can move
        world = self.runtime.world
        seen = self._seen_or_rough(report)  # before anything is measured, which takes memory too
        proposal = ""
        try:
            settings = self.runtime.settings
            machine = load_or_measure(world.device, disk_path=settings.budget.disk_path, mesh=settings.mesh)
            proposal = self._propose(reason, report.room, seen, machine) if world.rank == 0 else ""
        except (PrepareError, torch.OutOfMemoryError) as error:  # of measuring: training goes on as it did
            if world.size > 1:
                raise
            log.warning("the plan is kept after step %d (%s): %s", self._step, reason, error)
        text = self.runtime.gatherer.control.collect(proposal)[0]
        self._times = []
        self._usual = None
        self._pause *= 2
        self._next["speed"] = self._step + self._pause * EVERY
        if text:
            plan = Plan.from_json(text)
            _empty_cache(world.device)  # so that what moves does not lie in the blocks of activations
            moved = move(self.runtime, plan)
            _empty_cache(world.device)  # what was given up is there for others
            self.revisions.append(Revision(self._step, reason, tuple(moved), plan))
        _forget_peak(world.device)
        self._begun = time.perf_counter()

    def _propose(self, reason: str, room: Mapping[Tier, int], seen: ObservedStep, machine: MachineProfile) -> str:
        """Return the plan to obey from now on as JSON, or nothing to keep the present one."""
        limits = self._limits(room, seen)
        search = PlanSearch(self.runtime.settings, self.runtime.blueprints, self.runtime.world)
        try:
            now, best = search.revise(limits, machine, seen)
        except PrepareError as error:
            log.warning("the plan is kept after step %d (%s), although nothing fits: %s", self._step, reason, error)
            return ""
        before = now.predicted.step_s or 0.0
        after = best.predicted.step_s or 0.0
        fits = all(now.predicted.total(tier) <= limit for tier, limit in limits.items())
        if fits and before - after < max(GAIN * before, LEAST_GAIN_S):
            log.info(
                "the plan is kept after step %d (%s): a step takes %.3g s by the model and took %.3g s, and the best "
                "other plan would take %.3g s",
                *(self._step, reason, before, seen.step_s, after),
            )
            return ""
        why = f"a step of {before:.3g} s becomes {after:.3g} s"
        if not fits:
            why = f"it no longer fits; a step takes {after:.3g} s"
        log.info("the plan is revised after step %d (%s): %s\n%s", self._step, reason, why, best.explain())
        note = f"Revised after step {self._step}: {reason}."
        return replace(best, notes=(*best.notes, note)).to_json()

    def _seen_or_rough(self, report: RankReport) -> ObservedStep:
        """What was observed; before that a third of a step is forward. A device that ran out needs more room."""
        step_s = median(self._times) if self._times else 0.0
        activations = self._activation_bytes()
        seen = report.seen or ObservedStep(step_s, step_s / 3, 2 * step_s / 3, activation_bytes=activations)
        if report.is_short and Tier.DEVICE in report.room:
            return replace(seen, activation_bytes=int((activations or 0) + MORE_ROOM * report.room[Tier.DEVICE]))
        return seen

    def _limits(self, room: Mapping[Tier, int], seen: ObservedStep) -> dict[Tier, int]:
        """Return the bytes to plan with: the budget's, or what there is less a margin."""
        settings = self.runtime.settings
        assert settings.plan is not None
        limits = dict(settings.plan.limits)
        if settings.budget.device is None and seen.activation_bytes is not None:  # which are counted by themselves
            limits[Tier.DEVICE] = room[Tier.DEVICE]
        for tier, size in room.items():
            limits[tier] = min(limits.get(tier, 0), int((1 - MARGIN) * size))
        return limits


def _empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _forget_peak(device: torch.device) -> None:
    """Count the peak from here on: what loading, preparing or measuring took are no activations."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def _times_short(device: torch.device) -> int:
    """Return how often the device's allocator had to free its cache to find memory, or failed."""
    module = torch.get_device_module(device) if device.type != "cpu" else None
    if module is None or not hasattr(module, "memory_stats"):
        return 0
    stats = module.memory_stats(device)
    return int(stats.get("num_alloc_retries", 0)) + int(stats.get("num_ooms", 0))
