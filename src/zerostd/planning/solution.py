"""A solution of the planner: shares of group_costs, and what they are as homes of groups and as bytes of tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zerostd.planning.activations import activation_bytes, way_of
from zerostd.planning.costs import GroupCost, PlanRequest
from zerostd.planning.demands import GroupShares
from zerostd.planning.simulation import Timeline, simulate
from zerostd.policy import Homes, Kind, Route, Tier

__all__ = ["Solution", "activations_by_group", "fits", "homes_by_group", "model_state", "shares_of"]

TOLERANCE = 1e-5
SLOW_PACE = 0.8  # of its rates, that a processor has in slow minutes: 0.5 to 1.1 were seen within one hour


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
        """The same while others use the processor and its memory too."""
        machine = self.request.machine
        return replace(self.request, machine=replace(machine, processor=machine.processor.at_pace(SLOW_PACE)))

    @cached_property
    def slow_s(self) -> float:
        """A step in such minutes, never a shorter one. Where the device is the processor, they say nothing about
        placements."""
        if self.request.machine.link is None:
            return self.timeline.step_s
        return max(self.timeline.step_s, simulate(self.slow_request, self.costs, self.shares).step_s)

    @property
    def cost_s(self) -> float:
        """What placements are compared by: a step, half of them in such minutes."""
        return (self.timeline.step_s + self.slow_s) / 2


def homes_by_group(solution: Solution) -> dict[str, Homes]:
    """The shares as homes, by name of group."""
    names = [group.name for group in solution.request.model.groups]
    found = {}
    for cost, share in zip(solution.costs, solution.shares, strict=True):
        homes = _homes(share)
        for index in cost.members:
            found[names[index]] = homes
    return {name: found[name] for name in names}


def _homes(share: GroupShares) -> Homes:
    parts = [
        (Tier.DEVICE, Route.RESIDENT, share.resident),
        (Tier.HOST, Route.CPU, share.cpu),
        (Tier.HOST, Route.STREAMED, share.streamed),
        (Tier.DISK, Route.CPU, share.disk_cpu),
        (Tier.DISK, Route.STREAMED, share.disk_streamed),
    ]
    kept = [(tier, route, part) for tier, route, part in parts if part > 5e-6]
    total = sum(part for _, _, part in kept)
    parameters = Tier.HOST if share.parameters_host else Tier.DISK if share.parameters_disk else Tier.DEVICE
    return Homes(
        parameters,
        Tier.HOST if share.gradients_host else Tier.DEVICE,
        tuple((tier, route, part / total) for tier, route, part in kept),
    )


def model_state(solution: Solution) -> dict[Tier, dict[Kind, int]]:
    """Bytes by the closed form: 2 for a parameter, 2 for its gradient, 12 for its states, by what this rank holds."""
    return _state(solution.request, solution.costs, solution.shares)


def _state(
    request: PlanRequest, found: Sequence[GroupCost], shares: Sequence[GroupShares]
) -> dict[Tier, dict[Kind, int]]:
    model, total = request.model, {tier: dict[Kind, float]() for tier in Tier}

    passes = Tier.DEVICE if request.has_one_memory else Tier.HOST

    def add(tier: Tier, kind: Kind, size: float) -> None:
        total[tier][kind] = total[tier].get(kind, 0.0) + size

    for cost, share in zip(found, shares, strict=True):
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
                add(passes, Kind.BUFFERS, cost.updated * part * _passing(request, cost, homes))
    if request.chooses:
        for tier, size in zip((Tier.DEVICE, Tier.HOST), activation_bytes(found, shares), strict=True):
            add(tier, Kind.ACTIVATIONS, size)
    for tier, size in request.fixed.items():
        activations = model.activations() if tier is Tier.DEVICE and not request.chooses else 0
        add(tier, Kind.ACTIVATIONS, activations)
        add(tier, Kind.BUFFERS, max(0, size - activations))
    return {tier: {kind: int(size) for kind, size in kinds.items() if size >= 1} for tier, kinds in total.items()}


def _passing(request: PlanRequest, cost: GroupCost, homes: Homes) -> int:
    """Bytes of host memory that a parameter updated by the processor takes: its gradient, its new value."""
    gradient = weight = 0
    if request.machine.link is not None and homes.gradients is Tier.DEVICE:
        gradient = cost.gradient_bytes
    lands_on_gradient = gradient == request.model.parameter_bytes and not request.speculates
    if homes.parameters is Tier.DISK or (
        request.machine.link is not None and homes.parameters is Tier.DEVICE and not lands_on_gradient
    ):
        weight = request.model.parameter_bytes
    return gradient + weight


def shares_of(homes: Homes) -> GroupShares:
    """The counterpart of _homes."""
    names = {
        (Tier.DEVICE, Route.RESIDENT): "resident",
        (Tier.HOST, Route.CPU): "cpu",
        (Tier.HOST, Route.STREAMED): "streamed",
        (Tier.DISK, Route.CPU): "disk_cpu",
        (Tier.DISK, Route.STREAMED): "disk_streamed",
    }
    parts = {names[tier, route]: part for tier, route, part in homes.states}
    return GroupShares(
        **{"resident": 0.0, **parts},
        parameters_host=float(homes.parameters is Tier.HOST),
        parameters_disk=float(homes.parameters is Tier.DISK),
        gradients_host=float(homes.gradients is Tier.HOST),
    )


def activations_by_group(solution: Solution) -> dict[str, str]:
    """What each does, or one word for all; nothing where there is no choice."""
    if not solution.request.chooses:
        return {}
    names = [group.name for group in solution.request.model.groups]
    pairs = zip(solution.costs, solution.shares, strict=True)
    found = {index: way_of(share) for cost, share in pairs for index in cost.members}
    if len(set(found.values())) == 1:
        return {"*": found[0]}
    return {name: found[index] for index, name in enumerate(names)}


def fits(request: PlanRequest, found: Sequence[GroupCost], shares: Sequence[GroupShares]) -> bool:
    limits = request.limits
    held = {tier: sum(kinds.values()) for tier, kinds in _state(request, found, shares).items()}
    return all(size <= limits.get(tier, 0) * (1 + TOLERANCE) + 1 for tier, size in held.items())
