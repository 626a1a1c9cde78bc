"""Which candidates are tried: the best by prediction, each of another kind than those before."""

from __future__ import annotations

from zerostd import Plan
from zerostd.planning import Prediction
from zerostd.policy import Homes, Route, Tier
from zerostd.replanning.trials import MOST_TRIED, Trials


def plan(off: float, by_cpu: float, step_s: float, gradients: Tier = Tier.DEVICE, ways: str = "keep") -> Plan:
    """Ten groups with a part of their states on the host, a part of these updated by the CPU."""
    states = ((Tier.DEVICE, Route.RESIDENT, 1 - off), (Tier.HOST, Route.CPU, off * by_cpu))
    states += ((Tier.HOST, Route.STREAMED, off * (1 - by_cpu)),)
    homes = {f"block{index}": Homes(gradients=gradients, states=states) for index in range(10)}
    return Plan(homes, activations={"*": ways}, predicted=Prediction(step_s=step_s))


def tried(present: Plan, *candidates: Plan) -> list[Plan]:
    trials = Trials(present, candidates, 1.0, "the first steps were measured")
    left = []
    while (candidate := trials.next()) is not None:
        left.append(candidate)
    return left


def test_amounts_that_differ_a_little_are_not_tried() -> None:
    assert not tried(plan(0.5, 0.5, 1.0), plan(0.55, 0.5, 0.99), plan(0.5, 0.4, 1.0))


def test_they_are_if_they_are_predicted_to_be_faster() -> None:
    faster = plan(0.55, 0.5, 0.9)
    assert tried(plan(0.5, 0.5, 1.0), faster, plan(0.5, 0.4, 0.99)) == [faster]


def test_of_each_kind_the_best_is_tried() -> None:
    present = plan(0.5, 1.0, 1.0)
    candidates = [
        plan(0.5, 0.5, 0.90),
        plan(0.52, 0.45, 0.91),  # like the first
        plan(0.5, 0.0, 0.92),
        plan(0.5, 1.0, 0.93, gradients=Tier.HOST),
        plan(0.3, 1.0, 0.94, ways="recompute"),
    ]
    assert tried(present, *candidates) == [candidates[0], *candidates[2:]][:MOST_TRIED]


def test_what_is_predicted_to_be_slower_than_its_like_was_measured_is_not_tried() -> None:
    """The first candidate takes longer than predicted, and so would those of its kind; another kind may not."""
    candidates = [
        plan(0.9, 0.0, 0.90),
        plan(0.9, 0.3, 0.94),
        plan(0.9, 0.6, 0.95, gradients=Tier.HOST),
    ]
    trials = Trials(plan(0.0, 0.0, 1.0), candidates, 1.0, "the first steps were measured")
    first = trials.next()
    assert first is candidates[0]
    trials.record(first, 0.98)
    assert trials.next() is candidates[2]
    assert trials.next() is None


def test_the_next_of_a_kind_is_tried_if_the_first_one_was_not_measured() -> None:
    """It passed the budget."""
    candidates = [plan(0.9, 0.0, 0.90), plan(0.9, 0.3, 0.94)]
    assert tried(plan(0.0, 0.0, 1.0), *candidates) == candidates
