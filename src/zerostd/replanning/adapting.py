"""Observes training and obeys the plan that real steps prove best.

    the first pass        recomputes if the batch was not known; then everything is placed by the memory it took
    the first steps       a few are watched, rates are fitted to them, and candidates are ranked; the best are tried
                          one after the other, and the fastest stays
    afterwards            the same again, when steps take longer or clipping starts or stops. If steps take longer than
                          under the previous plan, that plan is restored. Room for other programs, or for a larger
                          batch, is made at once

Decisions are made before a forward, when there are no gradients. States move a few groups at a time, before the
backward passes that follow. All ranks watch the same steps and obey one plan.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from zerostd.engine.runtime import Runtime
from zerostd.monitoring.texts import size_text
from zerostd.parameters.observing import StepObserver
from zerostd.planning import Plan
from zerostd.planning.solution import ObservedStep
from zerostd.policy import Tier, Way
from zerostd.preparing.budgets import MARGIN
from zerostd.preparing.proposing import PlanSearch
from zerostd.preparing.remembering import recall, remember
from zerostd.replanning.changes import can_move
from zerostd.replanning.meter import DeviceMeter
from zerostd.replanning.moving import HomeMove
from zerostd.replanning.ranking import Ranking
from zerostd.replanning.room import PassRoom
from zerostd.replanning.trials import Revision, Trials, is_same
from zerostd.replanning.watching import EVERY, NUM_WATCHED, ClipCounter, Pace, RankReport, StepWatch, worst_of

NUM_FIRST = 2  # steps that are not looked at: the first ones are slower
MORE_ROOM = 0.1  # of the device, for activations, when it ran out of memory
MEASURED = "the first pass was measured"
MOVED_PART = 0.15  # of a step, that states may take to move in it

log = logging.getLogger("zerostd")


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
        self._room = PassRoom(runtime, self.meter, self._search)
        self._pace = Pace(runtime.backward.passes.num_steps)
        self._next_room = 0  # the first step at which to look for room again, after it was looked for in vain
        self._watch: StepWatch | None = None  # steps that are watched now
        self._seen: ObservedStep | None = None  # when it was watched last
        self._ranks_aside = self.meter.has_allocator
        self._ranking: Ranking | None = None  # of candidates, beside the steps
        self._trials: Trials | None = None  # under way
        self._moving: HomeMove | None = None  # under way
        self._clips = ClipCounter(runtime)
        # Times that this step ran out of memory: where free memory lies in holes, it looks as if it fitted.
        self._num_short = 0
        self.meter.reset()
        self.meter.cap(is_on=self.plan.is_untried)
        if runtime.settings.budget.device is not None or self.runtime.has_states_off:
            runtime.backward.activations.count()  # of the first pass: what else can be done with them
            self._room.begin_carefully(self.plan)
            runtime.hooks.renew()

    def before_forward(self) -> None:
        """Called when a forward of training begins."""
        passes = self.runtime.backward.passes
        if passes.num_steps != self._pace.step:
            self._begin_step(passes.num_steps)
        elif passes.num_done == 0 and self.runtime.world.size == 1:  # the last forward may have come to nothing
            self._check(only_short=True)
        self.meter.begin_pass()
        self._follow_input()

    def before_backward(self) -> None:
        """Called when a backward pass begins: updates are done, since forward needed the parameters."""
        if self._moving is not None and not self._moving.is_done and not self.runtime.backward.has_gradients:
            self._moving.advance(self.meter.room_now(), waits=self.runtime.world.size > 1)

    def after_backward(self) -> None:
        """Called when a backward pass has ended, before the first step makes states, which hide what the pass took."""
        if self.is_busy or self.plan.is_untried or self._room.is_careful or (self._pace.step + 1) % EVERY == 0:
            self.meter.note_pass(is_first=self.plan.is_untried or self._room.is_careful)

    def after_release(self) -> None:
        """Called when the model is an ordinary one again."""
        self.meter.cap(is_on=False)

    def _begin_step(self, step: int) -> None:
        """Do what is due before a step."""
        self._num_short = 0
        self._pace.begin(step)
        self._clips.note()
        self.runtime.backward.activations.counter.is_on = self.plan.is_untried
        if self.runtime.backward.has_gradients:
            return  # they are kept over the step: nothing can move
        if self.plan.is_untried:
            self._place()
        elif self._room.is_careful:
            self._confirm()
        elif self._moving is not None:
            self._moving.keep_pace()
            if self._moving.is_done:
                self._end_move()
        elif self._watch is not None:
            self._look()
        elif self._ranking is not None and step % EVERY > NUM_WATCHED:
            self._take_candidates()
        elif self._is_first_look:
            self._begin_watch("the first steps were measured")
        elif step % EVERY == 0:
            self._check()
        elif step == 1 and self.runtime.world.size == 1:
            self._check(only_short=True)

    @property
    def _is_first_look(self) -> bool:
        """Whether this plan is to be watched for the first time: something is off the device. All ranks agree on it."""
        is_time = self._pace.step == NUM_FIRST or self._pace.step % EVERY == 0
        keeps_all = set(self.plan.activations.values()) <= {Way.DEVICE.in_plan}
        return is_time and not self._pace.num_rounds and (self.runtime.has_states_off or not keeps_all)

    @property
    def is_busy(self) -> bool:
        """Whether another plan is searched for, tried or moved to."""
        return any(each is not None for each in (self._watch, self._ranking, self._trials, self._moving))

    @property
    def plan(self) -> Plan:
        """The plan that is obeyed now."""
        assert self.runtime.settings.plan is not None
        return self.runtime.settings.plan

    # The first pass, and larger ones

    def _place(self) -> None:
        """Place everything by the memory of the first pass. The plan of an earlier run comes first, then the present
        placement, then the best plan that fits. If nothing could be counted, groups continue to recompute."""
        self.runtime.backward.activations.counter.is_on = False
        self.meter.cap(is_on=False)
        control = self.runtime.gatherer.control
        names = [group.name for group in self.runtime.blueprints]
        ways = dict.fromkeys(names, self.plan.activations["*"])
        least = replace(self.plan, activations=ways, notes=self.plan.notes[:-1])
        kept = replace(least, activations={"*": Way.DEVICE.in_plan} if self._room.count() else ways)
        remembered = recall(self.runtime.settings, self.runtime.blueprints, self.runtime.world)
        plans: list[Plan] = control.collect([plan for plan in (remembered, kept) if plan is not None])[0]
        by_rank: list[list[bool]] = control.collect([self._room.holds(p, in_place=True) for p in plans])
        for plan, *is_held in zip(plans, *by_rank, strict=True):
            if all(is_held):
                self._start(plan)
                return
        self._revise(MEASURED, self._report())
        if self.plan.is_untried:  # nothing fits better
            self._refuse(control.collect(self._room.refusal(self.plan, "a pass like the first one, beside states")))
            self._start(least)

    def _confirm(self) -> None:
        """Obey the plan, unless the first pass, which recomputed, shows that it cannot fit beside the loss."""
        collect = self.runtime.gatherer.control.collect
        self._room.count()
        unsure = self.meter.grown_bytes  # gradients, which may have come after the peak
        if not all(collect(self._room.holds(self.plan, unsure=unsure))) and not self._revise(MEASURED, self._report()):
            self._refuse(collect(self._room.refusal(self.plan, "a pass like the first one", unsure=unsure)))
        self._room.end_care()

    def _refuse(self, refusals: Sequence[str]) -> None:
        """Refuse this forward and the next one, if a rank has a reason."""
        if any(refusals):
            self._pace.step -= 1
            raise torch.OutOfMemoryError(max(refusals, key=len))

    def _follow_input(self) -> None:
        """Make room for a batch that is larger than those before, or say what is missing."""
        if self._room.follow_input(self.plan):
            return
        why = self._room.why_grown
        num_revisions = len(self.revisions)
        if self.runtime.world.size == 1 and not self.runtime.backward.has_gradients:  # others cannot be asked here
            self._revise(why, self._report())
        if len(self.revisions) > num_revisions:
            self._room.obey_plan()
            return
        refusal = self._room.refusal(self.plan, why)
        if refusal:
            self._room.take_back()
            raise torch.OutOfMemoryError(refusal)

    # Watching

    def _begin_watch(self, reason: str) -> None:
        self.meter.watch_model(is_on=True)
        self._watch = StepWatch(self.runtime, self._pace.step, reason)

    def _look(self) -> None:
        """Continue watching; after enough steps, note their times."""
        assert self._watch is not None
        self.meter.watch_model(is_on=False)  # one step tells, and the others are timed
        if not self._watch.is_over(self._pace.step):
            return
        reason = self._watch.reason
        self._seen = self._watch.end(self.meter.activation_bytes())
        self._watch = None
        report = self._collect(replace(self._report(), why_short=self.meter.shortage()))
        if self._trials is not None:
            self._trials.record(self.plan, report.seen.step_s, report.why_short)
            self._try_next()
        elif not report.why_short or not self._revise(report.why_short, report):
            self._try(reason, report)

    def _check(self, *, only_short: bool = False) -> None:
        """Check memory, clipping and how long steps take. All ranks call it together."""
        why_short = self.meter.shortage()
        if self.runtime.optimizer is None or (only_short and not why_short):
            return
        pace = self._pace
        report = replace(self._report(), why_short=why_short)
        if not only_short:
            is_slow = pace.is_slower() and self.runtime.has_states_off
            report = replace(report, is_slow=is_slow, is_worse=pace.is_worse, why_grown=self._room.why_grown)
        report = self._collect(report)
        shortage = self._shortage(report, only_short=only_short)
        if shortage:
            if not self._revise(shortage, report):
                if pace.step == 1:  # later, what passes the limit may not be the model's, and is only said
                    self._refuse([self._room.refusal(self.plan, f"this batch does not fit: {shortage}")])
                self._next_room = pace.next_search  # nothing could be done about it
            elif report.why_grown:
                self._room.obey_plan()
        elif report.is_worse:
            self._undo()
        elif self._clips.has_changed(self._search.may_speculate, speculates=self.plan.speculate):
            self._begin_watch(self._clips.reason)
        elif report.is_slow:
            self._begin_watch(f"steps take {pace.median_s:.3g} s instead of {pace.usual_s or 0.0:.3g} s before")
        pace.clear()

    def _shortage(self, report: RankReport, *, only_short: bool) -> str:
        """Return why room has to be made; empty if there is enough."""
        if report.why_short:
            return report.why_short
        if only_short or self._pace.step < self._next_room:
            return ""
        if report.why_grown:
            return report.why_grown
        taken = [tier for tier, room in report.room.items() if self.meter.needs(tier) > (1 - MARGIN / 2) * room]
        room = ", ".join(f"{size_text(report.room[tier])} of the {tier.value}" for tier in taken)
        return f"other programs took memory, which leaves {room}" if taken else ""

    def _report(self) -> RankReport:
        """Return this rank's memory and times. Before steps were watched, forward counts as a third of one."""
        if self._seen is None:
            step_s = self._pace.median_s
            self._seen = ObservedStep(step_s, step_s / 3, 2 * step_s / 3)
        seen = replace(self._seen, activation_bytes=self.meter.activation_bytes(), late_bytes=self.meter.late_bytes())
        self._seen = replace(seen, profile=self._room.count())
        return RankReport(self.meter.room(), self._seen)

    def _collect(self, report: RankReport) -> RankReport:
        """Return the worst of all ranks."""
        reports: list[RankReport] = self.runtime.gatherer.control.collect(report)
        return worst_of(reports)

    # Trials

    def _try(self, reason: str, report: RankReport) -> None:
        """Rank candidates, and try the best of them one after the other."""
        self._pace.begin_round()
        if self._ranks_aside:
            self._ranking = self._rank(reason, report, is_aside=True)
        else:
            self._begin_trials(reason, report.seen.step_s, *self._candidates(reason, report))

    def _take_candidates(self) -> None:
        """Begin to try candidates, if they were found. What steps take now counts: they may clip no longer."""
        ranking = self._ranking
        assert ranking is not None
        if ranking.is_done():
            self._ranking = None
            step_s = max(self.runtime.gatherer.control.collect(self._pace.median_s))
            present, others = ranking.plans()
            self._begin_trials(ranking.reason, step_s, present or self.plan, others)

    def _begin_trials(self, reason: str, step_s: float, present: Plan, candidates: Sequence[Plan]) -> None:
        self._trials = Trials(replace(self.plan, predicted=present.predicted), candidates, step_s, reason)
        self._try_next()

    def _try_next(self) -> None:
        assert self._trials is not None
        while (plan := self._trials.next()) is not None:
            if all(self.runtime.gatherer.control.collect(can_move(self.runtime, plan))):
                self._start(plan)
                return
        trials = self._trials
        self._trials = None
        winner = trials.winner()
        text = "; ".join(f"{trial.measured_s:.3g} s with {trial.name}" for trial in winner.trials)
        log.info("tried plans after step %d (%s); the first is kept: %s", self._pace.step, trials.why, text)
        self._pace.replaced = None if is_same(winner, trials.present) else (trials.present, trials.present_s)
        self._choose(winner, trials.present, trials.why)

    def _undo(self) -> None:
        """Restore the plan before the last trials, if there is room for it: its steps were shorter."""
        assert self._pace.replaced is not None
        plan, seconds = self._pace.replaced
        self._pace.replaced = None
        if all(self.runtime.gatherer.control.collect(self._room.holds(plan))):
            reason = f"steps take {self._pace.median_s:.3g} s instead of {seconds:.3g} s under the previous plan"
            log.info("the previous plan is restored after step %d: %s", self._pace.step, reason)
            self._choose(plan, self.plan, reason)

    def _choose(self, plan: Plan, before: Plan, reason: str) -> None:
        """Obey a plan that real steps have chosen, and remember it for the next start."""
        if self.runtime.world.rank == 0:
            remember(plan, self.runtime.settings, self.runtime.blueprints, self.runtime.world)
        if not is_same(plan, before):
            plan = replace(plan, notes=(*plan.notes, f"Revised after step {self._pace.step}: {reason}."))
            names = [group.name for group in self.runtime.blueprints if group.members]
            moved = tuple(name for name in names if plan.homes_of(name) != before.homes_of(name))
            self.revisions.append(Revision(self._pace.step, reason, moved, plan))
        self._start(plan)

    def _start(self, plan: Plan) -> None:
        """Begin to obey a plan; states move in this step and those to come."""
        steps = self.runtime.gatherer.control.collect(0.0 if self._seen is None else self._seen.step_s)
        self._moving = HomeMove(self.runtime, plan, MOVED_PART * max(steps))
        self._moving.take_ahead()
        if self._moving.is_done:
            self._end_move()

    def _end_move(self) -> None:
        assert self._moving is not None
        self._moving.finish()
        self._moving = None
        self._room.recompute()
        if self._trials is None:  # else the next candidate takes it
            self.meter.give_surplus_back()  # to others
        self.meter.reset()
        self._pace.restart()
        if self._trials is not None:
            self._begin_watch(self._trials.why)

    # Room that has to be made at once

    def _revise(self, reason: str, report: RankReport) -> bool:
        """Obey the best plan that fits, at once, if the present one does not. False if none fits."""
        if self.runtime.backward.has_gradients:
            return False
        if self._moving is not None:
            self._moving.move_all()
            self._end_move()
        if report.why_short and Tier.DEVICE in report.room:  # it needs more room, and still more if that was too little
            self._num_short += 1
            missing = self.meter.missing(self._num_short * MORE_ROOM * report.room[Tier.DEVICE])
            more = int((self.meter.activation_bytes() or 0) + missing)
            report = replace(report, seen=replace(report.seen, activation_bytes=more))
        present, candidates = self._candidates(reason, report)
        self._trials = self._ranking = self._watch = None
        self.meter.watch_model(is_on=False)
        if not candidates:
            return False
        if all(present.predicted.total(tier) <= limit for tier, limit in self.meter.limits(report.room).items()):
            log.info("the plan is kept after step %d: by its own account it fits (%s)", self._pace.step, reason)
            self.meter.accept_peak()  # each search for its reason takes a second or two of a step
            return True
        plan = candidates[0]
        plan = replace(plan, notes=(*plan.notes, f"Revised after step {self._pace.step}: {reason}."))
        log.info("the plan does not fit and is revised after step %d (%s)\n%s", self._pace.step, reason, plan.explain())
        self.meter.give_cache_back()  # so that what moves does not lie in the blocks of activations
        self._moving = HomeMove(self.runtime, plan)
        self._moving.move_all()
        self.revisions.append(Revision(self._pace.step, reason, tuple(self._moving.names), plan))
        self._end_move()
        return True

    def _candidates(self, reason: str, report: RankReport) -> tuple[Plan, list[Plan]]:
        """Return the present plan as it was observed, and others, the best first; none if nothing fits."""
        present, others = self._rank(reason, report, is_aside=False).plans()
        return present or self.plan, others

    def _rank(self, reason: str, report: RankReport, *, is_aside: bool) -> Ranking:
        speculates = self._search.may_speculate and not self._clips.are_usual
        ranking = Ranking(self.runtime, reason, report)
        return ranking.begin(self.meter.limits(report.room), speculates=speculates, is_aside=is_aside)
