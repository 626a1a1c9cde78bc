"""A solution of the planner: the shares of groups, and what they are as homes and as bytes of tiers. Steps that use it
show how fast each worker really is: `refit` makes a request of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from zerostd.planning.demands import GroupShares, activation_bytes, again_seconds, lands_on_copy, way_of
from zerostd.planning.profiles import MachineProfile, ModelProfile
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
        gradients_host=float(homes.gradients is Tier.HOST),
        activations_recomputed=float(way == "recompute"),
        activations_host=float(way == "host"),
    )


def model_state(solution: Solution) -> dict[Tier, dict[Kind, int]]:
    """Return the bytes of this rank by the closed form: for bf16 and AdamW 2 for a parameter, 2 for its gradient, 10
    for its states, or 12 where the parameter is not at hand for the update."""
    request = solution.request
    model = request.model
    total = {tier: dict[Kind, float]() for tier in Tier}

    def add(tier: Tier, kind: Kind, size: float) -> None:
        total[tier][kind] = total[tier].get(kind, 0.0) + size

    for cost, share in solution.pairs:
        homes = homes_of(share)
        add(homes.parameters, Kind.PARAMETERS, cost.parameters)
        add(homes.gradients, Kind.GRADIENTS, cost.gradients)
        add(Tier.DEVICE, Kind.GRADIENTS, cost.pinned_gradients)
        for tier, route, part in homes.states:
            copies = 2 if request.speculates and tier is Tier.HOST else 1
            shares_master = tier is homes.parameters and tier is not Tier.DISK and copies == 1
            width = model.state_bytes + (0 if shares_master else model.master_bytes)
            width -= request.shared_bytes(tier, route, homes.parameters)
            add(tier, Kind.OPTIMIZER_STATES, cost.updated * part * width * copies)
            if route is Route.CPU:
                passes = Tier.DEVICE if request.has_one_memory else Tier.HOST
                add(passes, Kind.BUFFERS, cost.updated * part * _passing(request, cost, homes, tier))
    if request.chooses:
        device, host = activation_bytes(request, solution.shares)
        add(Tier.DEVICE, Kind.ACTIVATIONS, device)
        add(Tier.HOST, Kind.ACTIVATIONS, host)
    for tier, size in request.fixed.items():
        activations = model.activations() if tier is Tier.DEVICE and not request.chooses else 0
        add(tier, Kind.ACTIVATIONS, activations)
        add(tier, Kind.BUFFERS, max(0, size - activations))
    return {tier: {kind: int(size) for kind, size in kinds.items() if size >= 1} for tier, kinds in total.items()}


def _passing(request: PlanRequest, cost: GroupCost, homes: Homes, tier: Tier) -> int:
    """Return the bytes of host memory that a parameter updated by the CPU takes: its gradient, its new value."""
    has_link = request.machine.link is not None
    gradient = cost.gradient_bytes if has_link and homes.gradients is Tier.DEVICE else 0
    if tier is Tier.HOST and request.model.shared_bytes:
        return gradient  # new values are halves of masters
    lands_on_gradient = gradient > 0 and lands_on_copy(request, cost)
    goes_up = has_link and homes.parameters is Tier.DEVICE and not lands_on_gradient
    return gradient + (request.model.parameter_bytes if goes_up or homes.parameters is Tier.DISK else 0)


def activations_by_group(solution: Solution) -> dict[str, str]:
    """Return what each group does with its activations, or one word for all; nothing where there is no choice."""
    if not solution.request.chooses:
        return {}
    ways = solution.by_group(way_of)
    return ways if len(set(ways.values())) > 1 else {"*": next(iter(ways.values()))}


def fits(solution: Solution) -> bool:
    held = {tier: sum(kinds.values()) for tier, kinds in model_state(solution).items()}
    return all(size <= solution.request.limits.get(tier, 0) * (1 + TOLERANCE) + 1 for tier, size in held.items())


# -- rates as they were observed --


@dataclass(frozen=True)
class ObservedStep:
    """The seconds that steps were observed to take, on the rank that took longest."""

    step_s: float
    forward_s: float  # of one pass with all else that the loop does, which hides updates as well; without waiting
    backward_s: float
    num_passes: int = 1  # in a step
    busy: Mapping[str, float] = field(default_factory=dict)  # seconds of each worker in a step: cpu, streamed, disk
    activation_bytes: int | None = None  # on the device beside model state, at most; None: not known
    profile: ModelProfile | None = None  # of the model, with the activations that were counted in a pass; None: not


def refit(
    request: PlanRequest, homes: Mapping[str, Homes], observed: ObservedStep, way_of_group: WayOf | None = None
) -> PlanRequest:
    """Return the request with compute and rates as they were observed under a plan with these homes and ways.

    What a worker was seen to take is held against what it takes in the simulation of the same plan, and the rate it
    leans on is changed by that ratio. What it shares with others is in the simulation too, so it is not counted twice.
    """
    request = replace(request, model=_as_observed(request, homes, observed, way_of_group))
    model = request.model
    busy = dict(observed.busy)
    if request.machine.link is None:  # the CPU computes, and what else it did has made that longer
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
    device held beyond what was counted in each group is needed by any of them for a moment."""
    model = replace(request.model, forward_s=observed.forward_s, backward_s=observed.backward_s)
    if not request.chooses:
        known = observed.activation_bytes
        return model if known is None else replace(model, activation_bytes=known)
    now = evaluate(replace(request, model=model), homes, way_of_group)
    again_s = again_seconds(now.request, now.shares)
    model = replace(model, backward_s=max(observed.forward_s, observed.backward_s - again_s))
    held, _ = activation_bytes(now.request, now.shares)
    more = max(0.0, (observed.activation_bytes or 0) - held) / (model.samples or 1)
    groups = (replace(group, peak_bytes=group.peak_bytes + more) for group in model.groups)
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
