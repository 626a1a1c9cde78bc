"""A solution of the planner: the shares of groups, and what they are as homes and as bytes of tiers. Steps that use it
show how fast each worker really is: `refit` makes a request of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from zerostd.planning.demands import (
    GroupShares,
    ResourceDemands,
    activation_bytes,
    again_seconds,
    choice_of,
    staying,
    summed,
    values_of,
    way_of,
)
from zerostd.planning.profiles import RECOMPUTED, MachineProfile, ModelProfile
from zerostd.planning.request import GroupCost, PlanRequest
from zerostd.planning.simulation import Timeline, simulate
from zerostd.policy import Homes, Kind, Route, Tier

TOLERANCE = 1e-5
MOST_ROUNDS = 8  # of fitting rates
CLOSE = 0.02  # of what a worker was observed to take
LEAST_SECONDS = 1e-4  # of a worker in a step, for its rate to be told, and
LEAST_PART = 0.1  # of a step: in less, what it shares with others hides how fast it is
Value = TypeVar("Value")
WayOf = Callable[[str], str | None]  # what a group does with its activations, by its name
NAMES = {  # of shares of states
    (Tier.DEVICE, Route.RESIDENT): "resident",
    (Tier.HOST, Route.CPU): "cpu",
    (Tier.HOST, Route.STREAMED): "streamed",
    (Tier.DISK, Route.CPU): "disk_cpu",
    (Tier.DISK, Route.STREAMED): "disk_streamed",
}


@dataclass(frozen=True)
class Solution:
    """A placement of whole groups, and what it costs."""

    request: PlanRequest
    shares: list[GroupShares]
    asked: PlanRequest | None = None  # with less to choose from, where this is the answer to that

    @property
    def pairs(self) -> list[tuple[GroupCost, GroupShares]]:
        return list(zip(self.request.costs, self.shares, strict=True))

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.request, self.shares)

    @property
    def bytes_off(self) -> float:
        """Bytes of model state that are not on the device."""
        return sum(
            cost.updated * self.request.model.state_bytes * (1 - share.resident)
            + cost.parameters * share.parameters_off
            + cost.gradients * share.gradients_host
            for cost, share in self.pairs
        )

    @property
    def homes(self) -> dict[str, Homes]:
        return self.by_group(homes_of)

    def by_group(self, of_share: Callable[[GroupShares], Value]) -> dict[str, Value]:
        """Return a value of each group, by its name."""
        groups = self.request.model.groups
        return {groups[index].name: of_share(share) for cost, share in self.pairs for index in cost.members}


def evaluate(request: PlanRequest, homes: Mapping[str, Homes], way_of_group: WayOf | None = None) -> Solution:
    """Return what given homes, and ways to treat activations, cost. Groups placed as one must have the same."""
    ways = {cost.name: way_of_group(cost.name) if way_of_group is not None else None for cost in request.costs}
    return Solution(request, [shares_of(homes[cost.name], ways[cost.name]) for cost in request.costs])


def homes_of(share: GroupShares) -> Homes:
    parts = {place: getattr(share, name) for place, name in NAMES.items() if getattr(share, name) > 5e-6}
    total = sum(parts.values())
    parameters = Tier.HOST if share.parameters_host else Tier.DISK if share.parameters_disk else Tier.DEVICE
    gradients = Tier.HOST if share.gradients_host else Tier.DEVICE
    return Homes(parameters, gradients, tuple((tier, route, part / total) for (tier, route), part in parts.items()))


def shares_of(homes: Homes, way: str | None = None) -> GroupShares:
    states = dict.fromkeys(NAMES.values(), 0.0)
    for tier, route, part in homes.states:
        states[NAMES[tier, route]] = part
    return GroupShares(
        **states,
        parameters_host=float(homes.parameters is Tier.HOST),
        parameters_disk=float(homes.parameters is Tier.DISK),
        gradients_host=float(homes.gradients is not Tier.DEVICE),  # on disk: as if they were on the host
        activations_recomputed=float(way in RECOMPUTED),
        activations_host=float(way == "host"),
    )


def model_state(solution: Solution) -> dict[Tier, dict[Kind, int]]:
    """Return the bytes of this rank by the closed form: for bf16 and AdamW 2 for a parameter, 2 for its gradient, 10
    for its states, or 12 where the parameter is not at hand for the update."""
    request = solution.request
    demands = ResourceDemands(request)
    values = values_of(request, solution.shares)
    held: dict[Tier, dict[Kind, float]] = {}
    for tier in Tier:
        kinds = {kind: summed(factors, values) for kind, factors in demands.bytes(tier).items()}
        kinds[Kind.BUFFERS] = kinds.get(Kind.BUFFERS, 0.0) + request.fixed.get(tier, 0)
        held[tier] = kinds
    held[Tier.DEVICE][Kind.ACTIVATIONS] += choice_of(request, solution.shares).beside
    return {tier: {kind: int(size) for kind, size in kinds.items() if size >= 1} for tier, kinds in held.items()}


def activations_by_group(solution: Solution) -> dict[str, str]:
    """Return what each group does with its activations, or one word for all; nothing where there is no choice."""
    if not solution.request.chooses:
        return {}
    ways = solution.by_group(way_of)
    if solution.request.sends_inputs:
        ways = {name: "recompute+host" if way == "recompute" else way for name, way in ways.items()}
    return ways if len(set(ways.values())) > 1 else {"*": next(iter(ways.values()))}


def fits(solution: Solution) -> bool:
    held = {tier: sum(kinds.values()) for tier, kinds in model_state(solution).items()}
    return all(size <= solution.request.limits.get(tier, 0) * (1 + TOLERANCE) + 1 for tier, size in held.items())


Bytes = Mapping[Tier, Mapping[Kind, int]]
CountBytes = Callable[[Solution], Bytes]  # everything that a solution takes, by tier and kind

# -- rates as they were observed --


@dataclass(frozen=True)
class ObservedStep:
    """The seconds that steps were observed to take, on the rank that took longest."""

    step_s: float
    forward_s: float  # of one pass with all else that the loop does, which hides updates as well; without waiting
    backward_s: float
    num_passes: int = 1  # in a step
    busy: Mapping[str, float] = field(default_factory=dict)  # seconds of each worker in a step: cpu, streamed, disk
    activation_bytes: int | None = None  # on the device beside the most of model state; None: not known
    late_bytes: int = 0  # of activations beside these: they took the place of gradients that had yet to come
    profile: ModelProfile | None = None  # of the model, with the activations that were counted in a pass; None: not


def with_hidden(
    count: CountBytes, present: Mapping[Tier, Mapping[Kind, int]], late_bytes: int, solution: Solution
) -> Bytes:
    """Return the bytes of a solution, with activations that the peak of the present plan hid. They took the place of
    gradients and buffers that came later. A solution with fewer of these has less to hide them behind."""
    counted = count(solution)
    before = present.get(Tier.DEVICE, {})
    device = counted.get(Tier.DEVICE, {})
    fewer = sum(before.get(kind, 0) - device.get(kind, 0) for kind in (Kind.GRADIENTS, Kind.BUFFERS))
    hidden = min(late_bytes, max(0, fewer))
    return {**counted, Tier.DEVICE: {**device, Kind.ACTIVATIONS: device.get(Kind.ACTIVATIONS, 0) + hidden}}


def refit(
    request: PlanRequest, homes: Mapping[str, Homes], observed: ObservedStep, way_of_group: WayOf | None = None
) -> PlanRequest:
    """Return the request with compute and rates as they were observed under a plan with these homes and ways.

    The observed busy time of each worker is divided by its time in a simulation of the same plan, and the rate that
    limits the worker is changed by that ratio. The simulation includes contention, so it is not counted twice.
    """
    request = replace(request, model=_as_observed(request, homes, observed, way_of_group))
    model = request.model
    busy = dict(observed.busy)
    if request.launching:  # what else the CPU did has made computing longer
        busy["compute"] = request.accumulate * (observed.forward_s + observed.backward_s)
    forward_s = model.forward_s or 0.0
    backward_s = model.backward_s or 0.0
    for _ in range(MOST_ROUNDS):
        expected = evaluate(request, homes, way_of_group).timeline.busy
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


def _as_observed(
    request: PlanRequest, homes: Mapping[str, Homes], observed: ObservedStep, way_of_group: WayOf | None
) -> ModelProfile:
    """Return the model with the seconds that were observed, as if nothing had been recomputed, and the bytes. What the
    device held beyond what groups leave behind, any of them may need for a moment, and the loss does too."""
    model = replace(request.model, forward_s=observed.forward_s, backward_s=observed.backward_s)
    if not request.chooses:
        known = observed.activation_bytes
        return model if known is None else replace(model, activation_bytes=known)
    now = evaluate(replace(request, model=model), homes, way_of_group)
    again_s = again_seconds(now.request, now.shares)
    model = replace(model, backward_s=max(observed.forward_s, observed.backward_s - again_s))
    if observed.activation_bytes is None:
        return model
    held, _ = activation_bytes(now.request, now.shares)
    choice = choice_of(now.request, now.shares)
    left = held - choice.beside + staying(now.request)  # by groups that have run
    samples = model.samples or 1
    most = max(0.0, observed.activation_bytes - left) / samples
    passing = min(most, choice.passing / samples) if now.request.sends_inputs else 0.0
    ways = now.by_group(way_of)
    groups = (
        replace(
            group,
            peak_bytes=max(group.peak_bytes, most),
            inside_bytes=most if ways[group.name] == "recompute" else group.inside_bytes,
            passing_bytes=passing if ways[group.name] == "recompute" else 0.0,
        )
        for group in model.groups
    )
    return replace(model, groups=tuple(groups))


def _slower(machine: MachineProfile, by: Mapping[str, float]) -> MachineProfile:
    """Return the machine with each worker's rates divided by a ratio. The CPU is as fast as its cores or its memory let
    it be; it was its memory as far as what is streamed, which is in that memory too, was seen to be slower as well."""
    cpu = by.get("cpu", 1.0)
    streamed = by.get("streamed", 1.0)
    memory = min(cpu, streamed) if "streamed" in by else 1.0
    update_ns = {threads: ns * cpu for threads, ns in machine.processor.update_ns.items()}
    processor = replace(machine.processor, update_ns=update_ns, memory=machine.processor.memory / memory)
    link = machine.link
    if link is not None:
        link = replace(link, up=link.up / streamed, down=link.down / streamed, both=link.both / streamed)
    disk = machine.disk and machine.disk.slower(by.get("disk", 1.0))
    return replace(machine, processor=processor, link=link, disk=disk)
