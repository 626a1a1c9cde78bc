"""What a step costs, group by group: bytes at rest, bytes over each link, seconds of compute and of collectives.

In: a request, which is a model, a machine and how they are to be used. Out: a `GroupCost` for each group on one rank. Every
number here is linear in the shares that the program chooses, which is what makes it a linear program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zerostd.errors import PrepareError
from zerostd.planning.machine import DiskRates, MachineProfile, Wire
from zerostd.planning.model import WAYS, GroupProfile, ModelProfile
from zerostd.policy import Kind, Stage, Tier, shards

__all__ = [
    "FOR_ACTIVATIONS",
    "FOR_LIBRARIES",
    "MARGIN",
    "NUM_BUSY_THREADS",
    "WORTH_SPECULATING",
    "Activations",
    "GroupCost",
    "PlanRequest",
    "group_costs",
    "merged",
    "stages_of",
    "threads_of",
    "wire_of",
]

MIN_WIRE_BANDWIDTH = 1e6
MARGIN = 0.1  # of what is free that nobody plans with
FOR_ACTIVATIONS = 0.4  # of the device, while nobody has said how large a batch is and no budget was given
FOR_LIBRARIES = 128 << 20  # bytes of an accelerator that matrix products take to work in: 110 to 125 MiB were seen
WORTH_SPECULATING = 0.03  # of a step, for twice the host memory
NUM_BUSY_THREADS = 2  # cores left to the loop and the autograd engine while the processor updates beside them


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned."""

    model: ModelProfile
    machine: MachineProfile
    limits: Mapping[Tier, int]  # bytes this rank may use of each tier; a tier that is left out must not be used
    stage: Stage = Stage.PARAMETERS
    world_size: int = 1
    accumulate: int = 1
    waits_for_norm: bool = False  # clipping, or a loss scale: no update before the last gradient
    speculates: bool = False  # a second copy of states on the host, so that it need not wait
    num_threads: int = 1  # for updates on the processor
    fixed: Mapping[Tier, int] = field(default_factory=dict)  # bytes of working memory, whatever is placed where; and of
    # activations, where there is no choice about them
    activations: frozenset[str] = frozenset()  # of WAYS, those there is a choice among; empty: as the model does now
    can_place: frozenset[Kind] = frozenset({Kind.OPTIMIZER_STATES, Kind.GRADIENTS, Kind.PARAMETERS})
    rests: Mapping[str, Tier] | None = None  # by group: where parameters are and stay; None: they are placed too

    def __post_init__(self) -> None:
        unknown = sorted(self.activations - set(WAYS))
        if unknown:
            raise PrepareError(f"activations={unknown[0]!r} is unknown; use some of {', '.join(WAYS)}")
        if self.activations and not self.ways:
            raise PrepareError(
                "activations can rest on the host only where the device has memory of its own and the host may be "
                "used: let them be kept or recomputed too"
            )

    @property
    def ways(self) -> frozenset[str]:
        """What of `activations` can be done here."""
        has_host = self.machine.link is not None and Tier.HOST in self.limits
        return self.activations if has_host else self.activations - {"host"}

    @property
    def chooses(self) -> bool:
        """Whether what is done with activations is decided by the plan; their bytes are not in `fixed` then."""
        return bool(self.activations) and self.model.knows_activations

    @property
    def ranks_beside(self) -> int:
        """Ranks that share one node's memory, cores and disk."""
        return max(1, min(self.world_size, self.machine.ranks_per_node))

    @property
    def has_one_memory(self) -> bool:
        """Whether what passes through the host is the device's: it is the processor, and the host has no limit."""
        return self.machine.link is None and Tier.HOST not in self.limits

    @property
    def memory_rate(self) -> float:
        """Bytes/s of host memory for one rank."""
        return self.machine.processor.memory / self.ranks_beside

    @property
    def disk(self) -> DiskRates | None:
        """What one rank gets of the disk."""
        disk, ranks = self.machine.disk, self.ranks_beside
        if disk is None or ranks == 1:
            return disk
        return DiskRates(disk.path, disk.read / ranks, disk.write / ranks, disk.both / ranks)

    @property
    def is_early(self) -> bool:
        """Whether updates off the device begin inside backward."""
        gathers_in_step = self.world_size > 1 and self.stage in (Stage.OPTIMIZER_STATES, Stage.GRADIENTS)
        return (not self.waits_for_norm or self.speculates) and not gathers_in_step

    def may_place(self, kind: Kind) -> bool:
        """Whether a kind may rest off the device: what is whole on every rank may not."""
        if kind not in self.can_place:
            return False
        if kind is Kind.PARAMETERS and (self.speculates or self.rests is not None):
            return False
        return self.world_size == 1 or kind is Kind.OPTIMIZER_STATES or shards(self.stage, kind)

    def part(self, kind: Kind) -> float:
        """What one rank holds of a kind."""
        return 1.0 / self.world_size if self.world_size > 1 and shards(self.stage, kind) else 1.0


@dataclass(frozen=True)
class Activations:
    """Of one group in one pass on one rank, where the plan decides what is done with them."""

    kept: float  # bytes that are left for backward
    boundary: float  # bytes of them if the group is recomputed
    peak: float  # bytes beside what is kept, while the group runs
    inside: float  # the same if it is recomputed, which keeps all of it for a moment
    largest: float  # bytes that are kept of one group, where several are joined
    longer_s: float  # that backward takes longer if the group is recomputed
    again_s: float  # of arithmetic for that
    staying: float = 0.0  # bytes that are kept beside these, whatever is done


@dataclass(frozen=True)
class GroupCost:
    """One group on one rank."""

    name: str
    updated: float  # parameters that this rank updates
    parameters: float  # bytes of parameters that rest on this rank
    gradients: float  # bytes of gradients that can rest on the host instead
    pinned_gradients: float  # bytes of gradients that must be on the device
    gathered: float  # bytes of the whole group
    forward_s: float
    backward_s: float
    compute_s: float  # of arithmetic in both passes
    wire_s: float  # of collectives in both passes
    gradient_bytes: int  # of one parameter, as it crosses the link
    members: tuple[int, ...]  # indices of the model's groups
    rests: Tier | None = None  # where its parameters stay; None: they are placed too
    activations: Activations | None = None  # None: there is no choice about them


def threads_of(machine: MachineProfile, local_size: int) -> int:
    """For updates on the processor, by one of the ranks of a node."""
    cores = max(1, machine.processor.num_cores // local_size)
    return cores if machine.link is None else max(1, cores - NUM_BUSY_THREADS)


def stages_of(stage: Stage | None, world_size: int) -> list[Stage]:
    """The user's, or those worth trying: gradients sharded, which sends no more than data parallel does, and then
    parameters too, which are gathered once more."""
    if stage is not None:
        return [stage]
    return [Stage.PARAMETERS] if world_size == 1 else [Stage.GRADIENTS, Stage.PARAMETERS]


def group_costs(request: PlanRequest) -> list[GroupCost]:
    """One for each group of the model, in forward order."""
    groups = request.model.measured_groups
    forward = _forward_seconds(request)
    wire = wire_of(request.machine.wires, request.world_size)
    return [_group_cost(request, index, group, forward[index], wire) for index, group in enumerate(groups)]


def _group_cost(
    request: PlanRequest, index: int, group: GroupProfile, forward_s: float, wire: Wire | None
) -> GroupCost:
    model, size = request.model, request.world_size
    sums = request.accumulate > 1
    resting = max(4, model.gradient_bytes) if sums else model.gradient_bytes
    whole = group.trained * model.gradient_bytes
    updated = group.trained * request.part(Kind.OPTIMIZER_STATES)
    if size == 1 or shards(request.stage, Kind.GRADIENTS):
        gradients, pinned = updated * resting, 0.0
    else:
        gradients, pinned = 0.0, whole + (updated * 4 if sums else 0.0)
    gathered = (group.trained + group.frozen) * model.parameter_bytes
    gather_s, reduce_s = _wire_seconds(request, gathered, whole, wire)
    backward_s = forward_s * (3.0 if model.recomputes else 2.0 + model.recomputed)
    if model.backward_s is not None and model.forward_s:
        backward_s = forward_s * model.backward_s / model.forward_s
    if request.chooses and model.recomputes:
        backward_s = max(0.0, backward_s - forward_s)
    in_forward = gather_s if request.stage > Stage.DATA_PARALLEL else 0.0
    in_backward = (gather_s if shards(request.stage, Kind.PARAMETERS) else 0.0) + reduce_s
    return GroupCost(
        name=group.name,
        updated=updated,
        parameters=gathered * request.part(Kind.PARAMETERS),
        gradients=gradients,
        pinned_gradients=pinned,
        gathered=gathered,
        forward_s=max(forward_s, in_forward),
        backward_s=max(backward_s, in_backward),
        compute_s=forward_s + backward_s,
        wire_s=in_forward + in_backward,
        gradient_bytes=resting,
        members=(index,),
        rests=None if request.rests is None else request.rests.get(group.name, Tier.DEVICE),
        activations=_activations(request, group, forward_s, backward_s, in_backward) if request.chooses else None,
    )


def _activations(
    request: PlanRequest, group: GroupProfile, forward_s: float, backward_s: float, in_backward: float
) -> Activations:
    samples = request.model.samples or 0
    kept, peak = samples * group.kept_bytes, samples * group.peak_bytes
    if group.stays:
        return Activations(0.0, 0.0, peak, peak, 0.0, 0.0, 0.0, staying=kept)
    again_s = group.again * forward_s
    longer_s = max(again_s + backward_s, in_backward) - max(backward_s, in_backward)
    return Activations(kept, samples * group.boundary_bytes, peak, kept + peak, kept, longer_s, again_s)


def _forward_seconds(request: PlanRequest) -> list[float]:
    """Seconds of compute in one forward pass, by group; zeros if neither time nor samples are known."""
    model, machine = request.model, request.machine
    flops = [group.forward_flops for group in model.groups]
    if not any(flops):
        flops = [float(group.trained + group.frozen) for group in model.groups]
    total = sum(flops) or 1.0
    if model.forward_s is not None:
        return [model.forward_s * one / total for one in flops]
    if model.samples is None:
        return [0.0] * len(flops)
    rate = machine.matrix.get(model.dtype) or max(machine.matrix.values())
    return [group.forward_flops * model.samples / (rate * machine.achieved) for group in model.groups]


def wire_of(wires: Sequence[Wire], world_size: int) -> Wire | None:
    """The slowest choice that collectives of this many ranks go through."""
    if world_size == 1 or not wires:
        return None
    needed = []
    for wire in sorted(wires, key=lambda wire: wire.ranks):
        needed.append(wire)
        if wire.ranks >= world_size:
            break
    return min(needed, key=lambda wire: wire.bandwidth)


def _wire_seconds(request: PlanRequest, gathered: float, gradients: float, wire: Wire | None) -> tuple[float, float]:
    """Seconds of one group's gather and reduce. A reduce to everywhere is a reduce and a gather."""
    size = request.world_size
    if wire is None or size == 1:
        return 0.0, 0.0
    part, bandwidth = (size - 1) / size, max(wire.bandwidth, MIN_WIRE_BANDWIDTH)
    gather_s = part * gathered / bandwidth + wire.latency
    reduce_s = part * gradients / bandwidth + wire.latency
    if request.stage is Stage.DATA_PARALLEL:
        reduce_s *= 2
    return gather_s, reduce_s


def merged(found: Sequence[GroupCost], most: int) -> list[GroupCost]:
    """Neighbours joined until there are about `most` of them, of about the same size. Those whose parameters stay in
    different places are not."""
    if len(found) <= most:
        return list(found)
    weights = [cost.updated + cost.parameters + 1.0 for cost in found]
    target, filled = sum(weights) / most, 0.0
    joined: list[GroupCost] = []
    current: list[GroupCost] = []
    for cost, weight in zip(found, weights, strict=True):
        is_full = filled + weight / 2 > target * (len(joined) + 1)
        if current and (is_full or current[-1].rests is not cost.rests):
            joined.append(_join(current))
            current = []
        current.append(cost)
        filled += weight
    joined.append(_join(current))
    return joined


def _join(some: Sequence[GroupCost]) -> GroupCost:
    return GroupCost(
        name=some[0].name,
        updated=sum(cost.updated for cost in some),
        parameters=sum(cost.parameters for cost in some),
        gradients=sum(cost.gradients for cost in some),
        pinned_gradients=sum(cost.pinned_gradients for cost in some),
        gathered=max(cost.gathered for cost in some),
        forward_s=sum(cost.forward_s for cost in some),
        backward_s=sum(cost.backward_s for cost in some),
        compute_s=sum(cost.compute_s for cost in some),
        wire_s=sum(cost.wire_s for cost in some),
        gradient_bytes=some[0].gradient_bytes,
        members=tuple(index for cost in some for index in cost.members),
        rests=some[0].rests,
        activations=_join_activations([cost.activations for cost in some if cost.activations is not None]),
    )


def _join_activations(some: Sequence[Activations]) -> Activations | None:
    """Groups run one after the other: what is left of them adds up, what one needs while it runs does not."""
    if not some:
        return None
    return Activations(
        kept=sum(one.kept for one in some),
        boundary=sum(one.boundary for one in some),
        peak=max(one.peak for one in some),
        inside=max(one.inside for one in some),
        largest=max(one.largest for one in some),
        longer_s=sum(one.longer_s for one in some),
        again_s=sum(one.again_s for one in some),
        staying=sum(one.staying for one in some),
    )
