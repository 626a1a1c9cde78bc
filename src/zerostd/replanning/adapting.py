"""Observes training and obeys the plan that real steps prove best.

    the first pass        where the batch was not known it recomputes; then everything is placed by what it took
    the first steps       some are watched, rates are fitted to them, and candidates are ranked; the best are tried one
                          after the other, and the fastest stays
    afterwards            the same again, when steps take longer or clipping starts or stops. Memory that others took,
                          or that a larger batch needs, is made room for at once

Everything happens before a forward, when there are no gradients; states move a few groups at a time. All ranks watch
the same steps and obey one plan. Each round of trials doubles the time to the next: a plan does not go back and forth.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from zerostd.engine.runtime import Runtime
from zerostd.errors import PrepareError
from zerostd.measuring import load_or_measure
from zerostd.monitoring.texts import size_text
from zerostd.parameters.observing import StepObserver
from zerostd.planning import Plan
from zerostd.planning.request import MARGIN
from zerostd.planning.solution import ObservedStep
from zerostd.policy import Tier, Way
from zerostd.preparing.proposing import PlanSearch
from zerostd.preparing.remembering import plan_file, recall, remember
from zerostd.replanning.meter import DeviceMeter
from zerostd.replanning.moving import HomeMove
from zerostd.replanning.trials import Trials
from zerostd.replanning.watching import ClipCounter, StepWatch, counted_profile, scaled_profile

NUM_FIRST = 2  # steps that are not looked at: the first ones are slower
EVERY = 10  # steps between two looks at memory, at clipping and at how long steps take
SLOWER = 1.3  # times as long as before: worth looking for another plan
GREATER = 1.02  # times the bytes of input before: worth looking whether they fit
MORE_ROOM = 0.1  # of the device, for activations, when it ran out of memory
MOVED_RATE = 1e9  # bytes that may move before a step, for each second of it: at 5 GB/s they take a fifth

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
        self.meter = DeviceMeter(runtime)
        self.revisions: list[Revision] = []
        self._search = PlanSearch(runtime.settings, runtime.blueprints, runtime.world)
        self._step = runtime.backward.passes.num_steps  # that has begun
        self._begun = time.perf_counter()  # that step
        self._times: list[float] = []  # seconds of the steps since the last check
        self._usual: float | None = None  # seconds of a step under this plan
        self._pause = 1  # checks between two rounds of trials; doubles each time
        self._next = {"room": 0, "speed": EVERY, "input": 0}  # first steps at which to search again; bytes of input
        self._watch: StepWatch | None = None  # steps that are watched now
        self._seen: ObservedStep | None = None  # when it was watched last
        self._trials: Trials | None = None  # under way
        self._moving: HomeMove | None = None  # under way
        self._clips = ClipCounter(runtime)
        self.meter.reset()

    def before_forward(self) -> None:
        """A forward of training begins."""
        self._follow_input()
        passes = self.runtime.backward.passes
        if passes.num_steps == self._step:
            if passes.num_done == 0 and self.runtime.world.size == 1:  # the last forward may have come to nothing
                self._check(only_short=True)
            return
        now = time.perf_counter()
        self._times.append(now - self._begun)
        self._step = passes.num_steps
        self._begun = now
        self._clips.note()
        self.runtime.backward.activations.counter.is_on = self.plan.is_untried
        is_under_way = self._moving is not None or self._watch is not None or self.plan.is_untried
        if is_under_way or self._step == NUM_FIRST or self._step % EVERY == 0:
            self._go_on()

    def _go_on(self) -> None:
        """Do what is due before this step."""
        if self._has_gradients:
            return  # they are kept over the step: nothing can move
        if self.plan.is_untried:
            self._place()
        elif self._moving is not None:
            self._advance()
        elif self._watch is not None:
            self._look()
        elif self._pause == 1 and (self._is_off or self.runtime.backward.activations.is_on):
            self._begin_watch("after the first steps")
        elif self._step % EVERY == 0:
            self._check()

    @property
    def plan(self) -> Plan:
        """The plan that is obeyed now."""
        plan = self.runtime.settings.plan
        assert plan is not None
        return plan

    @property
    def _has_gradients(self) -> bool:
        return any(trained.parameter.grad is not None for trained in self.runtime.backward.trained)

    @property
    def _is_off(self) -> bool:
        """Whether states are off the device."""
        return self.runtime.optimizer is not None and self.runtime.optimizer.updater.offload is not None

    # The first pass, and larger ones

    def _place(self) -> None:
        """Place everything by what the first pass took. What was remembered of an earlier run comes first, then keeping
        all where it is, then the best plan that fits. Where nothing could be counted, groups go on recomputing."""
        self.runtime.backward.activations.counter.is_on = False
        seen = self._rough()
        way = Way.RECOMPUTE if seen.profile is None else Way.DEVICE
        ways = {group.name: way.in_plan for group in self.runtime.blueprints}
        kept = replace(self.plan, activations=ways, notes=self.plan.notes[:-1])
        file = plan_file(self.runtime.settings, self.runtime.blueprints, self.runtime.world)
        wanted = [plan for plan in (recall(file), kept) if plan is not None]
        plan = next((plan for plan in wanted if self._holds(plan, seen)), None)
        text = self.runtime.gatherer.control.collect(None if plan is None else plan.to_json())[0]
        if text is not None:
            self._start(Plan.from_json(text))
            return
        self._revise("after the first pass", self._collect(RankReport(self.meter.room(), seen=seen)))
        if self.plan.is_untried:  # nothing fits better
            self._start(replace(kept, activations=dict.fromkeys(ways, Way.RECOMPUTE.in_plan)))

    def _holds(self, plan: Plan, seen: ObservedStep, times: float = 1.0) -> bool:
        """Return whether model state and activations of a plan fit on the device, for so many times the batch."""
        limits = self.meter.limits()
        activations = seen.activation_bytes or 0
        if seen.profile is not None:
            activations = self.meter.activations_of(plan, seen.profile)
        limits[Tier.DEVICE] -= int(times * activations)
        return self._search.fits(plan, limits)

    def _follow_input(self) -> None:
        """Make room for a batch that is larger than those before, or say what is missing."""
        size = self.runtime.backward.passes.input_bytes
        before = self._next["input"]
        if not size or size <= GREATER * before or self.runtime.world.size > 1:
            return
        self._next["input"] = size
        self.runtime.backward.activations.counter.is_on = True
        seen = self._seen
        if not before or seen is None or seen.profile is None or self._holds(self.plan, seen, size / before):
            self._grow(size / before if before else 1.0)
            return
        if self._has_gradients or self._moving is not None:
            return
        self._grow(size / before)
        reason = f"a batch is {size / before:.3g} times as large as any before"
        num_revisions = len(self.revisions)
        self._revise(reason, RankReport(self.meter.room(), seen=self._seen))
        if len(self.revisions) == num_revisions and self.runtime.settings.budget.device is not None:
            self._next["input"] = before
            need = size_text(self.meter.activations_of(self.plan, seen.profile) * size / before)
            raise torch.OutOfMemoryError(
                f"{reason}: its activations would take {need}, which does not fit into "
                f"Budget(device={self.runtime.settings.budget.device!r}) whatever is recomputed or kept on the host. "
                "Use a smaller batch in more passes, or a larger budget"
            )

    def _grow(self, times: float) -> None:
        """Count with activations that are so many times as large."""
        if self._seen is not None and self._seen.profile is not None and times > 1.0:
            self._seen = replace(self._seen, profile=scaled_profile(self._seen.profile, times))

    # Watching

    def _begin_watch(self, reason: str) -> None:
        self._watch = StepWatch(self.runtime, self._step, reason)

    def _look(self) -> None:
        """Go on watching; when enough steps were seen, note what they took."""
        assert self._watch is not None
        if not self._watch.is_over(self._step):
            return
        reason = self._watch.reason
        seen = self._watch.end(self.meter.activation_bytes())
        self._watch = None
        profile = self._seen.profile if self._seen is not None else None
        self._seen = replace(seen, profile=profile)
        report = self._collect(RankReport(self.meter.room(), seen=self._seen))
        assert report.seen is not None
        if self._trials is None:
            self._try(reason, report, report.seen)
        else:
            self._trials.record(self.plan, report.seen.step_s)
            self._try_next()

    def _check(self, *, only_short: bool = False) -> None:
        """Check memory, clipping and how long steps take. All ranks call it together."""
        if self.runtime.optimizer is None:
            return
        is_short = self.meter.ran_short()
        if only_short and not is_short:
            return
        is_slow = not only_short and self._is_slower()
        report = self._collect(RankReport(self.meter.room(), is_short, is_slow, self._seen))
        taken: list[Tier] = []
        if not only_short and self._step >= self._next["room"]:
            taken = [tier for tier, room in report.room.items() if self.meter.needs(tier) > (1 - MARGIN / 2) * room]
        num_revisions = len(self.revisions)
        if report.is_short:
            self._revise("the device ran out of memory", report)
        elif taken:
            room = ", ".join(f"{size_text(report.room[tier])} of the {tier.value}" for tier in taken)
            self._revise(f"memory was taken by others, which leaves us {room}", report)
        elif self._clips.has_changed(self._search.may_speculate, speculates=self.plan.speculate):
            self._begin_watch(self._clips.reason)
        elif report.is_slow:
            self._begin_watch(f"steps take {median(self._times):.3g} s and took {self._usual or 0.0:.3g} s before")
        if (report.is_short or taken) and len(self.revisions) == num_revisions:
            self._next["room"] = self._next["speed"]  # nothing could be done about it
        self._times = []

    def _is_slower(self) -> bool:
        """Return whether steps take longer than they did under this plan at first."""
        if self._usual is None:
            self._usual = median(self._times)
            return False
        may_search = self._is_off and self._step >= self._next["speed"]
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

    # Trials

    def _try(self, reason: str, report: RankReport, seen: ObservedStep) -> None:
        """Rank candidates, and try the best of them one after the other."""
        present, candidates = self._candidates(reason, report, seen)
        self._usual = None
        self._pause *= 2
        self._next["speed"] = self._step + self._pause * EVERY
        self._trials = Trials(replace(self.plan, predicted=present.predicted), candidates, seen.step_s, reason)
        self._try_next()

    def _try_next(self) -> None:
        assert self._trials is not None
        plan = self._trials.next()
        if plan is not None:
            self._start(plan)
            return
        winner = self._trials.winner()
        reason = self._trials.why
        before = self._trials.present
        self._trials = None
        self._times = []
        text = "; ".join(f"{trial.name}: {trial.measured_s:.3g} s" for trial in winner.trials)
        log.info("tried after step %d (%s), the first stays: %s", self._step, reason, text)
        if self.runtime.world.rank == 0:
            remember(winner, plan_file(self.runtime.settings, self.runtime.blueprints, self.runtime.world))
        is_other = winner.homes != before.homes or winner.activations != before.activations
        if is_other or winner.speculate != before.speculate:
            note = f"Revised after step {self._step}: {reason}."
            winner = replace(winner, notes=(*winner.notes, note))
        self._start(winner)
        if winner.notes != before.notes:
            names = [group.name for group in self.runtime.blueprints if group.members]
            moved = tuple(name for name in names if winner.homes_of(name) != before.homes_of(name))
            self.revisions.append(Revision(self._step, reason, moved, winner))

    def _start(self, plan: Plan) -> None:
        """Begin to obey a plan; states move in the steps to come."""
        self._moving = HomeMove(self.runtime, plan)
        self._moving.take_ahead(self._most_bytes)
        if self._moving.is_done:
            self._end_move()

    @property
    def _most_bytes(self) -> float:
        """The bytes that may move before one step: the same on all ranks."""
        step_s = self._seen.step_s if self._seen is not None else 0.0
        slowest_s: float = max(self.runtime.gatherer.control.collect(step_s))
        return MOVED_RATE * slowest_s

    def _advance(self) -> None:
        assert self._moving is not None
        self._moving.advance(self._most_bytes)
        if self._moving.is_done:
            self._end_move()

    def _end_move(self) -> None:
        self._moving = None
        self.meter.give_cache_back()  # what was given up is there for others
        self.meter.reset()
        self._begun = time.perf_counter()
        if self._trials is not None:
            self._begin_watch(self._trials.why)

    # Room that has to be made at once

    def _revise(self, reason: str, report: RankReport) -> None:
        """Obey the best plan that fits, at once, if the present one does not."""
        if self._has_gradients:
            return
        if self._moving is not None:
            self._moving.advance()
        seen = report.seen or self._rough()
        if report.is_short and Tier.DEVICE in report.room:  # a device that ran out needs more room
            more = int((self.meter.activation_bytes() or 0) + MORE_ROOM * report.room[Tier.DEVICE])
            seen = replace(seen, activation_bytes=more)
        present, candidates = self._candidates(reason, report, seen)
        self._times = []
        self._usual = None
        self._trials = None
        self._watch = None
        limits = self.meter.limits(report.room).items()
        if not candidates or all(present.predicted.total(tier) <= limit for tier, limit in limits):
            return
        note = f"Revised after step {self._step}: {reason}."
        plan = replace(candidates[0], notes=(*candidates[0].notes, note))
        log.info("the plan is revised after step %d (%s): it no longer fits\n%s", self._step, reason, plan.explain())
        self.meter.give_cache_back()  # so that what moves does not lie in the blocks of activations
        move = HomeMove(self.runtime, plan)
        move.advance()
        self.revisions.append(Revision(self._step, reason, tuple(move.names), plan))
        self._end_move()

    def _candidates(self, reason: str, report: RankReport, seen: ObservedStep) -> tuple[Plan, list[Plan]]:
        """Return the present plan as it was observed, and others, the best first; none if nothing fits."""
        world = self.runtime.world
        plans: list[str] = []
        try:
            settings = self.runtime.settings
            machine = load_or_measure(world.device, disk_path=settings.budget.disk_path, mesh=settings.mesh)
            if world.rank == 0:
                self._search.settings = self.runtime.settings
                speculates = self._search.may_speculate and not self._clips.are_usual
                present, others = self._search.revise(
                    self.meter.limits(report.room), machine, seen, speculates=speculates
                )
                plans = [present.to_json(), *(plan.to_json() for plan in others)]
        except (PrepareError, torch.OutOfMemoryError) as error:  # training goes on as it did
            if world.size > 1 and not isinstance(error, PrepareError):
                raise
            log.warning("the plan is kept after step %d (%s): %s", self._step, reason, error)
        texts: Sequence[str] = json.loads(self.runtime.gatherer.control.collect(json.dumps(plans))[0])
        present, *others = [Plan.from_json(text) for text in texts] or [self.plan]
        return present, others

    # Memory

    def _rough(self) -> ObservedStep:
        """What is known before steps were watched: a third of a step is forward."""
        if self._seen is None:
            step_s = median(self._times) if self._times else 0.0
            self._seen = ObservedStep(step_s, step_s / 3, 2 * step_s / 3)
        profile = self._seen.profile or counted_profile(self.runtime)
        self._seen = replace(self._seen, activation_bytes=self.meter.activation_bytes(), profile=profile)
        return self._seen
