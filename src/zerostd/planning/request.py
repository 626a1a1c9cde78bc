"""What is to be planned: a model, a machine, how they are used, and what a rank may use of each tier.

In: profiles and a budget. Out: a `PlanRequest`, which the rest of the room reads and never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zerostd.errors import PrepareError
from zerostd.planning.machine import DiskRates, MachineProfile
from zerostd.planning.model import WAYS, ModelProfile
from zerostd.policy import Budget, Kind, Stage, Tier, parse_bytes, shards

MARGIN = 0.1  # of what is free: the part that no plan uses
FOR_ACTIVATIONS = 0.4  # of the device, if the batch is not known and there is no budget
FOR_LIBRARIES = 128 << 20  # bytes of an accelerator that matrix products take to work in: 110 to 125 MiB were seen
WORTH_SPECULATING = 0.03  # of a step, for twice the host memory
NUM_BUSY_THREADS = 2  # cores left to the loop and the autograd engine while the CPU updates beside them


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned, for one rank."""

    model: ModelProfile
    machine: MachineProfile
    limits: Mapping[Tier, int]  # bytes this rank may use of each tier; a tier that is left out must not be used
    stage: Stage = Stage.PARAMETERS
    world_size: int = 1
    accumulate: int = 1
    waits_for_norm: bool = False  # clipping, or a loss scale: no update before the last gradient
    speculates: bool = False  # keeps a second copy of states on the host, so that it need not wait
    num_threads: int = 1  # for updates on the CPU
    # Bytes of working memory, whatever is placed where, and of activations, where there is no choice about them.
    fixed: Mapping[Tier, int] = field(default_factory=dict)
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
        """Whether the plan decides what is done with activations; their bytes are not in `fixed` then."""
        return bool(self.activations) and self.model.knows_activations

    @property
    def knows_time(self) -> bool:
        """Whether the seconds of a pass are known."""
        return self.model.samples is not None or self.model.forward_s is not None

    @property
    def ranks_beside(self) -> int:
        """Ranks that share one node's memory, cores and disk."""
        return max(1, min(self.world_size, self.machine.ranks_per_node))

    @property
    def has_one_memory(self) -> bool:
        """Whether what passes through the host is the device's: it is the CPU, and the host has no limit."""
        return self.machine.link is None and Tier.HOST not in self.limits

    @property
    def memory_rate(self) -> float:
        """Bytes/s of host memory for one rank."""
        return self.machine.processor.memory / self.ranks_beside

    @property
    def disk(self) -> DiskRates | None:
        """What one rank gets of the disk."""
        disk = self.machine.disk
        ranks = self.ranks_beside
        if disk is None or ranks == 1:
            return disk
        return DiskRates(disk.path, disk.read / ranks, disk.write / ranks, disk.both / ranks)

    @property
    def is_early(self) -> bool:
        """Whether updates off the device begin inside backward."""
        gathers_in_step = self.world_size > 1 and self.stage in (Stage.OPTIMIZER_STATES, Stage.GRADIENTS)
        return (not self.waits_for_norm or self.speculates) and not gathers_in_step

    def may_place(self, kind: Kind) -> bool:
        """Return whether a kind may be kept off the device: what is whole on every rank may not."""
        if kind not in self.can_place:
            return False
        if kind is Kind.PARAMETERS and (self.speculates or self.rests is not None):
            return False
        return self.world_size == 1 or kind is Kind.OPTIMIZER_STATES or shards(self.stage, kind)

    def part(self, kind: Kind) -> float:
        """Return the part of a kind that one rank holds."""
        return 1.0 / self.world_size if self.world_size > 1 and shards(self.stage, kind) else 1.0


def threads_of(machine: MachineProfile, local_size: int) -> int:
    """Return the threads that one of the ranks of a node has for updates on the CPU."""
    cores = max(1, machine.processor.num_cores // local_size)
    return cores if machine.link is None else max(1, cores - NUM_BUSY_THREADS)


def stages_of(stage: Stage | None, world_size: int) -> list[Stage]:
    """Return the user's stage, or those worth trying: sharded gradients send no more than data parallel does, and
    sharded parameters are gathered once more."""
    if stage is not None:
        return [stage]
    return [Stage.PARAMETERS] if world_size == 1 else [Stage.GRADIENTS, Stage.PARAMETERS]


def limits_for(
    budget: Budget,
    free: Mapping[str, int],
    local: int,
    *,
    is_host: bool,
    has_disk: bool,
    held: int = 0,
    knows_activations: bool = True,
) -> dict[Tier, int]:
    """Return the bytes by tier that one of `local` ranks of a node may use: its part of the budget, or of what is free
    less a margin. Host and disk are left out if nothing is known of them.

    Where the device is the CPU (`is_host`) ranks share its memory too; an accelerator leaves some to libraries. `held`
    bytes of the device are the model's own already. Unless the plan `knows_activations`, some is left to them.
    """
    limits: dict[Tier, int] = {}
    usable = 1.0 - MARGIN
    if budget.device is not None:
        limits[Tier.DEVICE] = max(0, parse_bytes(budget.device) - (0 if is_host else FOR_LIBRARIES))
    elif "device" not in free:
        raise PrepareError("machine profile: free.device is missing; complete it, or give a budget for the device")
    else:
        part = usable if knows_activations else usable * (1.0 - FOR_ACTIVATIONS)
        limits[Tier.DEVICE] = int((free["device"] // (local if is_host else 1) + held) * part)
    if budget.host is not None:
        limits[Tier.HOST] = parse_bytes(budget.host) // local
    elif "host" in free:
        taken = limits[Tier.DEVICE] - held if is_host else 0
        limits[Tier.HOST] = max(0, int(free["host"] * usable) // local - taken)
    if has_disk and (budget.disk is not None or "disk" in free):
        on_disk = parse_bytes(budget.disk) if budget.disk is not None else int(free["disk"] * usable)
        limits[Tier.DISK] = on_disk // local
    return limits
