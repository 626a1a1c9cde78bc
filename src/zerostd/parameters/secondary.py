"""Secondary shards: slices of a gathered flat that a rank keeps, so that further gathers stay inside its node.

A gather from all ranks fills the buffer, and this rank keeps a slice of it: the buffer's length divided by the ranks of
the node. Until values change, a gather takes these slices, and nothing crosses from node to node. Group says when.

    STALE --await_values--> AWAITED --keep--> CURRENT --forget--> STALE

[Note: the same on all ranks] A rank whose secondary shard is stale gathers from all ranks, which must then do the same.
So only actions that all ranks take change the state: gathers, steps, and writes to parameters. Short memory, or a model
that sleeps on one rank, does not.
"""

from __future__ import annotations

import enum

import torch

from zerostd.communication import NodeWires
from zerostd.policy import Kind
from zerostd.tiers import Transfer


class SecondaryState(enum.Enum):
    """What a secondary shard holds now."""

    STALE = "nothing that counts; memory, if values come again before the next step"
    AWAITED = "memory, and a gather is under way whose values it will keep"
    CURRENT = "the values of the parameters as they are"


class SecondaryShard:
    """This rank's secondary shard of one flat buffer."""

    def __init__(self, numel: int, dtype: torch.dtype, wires: NodeWires) -> None:
        self.values = torch.empty(numel, dtype=dtype, device=wires.world.device)  # no memory while it is given back
        self.values.untyped_storage().resize_(0)
        self._state = SecondaryState.STALE
        self._wires = wires

    @property
    def is_current(self) -> bool:
        """Whether a gather can use it."""
        return self._state is SecondaryState.CURRENT

    def await_values(self) -> None:
        """Allocate memory for the values of the gather that begins now, unless it needs none."""
        if self.is_current:
            return
        storage = self.values.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.values.nbytes)
            self._wires.ledger.enter(Kind.BUFFERS, self.values.nbytes)
        self._state = SecondaryState.AWAITED

    def keep(self, full: torch.Tensor) -> None:
        """Keep this rank's slice of a buffer that was gathered from all ranks."""
        if self._state is SecondaryState.AWAITED:
            self.values.copy_(full.view(self._wires.world.size, -1)[self._wires.world.rank])
            self._state = SecondaryState.CURRENT

    def gather(self, full: torch.Tensor) -> Transfer:
        """Start filling a buffer from the secondary shards of the node."""
        assert self.is_current
        return self._wires.gather(full, self.values)

    def forget(self) -> None:
        """Note that parameters change. The memory stays, because a gather may still read it."""
        self._state = SecondaryState.STALE

    def give_back(self) -> None:
        """Give the memory back; no gather reads it."""
        self.forget()
        storage = self.values.untyped_storage()
        self._wires.ledger.leave(Kind.BUFFERS, storage.nbytes())
        storage.resize_(0)
