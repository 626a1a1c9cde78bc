"""Looks at training while it goes on, and gives it another plan where that is better.

    after the first steps    the profile is fitted to what was seen, and the plan made again, once
    afterwards               when steps take longer, memory was taken by others or the device ran out of it

Everything happens between two steps, at the door of the next forward, where there are no gradients. All ranks look at
the same steps and obey one plan. A change must bring enough to be made, and each search for a faster plan doubles the
time to the next, as does one that finds nothing: a plan does not go back and forth.
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
from zerostd.monitoring.loop_timer import LoopPhase
from zerostd.monitoring.texts import size_text
from zerostd.parameters.observing import StepObserver
from zerostd.planning import MachineProfile, Plan
from zerostd.planning.refitting import ObservedStep
from zerostd.planning.request import MARGIN
from zerostd.policy import Kind, Tier
from zerostd.preparing.proposing import revise
from zerostd.replanning.moving import move

__all__ = ["Adapter", "Revision", "adapt"]

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
class _Found:
    """What one rank finds at a look."""

    room: Mapping[Tier, int]  # bytes of a tier that are ours or nobody's
    is_short: bool = False  # the device's allocator had to look for memory, or found none
    is_slow: bool = False
    seen: ObservedStep | None = None


def adapt(runtime: Runtime) -> None:
    """Look after a model from now on, if its plan may be revised: one with limits that is not frozen."""
    plan = runtime.settings.plan
    if plan is not None and plan.adaptive and plan.limits:
        runtime.observers.append(Adapter(runtime))


class Adapter(StepObserver):
    """Of one prepared model."""

    revisions: list[Revision]

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.revisions = []
        self._step = 0  # that has begun
        self._begun = time.perf_counter()  # that step
        self._times: list[float] = []  # of steps, since the last look
        self._usual: float | None = None  # seconds of a step, under this plan
        self._pause = 1  # looks between two searches for another plan; doubles each time
        self._next = {"room": 0, "speed": EVERY}  # the first step at which to search for more
        self._watching: tuple[int, dict[str, float], str] | None = None  # first step, busy before, reason
        self._seen: ObservedStep | None = None  # when it was watched last
        self._num_short = _times_short(runtime.world.device)
        _forget_peak(runtime.world.device)

    def before_forward(self) -> None:
        """A forward of training begins."""
        passes = self.runtime.backward.passes
        if passes.num_steps == self._step:
            if passes.num_done == 0 and self.runtime.world.size == 1:  # the last forward may have come to nothing
                self._look(only_short=True)
            return
        now = time.perf_counter()
        self._times.append(now - self._begun)
        self._step, self._begun = passes.num_steps, now
        if self._watching is not None:
            if self._step == self._watching[0] + NUM_WATCHED:
                self._end_watching()
            self.runtime.gatherer.watch.cut()
        elif self._step == NUM_FIRST and self._is_moving:
            self._watch("after the first steps")
        elif self._step % EVERY == 0:
            self._look()

    @property
    def _is_moving(self) -> bool:
        """Whether anything is updated off the device."""
        optimizer = self.runtime.optimizer
        return optimizer is not None and optimizer._updater.routes is not None

    # Looking

    def _watch(self, reason: str) -> None:
        self.runtime.finish_updates()
        self._watching = (self._step, self._busy(), reason)
        self.runtime.gatherer.watch.start()

    def _busy(self) -> dict[str, float]:
        optimizer = self.runtime.optimizer
        assert optimizer is not None
        routes = optimizer._updater.routes
        return routes.busy() if routes is not None else {}

    def _end_watching(self) -> None:
        assert self._watching is not None
        _, before, reason = self._watching
        self._watching = None
        spent = self.runtime.gatherer.watch.stop()
        self.runtime.finish_updates()
        num_passes = self.runtime.backward.passes.num_before
        self._seen = ObservedStep(
            step_s=median(sum(one.values()) for one in spent),
            forward_s=median(one[LoopPhase.FORWARD] + one[LoopPhase.OUTSIDE] for one in spent) / num_passes,
            backward_s=median(one[LoopPhase.BACKWARD] for one in spent) / num_passes,
            num_passes=num_passes,
            busy={name: (seconds - before.get(name, 0.0)) / NUM_WATCHED for name, seconds in self._busy().items()},
            activation_bytes=self._activation_bytes(),
        )
        self._revise(reason, self._collect(_Found(self._room(), seen=self._seen)))

    def _look(self, *, only_short: bool = False) -> None:
        """At memory, and at how long steps take. Ranks must come here together."""
        if self.runtime.optimizer is None:
            return
        num_short = _times_short(self.runtime.world.device)
        is_short, self._num_short = num_short > self._num_short, num_short
        if only_short and not is_short:
            return
        is_slow = not only_short and self._is_slower()
        found = self._collect(_Found(self._room(), is_short, is_slow, self._seen))
        taken = [tier for tier, room in found.room.items() if self._needs(tier) > (1 - MARGIN / 2) * room]
        taken = [] if only_short or self._step < self._next["room"] else taken
        num_revisions = len(self.revisions)
        if found.is_short:
            self._revise("the device ran out of memory", found)
        elif taken:
            room = ", ".join(f"{size_text(found.room[tier])} of the {tier.value}" for tier in taken)
            self._revise(f"memory was taken by others, and {room} is what there is for us", found)
        elif found.is_slow:
            self._watch(f"steps take {median(self._times):.3g} s and took {self._usual or 0.0:.3g} s before")
        if (found.is_short or taken) and len(self.revisions) == num_revisions:
            self._next["room"] = self._next["speed"]  # there was nothing to be done about it
        self._times = []

    def _is_slower(self) -> bool:
        """Whether steps take longer than they did under this plan at first."""
        if self._usual is None:
            self._usual = median(self._times)
            return False
        is_time = self._is_moving and self._step >= self._next["speed"]
        return is_time and median(self._times) > SLOWER * self._usual

    def _collect(self, found: _Found) -> _Found:
        """The worst of all ranks."""
        everyone: list[_Found] = self.runtime.gatherer.control.collect(found)
        seen = [one.seen for one in everyone if one.seen is not None]
        return _Found(
            {tier: min(one.room[tier] for one in everyone) for tier in found.room},
            any(one.is_short for one in everyone),
            any(one.is_slow for one in everyone),
            max(seen, key=lambda one: one.step_s) if len(seen) == len(everyone) else None,
        )

    def _room(self) -> dict[Tier, int]:
        """Bytes that are ours or nobody's. Where the device is the processor, its memory is the host's."""
        world, ledger = self.runtime.world, self.runtime.ledger
        free = free_bytes(world.device, None)
        held = sum(size for (tier, _), size in ledger.now.items() if tier is Tier.HOST)
        room = {Tier.HOST: held + free["host"] // world.local_size}
        if world.device.type != "cpu":
            room[Tier.DEVICE] = free["device"] + torch.accelerator.memory_allocated(world.device)
        return room

    def _needs(self, tier: Tier) -> int:
        """What is planned for a tier or is there; on a device with memory of its own also what is not of the model."""
        plan, device = self.runtime.settings.plan, self.runtime.world.device
        assert plan is not None
        held = sum(size for (where, _), size in self.runtime.ledger.now.items() if where is tier)
        if tier is Tier.DEVICE and device.type != "cpu":
            held = torch.accelerator.memory_allocated(device)
        return max(held, plan.predicted.total(tier))

    def _activation_bytes(self) -> int | None:
        """What the device held at most beside what the plan knows of."""
        device, plan = self.runtime.world.device, self.runtime.settings.plan
        if device.type == "cpu" or plan is None:
            return None
        known = sum(
            size for kind, size in plan.predicted.bytes.get(Tier.DEVICE, {}).items() if kind != Kind.ACTIVATIONS
        )
        return max(0, torch.accelerator.max_memory_allocated(device) - known)

    # Revising

    def _revise(self, reason: str, found: _Found) -> None:
        """Make the plan again, and obey it if it is worth it or has to be."""
        if any(slot.parameter.grad is not None for slot in self.runtime.backward.slots):
            return  # gradients are kept over the step: nothing can move
        world, budget = self.runtime.world, self.runtime.settings.budget
        seen = self._seen_or_rough(found)  # before anything is measured, which takes memory too
        made = ""
        try:
            machine = load_or_measure(world.device, disk_path=budget.disk_path)  # from the cache, or by all together
            made = self._propose(reason, found.room, seen, machine) if world.rank == 0 else ""
        except (PrepareError, torch.OutOfMemoryError) as error:  # of measuring: training goes on as it did
            if world.size > 1:
                raise
            log.warning("the plan is kept after step %d (%s): %s", self._step, reason, error)
        text = self.runtime.gatherer.control.collect(made)[0]
        self._times, self._usual = [], None
        self._pause *= 2
        self._next["speed"] = self._step + self._pause * EVERY
        if text:
            plan = Plan.from_json(text)
            moved = move(self.runtime, plan)
            self.revisions.append(Revision(self._step, reason, tuple(moved), plan))
            if world.device.type != "cpu":
                torch.accelerator.empty_cache()  # what was given up is there for others
        _forget_peak(world.device)
        self._begun = time.perf_counter()

    def _propose(self, reason: str, room: Mapping[Tier, int], seen: ObservedStep, machine: MachineProfile) -> str:
        """The plan to obey from now on as JSON; empty if the one there is stays."""
        runtime, settings = self.runtime, self.runtime.settings
        limits = self._limits(room, seen)
        try:
            now, best = revise(settings, runtime.blueprints, runtime.world, limits, machine, seen)
        except PrepareError as error:
            log.warning("the plan is kept after step %d (%s), though nothing fits: %s", self._step, reason, error)
            return ""
        before, after = now.predicted.step_s or 0.0, best.predicted.step_s or 0.0
        fits = all(now.predicted.total(tier) <= limit for tier, limit in limits.items())
        if fits and (before - after < GAIN * before or before - after < LEAST_GAIN_S):
            log.info(
                "the plan is kept after step %d (%s): a step takes %.3g s (%.3g s seen), and %.3g s by the best other",
                *(self._step, reason, before, seen.step_s, after),
            )
            return ""
        why = f"{before:.3g} s a step become {after:.3g} s" if fits else f"it no longer fits; {after:.3g} s a step"
        log.info("the plan is revised after step %d (%s): %s\n%s", self._step, reason, why, best.explain())
        note = f"Revised after step {self._step}: {reason}."
        return replace(best, notes=(*best.notes, note)).to_json()

    def _seen_or_rough(self, found: _Found) -> ObservedStep:
        """What was seen; before that a third of a step is forward. A device that ran out needs more for activations."""
        step_s = median(self._times) if self._times else 0.0
        activations = self._activation_bytes()
        seen = found.seen or ObservedStep(step_s, step_s / 3, 2 * step_s / 3, activation_bytes=activations)
        if found.is_short and Tier.DEVICE in found.room:
            return replace(seen, activation_bytes=int((activations or 0) + MORE_ROOM * found.room[Tier.DEVICE]))
        return seen

    def _limits(self, room: Mapping[Tier, int], seen: ObservedStep) -> dict[Tier, int]:
        """Bytes to plan with: the budget's or what there is less a margin; what was kept free for activations is not
        kept twice."""
        settings = self.runtime.settings
        assert settings.plan is not None
        limits = dict(settings.plan.limits)
        if settings.budget.device is None and seen.activation_bytes is not None:
            limits[Tier.DEVICE] = room[Tier.DEVICE]
        for tier, size in room.items():
            limits[tier] = min(limits.get(tier, 0), int((1 - MARGIN) * size))
        return limits


def _forget_peak(device: torch.device) -> None:
    """The most that is held is counted from here on: what loading, preparing or measuring took are no activations."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def _times_short(device: torch.device) -> int:
    """How often the device's allocator had to give back what it kept, or failed."""
    module = torch.get_device_module(device) if device.type != "cpu" else None
    if module is None or not hasattr(module, "memory_stats"):
        return 0
    stats = module.memory_stats(device)
    return int(stats.get("num_alloc_retries", 0)) + int(stats.get("num_ooms", 0))
