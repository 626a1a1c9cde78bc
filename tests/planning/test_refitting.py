"""Rates fitted to what was seen: a machine that is not as its profile says is found out from steps alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from planning.machines import H200, LAPTOP, gpt, request_of
from zerostd.planning import MachineProfile, PlanRequest
from zerostd.planning.demands import activation_bytes
from zerostd.planning.planner import solve
from zerostd.planning.profiles import WAYS
from zerostd.planning.solution import ObservedStep, evaluate, refit
from zerostd.policy import Homes, Route, Tier

MODEL = gpt(2048, 12, 0.1)
HALVES = Homes(states=((Tier.HOST, Route.CPU, 0.6), (Tier.HOST, Route.STREAMED, 0.4)))
ON_DISK = Homes(states=((Tier.HOST, Route.CPU, 0.5), (Tier.DISK, Route.CPU, 0.5)))
ON_HOST = Homes(states=((Tier.HOST, Route.CPU, 1.0),))
Change = Callable[[MachineProfile], MachineProfile]


def slow_processor(machine: MachineProfile) -> MachineProfile:
    slower = {threads: 4 * ns for threads, ns in machine.processor.update_ns.items()}
    return replace(machine, processor=replace(machine.processor, update_ns=slower))


def slow_memory(machine: MachineProfile) -> MachineProfile:
    return replace(machine, processor=replace(machine.processor, memory=machine.processor.memory / 3))


def slow_link(machine: MachineProfile) -> MachineProfile:
    assert machine.link is not None
    return replace(machine, link=replace(machine.link, up=12e9, down=13e9, both=24e9))


def slow_disk(machine: MachineProfile) -> MachineProfile:
    assert machine.disk is not None
    return replace(machine, disk=replace(machine.disk, read=5e8, write=4e8, both=3e8))


def fast_processor(machine: MachineProfile) -> MachineProfile:
    faster = {threads: ns / 3 for threads, ns in machine.processor.update_ns.items()}
    return replace(machine, processor=replace(machine.processor, update_ns=faster, memory=3 * machine.processor.memory))


def seen_on(request: PlanRequest, homes: Homes) -> ObservedStep:
    """What a machine shows that does as the simulation says."""
    timeline = evaluate(request, dict.fromkeys([group.name for group in request.model.groups], homes)).timeline
    workers = {name: seconds for name, seconds in timeline.busy.items() if name in ("cpu", "streamed", "disk")}
    assert request.model.forward_s is not None and request.model.backward_s is not None
    longer = timeline.busy["compute"] / (request.model.forward_s + request.model.backward_s)  # beside what else is done
    return ObservedStep(
        timeline.step_s, longer * request.model.forward_s, longer * request.model.backward_s, busy=workers
    )


@pytest.mark.parametrize("clips", [False, True], ids=["", "clip"])
@pytest.mark.parametrize(
    ("machine", "homes", "change"),
    [
        (H200, HALVES, slow_processor),
        (H200, HALVES, slow_memory),
        (H200, HALVES, slow_link),
        (H200, HALVES, fast_processor),
        (H200, ON_DISK, slow_disk),
        (LAPTOP, ON_DISK, slow_disk),
        (LAPTOP, ON_HOST, slow_processor),
    ],
)
def test_what_changed_is_found(machine: MachineProfile, homes: Homes, change: Change, clips: bool) -> None:
    believed = request_of(MODEL, machine=machine, waits_for_norm=clips)
    real = replace(believed, machine=change(machine))
    seen = seen_on(real, homes)
    assert seen.step_s != pytest.approx(seen_on(believed, homes).step_s, rel=0.2), "the change must matter"
    fitted = refit(replace(believed, model=replace(MODEL, forward_s=None, backward_s=None)), _all(homes), seen)
    assert seen_on(fitted, homes).step_s == pytest.approx(seen.step_s, rel=0.05)


@pytest.mark.parametrize("gib", [6, 4, 3, 2])
def test_the_plan_that_follows_is_nearly_as_good_as_one_that_knew(gib: int) -> None:
    limits = {Tier.DEVICE: gib * 2**30, Tier.HOST: 64 * 2**30}
    believed = request_of(MODEL, limits)
    real = replace(believed, machine=slow_processor(H200))
    first = solve(believed).homes
    seen = evaluate(real, first).timeline
    workers = {name: seen.busy.get(name, 0.0) for name in ("cpu", "streamed")}
    fitted = refit(believed, first, ObservedStep(seen.step_s, 0.1 / 3, 0.2 / 3, busy=workers))
    second = evaluate(real, solve(fitted).homes).timeline.step_s
    knew = solve(real).timeline.step_s
    assert second < 0.8 * seen.step_s
    assert second <= 1.05 * knew


def test_nothing_seen_changes_nothing_but_compute() -> None:
    request = request_of(MODEL)
    fitted = refit(request, _all(HALVES), ObservedStep(1.0, 0.2, 0.5, activation_bytes=7))
    assert fitted.machine == request.machine
    assert (fitted.model.forward_s, fitted.model.backward_s, fitted.model.activations()) == (0.2, 0.5, 7)


def _all(homes: Homes) -> dict[str, Homes]:
    return dict.fromkeys([group.name for group in MODEL.groups], homes)


@pytest.mark.parametrize("way", ["keep", "recompute", "recompute+host"])
@pytest.mark.parametrize("more", [0.0, 3e9])
def test_the_plan_that_was_observed_takes_what_was_observed(way: str, more: float) -> None:
    """Whatever the device held beyond the groups' own bytes, and nothing twice."""
    sizes = {"kept_bytes": 3e8, "boundary_bytes": 1e8, "peak_bytes": 2e8}
    groups = tuple(replace(group, **sizes) for group in MODEL.groups)
    model = replace(MODEL, groups=groups, samples=1)
    ways = frozenset(WAYS)
    request = request_of(model, activations=ways - {"recompute"} if way == "recompute+host" else ways)
    homes = dict.fromkeys([group.name for group in groups], ON_HOST)

    def bytes_of(known: PlanRequest, sends: bool) -> float:
        known = replace(known, activations=ways - {"recompute"} if sends else ways)
        return activation_bytes(known, evaluate(known, homes, lambda _: way).shares)[0]

    predicted = bytes_of(request, request.sends_inputs)
    seen = replace(seen_on(request, ON_HOST), activation_bytes=int(predicted + more))
    refitted = refit(request, homes, seen, lambda _: way)
    assert bytes_of(refitted, request.sends_inputs) == pytest.approx(predicted + more, rel=1e-6)
    if way == "recompute+host":  # on the device they are there at once, and what was on its way may not have been
        assert bytes_of(refitted, False) == pytest.approx(predicted + more + len(groups) * 1e8, rel=1e-6)
