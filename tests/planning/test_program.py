"""The linear program against rules in words: the same costs, nothing better on a grid, prices that are derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planning.by_hand import ROUTES, fits, grid, held_bytes, step_seconds, update_seconds
from planning.machines import EVERYTHING, H200, LAPTOP, gpt, machines, models, plain, request_of, tight
from zerostd.planning import Link, MachineProfile, ModelProfile, PlanRequest, Wire
from zerostd.planning.demands import GroupShares, choice_of, work
from zerostd.planning.linear import Infeasible, LinearProgram
from zerostd.planning.program import SLACK, ScheduleProgram, optimise, prices_of, quickest
from zerostd.planning.request import GroupCost, group_costs, merged, wire_of
from zerostd.planning.rounding import missing_bytes
from zerostd.policy import Kind, Stage, Tier

FEW = 10_000  # bytes
STATES_ONLY = frozenset({Kind.OPTIMIZER_STATES})
parts = st.integers(0, 20).map(lambda place: place / 20)


def agree(one: float, other: float, least: float = 1e-7) -> bool:
    return abs(one - other) <= 1e-5 * max(abs(one), abs(other)) + least


# -- linear --


def test_the_best_corner_and_its_prices() -> None:
    """Three hours of one machine, four of another: the dual by hand is 1/5 and 3/5 of a piece for one more hour."""
    linear = LinearProgram()
    x, y = linear.variables(), linear.variables()
    linear.at_most([(x, 1.0), (y, 2.0)], 3.0, "first")
    linear.at_most([(x, 3.0), (y, 1.0)], 4.0, "second")
    linear.at_most([(x, 1.0)], 50.0, "idle")
    outcome = linear.minimise([(x, -2.0), (y, -1.0)])
    assert outcome.objective == pytest.approx(-3.0)
    assert outcome.values == pytest.approx([1.0, 1.0])
    assert outcome.prices == pytest.approx({"first": 0.2, "second": 0.6, "idle": 0.0})


def test_bounds_equalities_and_fixed_variables() -> None:
    linear = LinearProgram()
    x, y, z = linear.variables(upper=2.0), linear.variables(), linear.variables()
    linear.each_equals([(variables, 1.0) for variables in (x, y, z)], 4.0)
    linear.at_most([(z, -1.0), (y, 1.0)], 0.0)
    assert linear.minimise([(z, 1.0), (x, -1e-3)]).values == pytest.approx([2.0, 1.0, 1.0])
    linear.fix(x, [0.5])
    assert linear.minimise([(z, 1.0)]).values == pytest.approx([0.5, 1.75, 1.75])


def test_no_point_at_all_is_infeasible() -> None:
    linear = LinearProgram()
    x = linear.variables(upper=1.0)
    linear.at_most([(x, -1.0)], -2.0)
    with pytest.raises(Infeasible):
        linear.minimise([(x, 1.0)])


# -- costs of groups --


@pytest.mark.parametrize("size", [1, 2, 64])
@pytest.mark.parametrize("stage", list(Stage))
def test_bytes_of_a_rank_at_each_stage(stage: Stage, size: int) -> None:
    n = 64_000
    request = request_of(plain([n, 2 * n]), stage=stage, world_size=size)
    first, second = group_costs(request)
    part = [n, n / size, n / size, n / size][stage]
    assert first.updated == part
    assert first.parameters == (2 * n / size if stage == 3 else 2 * n)
    assert first.gathered == 2 * n
    if size == 1 or stage >= 2:
        assert (first.gradients, first.pinned_gradients) == (2 * part, 0)
    else:
        assert (first.gradients, first.pinned_gradients) == (0, 2 * n)
    assert first.gradient_bytes == 2
    in_all = 12 * first.updated + first.parameters + first.gradients + first.pinned_gradients
    assert in_all == [16 * n, 4 * n + 12 * n / size, 2 * n + 14 * n / size, 16 * n / size][stage]
    assert (second.updated, second.parameters, second.gradients) == (
        2 * first.updated,
        2 * first.parameters,
        2 * first.gradients,
    )


@pytest.mark.parametrize("stage", list(Stage))
def test_sums_over_passes_rest_in_fp32(stage: Stage) -> None:
    n = 64_000
    (alone,) = group_costs(request_of(plain([n]), stage=stage, accumulate=2))
    assert (alone.gradients, alone.pinned_gradients, alone.gradient_bytes) == (4 * n, 0, 4)
    (cost,) = group_costs(request_of(plain([n]), stage=stage, accumulate=2, world_size=4))
    expected = {0: (0, 2 * n + 4 * n), 1: (0, 2 * n + n), 2: (n, 0), 3: (n, 0)}[stage]
    assert (cost.gradients, cost.pinned_gradients) == expected


@pytest.mark.parametrize("stage", list(Stage))
def test_what_is_whole_on_every_rank_stays_on_the_device(stage: Stage) -> None:
    request = request_of(plain([1000]), stage=stage, world_size=4)
    assert request.may_place(Kind.OPTIMIZER_STATES)
    assert request.may_place(Kind.GRADIENTS) == (stage >= 2)
    assert request.may_place(Kind.PARAMETERS) == (stage == 3)
    assert all(
        replace(request, world_size=1).may_place(kind) for kind in STATES_ONLY | {Kind.GRADIENTS, Kind.PARAMETERS}
    )


def test_frozen_parameters_rest_and_are_never_updated() -> None:
    model = plain([1000])
    model = replace(model, groups=(replace(model.groups[0], trained=0, frozen=1000),))
    (cost,) = group_costs(request_of(model, world_size=2))
    assert (cost.updated, cost.parameters, cost.gradients, cost.gathered) == (0, 1000, 0, 2000)


def test_seconds_follow_flops_and_the_measured_total() -> None:
    groups = tuple(
        replace(group, forward_flops=flops) for group, flops in zip(plain([5, 5]).groups, (1e9, 3e9), strict=True)
    )
    model = ModelProfile("timed", groups, forward_s=0.4, backward_s=1.2)
    assert [(cost.forward_s, cost.backward_s) for cost in group_costs(request_of(model))] == [
        pytest.approx((0.1, 0.3)),
        pytest.approx((0.3, 0.9)),
    ]
    model = ModelProfile("estimated", groups, samples=2, recomputed=1.0)
    rate = H200.matrix["bfloat16"] * H200.achieved
    assert [cost.forward_s for cost in group_costs(request_of(model))] == pytest.approx([2e9 / rate, 6e9 / rate])
    assert [cost.backward_s for cost in group_costs(request_of(model))] == pytest.approx([6e9 / rate, 18e9 / rate])
    assert all(cost.forward_s == 0 for cost in group_costs(request_of(replace(model, samples=None))))


def test_a_group_takes_at_least_as_long_as_its_collectives() -> None:
    wire = Wire("nodes", 64, 1e9, 1e-3)
    machine = replace(H200, wires=(Wire("inside", 8, 1e11, 1e-5), wire))
    assert wire_of(machine.wires, 8).name == "inside"
    assert wire_of(machine.wires, 9) is wire_of(machine.wires, 1000) is wire
    assert wire_of(machine.wires, 1) is None and wire_of((), 4) is None
    gather = 15 / 16 * 2e9 / 1e9 + 1e-3
    for stage, forward, backward in [(0, 0.0, 2 * gather), (1, gather, gather), (2, gather, gather)]:
        (cost,) = group_costs(request_of(plain([10**9]), machine=machine, stage=Stage(stage), world_size=16))
        assert (cost.forward_s, cost.backward_s) == pytest.approx((forward, backward))
    (cost,) = group_costs(request_of(plain([10**9]), machine=machine, world_size=16))
    assert (cost.forward_s, cost.backward_s) == pytest.approx((gather, 2 * gather))


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300), st.integers(1, 40))
def test_merged_neighbours_lose_nothing(sizes: list[int], most: int) -> None:
    found = group_costs(request_of(plain(sizes, 1.0)))
    joined = merged(found, most)
    assert len(joined) <= max(most, 1)
    assert [index for cost in joined for index in cost.members] == list(range(len(sizes)))
    for name in ("updated", "parameters", "gradients", "forward_s", "backward_s"):
        assert sum(getattr(cost, name) for cost in joined) == pytest.approx(sum(getattr(cost, name) for cost in found))
    assert max(cost.gathered for cost in joined) == max(cost.gathered for cost in found)


# -- the same costs as by hand --


def solved_with(request: PlanRequest, shares: Sequence[GroupShares]) -> tuple[float, dict[Tier, float]]:
    """The program when everything is already decided: its step, and its bytes."""
    program = ScheduleProgram(request, choice_of(request, shares))
    program.hold(shares)
    first = program.linear.minimise([(program.step, 1.0)])
    program.linear.at_most([(program.step, 1.0)], first.objective * (1 + 1e-9) + 1e-9)
    held = {
        tier: program.linear.minimise(terms).objective * 1e9 + program.constant[tier]
        for tier, terms in program.bytes.items()
    }
    return first.objective, held


@st.composite
def placements(draw: st.DrawFn) -> GroupShares:
    """Any shares of states, parameters and gradients each at one place; gradients of resident states on the device."""
    lands = draw(st.booleans())
    cuts = sorted(draw(parts) for _ in range(4))
    if lands:
        cuts[0] = 0.0
    states = [high - low for low, high in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]
    home = draw(st.sampled_from(["device", "host", "disk"]))
    if home == "disk":  # such parameters are updated by the processor
        states = [states[0], states[1] + states[2], 0.0, states[3] + states[4], 0.0]
    return GroupShares(*states, float(home == "host"), float(home == "disk"), float(lands))


@st.composite
def any_choice(draw: st.DrawFn) -> tuple[PlanRequest, list[GroupShares]]:
    request = request_of(
        draw(models()),
        machine=draw(machines()),
        waits_for_norm=draw(st.booleans()),
        accumulate=draw(st.integers(1, 3)),
        num_threads=1,
    )
    return request, [draw(placements()) for _ in request.model.groups]


@settings(max_examples=60, deadline=None)
@given(any_choice())
def test_a_given_placement_costs_what_it_costs_by_hand(drawn: tuple[PlanRequest, list[GroupShares]]) -> None:
    request, shares = drawn
    found = group_costs(request)
    step_s, held = solved_with(request, shares)
    assert agree(step_s, step_seconds(request, found, shares))
    by_hand = [held_bytes(request, cost, share) for cost, share in zip(found, shares, strict=True)]
    for tier in Tier:
        assert agree(held[tier], sum(one[tier] for one in by_hand), FEW)


@settings(max_examples=20, deadline=None)
@given(models(), st.booleans(), st.data())
def test_speculating_holds_two_copies_and_does_not_wait(model: ModelProfile, off: bool, data: st.DataObject) -> None:
    request = request_of(model, waits_for_norm=True, speculates=True)
    cuts = [data.draw(parts) for _ in model.groups]
    shares = [GroupShares(resident=0.0, cpu=cut, streamed=1 - cut, gradients_host=float(off)) for cut in cuts]
    found = group_costs(request)
    step_s, held = solved_with(request, shares)
    assert agree(step_s, step_seconds(replace(request, waits_for_norm=False), found, shares))
    by_cpu = sum(cost.updated * cut for cost, cut in zip(found, cuts, strict=True))
    width = model.parameter_bytes
    gradients = width * (model.trained if off else by_cpu)
    assert agree(held[Tier.HOST], 24 * model.trained + gradients + width * by_cpu, FEW)


# -- nothing better on a grid --


@st.composite
def states_only(draw: st.DrawFn) -> PlanRequest:
    """Two groups on three tiers or three on two, with more or less room for their states."""
    has_disk = draw(st.booleans())
    model = draw(models(2 if has_disk else 3))
    states, rest = 12 * model.trained, 4 * model.trained
    limits = {Tier.DEVICE: int(rest + states * draw(st.floats(0.0, 1.1)))}
    limits[Tier.HOST] = int((states + rest) * draw(st.floats(0.3 if has_disk else 0.8, 1.2)))
    if has_disk:
        limits[Tier.DISK] = int(states * draw(st.floats(0.3, 1.0)))
    machine = draw(machines())
    return request_of(
        model,
        limits,
        machine=machine if draw(st.booleans()) else replace(machine, link=None),
        waits_for_norm=draw(st.booleans()),
        can_place=STATES_ONLY,
        num_threads=1,
    )


def best_on_grid(request: PlanRequest, found: Sequence[GroupCost], num_steps: int) -> float:
    """The shortest step of all points of the grid that fit."""
    has_link, has_disk = request.machine.link is not None, Tier.DISK in request.limits
    routes = [one for one in ROUTES if (has_link or "streamed" not in one) and (has_disk or "disk" not in one)]
    choices = list(grid(num_steps, routes))
    works = [[update_seconds(request, cost, share) for share in choices] for cost in found]
    held = [[held_bytes(request, cost, share) for share in choices] for cost in found]
    best = float("inf")
    for chosen in product(range(len(choices)), repeat=len(found)):
        if any(
            sum(held[group][one][tier] for group, one in enumerate(chosen)) > limit
            for tier, limit in request.limits.items()
        ):
            continue
        shares = [choices[one] for one in chosen]
        best = min(best, step_seconds(request, found, shares, [works[group][one] for group, one in enumerate(chosen)]))
    return best


def resolution(request: PlanRequest, found: Sequence[GroupCost], num_steps: int) -> tuple[float, dict[Tier, float]]:
    """How far the nearest point of a grid can be: seconds, and bytes of each tier. No share is off by a whole part."""
    seconds, sizes = 0.0, dict.fromkeys(Tier, 0.0)
    for cost, route in product(found, ROUTES):
        whole = GroupShares(**{**dict.fromkeys(ROUTES, 0.0), route: 1.0})
        seconds += max(update_seconds(request, cost, whole).values()) / num_steps
        seconds += whole.resident * cost.updated * request.machine.resident_ns * 1e-9 / num_steps
        nothing = held_bytes(request, cost, GroupShares(resident=0.0))
        for tier, size in held_bytes(request, cost, whole).items():
            sizes[tier] += (size - nothing[tier]) / num_steps
    return seconds, sizes


@dataclass(frozen=True)
class Solved:
    request: PlanRequest
    step_s: float
    shares: list[GroupShares]

    def used(self, tier: Tier) -> float:
        """Bytes, by hand."""
        pairs = zip(group_costs(self.request), self.shares, strict=True)
        return sum(held_bytes(self.request, cost, share)[tier] for cost, share in pairs)

    def busy(self) -> dict[str, float]:
        return work(self.request, self.shares)


def solved(request: PlanRequest, limits: Mapping[Tier, float] | None = None) -> Solved | None:
    """None: nothing fits."""
    if limits is not None:
        request = replace(request, limits={tier: max(0, int(size)) for tier, size in limits.items()})
    try:
        return Solved(request, *optimise(request))
    except Infeasible:
        return None


@settings(max_examples=40, deadline=None)
@given(states_only())
def test_no_point_of_a_grid_is_better_and_one_is_near(request: PlanRequest) -> None:
    """A point of the grid that fits is no better. With less room, by what rounding can take, the optimum still is no
    more than the grid's resolution better than the grid's best: its own nearest point then fits."""
    found, num_steps = group_costs(request), 4
    best, optimum = best_on_grid(request, found, num_steps), solved(request)
    if optimum is None:
        assert best == float("inf")
        return
    assert optimum.step_s <= best * (1 + 1e-6) + 1e-7
    seconds, sizes = resolution(request, found, num_steps)
    tighter = solved(request, {tier: limit - sizes[tier] for tier, limit in request.limits.items()})
    assert tighter is None or best <= tighter.step_s + seconds


@settings(max_examples=60, deadline=None)
@given(states_only())
def test_the_shares_that_are_found_fit_and_take_as_long_as_is_said(request: PlanRequest) -> None:
    optimum, found = solved(request), group_costs(request)
    assume(optimum is not None)
    assert fits(request, found, optimum.shares)
    assert step_seconds(request, found, optimum.shares) <= optimum.step_s * (1 + SLACK) + 1e-6


# -- prices --


@settings(max_examples=50, deadline=None)
@given(states_only(), st.sampled_from([Tier.DEVICE, Tier.HOST]))
def test_a_price_lies_between_what_one_percent_less_costs_and_one_more_saves(request: PlanRequest, tier: Tier) -> None:
    """The step is convex in the limit, so this holds in corners too."""
    optimum = solved(request)
    assume(optimum is not None)
    delta = request.limits[tier] // 100
    less = solved(request, {**request.limits, tier: request.limits[tier] - delta})
    more = solved(request, {**request.limits, tier: request.limits[tier] + delta})
    noise = 1e-7 / delta
    saved, price = (optimum.step_s - more.step_s) / delta, prices_of(quickest(request)[1])[tier]
    assert saved * 0.98 - noise <= price
    if less is not None:
        assert price <= (less.step_s - optimum.step_s) / delta * 1.02 + noise


def test_a_price_by_hand() -> None:
    """One group, no compute, six of twelve bytes of states on the device: the processor does one half as the device and
    the other at its own pace, and one more byte would make a twelfth of a parameter the device's."""
    n, ns = 10**9, LAPTOP.processor.ns(2)
    request = request_of(
        plain([n]),
        {Tier.DEVICE: 10 * n, Tier.HOST: 100 * n},
        machine=replace(LAPTOP, resident_ns=0.1),
        num_threads=2,
        can_place=STATES_ONLY,
    )
    optimum = solved(request)
    assert optimum.step_s == pytest.approx(0.5 * n * (ns + 0.1) * 1e-9)
    prices = prices_of(quickest(request)[1])
    assert prices == {Tier.DEVICE: pytest.approx((ns - 0.1) * 1e-9 / 12), Tier.HOST: 0.0, Tier.DISK: 0.0}


# -- monotone --


def assert_no_longer(one: PlanRequest, other: PlanRequest) -> None:
    first, second = solved(one), solved(other)
    if second is not None:
        assert first is not None
        assert first.step_s <= second.step_s * (1 + 1e-5) + 1e-7


@settings(max_examples=25, deadline=None)
@given(tight(), st.sampled_from(list(Tier)), st.floats(1.0, 3.0))
def test_more_memory_never_makes_a_step_longer(request: PlanRequest, tier: Tier, factor: float) -> None:
    assert_no_longer(
        replace(request, limits={**request.limits, tier: int(request.limits.get(tier, 0) * factor)}), request
    )


def with_link(machine: MachineProfile, factor: float) -> MachineProfile:
    link = machine.link
    return replace(machine, link=Link(link.up * factor, link.down * factor, link.both * factor))


@settings(max_examples=25, deadline=None)
@given(tight(), st.floats(1.0, 3.0))
def test_a_faster_link_never_makes_a_step_longer(request: PlanRequest, factor: float) -> None:
    assert_no_longer(replace(request, machine=with_link(request.machine, factor)), request)


@settings(max_examples=25, deadline=None)
@given(tight())
def test_waiting_for_the_norm_never_makes_a_step_shorter(request: PlanRequest) -> None:
    assert_no_longer(replace(request, waits_for_norm=False), replace(request, waits_for_norm=True))


@settings(max_examples=25, deadline=None)
@given(tight())
def test_speculating_is_never_longer_where_the_host_has_room(request: PlanRequest) -> None:
    kinds = frozenset({Kind.OPTIMIZER_STATES, Kind.GRADIENTS})
    waiting = replace(request, waits_for_norm=True, can_place=kinds, limits={**request.limits, Tier.HOST: 10**14})
    assert_no_longer(replace(waiting, speculates=True), waiting)


@settings(max_examples=40, deadline=None)
@given(tight())
def test_a_step_is_no_shorter_than_what_any_part_has_to_do(request: PlanRequest) -> None:
    optimum = solved(request)
    assume(optimum is not None)
    found = group_costs(request)
    assert optimum.step_s >= request.accumulate * sum(cost.forward_s + cost.backward_s for cost in found) * (1 - 1e-6)
    assert all(seconds <= optimum.step_s * (1 + SLACK) + 1e-6 for seconds in optimum.busy().values())
    for share in optimum.shares:
        assert sum(getattr(share, route) for route in ROUTES) == pytest.approx(1.0, abs=1e-6)


# -- which of equal ones --


@settings(max_examples=30, deadline=None)
@given(tight())
def test_nothing_leaves_a_device_that_is_large_enough_for_less_than_slack(request: PlanRequest) -> None:
    request = replace(request, limits=EVERYTHING)
    optimum, found = solved(request), group_costs(request)
    resident = step_seconds(request, found, [GroupShares() for _ in found])
    if resident <= optimum.step_s * (1 + SLACK):
        assert optimum.used(Tier.HOST) < FEW and optimum.used(Tier.DISK) < FEW
        assert all(share.resident > 1 - 1e-4 for share in optimum.shares)


@settings(max_examples=30, deadline=None)
@given(tight())
def test_the_disk_is_left_alone_where_the_host_is_as_fast(request: PlanRequest) -> None:
    limits = {**request.limits, Tier.DISK: 20 * request.model.trained}
    without, optimum = solved(request, {**limits, Tier.DISK: 0}), solved(request, limits)
    assume(optimum is not None and without is not None)
    if without.step_s <= optimum.step_s * (1 + SLACK):
        assert optimum.used(Tier.DISK) < FEW


def test_of_equal_ones_the_front_is_nearest() -> None:
    model = plain([10**8] * 6, 0.1)
    request = request_of(model, {Tier.DEVICE: 10 * model.trained, Tier.HOST: 40 * model.trained}, waits_for_norm=True)
    resident = [share.resident for share in solved(request).shares]
    assert resident == sorted(resident, reverse=True) and resident[0] == pytest.approx(1.0)


def test_without_a_link_nothing_is_streamed() -> None:
    limits = {Tier.DEVICE: 5 * 10**9, Tier.DISK: 40 * 10**9}
    model = plain([10**8] * 5, 0.5, parameter_bytes=4, gradient_bytes=4, dtype="float32")
    request = request_of(model, limits, machine=LAPTOP, num_threads=2)
    optimum = solved(request)
    assert all(share.streamed == share.disk_streamed == 0 for share in optimum.shares)
    assert {"up", "down", "link", "memory"}.isdisjoint(optimum.busy())
    assert optimum.used(Tier.DISK) > 0


# -- what is missing --


@settings(max_examples=40, deadline=None)
@given(tight(), st.floats(0.1, 0.9), st.booleans())
def test_what_is_missing_is_enough_and_no_less_is(request: PlanRequest, part: float, has_disk: bool) -> None:
    limits = {tier: int(size * part) for tier, size in request.limits.items()}
    limits |= {Tier.DEVICE: limits[Tier.DEVICE] // 8}
    limits = limits if has_disk else {tier: limits[tier] for tier in (Tier.DEVICE, Tier.HOST)}
    request = replace(request, limits=limits, fixed={Tier.DEVICE: 10**7})
    short = missing_bytes(request)
    if solved(request) is not None:
        assert sum(short.values()) < FEW
        return
    assert sum(short.values()) > 0
    assert solved(request, {tier: limit + short.get(tier, 0.0) + 1 for tier, limit in limits.items()}) is not None
    if sum(short.values()) > 10**6:  # else a hundredth is within the solver's tolerance
        assert solved(request, {tier: limit + 0.99 * short.get(tier, 0.0) for tier, limit in limits.items()}) is None


def test_what_is_missing_by_hand() -> None:
    """Nothing may be placed, so all 16 bytes of a parameter are on the device."""
    request = request_of(gpt(512, 2), {Tier.DEVICE: 10**8}, can_place=frozenset())
    short = missing_bytes(request)
    assert short.pop(Tier.DEVICE) == pytest.approx(16 * request.model.trained - 10**8)
    assert not any(short.values())
