"""A pool: rooms of host memory or of a file, taken and given back in any order, and kept for the next time.

Activations come and go in every pass, in sizes that nobody knows before the first one and that may differ from pass to
pass. Rooms are cut from slabs; the slabs stay, so that after the first passes nothing is allocated. A slab is as long
as what did not fit into those there were. When nothing is taken and the slabs have become much longer than was ever
needed at once, for sizes change, one slab of that length takes their place: a long run does not fragment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zerostd.policy import Kind, Tier
from zerostd.tiers.debug import DEBUG
from zerostd.tiers.disk import Extent
from zerostd.tiers.limits import check_host
from zerostd.tiers.tier_tensor import TierAllocator, TierTensor, padded

__all__ = ["Pool", "PoolBlock"]

WASTE = 1.25  # slabs, over the most that was taken at once


@dataclass(eq=False)
class _Slab:
    memory: torch.Tensor | Extent
    num_bytes: int
    free: list[tuple[int, int]] = field(default_factory=list)  # from, to; in order, never touching

    def take(self, size: int) -> int | None:
        """The start of the first free stretch that is long enough."""
        for index, (start, stop) in enumerate(self.free):
            if stop - start >= size:
                self.free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def give(self, start: int, stop: int) -> None:
        """Put a stretch back, and join it with its neighbours."""
        self.free = sorted([*self.free, (start, stop)])
        joined: list[tuple[int, int]] = []
        for low, high in self.free:
            if joined and joined[-1][1] == low:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        self.free = joined


_Place = tuple[_Slab, int, int]  # from, to


class PoolBlock:
    """Bytes of a pool. They go back when the last reference to the room does, on whichever thread."""

    def __init__(self, column: TierTensor, place: _Place, returned: deque[_Place]) -> None:
        self.column = column
        self._place = place
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._place)  # a lock could be held by this very thread: the collector runs anywhere


class Pool:
    """Rooms in one tier, host or disk. `limit`: the most bytes that all slabs together may take."""

    def __init__(self, stores: TierAllocator, tier: Tier, kind: Kind, limit: int | None = None) -> None:
        self.tier = tier
        self._stores = stores
        self._kind = kind
        self._limit = limit
        self._slabs: list[_Slab] = []
        self._used = 0
        self._most = 0  # ever used at once
        self._returned: deque[_Place] = deque()

    @property
    def num_bytes(self) -> int:
        """Of all slabs."""
        return sum(slab.num_bytes for slab in self._slabs)

    @property
    def used(self) -> int:
        """Bytes of rooms that are taken."""
        self._collect()
        return self._used

    def take(self, sizes: Sequence[int]) -> list[PoolBlock]:
        """A room for each of `sizes` bytes; PrepareError if there is no memory for them."""
        self._collect()
        if self._used == 0 and self.num_bytes > WASTE * max(self._most, sum(map(padded, sizes))):
            self._tidy()
        found = [self._find(size) for size in sizes]
        missing = sum(padded(size) for size, room in zip(sizes, found, strict=True) if room is None)
        if missing:
            self._grow(missing)
            found = [room or self._find(size) for size, room in zip(sizes, found, strict=True)]
        self._most = max(self._most, self._used)
        return [room for room in found if room is not None]

    def _find(self, size: int) -> PoolBlock | None:
        wanted = padded(size)
        for slab in self._slabs:
            start = slab.take(wanted)
            if start is not None:
                self._used += wanted
                column = self._column(slab, start, size)
                return PoolBlock(column, (slab, start, start + wanted), self._returned)
        return None

    def _column(self, slab: _Slab, start: int, size: int) -> TierTensor:
        if isinstance(slab.memory, Extent):
            return TierTensor(size, torch.uint8, self.tier, None, self._stores.disk, slab.memory, start)
        return TierTensor(size, torch.uint8, self.tier, slab.memory[start : start + size])

    def _grow(self, num_bytes: int) -> None:
        with self._stores.ledger.leaks.ignored():
            self._slabs.append(_Slab(self._allocate(num_bytes), num_bytes, [(0, num_bytes)]))

    def _allocate(self, num_bytes: int) -> torch.Tensor | Extent:
        if self.tier is Tier.HOST:
            left = None if self._limit is None else max(0, self._limit - self.num_bytes)
            check_host(num_bytes, f"more {self._kind.value} ({self.num_bytes} bytes are there)", left)
            return self._stores.host.allocate(num_bytes, self._kind)
        assert self._stores.disk is not None
        return self._stores.disk.allocate(num_bytes, self._kind)

    def _tidy(self) -> None:
        """One slab instead of many, as long as ever was needed."""
        for slab in self._slabs:
            if isinstance(slab.memory, Extent):
                assert self._stores.disk is not None
                self._stores.disk.free(slab.memory)
            else:
                self._stores.host.free(slab.memory)
        self._slabs.clear()
        self._grow(self._most)

    def _collect(self) -> None:
        """Take in what was given back."""
        while self._returned:
            slab, start, stop = self._returned.popleft()
            slab.give(start, stop)
            if isinstance(slab.memory, torch.Tensor) and self._stores.device.type == "cpu":
                DEBUG.poison(slab.memory[start:stop])
            self._used -= stop - start
