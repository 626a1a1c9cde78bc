"""Trials: candidates that are tried in real steps, one after the other. Placements give the same bits, so nothing is
lost by trying; the fastest stays, and measured seconds count for more than predicted ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerostd.monitoring.texts import percent_text
from zerostd.planning import Plan, Trial
from zerostd.policy import Route, Tier, Way

MOST_TRIED = 3  # candidates beside the present plan
MOST_LONGER = 1.3  # times the shortest predicted step: what is longer is not tried
ALIKE = 0.15  # of all groups: plans that differ in fewer tell nothing new
SCRAP = 0.005  # of a group's states
WORTH_KEEPING = 0.02  # of a step, that a candidate must save: seconds of one plan differ by as much

log = logging.getLogger("zerostd")


@dataclass(frozen=True)
class Revision:
    """A change of plan."""

    step: int  # after which it was made
    reason: str
    moved: tuple[str, ...]  # groups
    plan: Plan


class Trials:
    """The present plan, the candidates, and their measured steps."""

    def __init__(self, present: Plan, candidates: Sequence[Plan], measured_s: float, why: str) -> None:
        self.why = why  # they are made
        self.present = present
        shortest_s = min((plan.predicted.step_s or 0.0 for plan in candidates), default=0.0)
        self._left: list[Plan] = []
        for plan in candidates:
            is_new = not any(_is_told_by(other, plan) for other in (present, *self._left))
            if is_new and (plan.predicted.step_s or 0.0) <= MOST_LONGER * shortest_s:
                self._left.append(plan)
        self._left = self._left[:MOST_TRIED]
        self.present_s = measured_s
        self._measured = [(present, measured_s)]

    def next(self) -> Plan | None:
        """Return the candidate to try next; None: nothing that is left can be expected to be the fastest."""
        best_s = min(seconds for _, seconds in self._measured) * (1 - WORTH_KEEPING)
        while self._left:
            plan = self._left.pop(0)
            if self._expected_s(plan) < best_s:
                return plan
        return None

    def _expected_s(self, plan: Plan) -> float:
        """Return the predicted seconds of a step, times the ratio of measured to predicted seconds for plans of its
        kind. Zero if no plan of its kind was measured: then it has to be tried."""
        kind = _kind_of(plan)
        alike = [(other, seconds) for other, seconds in self._measured if _kind_of(other) == kind]
        ratios = [seconds / other.predicted.step_s for other, seconds in alike if other.predicted.step_s]
        return min(ratios, default=0.0) * (plan.predicted.step_s or 0.0)

    def record(self, plan: Plan, measured_s: float, why_short: str = "") -> None:
        """Note the seconds that steps with a candidate took, on the slowest rank. A candidate that was short of memory
        cannot be chosen."""
        if why_short:
            log.info("a plan that was tried is not kept, because %s: %s", why_short, name_of(plan))
        else:
            self._measured.append((plan, measured_s))

    def winner(self) -> Plan:
        """Return the plan that stays, with all measurements: the fastest, if it is faster by enough."""
        present, present_s = self._measured[0]
        best, best_s = min(self._measured, key=lambda pair: pair[1])
        if best_s > present_s * (1 - WORTH_KEEPING):
            best = present
        measured = sorted(self._measured, key=lambda pair: (pair[0] is not best, pair[1]))
        trials = tuple(Trial(name_of(plan), plan.predicted.step_s, seconds) for plan, seconds in measured)
        return replace(best, trials=trials)


def is_same(plan: Plan, other: Plan) -> bool:
    """Return whether two plans place everything alike."""
    return (plan.homes, plan.activations, plan.speculate) == (other.homes, other.activations, other.speculate)


def _is_told_by(other: Plan, plan: Plan) -> bool:
    """Return whether steps with another plan tell what a plan would take: they differ a little in amounts, and the plan
    is not predicted to be faster."""
    if _kind_of(plan) != _kind_of(other):
        return False
    if (plan.predicted.step_s or 0.0) < (other.predicted.step_s or 0.0) * (1 - WORTH_KEEPING):
        return False
    return all(abs(part - same) <= ALIKE for part, same in zip(_parts_of(plan), _parts_of(other), strict=True))


def _kind_of(plan: Plan) -> tuple[object, ...]:
    """Return the tiers and ways that a plan uses."""
    homes = plan.homes.values()
    parameters = {home.parameters for home in homes}
    states = {tier for home in homes for tier, _, part in home.states if part > SCRAP}
    return parameters, {home.gradients for home in homes}, states, set(plan.activations.values()), plan.speculate


def _parts_of(plan: Plan) -> tuple[float, ...]:
    """Return parts of the groups: of states off the device, of these by the CPU, of gradients off, of activations."""
    homes = list(plan.homes.values())
    off = sum(part for home in homes for tier, _, part in home.states if tier is not Tier.DEVICE)
    by_cpu = sum(part for home in homes for _, route, part in home.states if route is Route.CPU)
    gradients = sum(home.gradients is not Tier.DEVICE for home in homes)
    keeps = sum(way == Way.DEVICE.in_plan for way in plan.activations.values())
    num_groups = max(1, len(homes))
    num_ways = max(1, len(plan.activations))
    return off / num_groups, by_cpu / off if off else 0.0, gradients / num_groups, keeps / num_ways


def name_of(plan: Plan) -> str:
    """Return what distinguishes a plan, in a few words."""
    homes = list(plan.homes.values())
    shares = {tier: sum(part for home in homes for where, _, part in home.states if where is tier) for tier in Tier}
    total = sum(shares.values()) or 1.0
    parts = {tier.value: share / total for tier, share in shares.items() if share > 0.005}
    states = [f"{'all' if part == 1 else percent_text(part)} on the {tier}" for tier, part in parts.items()]
    words = [f"states {', '.join(states)}"] if states else []
    off = sum(part for home in homes for tier, _, part in home.states if tier is not Tier.DEVICE)
    by_cpu = sum(part for home in homes for _, route, part in home.states if route is Route.CPU)
    if off:
        words.append(f"the CPU updates {percent_text(by_cpu / off)} of what is off the device")
    tiers = sorted({home.gradients for home in homes} - {Tier.DEVICE}, reverse=True)
    words += [f"gradients on the {tier.value}" for tier in tiers]
    ways = sorted({way for way in plan.activations.values() if way != "keep"})
    words += [f"activations: {' and '.join(ways)}"] if ways else []
    words += ["speculative updates"] if plan.speculate else []
    return ", ".join(words)
