"""What is done with activations: bytes and seconds by hand, nothing better among all choices, and what a plan says."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planning.by_hand import fits, held_bytes, needed_inside, step_seconds
from planning.machines import EVERYTHING, GIB, H200, LAPTOP, fitted, machines, make_plan, request_of
from zerostd.errors import PrepareError
from zerostd.planning import GroupProfile, ModelProfile, Plan, PlanRequest
from zerostd.planning.demands import GroupShares, activation_bytes, activation_choices, choice_of, way_of
from zerostd.planning.described import from_numbers
from zerostd.planning.linear import Infeasible
from zerostd.planning.planner import fitting, solve
from zerostd.planning.program import SLACK, ScheduleProgram, optimise, prices_of, quickest
from zerostd.planning.request import GroupCost, group_costs, merged
from zerostd.planning.rounding import optimise_whole
from zerostd.planning.searching import search
from zerostd.planning.simulation import simulate
from zerostd.planning.solution import ObservedStep, Solution, activations_by_group, model_state, refit
from zerostd.policy import Homes, Kind, Tier

ANY = frozenset({"keep", "recompute", "host"})
KEPT = GroupShares()
AGAIN, AWAY = GroupShares(activations_recomputed=1.0), GroupShares(activations_host=1.0)
DOES = {"keep": KEPT, "recompute": AGAIN, "host": AWAY}
some_ways = st.sets(st.sampled_from(sorted(ANY)), min_size=1).map(frozenset)


@st.composite
def keeping(draw: st.DrawFn, most: int = 3) -> ModelProfile:
    """A few groups that leave something for backward."""
    groups = []
    for index in range(draw(st.integers(1, most))):
        kept = draw(st.integers(0, 20)) * 1e8
        groups.append(
            GroupProfile(
                f"g{index}",
                draw(st.integers(10**6, 10**8)),
                forward_flops=draw(st.integers(1, 10)),
                kept_bytes=kept,
                boundary_bytes=kept * draw(st.integers(0, 4)) / 10,
                peak_bytes=kept * draw(st.integers(0, 5)) / 10,
            )
        )
    forward_s = draw(st.sampled_from([1e-3, 1e-2, 0.1, 1.0]))
    backward_s = draw(st.floats(1.0, 3.0)) * forward_s
    samples = draw(st.integers(1, 3))
    return ModelProfile("keeping", tuple(groups), samples=samples, forward_s=forward_s, backward_s=backward_s)


@st.composite
def requests(draw: st.DrawFn, most: int = 3, *, is_tight: bool = True) -> PlanRequest:
    """Model state stays on the device; only activations are chosen."""
    model = draw(keeping(most))
    assume(model.knows_activations)
    request = request_of(
        model,
        machine=draw(machines()),
        accumulate=draw(st.integers(1, 3)),
        waits_for_norm=draw(st.booleans()),
        can_place=frozenset(),
        num_threads=1,
        activations=draw(some_ways),
    )
    if is_tight:
        state = 16 * model.trained + (2 * model.trained if request.accumulate > 1 else 0)
        limits = {Tier.DEVICE: int(state + model.activations() * draw(st.floats(0.1, 1.2))), Tier.HOST: 10**15}
        request = replace(request, limits=limits)
    return request


def choices(request: PlanRequest, found: Sequence[GroupCost]) -> Iterator[list[GroupShares]]:
    """All that whole groups can do."""
    for ways in product(sorted(request.ways), repeat=len(found)):
        yield [DOES[way] for way in ways]


def program_of(request: PlanRequest, shares: Sequence[GroupShares]) -> ScheduleProgram:
    program = ScheduleProgram(request, choice_of(request, shares))
    program.hold(shares)
    return program


# -- what it costs --


@settings(max_examples=80, deadline=None)
@given(requests(is_tight=False), st.data())
def test_a_given_choice_costs_what_it_costs_by_hand(request: PlanRequest, data: st.DataObject) -> None:
    found = group_costs(request)
    shares = [DOES[data.draw(st.sampled_from(sorted(ANY)))] for _ in found]
    program = program_of(request, shares)
    outcome = program.linear.minimise([(program.step, 1.0)])
    assert outcome.objective == pytest.approx(step_seconds(request, found, shares), rel=1e-5, abs=1e-7)
    by_hand = [held_bytes(request, cost, share) for cost, share in zip(found, shares, strict=True)]
    inside = {Tier.DEVICE: needed_inside(found, shares)}
    for tier in Tier:
        held = program.linear.minimise(program.bytes[tier]).objective * 1e9 + program.constant[tier]
        assert held == pytest.approx(sum(one[tier] for one in by_hand) + inside.get(tier, 0.0), abs=10_000)
    device, host = activation_bytes(request, shares)
    assert host == pytest.approx(sum(one[Tier.HOST] for one in by_hand))
    state = sum(cost.updated * 12 + cost.parameters + cost.gradients for cost in found)
    assert device + state == pytest.approx(sum(one[Tier.DEVICE] for one in by_hand) + inside[Tier.DEVICE])


@settings(max_examples=60, deadline=None)
@given(requests(5, is_tight=False), st.data())
def test_no_simulated_step_is_shorter_than_by_hand(request: PlanRequest, data: st.DataObject) -> None:
    found = group_costs(request)
    shares = [DOES[data.draw(st.sampled_from(sorted(ANY)))] for _ in found]
    timeline = simulate(request, shares)
    assert timeline.step_s >= 0.999 * step_seconds(request, found, shares, makes_room=True)
    assert timeline.busy["compute"] + timeline.busy["update"] == pytest.approx(timeline.compute_s, rel=1e-6)
    if not any(share.activations_host for share in shares):
        assert timeline.busy.keys() & {"send", "return"} == set()


def test_recomputing_runs_forward_again_and_keeps_inputs() -> None:
    groups = tuple(GroupProfile(f"g{i}", 10**6, 0, 10.0, 5e8, 1e8, 2e8) for i in range(4))
    model = ModelProfile("even", groups, samples=2, forward_s=0.4, backward_s=0.8)
    request = request_of(model, activations=ANY, can_place=frozenset())
    update = 4e6 * 0.008e-9
    assert simulate(request, [KEPT] * 4).step_s == pytest.approx(1.2 + update)
    assert simulate(request, [AGAIN] * 4).step_s == pytest.approx(1.6 + update)
    assert simulate(request, [AGAIN] * 4).compute_s == pytest.approx(1.6 + update)
    assert activation_bytes(request, [KEPT] * 4) == (4 * 1e9 + 4e8, 0.0) == (model.activations(), 0.0)
    assert activation_bytes(request, [AGAIN] * 4) == (4 * 2e8 + 1e9 + 4e8, 0.0)
    assert activation_bytes(request, [AWAY] * 4) == (2 * 1e9 + 4e8, 4e9)


def test_what_was_measured_takes_the_place_of_the_estimate() -> None:
    """More than the estimate is needed for a moment, and not kept; less is less of everything."""
    groups = tuple(GroupProfile(f"g{i}", 10**6, 0, 10.0, 5e8, 1e8, 2e8) for i in range(4))
    model = ModelProfile("even", groups, samples=1, forward_s=0.4, backward_s=0.8)
    assert model.activations() == 4 * 5e8 + 2e8
    more = request_of(replace(model, activation_bytes=3 * 10**9), activations=ANY)
    assert activation_bytes(more, [KEPT] * 4)[0] == pytest.approx(3e9)
    assert activation_bytes(more, [AGAIN] * 4)[0] == pytest.approx(4 * 1e8 + 5e8 + 1e9)
    less = request_of(replace(model, activation_bytes=11 * 10**8), activations=ANY)
    assert activation_bytes(less, [KEPT] * 4)[0] == pytest.approx(11e8)
    assert activation_bytes(less, [AGAIN] * 4)[0] == pytest.approx((4 * 1e8 + 5e8 + 2e8) / 2)


@given(st.integers(1, 40))
def test_joined_groups_keep_the_sum_and_need_the_largest(most: int) -> None:
    model = from_numbers("1.3B", samples=2)
    request = request_of(model, activations=ANY)
    found = request.costs
    joined = merged(found, most)
    shorter = replace(request)
    vars(shorter)["costs"] = joined
    for ways in (KEPT, AGAIN):
        apart, together = (activation_bytes(each, [ways] * len(each.costs)) for each in (request, shorter))
        assert apart == pytest.approx(together)
    assert sum(cost.activations.longer_s for cost in joined) == pytest.approx(
        sum(cost.activations.longer_s for cost in found)
    )


# -- nothing better --


def best_by_hand(request: PlanRequest, found: Sequence[GroupCost]) -> float:
    """The shortest step of all choices that fit."""
    tried = [step_seconds(request, found, shares) for shares in choices(request, found) if fits(request, found, shares)]
    return min(tried, default=float("inf"))


@settings(max_examples=80, deadline=None)
@given(requests())
def test_no_whole_choice_is_better_and_one_is_found_where_there_is_one(request: PlanRequest) -> None:
    found = group_costs(request)
    best = best_by_hand(request, found)
    try:
        step_s, fixed = optimise_whole(request)
    except Infeasible:
        assert best == float("inf")
        return
    assert {way_of(share) for share in fixed} <= request.ways
    assert fits(request, found, fixed, slack=1e-5)
    assert step_s >= best * (1 - 1e-5) - 1e-7
    assert step_s == pytest.approx(step_seconds(request, found, fixed), rel=1e-5, abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(requests())
def test_shares_are_no_worse_than_any_whole_choice_of_their_level(request: PlanRequest) -> None:
    """A choice has room for the largest of its groups, so the choices that need as much are those to compare with."""
    found = group_costs(request)
    for choice in activation_choices(request):
        program = ScheduleProgram(request, choice)
        try:
            step_s = program.linear.minimise([(program.step, 1.0)]).objective
        except Infeasible:
            step_s = float("inf")
        for shares in choices(request, found):
            need = choice_of(request, shares)
            is_in = (need.recomputed <= choice.recomputed).all() and (need.sent <= choice.sent).all()
            roomy = replace(request, fixed={Tier.DEVICE: choice.beside - need.beside})
            if is_in and choice.beside >= need.beside and fits(roomy, found, shares, slack=0.0):
                assert step_s <= step_seconds(request, found, shares) * (1 + 1e-5) + 1e-7


def test_choices_are_near_the_best_on_the_whole() -> None:
    """Rounding loses something where there are two groups, and little where there are many."""
    draw, ratios = random.Random(7), []
    for _ in range(40):
        groups = tuple(
            GroupProfile(f"g{i}", 10**7, 0, draw.uniform(1, 3), draw.uniform(1e8, 1e9), 2e7, 5e7) for i in range(5)
        )
        model = ModelProfile("drawn", groups, samples=2, forward_s=0.05, backward_s=0.1)
        limit = 16 * model.trained + int(model.activations() * draw.uniform(0.5, 0.95))
        request = request_of(model, {Tier.DEVICE: limit, Tier.HOST: 10**12}, can_place=frozenset(), activations=ANY)
        found = group_costs(request)
        best = best_by_hand(request, found)
        if best < float("inf"):
            chosen = solve(request)
            ratios.append(optimise(request, fixed=chosen.shares)[0] / best)
    assert len(ratios) > 25
    assert sum(ratios) / len(ratios) < 1.03 and max(ratios) < 1.2


@settings(max_examples=40, deadline=None)
@given(requests(4), st.floats(0.9, 1.5))
def test_a_price_lies_between_what_one_percent_less_costs_and_one_more_saves(request: PlanRequest, part: float) -> None:
    """With states that may be placed too, in a choice that stays the same: there the step is convex in the limit."""
    request = replace(
        request, activations=frozenset({"recompute", "host"}), can_place=frozenset({Kind.OPTIMIZER_STATES})
    )
    limit = int(request.limits[Tier.DEVICE] * part)
    steps = []
    for size in (limit - limit // 100, limit, limit + limit // 100):
        try:
            one = replace(request, limits={**request.limits, Tier.DEVICE: size})
            steps.append(quickest(one)[1])
        except Infeasible:
            steps.append(None)
    less, here, more = steps
    if here is None:
        return
    delta, price = limit // 100, prices_of(here)[Tier.DEVICE]
    noise = 1e-7 / delta
    assert (here.objective - more.objective) / delta * 0.98 - noise <= price
    if less is not None:
        assert price <= (less.objective - here.objective) / delta * 1.02 + noise


@settings(max_examples=40, deadline=None)
@given(requests(4))
def test_more_to_choose_from_never_makes_the_program_longer(request: PlanRequest) -> None:
    few, many = (replace(request, activations=ways) for ways in (frozenset({"keep"}), ANY))
    try:
        alone = optimise(few)[0]
    except Infeasible:
        return
    assert quickest(many)[1].objective <= alone * (1 + SLACK) + 1e-7


# -- plans --


def gpt_task(device: int, ways: frozenset[str] = ANY, **options: object) -> PlanRequest:
    return request_of(
        from_numbers("1.3B", samples=8), {Tier.DEVICE: device * GIB, Tier.HOST: 120 * GIB}, activations=ways, **options
    )


def totals(solution: Solution) -> dict[Tier, int]:
    return {tier: sum(kinds.values()) for tier, kinds in model_state(solution).items()}


@functools.cache
def solved_gpt(device: int, ways: frozenset[str]) -> Solution:
    return solve(gpt_task(device, ways))


FEWER = [frozenset({"keep", "recompute"}), frozenset({"keep", "host"})]  # ways
SIZES = [60, 30, 20, 14, 8]  # of the device


@pytest.mark.parametrize(
    ("device", "ways"),
    [
        *((device, ANY) for device in SIZES),
        *((device, ways) for ways, devices in zip(FEWER, ([20, 8], [30, 8]), strict=True) for device in devices),
        *(
            pytest.param(device, ways, marks=pytest.mark.full)
            for ways, devices in zip(FEWER, ([60, 30, 14], [60, 20, 14]), strict=True)
            for device in devices
        ),
    ],
)
def test_plans_fit_and_say_what_to_do(device: int, ways: frozenset[str]) -> None:
    request = gpt_task(device, ways)
    solution, plan = solved_gpt(device, ways), make_plan(request)
    assert all(held <= request.limits.get(tier, 0) * (1 + 1e-5) + 1 for tier, held in totals(solution).items())
    names = [group.name for group in request.model.groups]
    assert {plan.activations_of(name) for name in names} <= ways
    done = [plan.activations_of(group) for group in names]
    assert done == [way_of(share) for share in solution.shares]
    on_host = plan.predicted.bytes[Tier.HOST].get(Kind.ACTIVATIONS, 0)
    assert (on_host > 0) == ("host" in done)
    text = plan.explain()
    if device == 60:
        assert plan.activations == {"*": "keep"} and "Activations: keep them in all groups." in text
    if device == 8:
        assert set(done) - {"keep"}
    if set(done) != {"keep"}:
        assert ("recompute them in" in text) == ("recompute" in done)
        assert ("send them to the host in" in text) == ("host" in done)
        assert "Activations take" in text and "of the device instead of" in text
    assert Plan.from_json(plan.to_json()) == plan


def test_more_choice_and_more_memory_make_no_plan_much_longer() -> None:
    steps = {
        (device, len(ways)): solved_gpt(device, ways).timeline.step_s
        for device in SIZES
        for ways in (frozenset({"recompute"}), frozenset({"keep", "recompute"}), ANY)
    }
    for (device, count), step_s in steps.items():
        for (more, others), other in steps.items():
            if more >= device and others >= count:
                assert other <= step_s * 1.06, ((device, count), (more, others))  # 5 % are not worth moving any_choice


def test_without_a_choice_nothing_is_said_and_nothing_changes() -> None:
    model = from_numbers("1.3B", samples=8)
    limits = {Tier.DEVICE: 30 * GIB, Tier.HOST: 120 * GIB}
    without, only = request_of(model, limits), request_of(model, limits, activations=frozenset({"keep"}))
    one, other = make_plan(without), make_plan(only)
    assert one.activations == {} and other.activations == {"*": "keep"}
    assert one.predicted.step_s == pytest.approx(other.predicted.step_s, rel=1e-3)
    assert one.predicted.bytes[Tier.DEVICE][Kind.ACTIVATIONS] == pytest.approx(
        other.predicted.bytes[Tier.DEVICE][Kind.ACTIVATIONS], abs=2
    )
    assert "Activations:" not in one.explain()


def test_an_error_names_recomputing_where_it_is_not_open() -> None:
    model = from_numbers("6.7B", samples=8)
    request = request_of(model, {Tier.DEVICE: 24 * GIB, Tier.HOST: 160 * GIB}, activations=frozenset({"keep"}))
    with pytest.raises(PrepareError, match="fewer samples in a pass, or recomputed activations"):
        fitted(request)
    assert solve(replace(request, activations=frozenset({"keep", "recompute"})))
    small = replace(request, limits={Tier.DEVICE: GIB, Tier.HOST: GIB}, activations=frozenset({"recompute"}))
    with pytest.raises(PrepareError, match="fewer samples in a pass") as caught:
        fitted(small)
    assert "recomputed activations" not in str(caught.value)


def test_what_there_is_to_choose_from_is_checked() -> None:
    model = from_numbers("100M", samples=1)
    with pytest.raises(PrepareError, match="only if the device has its own memory"):
        request_of(model, EVERYTHING, machine=LAPTOP, activations=frozenset({"host"}))
    assert request_of(model, EVERYTHING, machine=LAPTOP, activations=ANY).ways == {"keep", "recompute"}
    no_host = request_of(model, {Tier.DEVICE: 10**12}, machine=H200, activations=ANY)
    assert no_host.ways == {"keep", "recompute"}
    assert not request_of(replace(model, samples=None), activations=ANY).chooses


# -- inputs of recomputed groups on the host --


def test_inputs_of_recomputed_groups_go_to_the_host_where_nothing_else_fits() -> None:
    group = GroupProfile("g", 10**6, forward_flops=1.0, kept_bytes=3e9, boundary_bytes=1e9)
    groups = tuple(replace(group, name=f"g{index}") for index in range(8))
    model = ModelProfile("deep", groups, samples=1, forward_s=0.1, backward_s=0.2)
    ways = frozenset({"keep", "recompute", "recompute+host"})
    tight = request_of(model, {Tier.DEVICE: 7 * 10**9, Tier.HOST: 10**11}, activations=ways, can_place=frozenset())
    found = search([tight], model_state, may_speculate=False).candidates[0]
    held = model_state(found.solution)
    assert activations_by_group(found.solution) == {"*": "recompute+host"}
    assert held[Tier.DEVICE][Kind.ACTIVATIONS] == 5 * 10**9  # the group that runs, and two inputs on their way
    assert held[Tier.HOST][Kind.ACTIVATIONS] == 8 * 10**9
    roomy = replace(tight, limits={Tier.DEVICE: 40 * 10**9, Tier.HOST: 10**11})
    assert activations_by_group(search([roomy], model_state, may_speculate=False).candidates[0].solution) == {
        "*": "keep"
    }
    with pytest.raises(PrepareError):
        search([replace(tight, activations=ways - {"recompute+host"})], model_state, may_speculate=False)
    only = search([replace(tight, activations=ways - {"recompute"})], model_state, may_speculate=False)
    assert activations_by_group(only.candidates[0].solution) == {"*": "recompute+host"}, "where no other way is allowed"


@pytest.mark.parametrize("way", ["recompute", "recompute+host"])
def test_what_a_pass_needs_for_a_moment_counts_for_every_plan(way: str) -> None:
    """A first pass that recomputes shows eight inputs and five more; a plan that keeps all needs the five as well."""
    group = GroupProfile("g", 10**6, forward_flops=1.0, kept_bytes=3e9, boundary_bytes=1e9)
    groups = tuple(replace(group, name=f"g{index}") for index in range(8))
    model = ModelProfile("deep", groups, samples=1)
    request = request_of(model, EVERYTHING, activations=ANY - {"recompute"} | {way})
    homes = {group.name: Homes() for group in groups}
    inputs = 8e9 if way == "recompute" else 0.0
    seen = ObservedStep(0.3, 0.1, 0.2, activation_bytes=int(inputs + 5e9))
    fitted = replace(refit(request, homes, seen, lambda _: way), activations=ANY)
    for shares, bytes_held in (([KEPT] * 8, 29e9), ([AGAIN] * 8, 13e9), ([AGAIN] * 4 + [KEPT] * 4, 21e9)):
        assert activation_bytes(fitted, shares)[0] == bytes_held


def test_nothing_is_streamed_where_its_slots_do_not_fit() -> None:
    """Slots take more of the device than the states of a small model, and the program does not know them."""
    group = GroupProfile("g", 8 * 10**6, forward_flops=1.0)
    groups = tuple(replace(group, name=f"g{index}") for index in range(8))
    model = ModelProfile("small", groups, samples=1, forward_s=0.01, backward_s=0.02)
    request = request_of(model, {Tier.DEVICE: 4 * 10**8, Tier.HOST: 10**11})

    def count(solution: Solution) -> dict[Tier, dict[Kind, int]]:
        held = model_state(solution)
        slots = 6 * 10**8 * any(share.streamed for share in solution.shares)
        return {**held, Tier.DEVICE: {**held[Tier.DEVICE], Kind.BUFFERS: slots}}

    best = fitting(request, count)[0]
    assert sum(best.held[Tier.DEVICE].values()) <= 4 * 10**8
    assert not any(share.streamed for share in best.solution.shares) and any(
        share.cpu for share in best.solution.shares
    )
