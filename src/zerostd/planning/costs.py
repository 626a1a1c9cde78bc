"""What a step costs, group by group: bytes at rest, bytes over each link, seconds of compute and of collectives.

In: a request. Out: a `GroupCost` for each group on one rank. Every number here is linear in the shares that the program
chooses, which is what makes it a linear program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerostd.planning.machine import Wire
from zerostd.planning.model import GroupProfile
from zerostd.planning.request import PlanRequest
from zerostd.policy import Kind, Stage, Tier, shards

MIN_WIRE_BANDWIDTH = 1e6


@dataclass(frozen=True)
class ActivationCost:
    """Activations of one group in one pass on one rank, where the plan decides what is done with them."""

    kept: float = 0.0  # bytes that are left for backward
    boundary: float = 0.0  # bytes of them if the group is recomputed
    peak: float = 0.0  # bytes beside what is kept, while the group runs
    inside: float = 0.0  # the same if it is recomputed, which keeps all of it for a moment
    largest: float = 0.0  # bytes that are kept of one group, where several are merged
    longer_s: float = 0.0  # that backward takes longer if the group is recomputed
    again_s: float = 0.0  # of arithmetic for that
    staying: float = 0.0  # bytes that are kept beside these, whatever is done


@dataclass(frozen=True)
class GroupCost:
    """One group on one rank, or several neighbours that are placed as one."""

    name: str
    updated: float  # parameters that this rank updates
    parameters: float  # bytes of parameters that this rank holds
    gradients: float  # bytes of gradients that can be on the host instead
    pinned_gradients: float  # bytes of gradients that must be on the device
    gathered: float  # bytes of the whole group
    forward_s: float
    backward_s: float
    compute_s: float  # of arithmetic in both passes
    wire_s: float  # of collectives in both passes
    gradient_bytes: int  # of one parameter, as it crosses the link
    members: tuple[int, ...]  # indices of the model's groups
    rests: Tier | None = None  # where its parameters stay; None: they are placed too
    activations: ActivationCost | None = None  # None: there is no choice about them


def group_costs(request: PlanRequest) -> list[GroupCost]:
    """Return one cost for each group of the model, in forward order."""
    forward = _forward_seconds(request)
    wire = wire_of(request.machine.wires, request.world_size)
    return [
        _group_cost(request, index, group, forward[index], wire)
        for index, group in enumerate(request.model.measured_groups)
    ]


def _group_cost(
    request: PlanRequest, index: int, group: GroupProfile, forward_s: float, wire: Wire | None
) -> GroupCost:
    model = request.model
    sums = request.accumulate > 1
    gradient_bytes = max(4, model.gradient_bytes) if sums else model.gradient_bytes
    reduced = group.trained * model.gradient_bytes
    updated = group.trained * request.part(Kind.OPTIMIZER_STATES)
    gradients = 0.0
    pinned = 0.0
    if request.world_size == 1 or shards(request.stage, Kind.GRADIENTS):
        gradients = updated * gradient_bytes
    else:
        pinned = reduced + (updated * 4 if sums else 0.0)
    gathered = (group.trained + group.frozen) * model.parameter_bytes
    gather_s, reduce_s = _wire_seconds(request, gathered, reduced, wire)
    wire_forward_s = gather_s if request.stage > Stage.DATA_PARALLEL else 0.0
    wire_backward_s = (gather_s if shards(request.stage, Kind.PARAMETERS) else 0.0) + reduce_s
    backward_s = _backward_seconds(request, forward_s)
    return GroupCost(
        name=group.name,
        updated=updated,
        parameters=gathered * request.part(Kind.PARAMETERS),
        gradients=gradients,
        pinned_gradients=pinned,
        gathered=gathered,
        forward_s=max(forward_s, wire_forward_s),
        backward_s=max(backward_s, wire_backward_s),
        compute_s=forward_s + backward_s,
        wire_s=wire_forward_s + wire_backward_s,
        gradient_bytes=gradient_bytes,
        members=(index,),
        rests=None if request.rests is None else request.rests.get(group.name, Tier.DEVICE),
        activations=_activation_cost(request, group, forward_s, backward_s, wire_backward_s),
    )


def _activation_cost(
    request: PlanRequest, group: GroupProfile, forward_s: float, backward_s: float, wire_backward_s: float
) -> ActivationCost | None:
    if not request.chooses:
        return None
    samples = request.model.samples or 0
    kept = samples * group.kept_bytes
    peak = samples * group.peak_bytes
    if group.stays:
        return ActivationCost(peak=peak, inside=peak, staying=kept)
    again_s = group.again * forward_s
    return ActivationCost(
        kept=kept,
        boundary=samples * group.boundary_bytes,
        peak=peak,
        inside=kept + peak,
        largest=kept,
        longer_s=max(again_s + backward_s, wire_backward_s) - max(backward_s, wire_backward_s),
        again_s=again_s,
    )


def _forward_seconds(request: PlanRequest) -> list[float]:
    """Return the seconds of compute in one forward pass, by group; zeros if neither time nor samples are known."""
    model = request.model
    flops = [group.forward_flops for group in model.groups]
    if not any(flops):
        flops = [float(group.trained + group.frozen) for group in model.groups]
    if model.forward_s is not None:
        total = sum(flops) or 1.0
        return [model.forward_s * count / total for count in flops]
    if model.samples is None:
        return [0.0] * len(flops)
    machine = request.machine
    rate = machine.matrix.get(model.dtype) or max(machine.matrix.values())
    return [group.forward_flops * model.samples / (rate * machine.achieved) for group in model.groups]


def _backward_seconds(request: PlanRequest, forward_s: float) -> float:
    model = request.model
    backward_s = forward_s * (3.0 if model.recomputes else 2.0 + model.recomputed)
    if model.backward_s is not None and model.forward_s:
        backward_s = forward_s * model.backward_s / model.forward_s
    if request.chooses and model.recomputes:
        return max(0.0, backward_s - forward_s)
    return backward_s


def wire_of(wires: Sequence[Wire], world_size: int) -> Wire | None:
    """Return the slowest level that collectives of this many ranks go through."""
    if world_size == 1 or not wires:
        return None
    needed = []
    for wire in sorted(wires, key=lambda wire: wire.ranks):
        needed.append(wire)
        if wire.ranks >= world_size:
            break
    return min(needed, key=lambda wire: wire.bandwidth)


def _wire_seconds(request: PlanRequest, gathered: float, reduced: float, wire: Wire | None) -> tuple[float, float]:
    """Return the seconds of one group's gather and reduce. A reduce to everywhere is a reduce and a gather."""
    if wire is None:
        return 0.0, 0.0
    part = (request.world_size - 1) / request.world_size
    bandwidth = max(wire.bandwidth, MIN_WIRE_BANDWIDTH)
    gather_s = part * gathered / bandwidth + wire.latency
    reduce_s = part * reduced / bandwidth + wire.latency
    if request.stage is Stage.DATA_PARALLEL:
        reduce_s *= 2
    return gather_s, reduce_s


def merged(costs: Sequence[GroupCost], most: int) -> list[GroupCost]:
    """Merge neighbours until there are about `most`, of about the same size. Groups whose parameters stay in different
    places are not merged."""
    if len(costs) <= most:
        return list(costs)
    weights = [cost.updated + cost.parameters + 1.0 for cost in costs]
    target = sum(weights) / most
    filled = 0.0
    done: list[GroupCost] = []
    current: list[GroupCost] = []
    for cost, weight in zip(costs, weights, strict=True):
        is_full = filled + weight / 2 > target * (len(done) + 1)
        if current and (is_full or current[-1].rests is not cost.rests):
            done.append(_merge(current))
            current = []
        current.append(cost)
        filled += weight
    done.append(_merge(current))
    return done


def _merge(costs: Sequence[GroupCost]) -> GroupCost:
    return replace(
        costs[0],
        updated=sum(cost.updated for cost in costs),
        parameters=sum(cost.parameters for cost in costs),
        gradients=sum(cost.gradients for cost in costs),
        pinned_gradients=sum(cost.pinned_gradients for cost in costs),
        gathered=max(cost.gathered for cost in costs),
        forward_s=sum(cost.forward_s for cost in costs),
        backward_s=sum(cost.backward_s for cost in costs),
        compute_s=sum(cost.compute_s for cost in costs),
        wire_s=sum(cost.wire_s for cost in costs),
        members=tuple(index for cost in costs for index in cost.members),
        activations=_merge_activations([cost.activations for cost in costs if cost.activations is not None]),
    )


def _merge_activations(costs: Sequence[ActivationCost]) -> ActivationCost | None:
    """Groups run one after the other: what is left of them adds up, what one needs while it runs does not."""
    if not costs:
        return None
    return ActivationCost(
        kept=sum(cost.kept for cost in costs),
        boundary=sum(cost.boundary for cost in costs),
        peak=max(cost.peak for cost in costs),
        inside=max(cost.inside for cost in costs),
        largest=max(cost.largest for cost in costs),
        longer_s=sum(cost.longer_s for cost in costs),
        again_s=sum(cost.again_s for cost in costs),
        staying=sum(cost.staying for cost in costs),
    )
