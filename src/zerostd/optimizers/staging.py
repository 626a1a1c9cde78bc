"""Slots: memory that the states of a tile pass through on their way to an update and back.

The streamed route has slots on the device, states on disk have slots on the host. Both know a tile by its task and a
slice of the task's span.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from zerostd.kernels import Moment, TileMoves, column_bytes
from zerostd.optimizers.spans import Tensors, UpdateTask
from zerostd.parameters.state_shard import HIGH, StateShard, kept_as
from zerostd.policy import Tier
from zerostd.sharding import Portion
from zerostd.sharding.layout import UNIT
from zerostd.tiers import Transfer
from zerostd.tiers.debug import poison
from zerostd.tiers.transfer import StreamEvent

FEW = 4  # tiles that a shard is cut into if one tile could hold it
LEAST = 1 << 16
Column = torch.dtype | Moment  # how a master or a state is kept


@dataclass(eq=False)
class StagingSlot:
    """Memory for one tile of states on its way to an update and back, and the transfers that fill and empty it."""

    memory: Tensors  # bytes, by name
    reads: list[Transfer] = field(default_factory=list)
    writes: list[Transfer] = field(default_factory=list)
    task: UpdateTask | None = None  # whose tile is in it: what it reads and writes must stay as long
    block: slice = field(default_factory=lambda: slice(0, 0))  # from disk: what it holds of the task's shard
    # Where native code queues tiles: the last one that it queued is up, updated, home
    moments: list[StreamEvent] = field(default_factory=list)

    def wait_writes(self) -> None:
        """Return when nothing is on its way out."""
        for write in self.writes:
            write.synchronize()
        for memory in self.memory.values() if self.writes else ():
            if memory.device.type == "cpu":  # on a device it is poisoned in the stream
                poison(memory)
        self.writes.clear()

    def views(self, columns: Mapping[str, Column], numel: int) -> Tensors:
        """Return the memory as tensors of this many numbers, coded or not."""
        return {name: self.view(name, column, numel) for name, column in columns.items()}

    def view(self, name: str, column: Column, numel: int) -> torch.Tensor:
        memory = self.memory[name][: column_bytes(column, numel)]
        return memory.view(column.dtype if isinstance(column, Moment) else column)


def tile_numel(most: int, stretches: Iterable[Portion | StateShard], unit: int = UNIT) -> int:
    """Return the elements of a tile: `most`, or fewer where that would be one tile for the longest stretch, so that
    buffers stay small beside what they serve. 0 if there is none."""
    longest = max((stretch.numel for stretch in stretches), default=0)
    if longest >= most:
        return most
    shorter = min(longest, max(LEAST, -(-longest // FEW)))
    return min(most, -(-shorter // unit) * unit)


def widest_dtypes(many: Iterable[Mapping[str, Column]]) -> dict[str, Column]:
    """Return the widest dtype of each name; what is coded is so everywhere."""
    dtypes: dict[str, Column] = {}
    for columns in many:
        for name, dtype in columns.items():
            known = dtypes.get(name, dtype)
            if not isinstance(known, Moment) and not isinstance(dtype, Moment):
                dtype = torch.promote_types(known, dtype)
            dtypes[name] = dtype
    return dtypes


def staged_dtypes(shard: StateShard, device: torch.device) -> dict[str, Column]:
    """Return the dtypes of what passes through a slot of the device: all but upper halves that are there."""
    return {
        name: kept_as(tensor)
        for name, tensor in shard.tensors.items()
        if name != HIGH or not (device.type == "cpu" or tensor.tier is Tier.DEVICE)
    }


@dataclass(frozen=True)
class TileUpdate:
    """The update of a tile, or of several one after the other: what it reads and writes, and the copies around it."""

    tensors: Tensors  # on the device: master and states
    incoming: torch.Tensor  # the gradient
    rounded: torch.Tensor | None  # takes new parameters
    is_shown: bool  # whether new parameters are on the device
    moves: TileMoves
    num_bytes: int


def copy_pairs(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy sources to targets in the current stream."""
    for source, target in pairs:
        target.copy_(source, non_blocking=True)
