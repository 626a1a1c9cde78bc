"""Shared tensors: parameters with the same bytes in one tier, of one or several models, are kept once.

Each owner has a separate tensor over the same memory. The first write through that tensor makes a copy, and the others
keep their values. `parameters` makes shared tensors of frozen parameters; what trains is never shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from zerostd.errors import PrepareError
from zerostd.kernels import crc32
from zerostd.policy import Kind
from zerostd.tiers.allocator import TierAllocator, TierTensor
from zerostd.tiers.extents import Extent
from zerostd.tiers.holders import Holders

TILE_BYTES = 4 << 20  # that are compared or copied at once


@dataclass(eq=False)
class SharedTensor(TierTensor):
    """The parameters of one owner, which are all of its arena."""

    allocator: TierAllocator = field(kw_only=True, repr=False)
    owner: str = field(kw_only=True)

    @classmethod
    def of(cls, values: TierTensor, allocator: TierAllocator, owner: str) -> SharedTensor:
        """Return a tensor with the same memory, which can be shared."""
        if isinstance(values, cls):
            return values
        place = (values.numel, values.dtype, values.tier, values.tensor, values.disk, values.extent)
        return cls(*place, allocator=allocator, owner=owner)

    @property
    def memory(self) -> torch.Tensor | Extent:
        """The arena."""
        memory = self.allocator.arena_of(self.owner, self.tier, Kind.PARAMETERS)
        assert memory is not None
        return memory

    @property
    def num_bytes(self) -> int:
        """The bytes that the arena takes in its tier."""
        memory = self.memory
        return memory.held_bytes if isinstance(memory, Extent) else memory.nbytes

    @property
    def holders(self) -> Holders:
        return self.allocator.holders_of(self.memory)

    def shared_with(self, values: TierTensor, allocator: TierAllocator, owner: str) -> SharedTensor:
        """Return a tensor over this memory for an owner with the same bytes. The owner's own memory is freed, and
        nobody may read `values` any more."""
        memory = self.memory
        allocator.join(memory, self.allocator)
        give_back = allocator.exchange(owner, Kind.PARAMETERS, {self.tier: memory})
        give_back()
        place = (self.numel, self.dtype, self.tier, self.tensor, values.disk, self.extent)
        return SharedTensor(*place, allocator=allocator, owner=owner)

    def write(self, part: slice, values: torch.Tensor) -> None:
        """Write numbers to a part, in a copy if others share the memory. Writing the values that are already there
        needs no copy."""
        if self.holders.num > 1 and _have_equal_bytes(self.read(part), values.to(self.dtype)):
            return
        self.keep_own()
        super().write(part, values)

    def keep_own(self) -> None:
        """Copy the numbers to separate memory, unless nobody shares the memory. Raises PrepareError if there is no room
        for them; nothing was changed."""
        if self.holders.num == 1:
            return
        memory = self.memory
        self.holders.pass_on(self.allocator.ledger)  # a limit counts the copy instead
        num_bytes = memory.num_bytes if isinstance(memory, Extent) else memory.nbytes
        item_bytes = memory.item_bytes if isinstance(memory, Extent) else 0
        try:
            own = self.allocator.allocate_bytes(
                self.tier, Kind.PARAMETERS, num_bytes, self.owner, item_bytes=item_bytes
            )
        except PrepareError as error:
            raise PrepareError(
                f"parameters of the group of {self.owner!r} are written to, but share memory with equal ones, and "
                f"there is no room for a copy: {error}"
            ) from error
        copy = TierTensor.cut(own, 0, self.numel, self.dtype, self.disk)
        for tile in tiles_of(self):
            copy.write(tile, self.read(tile))
        give_back = self.allocator.exchange(self.owner, Kind.PARAMETERS, {self.tier: own})
        self.tensor = copy.tensor
        self.extent = copy.extent
        give_back()


def shared_bytes(tensors: Iterable[TierTensor]) -> tuple[int, int]:
    """Return the bytes of those tensors of one model that share memory, and how many of them its ledger counts."""
    shared = [tensor for tensor in tensors if isinstance(tensor, SharedTensor) and tensor.holders.num > 1]
    counted = {
        id(tensor.memory): tensor.num_bytes for tensor in shared if tensor.holders.first is tensor.allocator.ledger
    }
    return sum(tensor.num_bytes for tensor in shared), sum(counted.values())


def tiles_of(values: TierTensor) -> Iterator[slice]:
    """Yield the parts of a tensor that are read at once."""
    step = TILE_BYTES // values.dtype.itemsize
    for start in range(0, values.numel, step):
        yield slice(start, min(values.numel, start + step))


def checksum(values: TierTensor) -> int:
    """Return a checksum of the bytes of a tensor that is all of its arena. For a tensor on disk it is the checksum of
    its pages' checksums, so the pages need not be read. Checksums are comparable only inside one tier."""
    if values.extent is not None:
        return values.extent.checksum
    assert values.tensor is not None
    return crc32(values.tensor.view(torch.uint8))


def are_equal(values: TierTensor, other: TierTensor) -> bool:
    """Return whether tensors of the same length and dtype have the same bytes."""
    return all(_have_equal_bytes(values.read(tile), other.read(tile)) for tile in tiles_of(values))


def _have_equal_bytes(values: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare tensors of one dtype byte by byte, wherever they are: eight bytes at a time where the length allows, for
    the speed."""
    here, there = (tensor.detach().to("cpu").reshape(-1).contiguous().view(torch.uint8) for tensor in (values, other))
    if len(here) % 8 or here.storage_offset() % 8 or there.storage_offset() % 8:
        return torch.equal(here, there)
    return torch.equal(here.view(torch.int64), there.view(torch.int64))
