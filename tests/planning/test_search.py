"""How a step is divided into passes, and at which stage: what is tried, what is chosen, what is said of the others."""

from __future__ import annotations

import re
from dataclasses import replace
from math import log, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.machines import H200, plain, request_of
from zerostd.engine.settings import Settings
from zerostd.errors import PrepareError
from zerostd.planning import Plan, PlanRequest, Wire
from zerostd.planning.described import from_numbers
from zerostd.planning.planner import Counted
from zerostd.planning.searching import SearchResult, divisions, search, table
from zerostd.planning.simulation import Timeline
from zerostd.planning.solution import Solution, model_state
from zerostd.policy import Budget, Stage, Tier
from zerostd.preparing.scaling import plan_numbers

STAGE = Stage.PARAMETERS


# -- what is tried --


def test_all_divisions_of_a_small_batch_largest_first() -> None:
    assert divisions(1) == [(1, 1)]
    assert divisions(7) == [(7, 1), (1, 7)]
    assert divisions(12) == [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]
    assert [size for size, _ in divisions(128)] == [128, 64, 32, 16, 8, 4, 2, 1]


@given(st.integers(1, 5000), st.integers(2, 8))
def test_divisions_divide_and_are_few_and_far_apart(batch: int, most: int) -> None:
    found = divisions(batch, most)
    assert len(found) <= most and all(prod(one) == batch for one in found)
    assert found[0] == (batch, 1) and found[-1] == (1, batch)
    assert found == sorted(found, reverse=True)
    every = [size for size in range(1, batch + 1) if batch % size == 0]
    if len(every) <= most:
        assert [size for size, _ in found] == every[::-1]
    else:
        wanted = [log(batch) * place / (most - 1) for place in range(most)]
        for one in wanted:  # none is left out that is nearest to one of the places
            assert min(abs(log(size) - one) for size, _ in found) == min(abs(log(size) - one) for size in every)


def step_of(samples: int, passes: int, stage: Stage = STAGE) -> PlanRequest:
    return request_of(plain([10], samples=samples), accumulate=passes, stage=stage)


def counted(request: PlanRequest, step_s: float) -> Counted:
    solution = Solution(request, [])
    vars(solution)["timeline"] = Timeline(step_s=step_s)
    return Counted(solution, {})


SECONDS = {16: 2.0, 8: 1.005, 4: 1.0, 2: 1.5, 1: 3.0}  # by samples in a pass; more do not fit


def solved() -> SearchResult:
    """Large passes do not fit; of the others the larger ones are faster, but for one that is nearly as fast."""
    requests = [step_of(size, passes) for size, passes in divisions(64)]
    fits = [counted(each, SECONDS[each.model.samples or 0]) for each in requests if (each.model.samples or 0) <= 16]
    large = [each for each in requests if (each.model.samples or 0) > 16]
    text = "stage 3 on 1 rank(s) does not fit: {}.5 GiB of the device is missing. Pity"
    return SearchResult(fits, [(each, PrepareError(text.format(each.model.samples))) for each in large])


def test_the_shortest_is_found_and_others_are_told() -> None:
    result = solved()
    best = result.shortest
    assert best.solution.request == step_of(8, 8) and best.seconds == 1.005  # almost, in half the passes
    assert table(result).splitlines() == [
        "A step of 64 samples is divided into passes of 8: accumulate=8. Tried:",
        "  64 x 1: 64.5 GiB of the device is missing",
        "  32 x 2: 32.5 GiB of the device is missing",
        "  16 x 4: 2 s a step",
        "  8 x 8: 1 s a step",
        "  4 x 16: 1 s a step",
        "  2 x 32: 1.5 s a step",
        "  1 x 64: 3 s a step",
    ]


def test_of_each_division_the_best_stage_is_told() -> None:
    fits = [counted(step_of(4, 2, stage), seconds) for stage, seconds in zip(Stage, (4.0, 2.0, 3.0), strict=False)]
    result = SearchResult(fits, [(step_of(4, 2), PrepareError("no"))])
    assert table(result).endswith("Tried:\n  4 x 2: 2 s a step")
    assert result.shortest is fits[1]


def test_nothing_that_fits_is_the_last_refusal() -> None:
    requests = [request_of(plain([10**9], 0.1), {Tier.DEVICE: size}) for size in (10**9, 10**8)]
    with pytest.raises(PrepareError, match=r"with 95\.37 MiB of the device"):
        search(requests, lambda solution: model_state(solution), may_speculate=False)


# -- of models in numbers --

KEEP = frozenset({"keep"})
ANY = frozenset({"keep", "recompute", "host"})
SMALL = Budget(device="30GiB", host="100GiB")


def chosen(plan: Plan) -> tuple[int, int, list[str]]:
    """Samples in a pass, passes and the lines of the table."""
    (note,) = [note for note in plan.notes if note.startswith("A step of ")]
    words, *lines = note.splitlines()
    samples, passes = re.findall(r"passes of (\d+): accumulate=(\d+)\.", words)[0]
    return int(samples), int(passes), lines


def test_a_batch_is_divided_as_is_fastest() -> None:
    model, machine = from_numbers("1.3B"), replace(H200, disk=None)
    plan = plan_numbers(model, machine, Settings(budget=SMALL), batch=24, ways=KEEP)
    samples, passes, lines = chosen(plan)
    assert samples * passes == 24 and len(lines) == len(divisions(24))
    assert "24 x 1" in lines[0] and "is missing" in lines[0]
    steps = {}
    for size, count in divisions(24):
        try:
            settings = Settings(accumulate=count, budget=SMALL)
            one = plan_numbers(replace(model, samples=size), machine, settings, ways=KEEP)
            steps[size] = one.predicted.step_s
        except PrepareError:
            assert any(f"{size} x {count}" in line and "missing" in line for line in lines)
    assert plan.predicted.step_s == pytest.approx(steps[samples])
    assert steps[samples] <= min(steps.values()) * 1.011
    assert not any("accumulate= was not passed" in note for note in plan.notes)


def test_more_to_do_with_activations_lets_more_samples_into_a_pass() -> None:
    model, machine = from_numbers("1.3B"), replace(H200, disk=None)
    settings = Settings(budget=SMALL)
    kept, any_way = (plan_numbers(model, machine, settings, batch=32, ways=ways) for ways in (KEEP, ANY))
    assert "missing" in chosen(kept)[2][0] and "missing" not in chosen(any_way)[2][0]
    assert any_way.predicted.step_s <= kept.predicted.step_s * 1.01


def test_a_batch_with_samples_or_passes_is_no_search() -> None:
    model = from_numbers("100M")
    by_samples = plan_numbers(replace(model, samples=4), H200, Settings(), batch=16)
    by_passes = plan_numbers(model, H200, Settings(accumulate=4), batch=16)
    assert chosen(by_samples)[:2] == chosen(by_passes)[:2] == (4, 4)
    assert by_samples.predicted == by_passes.predicted
    for samples, passes in ((3, None), (None, 5), (4, 2)):
        with pytest.raises(PrepareError, match="a batch of 16 cannot be"):
            plan_numbers(replace(model, samples=samples), H200, Settings(accumulate=passes), batch=16)
    with pytest.raises(PrepareError, match="batch=0"):
        plan_numbers(model, H200, Settings(), batch=0)


def test_stages_and_speculation_are_searched_with_the_batch() -> None:
    machine = replace(H200, disk=None, ranks_per_node=8, wires=(Wire("inside", 8, 4e11, 1e-5),))
    settings = Settings(max_grad_norm=1.0, budget=Budget(device="12GiB"))
    plan = plan_numbers(from_numbers("1.3B"), machine, settings, 8, batch=8, ways=KEEP)
    assert plan.stage in (Stage.GRADIENTS, Stage.PARAMETERS)
    assert len(chosen(plan)[2]) == 4
    assert any("Doubling the micro-batch" in note for note in plan.notes)


@pytest.mark.parametrize("samples", [4, 8])
def test_a_plan_that_speculates_says_what_steps_take_without(samples: int) -> None:
    """And advises against it where clipped steps take longer than all would without."""
    model, budget = replace(from_numbers("1.3B"), samples=samples), Budget(device="22GiB")
    settings = Settings(max_grad_norm=1.0, budget=budget)
    plan = plan_numbers(model, H200, replace(settings, accumulate=1), ways=KEEP)
    late = plan_numbers(model, H200, settings, ways=KEEP)
    assert plan.speculate and not late.speculate and late.predicted.clipped_s is None
    assert f"A clipped step takes {plan.predicted.clipped_s:.3g} s." in plan.explain()
    advice = f"Without speculation every step takes {late.predicted.step_s:.3g} s."
    is_longer = (plan.predicted.clipped_s or 0.0) > 1.02 * (late.predicted.step_s or 0.0)
    assert (advice in plan.explain()) == is_longer and "speculative" not in late.explain()
