"""A request for a plan: a model, a machine, the training options, the limits of each tier, and from these the cost of a
step, group by group.

In: profiles and a budget. Out: a `PlanRequest`, which the rest of the room reads and never changes. Its costs are a
`GroupCost` for each group on one rank: bytes at rest, bytes over each link, seconds of compute and of collectives. All
of them are linear in the shares that the program chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from zerostd.errors import PrepareError
from zerostd.planning.profiles import (
    RECOMPUTED,
    STATES,
    WIRES,
    DiskRates,
    GroupProfile,
    MachineProfile,
    ModelProfile,
    Wire,
)
from zerostd.policy import Kind, Stage, Tier, shards

WORTH_SPECULATING = 0.03  # of a step, for twice the host memory
# Of the launches of a forward: those of recomputing it in backward, where saved tensors pass through Python
LAUNCHED_AGAIN = 1.25
NUM_BUSY_THREADS = 2  # cores left to the loop and the autograd engine while the CPU updates beside them
MOST_GROUPS = 96  # that the program sees; neighbours of larger models are placed together
LARGEST = {"gathered", "peak", "inside", "largest"}  # costs of which neighbours together have the largest, not the sum


@dataclass(frozen=True)
class ActivationCost:
    """Activations of one group in one pass on one rank; zeros where the plan does not choose what is done with them."""

    kept: float = 0.0  # bytes that are left for backward
    boundary: float = 0.0  # bytes of them if the group is recomputed
    peak: float = 0.0  # bytes beside what is kept, while the group runs
    inside: float = 0.0  # the same if it is recomputed, which keeps all of it for a moment
    largest: float = 0.0  # bytes that are kept of one group, where several are merged
    longer_s: float = 0.0  # that backward takes longer if the group is recomputed
    again_s: float = 0.0  # of arithmetic for that
    inputs: float = 0.0  # bytes on the host if the group is recomputed
    staying: float = 0.0  # bytes that are kept beside these, whatever is done

    def left(self, way: str) -> float:
        """Return the bytes that a forward of the group leaves, in any tier."""
        return self.boundary if way in RECOMPUTED else self.kept


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
    activations: ActivationCost = field(default_factory=ActivationCost)


@dataclass(frozen=True)
class PlanRequest:
    """A model to be planned on a machine, for one rank."""

    model: ModelProfile
    machine: MachineProfile
    limits: Mapping[Tier, int]  # bytes this rank may use of each tier; a tier that is left out must not be used
    stage: Stage = Stage.PARAMETERS
    world_size: int = 1  # ranks that share the model state
    num_replicas: int = 1  # of the model state, each on as many ranks
    accumulate: int = 1
    waits_for_norm: bool = False  # clipping, or a loss scale: no update before the last gradient
    speculates: bool = False  # keeps a second copy of states on the host, so that it need not wait
    num_threads: int = 1  # for updates on the CPU
    fixed: Mapping[Tier, int] = field(default_factory=dict)  # working memory
    activations: frozenset[str] = frozenset()  # of WAYS, those there is a choice among; empty: as the model does now
    keeps_gradients: bool = True  # until the step; False: each is freed as its group is updated inside backward
    can_place: frozenset[Kind] = frozenset({Kind.OPTIMIZER_STATES, Kind.GRADIENTS, Kind.PARAMETERS})
    rests: Mapping[str, Tier] | None = None  # by group: where parameters are and stay; None: they are placed too

    def __post_init__(self) -> None:
        if self.activations and not self.ways:
            raise PrepareError(
                "activations can be kept on the host only if the device has its own memory and the host may be used: "
                "also allow keep or recompute"
            )

    @cached_property
    def costs(self) -> list[GroupCost]:
        """The cost of each group, in forward order; neighbours of a model with many groups together."""
        return merged(group_costs(self), MOST_GROUPS)

    @property
    def ways(self) -> frozenset[str]:
        has_host = self.machine.link is not None and Tier.HOST in self.limits
        return self.activations if has_host else self.activations - {"host", "recompute+host"}

    @property
    def recomputes(self) -> bool:
        """Whether groups may be recomputed."""
        return not self.ways.isdisjoint(RECOMPUTED)

    @property
    def sends_inputs(self) -> bool:
        """Whether inputs of recomputed groups go to the host: where they may, and may not stay on the device."""
        return "recompute+host" in self.ways and "recompute" not in self.ways

    @property
    def chooses(self) -> bool:
        """Whether the plan decides what is done with activations."""
        return bool(self.activations) and self.model.knows_activations

    @property
    def ranks_beside(self) -> int:
        return max(1, min(self.world_size, self.machine.ranks_per_node))

    @property
    def cpu_s(self) -> float:
        """The seconds that the CPU takes to update one parameter."""
        processor = self.machine.processor
        return processor.ns(self.num_threads) * 1e-9 * (processor.coded_factor if self.model.is_coded else 1.0)

    @property
    def launching(self) -> float:
        """The part of the CPU that computing takes: all of it if the CPU is the device, else for launches. Updates on
        the CPU take its memory bandwidth, so launches take longer beside them."""
        return 1.0 if self.machine.link is None else self.model.launches

    @property
    def resident_s(self) -> float:
        """The same for the device."""
        is_coded = self.model.is_coded and self.machine.link is None
        return self.machine.resident_ns * 1e-9 * (self.machine.processor.coded_factor if is_coded else 1.0)

    @property
    def codec(self) -> dict[str, str]:
        """The codecs of the plan."""
        names = [STATES] * self.model.is_coded
        if WIRES in self.model.codes:
            names += ["gather"] * shards(self.stage, Kind.PARAMETERS) + ["reduce"]
        return dict.fromkeys(names, "int8")

    @property
    def memory_rate(self) -> float:
        return self.machine.processor.memory / self.ranks_beside

    @property
    def disk(self) -> DiskRates | None:
        return self.machine.disk and self.machine.disk.slower(self.ranks_beside)

    @property
    def is_early(self) -> bool:
        """Whether updates off the device begin inside backward."""
        gathers_in_step = self.world_size > 1 and self.stage in (Stage.OPTIMIZER_STATES, Stage.GRADIENTS)
        return (not self.waits_for_norm or self.speculates) and not gathers_in_step

    def may_place(self, kind: Kind) -> bool:
        """Return whether a kind may be kept off the device; a kind that is whole on every rank may not."""
        if kind not in self.can_place:
            return False
        if kind is Kind.PARAMETERS and (self.speculates or self.rests is not None):
            return False
        return self.world_size == 1 or kind is Kind.OPTIMIZER_STATES or shards(self.stage, kind)

    def on_replicas(self, count: int) -> PlanRequest:
        """Return the same for `count` times as many replicas of the model state, each on a part of the ranks."""
        return replace(self, world_size=self.world_size // count, num_replicas=self.num_replicas * count)

    def wire_s(self, numel: float, width: float, *, is_coded: bool) -> float:
        """Return the seconds of a collective that gathers or reduces this many numbers of `width` bytes."""
        wire = wire_of(self.machine.wires, self.world_size)
        if wire is None:
            return 0.0
        part = (self.world_size - 1) / self.world_size
        return part * numel / wire.numbers_per_s(width, is_coded=is_coded) + wire.latency

    def across_s(self, numel: float, width: float) -> float:
        """Return the seconds that replicas take to average this many gradients of `width` bytes. Each rank averages its
        slice."""
        wire = wire_of(self.machine.wires, self.world_size * self.num_replicas)
        if wire is None or self.num_replicas == 1:
            return 0.0
        part = 2 * (self.num_replicas - 1) / self.num_replicas / self.world_size
        return part * numel / wire.numbers_per_s(width, is_coded=WIRES in self.model.codes) + wire.latency

    def part(self, kind: Kind) -> float:
        return 1.0 / self.world_size if self.world_size > 1 and shards(self.stage, kind) else 1.0


def threads_of(machine: MachineProfile, local_size: int) -> int:
    cores = max(1, machine.processor.num_cores // local_size)
    return cores if machine.link is None else max(1, cores - NUM_BUSY_THREADS)


def shared(machine: MachineProfile, local_size: int) -> MachineProfile:
    """Return a machine as one of the ranks of a node has it: where the CPU is the device, they share it."""
    if machine.link is not None:
        return machine
    matrix = {dtype: rate / local_size for dtype, rate in machine.matrix.items()}
    return replace(machine, matrix=matrix, resident_ns=machine.resident_ns * local_size)


def replicas_of(machine: MachineProfile, world_size: int) -> list[int]:
    """Return the numbers of replicas worth trying: those whose ranks share a faster wire, and then one replica, whose
    refusal is reported."""
    wire = wire_of(machine.wires, world_size)
    faster = [
        inner.ranks
        for inner in machine.wires
        if wire is not None and 1 < inner.ranks < world_size and inner.bandwidth > wire.bandwidth
    ]
    return [*(world_size // ranks for ranks in sorted(faster) if world_size % ranks == 0), 1]


def stages_of(stage: Stage | None, world_size: int) -> list[Stage]:
    """Return the user's stage, or those worth trying: 2 and 3, since stage 2 sends no more than 0 and 1."""
    if stage is not None:
        return [stage]
    return [Stage.PARAMETERS] if world_size == 1 else [Stage.GRADIENTS, Stage.PARAMETERS]


# -- costs --


def group_costs(request: PlanRequest) -> list[GroupCost]:
    groups = zip(request.model.measured_groups, forward_seconds(request.model, request.machine), strict=True)
    return [_group_cost(request, index, group, forward_s) for index, (group, forward_s) in enumerate(groups)]


def _group_cost(request: PlanRequest, index: int, group: GroupProfile, forward_s: float) -> GroupCost:
    model = request.model
    sums = request.accumulate > 1
    gradient_bytes = max(4, model.gradient_bytes) if sums else model.gradient_bytes
    reduced = group.trained * model.gradient_bytes
    updated = group.trained * request.part(Kind.OPTIMIZER_STATES)
    gradients = 0.0
    pinned = 0.0
    if request.keeps_gradients and (request.world_size == 1 or shards(request.stage, Kind.GRADIENTS)):
        gradients = updated * gradient_bytes
    elif request.keeps_gradients:
        pinned = reduced + (updated * 4 if sums else 0.0)
    gathered = (group.trained + group.frozen) * model.parameter_bytes
    numel = group.trained + group.frozen
    gather_s = request.wire_s(numel, model.parameter_bytes, is_coded="gather" in request.codec)
    reduce_s = request.wire_s(group.trained, model.gradient_bytes, is_coded="reduce" in request.codec)
    reduce_s *= 2 if request.stage is Stage.DATA_PARALLEL else 1  # to everywhere
    reduce_s += request.across_s(group.trained, model.gradient_bytes)
    wire_forward_s = gather_s if request.stage > Stage.DATA_PARALLEL else 0.0
    wire_backward_s = (gather_s if shards(request.stage, Kind.PARAMETERS) else 0.0) + reduce_s
    backward_s = forward_s * (2.0 + model.recomputed)
    if model.backward_s is not None and group.backward_part is not None:
        backward_s = model.backward_s * group.backward_part
    elif model.backward_s is not None and model.forward_s:
        backward_s = forward_s * model.backward_s / model.forward_s
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
) -> ActivationCost:
    if not request.chooses:
        return ActivationCost()
    samples = request.model.samples or 0
    kept = samples * group.kept_bytes
    peak = samples * group.peak_bytes
    if group.stays:
        return ActivationCost(peak=peak, inside=peak, staying=kept)
    boundary = samples * group.boundary_bytes
    again_s = forward_s
    if group.again_flops is not None and group.forward_flops:
        again_s = group.again_flops / group.forward_flops * forward_s
    again_s = max(again_s, LAUNCHED_AGAIN * request.model.launches * forward_s)
    inside = kept + peak if group.inside_bytes is None else samples * group.inside_bytes
    if request.sends_inputs:
        inside -= samples * group.passing_bytes  # they are counted apart
    return ActivationCost(
        kept=kept,
        boundary=0.0 if request.sends_inputs else boundary,
        peak=peak,
        inside=inside,
        largest=kept,
        longer_s=max(again_s + backward_s, wire_backward_s) - max(backward_s, wire_backward_s),
        again_s=again_s,
        inputs=boundary if request.sends_inputs else 0.0,
    )


def forward_seconds(model: ModelProfile, machine: MachineProfile) -> list[float]:
    """Return the seconds of each group in a forward, measured or estimated; zeros without samples."""
    flops = [group.forward_flops for group in model.groups]
    if not any(flops):
        flops = [float(group.trained + group.frozen) for group in model.groups]
    if model.forward_s is not None:
        parts = [group.forward_part for group in model.groups if group.forward_part is not None]
        if len(parts) == len(model.groups):
            return [model.forward_s * part for part in parts]
        total = sum(flops) or 1.0
        return [model.forward_s * count / total for count in flops]
    if model.samples is None:
        return [0.0] * len(flops)
    rate = machine.matrix.get(model.dtype) or max(machine.matrix.values())
    return [group.forward_flops * model.samples / (rate * machine.achieved) for group in model.groups]


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


def merged(costs: Sequence[GroupCost], most: int) -> list[GroupCost]:
    """Merge neighbours into about `most` of about the same size, unless their parameters stay in different places."""
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
    total: GroupCost = _added(costs)
    members = tuple(index for cost in costs for index in cost.members)
    return replace(total, members=members, activations=_added([cost.activations for cost in costs]))


def _added(costs: Sequence[Any]) -> Any:
    """Return the costs of groups that run one after the other: kept bytes add up, working memory does not."""
    numbers = [field.name for field in fields(costs[0]) if field.type == "float"]
    columns = {name: [getattr(cost, name) for cost in costs] for name in numbers}
    return replace(costs[0], **{name: max(of) if name in LARGEST else sum(of) for name, of in columns.items()})
