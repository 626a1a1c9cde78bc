"""A column: numbers in a row that rest in one tier.

In memory (device or host) a column is a tensor, and whoever works on it works on that. On disk it is an interval of a
file: it is read and written in parts, through memory of the caller's or, outside the step, through memory of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerostd.monitoring import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers.disk import Disk, Extent
from zerostd.tiers.host import Host
from zerostd.tiers.transfer import Transfer

__all__ = ["PAGE", "TierAllocator", "TierTensor", "aligned", "padded"]

PAGE = 4096


@dataclass(eq=False)
class TierTensor:
    """`numel` numbers of one dtype. `tensor` is None on disk."""

    numel: int
    dtype: torch.dtype
    tier: Tier
    tensor: torch.Tensor | None
    disk: Disk | None = None
    extent: Extent | None = None
    offset: int = 0  # bytes, in the extent

    def read(self, part: slice, memory: torch.Tensor | None = None) -> torch.Tensor:
        """The numbers of a part: a view in memory, a copy from disk, in `memory` (which starts on a page and has one
        to spare) if that is given. Not for the step: it waits."""
        if self.tensor is not None:
            return self.tensor[part]
        low = part.start * self.dtype.itemsize // PAGE * PAGE
        size = part.stop * self.dtype.itemsize - low
        buffer = aligned(size) if memory is None else memory[:size]
        self.start_read(low // self.dtype.itemsize, buffer).wait()
        skip = part.start * self.dtype.itemsize - low
        return buffer[skip:].view(self.dtype)

    def write(self, part: slice, values: torch.Tensor) -> None:
        """Put numbers into a part. Not for the step: it waits."""
        if self.tensor is not None:
            self.tensor[part].copy_(values)
            return
        if part.start == part.stop:
            return
        per_page = PAGE // self.dtype.itemsize
        low = part.start // per_page * per_page
        high = min(self.numel, -(-part.stop // per_page) * per_page)
        buffer = aligned((high - low) * self.dtype.itemsize)
        shared = {low} if low < part.start else set()  # pages that hold more than the part
        shared |= {(high - 1) // per_page * per_page} if part.stop < high else set()
        for page in shared:
            begin = (page - low) * self.dtype.itemsize
            self.start_read(page, buffer[begin : begin + PAGE]).wait()
        buffer.view(self.dtype)[part.start - low : part.stop - low].copy_(values)
        self.start_write(low, buffer).wait()

    def start_read(self, start: int, target: torch.Tensor) -> Transfer:
        """From disk, from element `start` (on a page), into memory that starts on a page."""
        assert self.disk is not None and self.extent is not None
        return self.disk.read(self.extent, self.offset + start * self.dtype.itemsize, target)

    def start_write(self, start: int, source: torch.Tensor) -> Transfer:
        """To disk; the counterpart of `start_read`."""
        assert self.disk is not None and self.extent is not None
        return self.disk.write(self.extent, self.offset + start * self.dtype.itemsize, source)


@dataclass(eq=False)
class _Arena:
    """Memory or a file, and how much of it columns have."""

    memory: torch.Tensor | Extent
    used: int = 0


class TierAllocator:
    """The tiers of one prepared model: makes columns in them, from arenas of the exact size. Each owner (a name) has
    arenas of its own, so that what it has can be given back when it moves."""

    disk: Disk | None

    def __init__(self, device: torch.device, host: Host, disk: Disk | None, ledger: Ledger) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        self.ledger = ledger
        self._arenas: dict[tuple[str, Tier, Kind], _Arena] = {}
        self._on_device: dict[tuple[str, Kind], list[int]] = {}
        self.stop_users: list[Callable[[], None]] = []  # threads that must have stopped before anything is given back

    def reserve(self, owner: str, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """Allocate the arena that an owner's columns of one kind will be cut from."""
        if num_bytes == 0 or tier is Tier.DEVICE:
            return
        if tier is Tier.HOST:
            self._arenas[owner, tier, kind] = _Arena(self.host.allocate(num_bytes, kind))
        else:
            assert self.disk is not None
            self._arenas[owner, tier, kind] = _Arena(self.disk.allocate(num_bytes, kind))

    def column(self, owner: str, tier: Tier, kind: Kind, numel: int, dtype: torch.dtype) -> TierTensor:
        """Numbers in a tier, zero at first. On host and disk they come from the arena reserved for owner and kind."""
        if tier is Tier.DEVICE:
            tensor = torch.zeros(numel, dtype=dtype, device=self.device)
            self.ledger.enter(kind, tensor.nbytes)
            self._on_device.setdefault((owner, kind), []).append(tensor.nbytes)
            return TierTensor(numel, dtype, tier, tensor)
        arena = self._arenas[owner, tier, kind]
        start = arena.used
        arena.used = start + padded(numel * dtype.itemsize)
        if isinstance(arena.memory, Extent):
            return TierTensor(numel, dtype, tier, None, self.disk, arena.memory, start)
        return TierTensor(numel, dtype, tier, arena.memory[start : start + numel * dtype.itemsize].view(dtype))

    def free(self, owner: str, kind: Kind) -> None:
        """Give back what an owner has of one kind; these columns must not be used any more."""
        for num_bytes in self._on_device.pop((owner, kind), ()):
            self.ledger.leave(kind, num_bytes)
        for key in [key for key in self._arenas if key[0] == owner and key[2] is kind]:
            memory = self._arenas.pop(key).memory
            if isinstance(memory, Extent):
                assert self.disk is not None
                self.disk.free(memory)
            else:
                self.host.free(memory)

    def close_aside(self) -> None:
        """The same from any thread, also from one that it waits for: the collector runs everywhere."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:
            threading.Thread(target=self.close).start()

    def close(self) -> None:
        """Give everything off the device back."""
        for stop in self.stop_users:
            stop()
        self._arenas.clear()
        self.host.free_all()
        if self.disk is not None:
            self.disk.close()


def padded(num_bytes: int) -> int:
    """Bytes a column takes in its arena: whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def aligned(num_bytes: int) -> torch.Tensor:
    """Memory that starts on a page."""
    memory = torch.empty(num_bytes + PAGE, dtype=torch.uint8)
    skip = -memory.data_ptr() % PAGE
    return memory[skip : skip + num_bytes]
