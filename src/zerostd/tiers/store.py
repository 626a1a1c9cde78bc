"""A store: users' own tensors in device, host and disk memory, by the code that keeps optimizer states.

Tensors have names. Rows are read and written in a thread beside the caller, in the order of their priority; what
touches the same tensor keeps its order. What is on disk is checked page by page, retried, and moved to host memory if
the disk fails, as states are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from zerostd.errors import MisuseError, PrepareError, is_whole
from zerostd.monitoring import Ledger
from zerostd.policy import Budget, Kind, Tier, limit_of
from zerostd.tiers.allocator import TierAllocator, TierTensor
from zerostd.tiers.host import Host, check_host, padded
from zerostd.tiers.pacing import LinkPace, Priority, at
from zerostd.tiers.transfer import AllOf, Done, Transfer
from zerostd.tiers.worker import Work, Worker

PRIORITIES = ("urgent", "prefetch", "background")  # the first are served first
TILE_BYTES = 16 << 20  # of one part of a transfer: between two of them another one may overtake
NUM_THREADS = 4  # for the first touch of host memory


class Reading(Transfer):
    """A read that has started; `wait` returns the rows."""

    def __init__(self, work: Work, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self) -> torch.Tensor:  # type: ignore[override]
        """Wait for the rows and return them."""
        self._work.synchronize()
        return self._tensor

    def is_done(self) -> bool:
        return self._work.is_done()


@dataclass(eq=False)
class KeptTensor:
    """A tensor in a store, with its shape, its dtype and its tier."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: TierTensor = field(repr=False)
    worker: Worker = field(repr=False)
    counts: dict[str, int] = field(repr=False)  # bytes read and written, of the whole store
    pace: LinkPace = field(repr=False)  # of background transfers
    is_there: bool = True
    _written: Transfer = field(init=False, repr=False, default_factory=Done)  # the last write
    _read: list[Transfer] = field(init=False, repr=False, default_factory=list)  # since then

    @property
    def tier(self) -> str:
        """Return the tier that keeps it: 'device', 'host' or 'disk'."""
        return self.values.tier.value

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, rows: slice = slice(None), *, out: torch.Tensor | None = None, priority: str = "urgent") -> Reading:
        """Start reading rows, a slice of the first dimension without a step, into `out` or into new host memory."""
        start, stop = self._elements(rows)
        per_row = max(1, math.prod(self.shape[1:]))
        shape = ((stop - start) // per_row, *self.shape[1:])
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        elif not isinstance(out, torch.Tensor):
            raise MisuseError(f"read of {self.name!r} into out={type(out).__name__}: it must be a tensor")
        elif tuple(out.shape) != shape or out.dtype != self.dtype or not out.is_contiguous():
            raise MisuseError(
                f"read of {self.name!r} into a tensor of shape {tuple(out.shape)} and {out.dtype}: it must be "
                f"contiguous, of shape {shape} and {self.dtype}"
            )
        flat = out.view(-1)

        def copy(low: int, high: int) -> None:
            flat[low:high].copy_(self.values.read(slice(start + low, start + high)))

        work = self._submit(copy, stop - start, priority, self._written)
        self._read = [*(read for read in self._read if not read.has_arrived()), work]
        self.counts["read"] += out.nbytes
        return Reading(work, out)

    def write(self, values: torch.Tensor, rows: slice = slice(None), *, priority: str = "prefetch") -> Transfer:
        """Start writing rows. Do not change `values` until `wait` of the returned transfer has returned."""
        start, stop = self._elements(rows)
        if not isinstance(values, torch.Tensor):
            raise MisuseError(f"write of values={type(values).__name__} to {self.name!r}: it must be a tensor")
        if values.dtype != self.dtype or values.numel() != stop - start:
            raise MisuseError(
                f"write of {values.numel()} elements of {values.dtype} to {stop - start} elements of {self.name!r}, "
                f"which has {self.dtype}: pass the same number, of that dtype"
            )
        flat = values.detach().reshape(-1)

        def copy(low: int, high: int) -> None:
            self.values.write(slice(start + low, start + high), flat[low:high])

        self._written = self._submit(copy, stop - start, priority, AllOf(self._written, *self._read))
        self._read = []
        self.counts["written"] += flat.nbytes
        return self._written

    def synchronize(self) -> None:
        """Wait for all reads and writes of the tensor."""
        for transfer in (self._written, *self._read):
            transfer.synchronize()

    def _submit(self, copy: Callable[[int, int], None], numel: int, priority: str, ready: Transfer) -> Work:
        if priority not in PRIORITIES:
            raise MisuseError(f"priority={priority!r} must be one of {PRIORITIES}")
        tile = max(1, TILE_BYTES // self.dtype.itemsize)
        place = Priority(PRIORITIES.index(priority))
        if place is Priority.BACKGROUND:
            pace = self.pace
        else:
            pace = None
            self.pace.ask()

        def part(low: int, high: int) -> None:
            with at(place):
                copy(low, high)
            if place is not Priority.BACKGROUND:
                self.pace.ask()

        parts = [partial(part, low, min(numel, low + tile)) for low in range(0, max(1, numel), tile)]
        return self.worker.submit(*parts, place=place, ready=ready, pace=pace)

    def _elements(self, rows: slice) -> tuple[int, int]:
        if not self.is_there:
            raise MisuseError(f"{self.name!r} was deleted from its store")
        if not isinstance(rows, slice) or rows.step not in (None, 1) or not self.shape:
            raise MisuseError(f"rows={rows!r} of {self.name!r} must be a slice of rows without a step: slice(0, 100)")
        try:
            start, stop, _ = rows.indices(self.shape[0])
        except TypeError as error:
            raise MisuseError(f"rows={rows!r} of {self.name!r}: {error}; use whole numbers") from error
        per_row = math.prod(self.shape[1:])
        return start * per_row, max(start, stop) * per_row


class TierStore:
    """Keeps tensors by name in device, host and disk memory, and reads and writes their rows in the background.

    with zerostd.TierStore(budget={"host": "8GiB", "disk": "100GiB", "disk_path": "/nvme"}) as store:
        replay = store.allocate("replay", (1_000_000, 84, 84), torch.uint8, tier="disk")
        replay.write(frames, slice(0, 64))
        batch = replay.read(slice(0, 32), priority="urgent").wait()

    Args:
        device: The device of the tier 'device'. None: the CPU's memory, counted as the device.
        budget: Limit of each tier, and the path of the disk. None: the free memory, and the system's directory for
            temporary files. `background` is the part of the time that background transfers may take while others are
            asked for.
    """

    def __init__(self, device: torch.device | str | None = None, budget: Budget | Any = None) -> None:
        try:
            probe = torch.zeros(1, device="cpu" if device is None else device)
            probe.item()  # of the meta device it fails
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise PrepareError(f"device={device!r} cannot keep tensors ({error}); use 'cuda' or 'cpu'") from error
        self.device = probe.device
        self.budget = Budget.parse(budget)
        self._ledger = Ledger()
        host = Host(self.device, self._ledger, NUM_THREADS)
        self._allocator = TierAllocator(self.device, host, None, self._ledger, self.budget.background)
        self._worker = Worker("the transfers of a store", self.device)
        self._allocator.before_close(self._worker.stop)
        self._tensors: dict[str, KeptTensor] = {}
        self._counts = {"read": 0, "written": 0}
        self._is_open = True

    def allocate(
        self, name: str, shape: tuple[int, ...] | list[int], dtype: torch.dtype = torch.float32, *, tier: str = "host"
    ) -> KeptTensor:
        """Allocate a tensor of zeros under a new name. Raises PrepareError if it does not fit or the name is taken."""
        if not self._is_open:
            raise MisuseError("this store is closed: make a new one")
        if not isinstance(name, str) or not name or name in self._tensors:
            raise PrepareError(
                f"name={name!r} must be a string that is not in the store yet; use another, or del store[name] first"
            )
        if not isinstance(shape, list | tuple) or not shape or not all(map(is_whole, shape)):
            raise PrepareError(f"shape={shape!r} of {name!r} must be one or more whole numbers, rows first")
        if not isinstance(dtype, torch.dtype):
            raise PrepareError(f"dtype={dtype!r} of {name!r} must be a torch.dtype, such as torch.float32")
        values = self._take(name, Tier.parse(tier), math.prod(shape), dtype)
        parts = (self._worker, self._counts, self._allocator.pace)
        self._tensors[name] = KeptTensor(name, tuple(shape), dtype, values, *parts)
        return self._tensors[name]

    def _take(self, owner: str, tier: Tier, numel: int, dtype: torch.dtype) -> TierTensor:
        size = max(1, padded(numel * dtype.itemsize))  # tensors without elements have a place too
        used = self._used(tier)
        if tier is Tier.DISK and self._allocator.disk is None:
            self._allocator.open_disk(self.budget, 1)
        limit = limit_of(getattr(self.budget, tier.value))
        if tier is Tier.HOST:
            check_host(size, f"{owner!r} in a store", None if limit is None else max(0, limit - used))
        elif limit is not None and used + size > limit:
            raise PrepareError(
                f"{owner!r} takes {size} bytes of the {tier.value}, of which {used} bytes are used and "
                f"Budget({tier.value}={getattr(self.budget, tier.value)!r}) allows no more: delete a tensor, or keep "
                "this one in another tier"
            )
        self._allocator.reserve(owner, tier, Kind.BUFFERS, size)
        return self._allocator.allocate(owner, tier, Kind.BUFFERS, numel, dtype)

    def move(self, name: str, tier: str) -> None:
        """Move a tensor with its values to another tier. Waits for its reads and writes."""
        stored = self[name]
        home = Tier.parse(tier)
        if home is stored.values.tier:
            return
        stored.synchronize()
        before = stored.values
        owner = f"{name} in {home.value}"
        values = self._take(owner, home, before.numel, before.dtype)
        tile = max(1, TILE_BYTES // before.dtype.itemsize)
        for low in range(0, before.numel, tile):
            part = slice(low, min(before.numel, low + tile))
            values.write(part, before.read(part))
        stored.values = values
        for taken in (name, *(f"{name} in {other.value}" for other in Tier if other is not home)):
            self._allocator.free(taken, Kind.BUFFERS)

    def statistics(self) -> dict[str, dict[str, int]]:
        """Return tensors, bytes and peak bytes of each tier, and the bytes read and written so far."""
        memory = self._ledger.memory()
        counts: dict[str, dict[str, int]] = {}
        for tier in Tier:
            count = sum(stored.values.tier is tier for stored in self._tensors.values())
            peak = sum(memory.peak.get(tier.value, {}).values())
            counts[tier.value] = {"tensors": count, "bytes": self._used(tier), "peak_bytes": peak}
        return {**counts, "transfers": dict(self._counts)}

    def _used(self, tier: Tier) -> int:
        return sum(self._ledger.memory().now.get(tier.value, {}).values())

    def __getitem__(self, name: str) -> KeptTensor:
        if name not in self._tensors:
            raise KeyError(f"{name!r} is not in this store; it has {', '.join(list(self._tensors)[:8]) or 'nothing'}")
        return self._tensors[name]

    def __delitem__(self, name: str) -> None:
        stored = self[name]
        stored.synchronize()
        stored.is_there = False
        del self._tensors[name]
        for taken in (name, *(f"{name} in {tier.value}" for tier in Tier)):
            self._allocator.free(taken, Kind.BUFFERS)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Finish pending transfers, then free all tensors."""
        if self._is_open:
            for name in list(self._tensors):
                del self[name]
            self._is_open = False
            self._allocator.close()

    def __enter__(self) -> TierStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
