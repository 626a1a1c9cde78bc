"""A request whose rates are those that were observed: steps under a plan show how fast each worker really is.

What a worker was seen to take is held against what it takes in the simulation of the same plan, and the rate it leans
on is changed by that ratio. What it shares with others is in the simulation too, so it is not counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zerostd.planning.machine import MachineProfile
from zerostd.planning.planner import evaluate
from zerostd.planning.request import PlanRequest
from zerostd.policy import Homes

MOST_ROUNDS = 8
CLOSE = 0.02  # of what a worker was seen to take
LEAST_SECONDS = 1e-4  # of a worker in a step, for its rate to be told, and
LEAST_PART = 0.1  # of a step: in less, what it shares with others hides how fast it is


@dataclass(frozen=True)
class ObservedStep:
    """What steps were observed to take, on the rank that took longest."""

    step_s: float
    forward_s: float  # of one pass with all else that the loop does, which hides updates as well; without waiting
    backward_s: float
    num_passes: int = 1  # in a step
    busy: Mapping[str, float] = field(default_factory=dict)  # seconds of each worker in a step: cpu, streamed, disk
    activation_bytes: int | None = None  # on the device beside model state, at most; None: not known


def refit(request: PlanRequest, homes: Mapping[str, Homes], observed: ObservedStep) -> PlanRequest:
    """Return the request with compute and rates as they were observed under a plan with these homes."""
    model = replace(request.model, forward_s=observed.forward_s, backward_s=observed.backward_s)
    if observed.activation_bytes is not None:
        model = replace(model, activation_bytes=observed.activation_bytes)
    request = replace(request, model=model)
    busy = dict(observed.busy)
    if request.machine.link is None:  # the CPU computes, and what else it did has made that longer
        busy["compute"] = request.accumulate * (observed.forward_s + observed.backward_s)
    forward_s = observed.forward_s
    backward_s = observed.backward_s
    for _ in range(MOST_ROUNDS):
        expected = evaluate(request, homes).timeline.busy
        ratios = {
            worker: seconds / expected[worker]
            for worker, seconds in busy.items()
            if min(seconds, expected.get(worker, 0.0)) > LEAST_SECONDS and seconds > LEAST_PART * observed.step_s
        }
        if all(abs(ratio - 1.0) < CLOSE for ratio in ratios.values()):
            break
        computing = ratios.pop("compute", 1.0)
        forward_s *= computing
        backward_s *= computing
        model = replace(model, forward_s=forward_s, backward_s=backward_s)
        request = replace(request, model=model, machine=_slower(request.machine, ratios))
    return request


def _slower(machine: MachineProfile, by: Mapping[str, float]) -> MachineProfile:
    """Return the machine with each worker's rates divided by a ratio. The CPU is as fast as its cores or its memory let
    it be; it was its memory as far as what is streamed, which is in that memory too, was seen to be slower as well."""
    cpu = by.get("cpu", 1.0)
    streamed = by.get("streamed", 1.0)
    memory = min(cpu, streamed) if "streamed" in by else 1.0
    processor = replace(
        machine.processor,
        update_ns={threads: ns * cpu for threads, ns in machine.processor.update_ns.items()},
        memory=machine.processor.memory / memory,
    )
    link = machine.link
    if link is not None:
        link = replace(link, up=link.up / streamed, down=link.down / streamed, both=link.both / streamed)
    disk = machine.disk
    if disk is not None:
        slower = by.get("disk", 1.0)
        disk = replace(disk, read=disk.read / slower, write=disk.write / slower, both=disk.both / slower)
    return replace(machine, processor=processor, link=link, disk=disk)
