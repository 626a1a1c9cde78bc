"""A solution of the planner: the shares of groups, and what they are as homes and as bytes of tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zerostd.planning.activations import activation_bytes, way_of
from zerostd.planning.costs import GroupCost
from zerostd.planning.demands import GroupShares, lands_on_copy
from zerostd.planning.request import PlanRequest
from zerostd.planning.simulation import Timeline, simulate
from zerostd.policy import Homes, Kind, Route, Tier

TOLERANCE = 1e-5
SLOW_PACE = 0.8  # of its rates, that a CPU has in slow minutes: 0.5 to 1.1 were seen within one hour
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
    costs: list[GroupCost]
    shares: list[GroupShares]
    timeline: Timeline
    asked: PlanRequest | None = None  # with less to choose from, where this is the answer to that

    @property
    def slow_request(self) -> PlanRequest:
        """The same request while others use the CPU and its memory too."""
        machine = self.request.machine
        return replace(self.request, machine=replace(machine, processor=machine.processor.at_pace(SLOW_PACE)))

    @cached_property
    def slow_s(self) -> float:
        """A step in such minutes, never a shorter one. Where the device is the CPU, they say nothing about
        placements."""
        if self.request.machine.link is None:
            return self.timeline.step_s
        return max(self.timeline.step_s, simulate(self.slow_request, self.costs, self.shares).step_s)

    @property
    def cost_s(self) -> float:
        """What placements are compared by: a step, half of them in such minutes."""
        return (self.timeline.step_s + self.slow_s) / 2

    @property
    def bytes_off(self) -> float:
        """Bytes of model state that are not on the device."""
        return sum(
            cost.updated * self.request.model.state_bytes * (1 - share.resident)
            + cost.parameters * (share.parameters_host + share.parameters_disk)
            + cost.gradients * share.gradients_host
            for cost, share in zip(self.costs, self.shares, strict=True)
        )


def homes_by_group(solution: Solution) -> dict[str, Homes]:
    """Return the shares as homes, by name of group."""
    homes = {
        index: _homes(share)
        for cost, share in zip(solution.costs, solution.shares, strict=True)
        for index in cost.members
    }
    return {group.name: homes[index] for index, group in enumerate(solution.request.model.groups)}


def _homes(share: GroupShares) -> Homes:
    parts = [(tier, route, getattr(share, name)) for (tier, route), name in NAMES.items()]
    parts = [(tier, route, part) for tier, route, part in parts if part > 5e-6]
    total = sum(part for _, _, part in parts)
    parameters = Tier.HOST if share.parameters_host else Tier.DISK if share.parameters_disk else Tier.DEVICE
    return Homes(
        parameters,
        Tier.HOST if share.gradients_host else Tier.DEVICE,
        tuple((tier, route, part / total) for tier, route, part in parts),
    )


def shares_of(homes: Homes) -> GroupShares:
    """Return homes as shares: the counterpart of `_homes`."""
    states = dict.fromkeys(NAMES.values(), 0.0)
    for tier, route, part in homes.states:
        states[NAMES[tier, route]] = part
    return GroupShares(
        **states,
        parameters_host=float(homes.parameters is Tier.HOST),
        parameters_disk=float(homes.parameters is Tier.DISK),
        gradients_host=float(homes.gradients is Tier.HOST),
    )


def model_state(solution: Solution) -> dict[Tier, dict[Kind, int]]:
    """Return bytes by the closed form: 2 for a parameter, 2 for its gradient, 12 for its states, by what this rank
    holds."""
    return _model_state(solution.request, solution.costs, solution.shares)


def _model_state(
    request: PlanRequest, costs: Sequence[GroupCost], shares: Sequence[GroupShares]
) -> dict[Tier, dict[Kind, int]]:
    model = request.model
    total = {tier: dict[Kind, float]() for tier in Tier}

    def add(tier: Tier, kind: Kind, size: float) -> None:
        total[tier][kind] = total[tier].get(kind, 0.0) + size

    for cost, share in zip(costs, shares, strict=True):
        homes = _homes(share)
        add(homes.parameters, Kind.PARAMETERS, cost.parameters)
        add(homes.gradients, Kind.GRADIENTS, cost.gradients)
        add(Tier.DEVICE, Kind.GRADIENTS, cost.pinned_gradients)
        for tier, route, part in homes.states:
            copies = 2 if request.speculates and tier is Tier.HOST else 1
            shares_master = tier is homes.parameters and tier is not Tier.DISK and copies == 1
            width = model.state_bytes + (0 if shares_master else model.master_bytes)
            add(tier, Kind.OPTIMIZER_STATES, cost.updated * part * width * copies)
            if route is Route.CPU:
                passes = Tier.DEVICE if request.has_one_memory else Tier.HOST
                add(passes, Kind.BUFFERS, cost.updated * part * _passing(request, cost, homes))
    if request.chooses:
        device, host = activation_bytes(costs, shares)
        add(Tier.DEVICE, Kind.ACTIVATIONS, device)
        add(Tier.HOST, Kind.ACTIVATIONS, host)
    for tier, size in request.fixed.items():
        activations = model.activations() if tier is Tier.DEVICE and not request.chooses else 0
        add(tier, Kind.ACTIVATIONS, activations)
        add(tier, Kind.BUFFERS, max(0, size - activations))
    return {tier: {kind: int(size) for kind, size in kinds.items() if size >= 1} for tier, kinds in total.items()}


def _passing(request: PlanRequest, cost: GroupCost, homes: Homes) -> int:
    """Return the bytes of host memory that a parameter updated by the CPU takes: its gradient, its new value."""
    has_link = request.machine.link is not None
    gradient = cost.gradient_bytes if has_link and homes.gradients is Tier.DEVICE else 0
    lands_on_gradient = gradient > 0 and lands_on_copy(request, cost)
    goes_up = has_link and homes.parameters is Tier.DEVICE and not lands_on_gradient
    return gradient + (request.model.parameter_bytes if goes_up or homes.parameters is Tier.DISK else 0)


def activations_by_group(solution: Solution) -> dict[str, str]:
    """Return what each group does with its activations, or one word for all; nothing where there is no choice."""
    if not solution.request.chooses:
        return {}
    pairs = zip(solution.costs, solution.shares, strict=True)
    ways = {index: way_of(share) for cost, share in pairs for index in cost.members}
    if len(set(ways.values())) == 1:
        return {"*": ways[0]}
    return {group.name: ways[index] for index, group in enumerate(solution.request.model.groups)}


def fits(request: PlanRequest, costs: Sequence[GroupCost], shares: Sequence[GroupShares]) -> bool:
    """Return whether shares of whole groups stay inside the limits."""
    held = {tier: sum(kinds.values()) for tier, kinds in _model_state(request, costs, shares).items()}
    return all(size <= request.limits.get(tier, 0) * (1 + TOLERANCE) + 1 for tier, size in held.items())
