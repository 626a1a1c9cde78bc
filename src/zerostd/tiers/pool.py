"""A pool of blocks in host memory or on disk, for bytes that come and go in every pass."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zerostd.errors import PrepareError, StorageError
from zerostd.policy import Kind, Tier
from zerostd.tiers.allocator import TierAllocator, TierTensor
from zerostd.tiers.debug import poison
from zerostd.tiers.extents import Extent
from zerostd.tiers.host import check_host, padded

WASTE = 1.25  # slabs, over the most that was taken at once


@dataclass(eq=False)
class _Slab:
    memory: torch.Tensor | Extent
    num_bytes: int
    free: list[tuple[int, int]] = field(default_factory=list)  # from, to; in order, never touching

    def take(self, size: int) -> int | None:
        for index, (start, stop) in enumerate(self.free):
            if stop - start >= size:
                self.free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def give(self, start: int, stop: int) -> None:
        """Put a stretch back, and join it with its neighbours."""
        joined: list[tuple[int, int]] = []
        for low, high in sorted([*self.free, (start, stop)]):
            if joined and joined[-1][1] == low:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        self.free = joined


class Pool:
    """Blocks of host memory or of the disk, taken and given back in any order, and kept for the next time.

    Activations come and go in every pass, in sizes that nobody knows before the first one and that may differ from pass
    to pass. Blocks are cut from slabs; the slabs stay, so that after the first passes nothing is allocated. A new slab
    is as long as the block that did not fit into the others. When no block is taken and the slabs have become much
    longer than was ever needed at once, one slab of that length takes their place: a long run does not fragment.

    A block is a tier tensor of bytes. It goes back with the last reference to that, on whichever thread. `limit` is the
    most bytes that all slabs together may take.
    """

    def __init__(self, allocator: TierAllocator, tier: Tier, kind: Kind, limit: int | None = None) -> None:
        self.tier = tier
        self._allocator = allocator
        self._kind = kind
        self._limit = limit
        self._slabs: list[_Slab] = []
        self._used = 0
        self._most = 0  # ever used at once, or asked for by `grow_to`
        self._returned: deque[tuple[_Slab, int, int]] = deque()  # no lock: the collector may run where one is held
        self._grown: deque[_Slab] = deque()  # by other threads

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.num_bytes for slab in self._slabs)

    @property
    def used(self) -> int:
        """Bytes of the blocks that are taken."""
        self._collect()
        return self._used

    def grow_to(self, num_bytes: int) -> None:
        """Allocate what slabs are short of `num_bytes`, in any thread; blocks are cut from it from the next `take` on.
        If there is no memory for that, the `take` that needs it says so."""
        missing = padded(num_bytes) - self.num_bytes - sum(slab.num_bytes for slab in tuple(self._grown))
        if missing > 0:
            with contextlib.suppress(PrepareError, StorageError):
                self._grown.append(self._slab(missing))

    def take(self, sizes: Sequence[int]) -> list[TierTensor]:
        """Return a block for each of `sizes` bytes; raise PrepareError if there is no memory for them."""
        self._collect()
        if self.num_bytes > WASTE * max(self._most, sum(map(padded, sizes))) and self.give_back():
            self._grow(self._most)
        blocks = [self._find(size) for size in sizes]
        missing = sum(padded(size) for size, block in zip(sizes, blocks, strict=True) if block is None)
        if missing:
            self._grow(missing)
            blocks = [block or self._find(size) for size, block in zip(sizes, blocks, strict=True)]
        self._most = max(self._most, self._used)
        return [block for block in blocks if block is not None]

    def give_back(self) -> bool:
        """Give all memory back, unless a block is in use."""
        self._collect()
        if self._used == 0:
            for slab in self._slabs:
                self._allocator.free_bytes(slab.memory)
            self._slabs.clear()
        return self._used == 0

    def _find(self, size: int) -> TierTensor | None:
        wanted = padded(size)
        for slab in self._slabs:
            start = slab.take(wanted)
            if start is not None:
                self._used += wanted
                block = TierTensor.cut(slab.memory, start, size, torch.uint8, self._allocator.disk)
                finalizer = weakref.finalize(block, self._returned.append, (slab, start, start + wanted))
                finalizer.atexit = False
                return block
        return None

    def _grow(self, num_bytes: int) -> None:
        self._slabs.append(self._slab(num_bytes))

    def _slab(self, num_bytes: int) -> _Slab:
        if self.tier is Tier.HOST:
            left = None if self._limit is None else max(0, self._limit - self.num_bytes)
            check_host(num_bytes, f"more {self._kind.value} ({self.num_bytes} bytes are there)", left)
        with self._allocator.ledger.leaks.ignored():  # kept for the next pass
            memory = self._allocator.allocate_bytes(self.tier, self._kind, num_bytes)
        return _Slab(memory, num_bytes, [(0, num_bytes)])

    def _collect(self) -> None:
        """Take in the blocks that were given back, and slabs of other threads."""
        while self._grown:
            self._slabs.append(self._grown.popleft())
            self._most = max(self._most, self.num_bytes)
        while self._returned:
            slab, start, stop = self._returned.popleft()
            slab.give(start, stop)
            if isinstance(slab.memory, torch.Tensor) and self._allocator.device.type == "cpu":
                poison(slab.memory[start:stop])
            self._used -= stop - start
