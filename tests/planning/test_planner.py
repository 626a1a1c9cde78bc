"""From a request to a plan: groups as a whole, within the limits, and errors that say how many bytes are missing."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import scipy.optimize
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from planning.by_hand import fits, step_seconds
from planning.machines import EVERYTHING, GIB, LAPTOP, fitted, gpt, make_plan, plain, request_of, tight
from zerostd.errors import PrepareError
from zerostd.monitoring.texts import seconds_text
from zerostd.planning import GroupProfile, ModelProfile, Plan, PlanRequest, pricing, simulation
from zerostd.planning import solution as solutions
from zerostd.planning.demands import WHOLE, GroupShares
from zerostd.planning.linear import Infeasible
from zerostd.planning.planner import solve
from zerostd.planning.program import optimise
from zerostd.planning.request import MOST_GROUPS, group_costs, merged
from zerostd.planning.rounding import _bytes_program
from zerostd.planning.solution import Solution, model_state
from zerostd.policy import Kind, Route, Stage, Tier

GIVES = re.compile(r"\((\d+) bytes\) of the (device|host|disk)")
LARGER = re.compile(r"Budget\((device|host|disk)=...\) larger by [^(]*\((\d+) bytes\)")
HOMES = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))  # of parameters: device, host, disk


def solved(request: PlanRequest) -> Solution | None:
    """None: nothing fits."""
    try:
        return solve(request)
    except Infeasible:
        return None


def totals(solution: Solution) -> dict[Tier, int]:
    return {tier: sum(kinds.values()) for tier, kinds in model_state(solution).items()}


# -- whole groups within limits --


@settings(max_examples=20, deadline=None)
@given(tight())
def test_parameters_and_gradients_of_a_group_are_in_one_tier(request: PlanRequest) -> None:
    solution = solved(request)
    assume(solution is not None)
    for share in solution.shares:
        assert {share.parameters_host, share.parameters_disk, share.gradients_host} <= {0.0, 1.0}
        assert share.parameters_host + share.parameters_disk <= 1.0
    homes = make_plan(request).homes
    assert list(homes) == [group.name for group in request.model.groups]
    for home in homes.values():
        assert home.gradients is not Tier.DISK
        assert sum(part for _, _, part in home.states) == pytest.approx(1.0)
        assert not any(route is Route.STREAMED for _, route, _ in home.states) or home.parameters is not Tier.DISK


@settings(max_examples=30, deadline=None)
@given(tight(), st.integers(0, 10**8))
def test_no_limit_is_passed(request: PlanRequest, fixed: int) -> None:
    request = replace(request, fixed={Tier.DEVICE: fixed, Tier.HOST: fixed // 2})
    solution = solved(request)
    assume(solution is not None)
    for tier, held in totals(solution).items():
        assert held <= request.limits.get(tier, 0) * (1 + 1e-5) + 10_000
    assert fits(request, solution.request.costs, solution.shares, slack=1e-4)


@settings(max_examples=20, deadline=None)
@given(tight(), st.sampled_from([1, 2, 8]), st.sampled_from(list(Stage)))
def test_no_limit_is_passed_at_any_stage(request: PlanRequest, size: int, stage: Stage) -> None:
    limits = {tier: limit // (size if stage == 3 else 1) for tier, limit in request.limits.items()}
    solution = solved(replace(request, limits=limits, world_size=size, stage=stage))
    assume(solution is not None)
    for tier, held in totals(solution).items():
        assert held <= limits.get(tier, 0) * (1 + 1e-5) + 10_000
    if size > 1:
        assert stage >= 2 or not any(share.gradients_host for share in solution.shares)
        assert stage == 3 or not any(share.parameters_host + share.parameters_disk for share in solution.shares)


@settings(max_examples=15, deadline=None)
@given(tight())
def test_the_prediction_is_no_better_than_the_rules_allow(request: PlanRequest) -> None:
    """Clipping aside: gradients may land before the norm is known."""
    solution = solved(replace(request, waits_for_norm=False))
    assume(solution is not None)
    by_hand = step_seconds(solution.request, solution.request.costs, solution.shares)
    assert solution.timeline.step_s >= 0.99 * by_hand
    assert make_plan(solution.request).predicted.step_s == pytest.approx(solution.timeline.step_s)


# -- what goes where --


def as_measured(limits: dict[Tier, int], **options: Any) -> PlanRequest:
    """1.3 B parameters in batches of 8x1024."""
    block = GroupProfile("", 50_331_648, 0, 1.0, kept_bytes=67e6, boundary_bytes=4.2e6, peak_bytes=60e6)
    first = replace(block, name="embedding", trained=67_000_000, forward_flops=0.01, kept_bytes=1e6, boundary_bytes=1e6)
    last = replace(block, name="head", trained=65_000_000, forward_flops=1.3, kept_bytes=5e7, boundary_bytes=5e7)
    groups = (first, *(replace(block, name=f"block{index}") for index in range(24)), last)
    model = ModelProfile("gpt", groups, samples=8, forward_s=0.039, backward_s=0.084)
    return request_of(model, limits, activations=frozenset({"keep", "recompute"}), **options)


CLIPPED = {"waits_for_norm": True}


@pytest.mark.parametrize(
    ("size", "options"),
    [(14, {}), (20, {}), (14, CLIPPED), (20, CLIPPED), (24, CLIPPED), (18, {**CLIPPED, "speculates": True})],
)
def test_a_price_is_what_more_memory_saves(size: int, options: dict[str, Any]) -> None:
    """Also where each group recomputes or does not, and as long as none changes more memory is of no use to any."""

    def planned(more: int) -> Plan:
        return make_plan(as_measured({Tier.DEVICE: (size + more) * GIB, Tier.HOST: 100 * GIB}, **options))

    plan = planned(0)
    price = plan.predicted.prices[Tier.DEVICE]
    saved = ((plan.predicted.step_s or 0.0) - (planned(3).predicted.step_s or 0.0)) / 3
    assert price * GIB == pytest.approx(saved, rel=0.2) and saved > 0.002
    assert f"One more GiB of the device would save {seconds_text(price * GIB)} a step." in plan.explain()
    assert "One more GiB of the host would not shorten the step." in plan.explain()


def test_no_price_promises_more_than_there_is() -> None:
    """Some is recomputed in 24 GiB, and nothing at last."""
    step_s, prices = [], []
    for size in (24, 25, 26, 27, 28, 40):
        found = make_plan(as_measured({Tier.DEVICE: size * GIB, Tier.HOST: 100 * GIB}, **CLIPPED)).predicted
        assert found.prices[Tier.DEVICE] * GIB <= (found.step_s or 0.0) - 0.123 + 1e-9
        step_s, prices = [*step_s, found.step_s], [*prices, found.prices[Tier.DEVICE]]
    assert step_s[-1] < step_s[0] and prices[0] > 0 == prices[-1]


@pytest.mark.parametrize("clips", [False, True])
def test_nothing_leaves_a_device_that_is_large_enough(clips: bool) -> None:
    request = request_of(gpt(2048, 24, 2.0), waits_for_norm=clips)
    plan = make_plan(request)
    assert all(home.states == ((Tier.DEVICE, Route.RESIDENT, 1.0),) for home in plan.homes.values())
    assert plan.predicted.total(Tier.DEVICE) == 16 * request.model.trained
    assert plan.predicted.total(Tier.HOST) == plan.predicted.total(Tier.DISK) == 0
    assert plan.predicted.step_s == pytest.approx(2.0 + request.model.trained * 0.008e-9)
    assert not make_plan(replace(request, waits_for_norm=True, speculates=True)).speculate


@settings(max_examples=15, deadline=None)
@given(tight())
def test_what_leaves_a_device_that_is_large_enough_is_worth_it(request: PlanRequest) -> None:
    request = replace(request, limits=EVERYTHING)
    solution = solve(request)
    if any(share != GroupShares() for share in solution.shares):
        resident = step_seconds(request, solution.request.costs, [GroupShares() for _ in solution.request.costs])
        assert solution.timeline.step_s < resident


def test_the_front_is_nearest_where_an_update_waits_for_the_norm() -> None:
    model = gpt(2048, 24, 0.3)
    request = request_of(model, {Tier.DEVICE: 10 * model.trained, Tier.HOST: 100 * GIB}, waits_for_norm=True)
    resident = [share.resident for share in solve(request).shares]
    half, quarter = len(resident) // 2, len(resident) // 4
    assert min(resident[: half - 1]) > 0.999 and max(resident[-quarter:]) < 0.001
    assert (
        half - 2 <= sum(resident) <= 10 / 16 * len(resident) + 1
    )  # more, where nothing of the others is on the device


def test_the_disk_only_where_the_host_is_too_small() -> None:
    model = gpt(2048, 24, 0.3)
    limits = {Tier.DEVICE: 5 * model.trained, Tier.HOST: 20 * model.trained, Tier.DISK: 20 * model.trained}
    plan = make_plan(request_of(model, limits))
    assert plan.predicted.total(Tier.HOST) > 11 * model.trained
    assert not any(tier is Tier.DISK for home in plan.homes.values() for tier, _, _ in home.states)
    used = totals(solve(request_of(model, {**limits, Tier.HOST: 5 * model.trained})))
    assert used[Tier.DISK] > 5 * model.trained


def test_without_a_link_states_go_to_disk_by_the_processor() -> None:
    model = plain([10**8] * 5, 1.0, parameter_bytes=4, gradient_bytes=4, state_bytes=8, master_bytes=4)
    request = request_of(model, {Tier.DEVICE: 6 * 10**9, Tier.DISK: 20 * GIB}, machine=LAPTOP, num_threads=4)
    plan = make_plan(request)
    routes = {(tier, route) for home in plan.homes.values() for tier, route, _ in home.states}
    assert routes == {(Tier.DEVICE, Route.RESIDENT), (Tier.DISK, Route.CPU)}
    assert {"up", "down", "link"}.isdisjoint(plan.predicted.busy)


def test_without_a_link_and_a_limit_of_the_host_what_passes_is_the_devices() -> None:
    """Adapters on a frozen model: its parameters rest on disk, and only what is trained passes through memory."""
    groups = tuple(GroupProfile(f"g{i}", 10**6, 10**8) for i in range(5))
    model = ModelProfile("adapters", groups, forward_s=1.0, backward_s=2.0)
    request = request_of(model, {Tier.DEVICE: 4 * 10**8, Tier.DISK: 20 * GIB}, machine=LAPTOP, num_threads=4)
    plan = make_plan(request)
    assert sum(home.parameters is Tier.DISK for home in plan.homes.values()) >= 4
    assert plan.predicted.total(Tier.HOST) == 0 and plan.predicted.total(Tier.DEVICE) <= 4 * 10**8
    assert fits(request, group_costs(request), solve(request).shares, slack=1e-5)


def test_seconds_are_only_predicted_where_they_can_be_known() -> None:
    model = replace(gpt(1024, 8), samples=None)
    plan = make_plan(request_of(model, {Tier.DEVICE: 6 * model.trained, Tier.HOST: 100 * GIB}), notes=["so it is"])
    assert plan.predicted.step_s is None and plan.predicted.compute_s is None
    assert plan.notes[0] == "so it is"
    known = make_plan(request_of(gpt(1024, 8, 0.2)))
    assert known.predicted.step_s is not None and known.predicted.compute_s <= known.predicted.step_s


def test_buffers_are_not_counted_as_activations_twice() -> None:
    model = replace(gpt(1024, 8, 0.2), activation_bytes=3 * GIB)
    held = model_state(solve(request_of(model, fixed={Tier.DEVICE: GIB, Tier.HOST: GIB})))
    assert held[Tier.DEVICE][Kind.ACTIVATIONS] == 3 * GIB
    assert held[Tier.DEVICE][Kind.BUFFERS] == GIB
    assert held[Tier.HOST] == {Kind.BUFFERS: GIB}
    assert sum(held[Tier.DEVICE].values()) == 16 * model.trained + 4 * GIB


# -- many --


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the solver and the simulation are asked, and how large the program is at most: seconds would depend on
    who else is busy."""
    found = {"solved": 0, "variables": 0, "entries": 0, "simulated": 0}

    def solving(cost: Any, most: Any, *rest: Any, **options: Any) -> Any:
        found["solved"] += 1
        found["variables"] = max(found["variables"], len(cost))
        found["entries"] = max(found["entries"], most.nnz)
        return linprog(cost, most, *rest, **options)

    def simulating(*given_: Any) -> Any:
        found["simulated"] += 1
        return simulation.simulate(*given_)

    monkeypatch.setattr(scipy.optimize, "linprog", solving)
    monkeypatch.setattr(pricing, "simulate", simulating)
    monkeypatch.setattr(solutions, "simulate", simulating)
    return found


MANY = random.Random(0)
TENSORS = [[MANY.randrange(10**3, 10**6) for _ in range(10)] for _ in range(2000)]  # 20,000 in 2,000 groups


MANY_LIMITS = [(20.0, 40.0, 0.0), (5.0, 40.0, 0.0), (1.0, 40.0, 0.0), (1.041, 4.2, 20.0), (2.0, 2.002, 12.01)]


@pytest.mark.parametrize(
    ("limits", "passes"),
    [
        pytest.param(limits, (1, 4)[(number + part) % 2], marks=pytest.mark.full if part else ())
        for number, limits in enumerate(MANY_LIMITS)
        for part in (0, 1)
    ],
)
def test_many_groups_are_placed_together(
    limits: tuple[float, float, float], passes: int, counts: dict[str, int]
) -> None:
    """2,000 groups with 20,000 parameter tensors between them: of a group, the program never sees more than sizes. What
    hardly fits takes no more than what is roomy: below 5 s, half of it twice the samples."""
    model = plain([sum(sizes) for sizes in TENSORS], 0.3)
    request = request_of(
        model, {tier: int(size * model.trained) for tier, size in zip(Tier, limits, strict=True) if size}
    )
    request = replace(request, accumulate=passes)
    assert len(merged(group_costs(request), MOST_GROUPS)) <= MOST_GROUPS < len(group_costs(request))
    if passes > 1 and limits[0] < 3:
        request = replace(
            request, limits={**request.limits, Tier.HOST: 40 * model.trained}
        )  # sums take twice the bytes
    plan = make_plan(request)
    assert list(plan.homes) == [group.name for group in model.groups]
    assert all(plan.predicted.total(tier) <= limit * (1 + 1e-5) + 10_000 for tier, limit in request.limits.items())
    assert counts["solved"] <= 32 and counts["simulated"] <= 72  # up to four for prices
    assert counts["variables"] <= 30 * MOST_GROUPS and counts["entries"] <= 150 * MOST_GROUPS


def test_many_groups_that_do_not_fit_are_refused_as_quickly(counts: dict[str, int]) -> None:
    model = plain([sum(sizes) for sizes in TENSORS], 0.3)
    with pytest.raises(PrepareError, match="is missing"):
        fitted(
            request_of(model, {Tier.DEVICE: model.trained, Tier.HOST: 2 * model.trained, Tier.DISK: 9 * model.trained})
        )
    assert counts["solved"] <= 8 and counts["simulated"] == 0


# -- what is missing --


def asked(error: PrepareError) -> list[dict[Tier, int]]:
    """The changes of limits that an error says would fit, each by itself enough."""
    ways = str(error).split("What would fit: ")[1].split("; or ")
    return [{Tier(tier): int(size) for tier, size in LARGER.findall(way)} for way in ways if LARGER.search(way)]


def larger(request: PlanRequest, by: Mapping[Tier, int]) -> PlanRequest:
    return replace(request, limits={tier: size + by.get(tier, 0) for tier, size in request.limits.items()})


@settings(max_examples=20, deadline=None)
@given(tight(), st.floats(0.1, 0.9))
def test_what_an_error_asks_for_is_enough(request: PlanRequest, part: float) -> None:
    """To the byte: groups that move as a whole are counted in."""
    request = replace(request, limits={tier: int(limit * part) for tier, limit in request.limits.items()})
    if solved(request) is not None:
        return
    with pytest.raises(PrepareError) as caught:
        fitted(request)
    changes = asked(caught.value)
    assert changes and " is missing" in str(caught.value)
    for by in changes:
        assert solved(larger(request, by)) is not None


@pytest.mark.parametrize("seed", range(6))
def test_what_an_error_asks_for_is_the_least_that_whole_groups_need(seed: int) -> None:
    """Against all ways to place two groups: what each of them is short of, states placed at will."""
    draw = random.Random(seed)
    model = plain([draw.randrange(10**8, 10**9) for _ in range(2)], 0.1)
    limits = (draw.uniform(0.5, 3), draw.uniform(0.5, 3), draw.uniform(11, 14))
    request = request_of(model, {tier: int(size * model.trained) for tier, size in zip(Tier, limits, strict=True)})
    least = float("inf")
    for fixed in product([(*home, landed) for home in HOMES for landed in (0.0, 1.0)], repeat=2):
        program, short = _bytes_program(request, dict.fromkeys(Tier, -1.0))
        program.hold([GroupShares(0.0, 0.0, 0.0, 0.0, 0.0, *one) for one in fixed], WHOLE)
        least = min(least, program.linear.minimise([(short, 1.0)]).objective * 1e9)
    if solved(request) is not None:
        assert least < 10_000
        return
    with pytest.raises(PrepareError) as caught:
        fitted(request)
    assert sum(asked(caught.value)[0].values()) == pytest.approx(least, abs=1e-3 * least + 4e-5 * 16 * model.trained)


def test_less_than_a_group_is_named_in_bytes() -> None:
    """Shares would fit, groups do not: the error says by how much. Three of 48 GB have to leave, and two parameters in
    three take four of the host's three."""
    model = plain([10**9] * 3, 0.1)
    limits = {Tier.DEVICE: 45 * 10**9, Tier.HOST: 3 * 10**9}
    request = request_of(model, limits, can_place=frozenset({Kind.PARAMETERS}))
    assert optimise(request)
    with pytest.raises(PrepareError, match=r"at least .* is missing") as caught:
        fitted(request)
    changes = asked(caught.value)
    assert sorted(tier for by in changes for tier in by) == [Tier.DEVICE, Tier.HOST]
    assert [size for by in changes for size in by.values()] == pytest.approx([10**9] * 2, rel=1e-3)
    assert all(solved(larger(request, by)) for by in changes)


def test_an_error_names_bytes_tiers_and_remedies() -> None:
    """12 bytes of states are nowhere to go but to a host that has 10 for each."""
    n = 10**9
    model = replace(plain([n // 10] * 10, 0.3), activation_bytes=GIB)
    request = request_of(model, {Tier.DEVICE: 4 * n, Tier.HOST: 10 * n})
    with pytest.raises(PrepareError) as caught:
        fitted(request)
    text = str(caught.value)
    assert "1 B parameters at stage 3 on 1 rank," in text
    assert "of the device" in text and "of the host" in text
    sizes = [int(size) for size, _ in GIVES.findall(text)]
    assert 2 * n * 0.99 <= sum(sizes) <= 4.2 * n
    for remedy in ("Budget(", "disk_path", "fewer samples", "more ranks"):
        assert remedy in text
    assert all(solved(larger(request, by)) for by in asked(caught.value))
    with pytest.raises(PrepareError, match="stage=3"):
        fitted(replace(request, limits={Tier.DEVICE: n, Tier.HOST: n}, stage=Stage.GRADIENTS, world_size=2))


@pytest.mark.parametrize(
    ("sizes", "limits"),
    [
        ([478_470_446], (1.041, 4.2, 20)),
        ([177_618_099, 602_843_422, 191_520_927], (2.677, 1.86, 20)),
        ([696_361_801, 922_920_864, 423_879_278], (2.009, 2.102, 12)),
        ([340_513_075, 53_934_571], (3.543, 1.178, 12)),
    ],
)
def test_whole_groups_are_found_where_there_is_a_way(sizes: list[int], limits: tuple[float, float, float]) -> None:
    """Where hardly any_choice fits: some group has to go where its shares do not point."""
    model = plain(sizes, 0.1)
    request = request_of(model, {tier: int(size * model.trained) for tier, size in zip(Tier, limits, strict=True)})
    if solved(request) is not None:
        return
    places = [GroupShares(0.0, 0.0, 0.0, 0.0, 0.0, *home, landed) for home in HOMES for landed in (0.0, 1.0)]
    for fixed in product(places, repeat=len(sizes)):
        with pytest.raises(Infeasible):
            optimise(request, fixed=fixed)


# -- Table 1 of the ZeRO paper --

# model state in GB on each device, by parameters (in billions) and degree: at stages 1, 2 and 3, as printed
PAPER = {
    7.5: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1000: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}


@pytest.mark.parametrize("billions", list(PAPER))
@pytest.mark.parametrize("size", [1, 4, 16, 64, 256, 1024])
def test_model_state_is_that_of_the_papers_table(billions: float, size: int) -> None:
    """The paper rounds some numbers and cuts off others, so one unit of the last digit is allowed."""
    model = ModelProfile("paper", (GroupProfile("all", int(billions * 10**9)),), forward_s=1e6, backward_s=2e6)
    for stage, printed in zip((1, 2, 3), PAPER[billions][size], strict=True):
        request = request_of(model, stage=Stage(stage), world_size=size)
        held = totals(solve(request))[Tier.DEVICE] / 1e9
        part = 1 / size
        exact = billions * {1: 4 + 12 * part, 2: 2 + 14 * part, 3: 16 * part}[stage]
        assert held == pytest.approx(exact, rel=1e-8)
        unit = 10.0 ** -len(printed.partition(".")[2])
        assert abs(held - float(printed)) < unit


def test_what_twice_the_samples_would_buy() -> None:
    """Where updates hold up the step, samples are nearly free; where the device computes all the time, they are not."""
    model = gpt(2048, 24, 0.1)
    tight = make_plan(request_of(model, {Tier.DEVICE: 5 * model.trained, Tier.HOST: 20 * model.trained}))
    roomy = make_plan(request_of(model))
    gains = [float(plan.notes[0].split(" raise throughput by ")[1].split()[0]) for plan in (tight, roomy)]
    assert 50 < gains[0] <= 100 and 0 <= gains[1] < 20
    kept = replace(model, samples=8, activation_bytes=model.trained)
    full = request_of(kept, {Tier.DEVICE: int(5.2 * model.trained), Tier.HOST: model.trained})
    with pytest.raises(PrepareError, match="is missing"):
        make_plan(full)
    little = {Tier.DEVICE: 17 * model.trained + 1000}
    plan = make_plan(request_of(kept, little))
    assert plan.notes[0] == "Doubling the micro-batch would not fit."
