"""The simulation: exact where nothing overlaps, near to what was measured, and never faster than the program allows."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.by_hand import step_seconds, update_seconds
from planning.machines import gpt, machines, models, plain, request_of
from zerostd.optimizers import streamed_updater
from zerostd.planning import DiskRates, GroupProfile, Link, MachineProfile, ModelProfile, PlanRequest
from zerostd.planning.demands import GroupShares
from zerostd.planning.request import group_costs
from zerostd.planning.simulation import QUEUED, TILE, StepSimulation, simulate

RESIDENT = GroupShares()
HALVES = GroupShares(resident=0.0, cpu=0.55, streamed=0.45)


def seconds(request: PlanRequest, share: GroupShares) -> float:
    """One step with all groups alike."""
    return simulate(request, [share] * len(request.model.groups)).step_s


# -- exact --


@settings(max_examples=40, deadline=None)
@given(models(), machines(), st.booleans(), st.integers(1, 3))
def test_all_on_the_device_is_compute_and_the_update(
    model: ModelProfile, machine: MachineProfile, clips: bool, passes: int
) -> None:
    request = request_of(model, machine=machine, waits_for_norm=clips, accumulate=passes)
    timeline = simulate(request, [RESIDENT] * len(model.groups))
    update = model.trained * machine.resident_ns * 1e-9
    assert timeline.step_s == pytest.approx(passes * (model.forward_s + model.backward_s) + update, rel=1e-9)
    assert timeline.compute_s == pytest.approx(timeline.step_s, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(models(), machines(), st.booleans(), st.integers(1, 3), st.floats(0.0, 1.0))
def test_a_processor_that_is_the_device_does_one_thing_after_the_other(
    model: ModelProfile, machine: MachineProfile, clips: bool, passes: int, part: float
) -> None:
    machine = replace(machine, link=None)
    request = request_of(model, machine=machine, waits_for_norm=clips, accumulate=passes)
    timeline = simulate(request, [GroupShares(resident=1.0 - part, cpu=part)] * len(model.groups))
    compute_s = passes * (model.forward_s + model.backward_s)
    by_cpu_s = model.trained * part * machine.processor.ns(request.num_threads) * 1e-9
    own_s = model.trained * (1.0 - part) * machine.resident_ns * 1e-9
    assert timeline.step_s == pytest.approx(compute_s + own_s + by_cpu_s, rel=1e-6)
    assert timeline.compute_s == pytest.approx(compute_s + own_s, rel=1e-9)


@pytest.mark.parametrize("share", [RESIDENT, HALVES, replace(HALVES, parameters_host=1.0, gradients_host=1.0)])
@pytest.mark.parametrize("passes", [1, 3])
def test_spans_are_what_keeps_workers_busy(share: GroupShares, passes: int) -> None:
    request = request_of(gpt(1024, 6, 0.1), waits_for_norm=True, accumulate=passes)
    timeline = simulate(request, [share] * len(request.costs))
    covered: dict[str, list[tuple[float, float]]] = {}
    for worker, _, _, start, end in sorted(timeline.spans, key=lambda span: span[3]):
        covered.setdefault(worker, []).append((start, end))
    waited = covered.pop("wait", [])
    for worker, spans in covered.items():
        assert sum(end - start for start, end in spans) == pytest.approx(timeline.busy[worker], rel=1e-6), worker
        assert all(start >= before[1] - 1e-9 for before, (start, _) in pairwise(spans)), worker
        assert spans[0][0] >= 0.0 and spans[-1][1] <= timeline.step_s + 1e-9
    assert set(covered) == {worker for worker, seconds in timeline.busy.items() if seconds > 1e-9}
    loop = sum(end - start for start, end in [*waited, *covered["compute"], *covered.get("update", [])])
    assert loop == pytest.approx(timeline.step_s, rel=1e-6)
    groups = len(request.costs)
    names = [name for worker, name, _, _, _ in timeline.spans if worker == "compute"]
    assert names.count("forward") == names.count("backward") == passes * groups


def test_passes_that_are_not_simulated_are_one_span() -> None:
    request = request_of(gpt(1024, 2, 0.1), accumulate=10)
    timeline = simulate(request, [RESIDENT] * len(request.costs))
    (several,) = [span for span in timeline.spans if span[1] == "several"]
    one_s = sum(cost.forward_s + cost.backward_s for cost in request.costs)
    assert several[4] - several[3] == pytest.approx(6 * one_s)


def test_one_group_by_hand() -> None:
    """Nothing overlaps: backward, the update at the pace of what is slowest of it, forward."""
    n, request = 10**9, request_of(plain([10**9], 0.1))
    for share, update in (
        (GroupShares(resident=0.0, cpu=1.0), n * max(0.21e-9, (2 + 2 + 24 + 4) / 157e9)),
        (GroupShares(resident=0.0, streamed=1.0), n * 24 / 99.8e9),
        (GroupShares(resident=0.0, disk_cpu=1.0), n * 12 / 1.75e9),
        (GroupShares(resident=0.0, disk_streamed=1.0), n * 12 / 1.75e9),
        (GroupShares(resident=0.5, streamed=0.5), n * 12 / 99.8e9),
    ):
        assert seconds(request, share) == pytest.approx(0.3 + update, rel=1e-6)
        clipped = seconds(replace(request, waits_for_norm=True), share) - share.resident * n * 0.008e-9
        gradient = n * 2 / 55e9 if share.cpu + share.disk_cpu else 0.0  # may land first
        assert 0.3 + update <= clipped * (1 + 1e-6) <= (0.3 + update + gradient) * (1 + 2e-6)


def quick(request: PlanRequest) -> PlanRequest:
    """Nothing but the link takes time."""
    processor = replace(request.machine.processor, update_ns={1: 1e-6}, memory=1e15)
    return replace(request, machine=replace(request.machine, processor=processor, resident_ns=0.0))


def test_parameters_on_the_host_come_twice_but_the_last_once() -> None:
    """It stays from forward to backward. Gradients go down at the same time as parameters of other groups come up."""
    share = GroupShares(resident=0.0, cpu=1.0, parameters_host=1.0)
    one = 2e9 / 55e9
    assert seconds(quick(request_of(plain([10**9]))), share) == pytest.approx(2 * one)
    assert 6 * one < seconds(quick(request_of(plain([10**9] * 3))), share) < 7 * one


def test_the_processor_is_shared_by_states_on_the_host_and_on_disk() -> None:
    request = quick(request_of(plain([10**9])))
    slow = replace(request.machine.processor, update_ns={1: 1.0})
    request = replace(request, machine=replace(request.machine, processor=slow, disk=DiskRates("/", 1e15, 1e15, 1e15)))
    request = replace(request, num_threads=1)
    assert seconds(request, GroupShares(resident=0.0, cpu=1.0)) == pytest.approx(1.0, rel=1e-6)
    assert seconds(request, GroupShares(resident=0.0, cpu=0.5, disk_cpu=0.5)) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("share", [RESIDENT, HALVES, replace(HALVES, parameters_host=1.0)])
def test_another_pass_adds_its_compute(clips: bool, share: GroupShares) -> None:
    """From the second on: a sum over passes has four bytes where a gradient has two. Compute hides what is brought."""
    request = request_of(gpt(2048, 24, 0.9), waits_for_norm=clips)
    two, five = (seconds(replace(request, accumulate=passes), share) for passes in (2, 5))
    assert five - two == pytest.approx(3 * 0.9, rel=0.01)
    if share is RESIDENT:
        assert two - seconds(request, share) == pytest.approx(0.9)


def test_parameters_come_behind_what_is_streamed() -> None:
    """A lane is a queue: tiles that are in it already go first, and no other is put in between."""
    request = request_of(plain([10**9, 10**8], 0.0))
    request = replace(request, machine=replace(request.machine, link=Link(50e9, 50e9, 1e12)))
    moved = [GroupShares(resident=0.0, streamed=1.0), GroupShares(parameters_host=1.0)]
    steps = StepSimulation(request, moved)
    steps.update(0)
    steps.wait_for(1)
    tiles = QUEUED * TILE * 12 / 50e9
    assert steps.now == pytest.approx(tiles + 2 * 10**8 / 50e9)
    steps.wait_for(0)
    assert steps.now == pytest.approx(10**9 * 12 / 50e9 + 2 * 10**8 / 50e9)
    assert TILE == streamed_updater.TILE_NUMEL


def test_groups_that_keep_theirs_make_room_for_activations_that_leave() -> None:
    """Each group of 24 takes as long forward as a sixth of its activations does on the link: what three leave takes
    three quarters of a forward, and what twelve leave three forwards."""
    group = GroupProfile("block", 10**6, forward_flops=1.0, kept_bytes=1e9, boundary_bytes=1e8)
    groups = tuple(replace(group, name=f"g{index}") for index in range(24))
    model = ModelProfile("alike", groups, samples=1, forward_s=1.0, backward_s=2.0)
    request = request_of(model, activations=frozenset({"keep", "host"}))
    link = Link(24 / 6 * 1e9, 24 / 6 * 1e9, 1e12)  # bytes a second
    request = replace(request, machine=replace(request.machine, link=link))
    away = GroupShares(activations_host=1.0)
    for sent, waits in ((3, False), (12, True)):
        shares = [away] * sent + [RESIDENT] * (24 - sent)
        timeline = simulate(request, shares)
        waited = timeline.step_s - timeline.compute_s
        assert (waited > 0.01) is waits, waited
        assert waits or waited == pytest.approx(0.0, abs=1e-12)


# -- measured --

# on an H200 with 14 threads, states on the host, 0.55 of them by the processor: benchmarks/results/offload-*.md
MEASURED = [
    (2048, 24, 0.128, False, 0.2485),
    (2048, 24, 0.128, True, 0.3284),
    (2048, 24, 0.488, False, 0.5076),
    (3072, 30, 0.33, False, 0.689),
    (3072, 30, 0.33, True, 0.857),
    (4096, 32, 0.33, False, 1.2047),
    (4096, 32, 0.33, True, 1.355),
]


@pytest.mark.parametrize(("width", "layers", "compute_s", "clips", "measured"), MEASURED)
def test_near_what_was_measured(width: int, layers: int, compute_s: float, clips: bool, measured: float) -> None:
    request = request_of(gpt(width, layers, compute_s), waits_for_norm=clips)
    assert seconds(request, HALVES) == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize("share", [HALVES, replace(HALVES, parameters_host=1.0, gradients_host=1.0)])
def test_many_loads_take_no_time(share: GroupShares) -> None:
    request = request_of(gpt(1024, 158, 0.3))
    vars(request)["costs"] = group_costs(request)  # more than the planner ever simulates
    assert len(request.costs) == len(request.model.groups) == 160
    best = float("inf")
    for _ in range(3):
        begun = time.process_time()
        seconds(request, share)
        best = min(best, time.process_time() - begun)
    assert best < 0.5


# -- any_choice --


@st.composite
def offloaded(draw: st.DrawFn) -> tuple[PlanRequest, list[GroupShares]]:
    """States anywhere; parameters and gradients each at one place."""
    request = request_of(
        draw(models(6)),
        machine=draw(machines()),
        waits_for_norm=draw(st.booleans()),
        accumulate=draw(st.integers(1, 3)),
        num_threads=1,
    )
    shares = []
    for _ in request.model.groups:
        cuts = sorted(draw(st.integers(0, 10)) / 10 for _ in range(4))
        states = [high - low for low, high in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]
        off, landed = draw(st.booleans()), draw(st.booleans())
        shares.append(GroupShares(*states, parameters_host=float(off), gradients_host=float(landed)))
    return request, shares


@settings(max_examples=150, deadline=None)
@given(offloaded())
def test_all_that_the_device_does_is_in_the_timeline(drawn: tuple[PlanRequest, list[GroupShares]]) -> None:
    request, shares = drawn
    timeline = simulate(request, shares)
    assert timeline.busy["compute"] + timeline.busy["update"] == pytest.approx(timeline.compute_s, rel=1e-6)
    assert max(timeline.busy.values()) <= timeline.step_s * (1 + 1e-6)


@settings(max_examples=150, deadline=None)
@given(offloaded())
def test_no_step_is_shorter_than_the_program_says(drawn: tuple[PlanRequest, list[GroupShares]]) -> None:
    """But for the way of gradients to the host, which the program takes to be after the norm."""
    request, shares = drawn
    found = group_costs(request)
    works = [
        update_seconds(request, cost, share, lands=request.is_early) for cost, share in zip(found, shares, strict=True)
    ]
    assert simulate(request, shares).step_s >= 0.99 * step_seconds(request, found, shares, works)
