"""Staging slots: memory that states pass through in tiles, on the device or, from disk, on the host.

A few slots are used in turn, so that reading, updating and writing overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from zerostd.optimizers.tasks import Tensors, UpdateTask
from zerostd.parameters.flat import StateShard
from zerostd.sharding.portions import UNIT
from zerostd.tiers import TierTensor, Transfer

NUM_SLOTS = 4
FEW = 4  # tiles that a shard is cut into if one tile could hold it
LEAST = 1 << 16


@dataclass(eq=False)
class StagingSlot:
    """Memory for one tile, and what is on its way in and out."""

    memory: Tensors  # bytes, by name
    reads: list[Transfer] = field(default_factory=list)
    writes: list[Transfer] = field(default_factory=list)
    task: UpdateTask | None = None  # whose tile is in it: what it reads and writes must stay as long
    block: slice | None = None  # from disk: the elements of the task's shard that it holds

    def wait_writes(self) -> None:
        """Return when nothing is on its way out."""
        for write in self.writes:
            write.synchronize()
        self.writes.clear()

    def views(self, tensors: Mapping[str, torch.Tensor | TierTensor], numel: int) -> Tensors:
        """Return the memory as tensors of the dtypes of `tensors`."""
        return {name: self.view(name, tensor.dtype, numel) for name, tensor in tensors.items()}

    def view(self, name: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return one memory as a tensor."""
        return self.memory[name][: numel * dtype.itemsize].view(dtype)


def tile_numel(most: int, longest: int) -> int:
    """Return the elements of a tile where the longest shard has `longest`: `most`, or fewer where that would be one
    tile for all, so that buffers stay small beside what they serve."""
    if longest >= most:
        return most
    return min(most, -(-max(LEAST, -(-longest // FEW)) // UNIT) * UNIT, -(-longest // UNIT) * UNIT)


def widest_dtypes(shards: Iterable[StateShard]) -> dict[str, torch.dtype]:
    """Return the widest dtype of each tensor of the shards, by name."""
    dtypes: dict[str, torch.dtype] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            dtypes[name] = torch.promote_types(dtypes.get(name, tensor.dtype), tensor.dtype)
    return dtypes
