"""Tier tensors: numbers in a row that are kept in one tier, how they are allocated, and their way to the device.

On the device and the host a tier tensor is a torch tensor, which other code uses directly. On disk it is an interval of
a file, read and written in parts: through memory of the caller or, outside the step, through new memory. `preparing`
and `replanning` allocate; parameters are uploaded when a group is gathered.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from zerostd.monitoring import Ledger
from zerostd.policy import Budget, Kind, Tier, limit_of
from zerostd.tiers.debug import poison
from zerostd.tiers.disk import Disk
from zerostd.tiers.extents import Extent, Fallback
from zerostd.tiers.holders import Holders
from zerostd.tiers.host import PAGE, Host, aligned, padded
from zerostd.tiers.pacing import LinkPace
from zerostd.tiers.transfer import Done, Streams, Transfer, record_event
from zerostd.tiers.worker import Work, Worker

NUM_BUFFERS = 2  # of an uploader

Arena = tuple[str, Tier, Kind]  # of an owner


@dataclass(eq=False)
class TierTensor:
    """`numel` numbers of one dtype. `tensor` is None on disk."""

    numel: int
    dtype: torch.dtype
    tier: Tier
    tensor: torch.Tensor | None
    disk: Disk | None = None
    extent: Extent | None = None
    offset: int = 0  # bytes, in the extent: where a page begins
    lead: int = 0  # elements on disk between `offset` and the first of these numbers
    behind: int = 0  # elements on disk that are of the same whole and behind these

    @classmethod
    def cut(
        cls, memory: torch.Tensor | Extent, start: int, numel: int, dtype: torch.dtype, disk: Disk | None
    ) -> TierTensor:
        """Return the numbers from byte `start` of host memory or of an extent on `disk`."""
        if isinstance(memory, Extent):
            return cls(numel, dtype, Tier.DISK, None, disk, memory, start)
        return cls(numel, dtype, Tier.HOST, memory[start : start + numel * dtype.itemsize].view(dtype))

    def part(self, part: slice) -> TierTensor:
        """Return a part of it as a tier tensor. On disk, only `read` and `write` take one that starts inside a page."""
        numel = part.stop - part.start
        if self.tensor is not None:
            return TierTensor(numel, self.dtype, self.tier, self.tensor[part])
        lead = (self.lead + part.start) % (PAGE // self.dtype.itemsize)
        offset = self.offset + (self.lead + part.start - lead) * self.dtype.itemsize
        behind = self.behind + self.numel - part.stop
        return TierTensor(numel, self.dtype, self.tier, None, self.disk, self.extent, offset, lead, behind)

    def read(self, part: slice, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return the numbers of a part: a view, or a copy if they are on disk. Blocks the host, so it is not for the
        step. The copy is in `memory`, which must start on a page and be one page longer, or in new memory."""
        if self.tensor is not None:
            return self.tensor[part]
        skip = (self.lead + part.start) % (PAGE // self.dtype.itemsize)
        size = (part.stop - part.start + skip) * self.dtype.itemsize
        buffer = aligned(size) if memory is None else memory[:size]
        self._start(self.lead + part.start - skip, buffer, is_write=False).wait()
        return buffer.view(self.dtype)[skip:]

    def write(self, part: slice, values: torch.Tensor) -> None:
        """Write numbers to a part. Blocks the host, so it is not for the step."""
        if self.tensor is not None:
            self.tensor[part].copy_(values)
        if self.tensor is not None or part.start == part.stop:
            return
        per_page = PAGE // self.dtype.itemsize
        first = self.lead + part.start
        end = self.lead + part.stop
        low = first // per_page * per_page
        high = min(self.lead + self.numel + self.behind, -(-end // per_page) * per_page)
        buffer = aligned((high - low) * self.dtype.itemsize)
        shared = {low} if low < first else set()  # pages that hold more than the part
        shared |= {(high - 1) // per_page * per_page} if end < high else set()
        for page in shared:
            begin = (page - low) * self.dtype.itemsize
            self._start(page, buffer[begin : begin + PAGE], is_write=False).wait()
        buffer.view(self.dtype)[first - low : end - low].copy_(values)
        self._start(low, buffer, is_write=True).wait()

    def start_read(self, start: int, target: torch.Tensor) -> Transfer:
        """Start reading from disk, from element `start` (on a page), into memory that starts on a page."""
        assert not self.lead
        return self._start(start, target, is_write=False)

    def start_write(self, start: int, source: torch.Tensor) -> Transfer:
        """Start writing to disk, to element `start` (on a page), from memory that starts on a page."""
        assert not self.lead
        self.keep_own()
        return self._start(start, source, is_write=True)

    def keep_own(self) -> None:
        """Prepare for direct writes to the memory, which must not be shared then (`SharedTensor`)."""

    def _start(self, page: int, memory: torch.Tensor, *, is_write: bool) -> Transfer:
        assert self.disk is not None and self.extent is not None
        move = self.disk.write if is_write else self.disk.read
        return move(self.extent, self.offset + page * self.dtype.itemsize, memory)


class TierAllocator:
    """Allocates in the tiers of one prepared model.

    On host and disk an owner (a name) reserves an arena of the exact size for each kind, and its tensors are cut from
    it; so all its memory can be freed when it moves.
    """

    def __init__(
        self, device: torch.device, host: Host, disk: Disk | None, ledger: Ledger, share: float | None = None
    ) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        self.ledger = ledger
        self.pace = LinkPace(share)  # of background work on the disk
        self._arenas: dict[Arena, torch.Tensor | Extent] = {}
        self._used: Counter[Arena] = Counter()  # bytes of each
        self._on_device: dict[tuple[str, Kind], list[torch.Tensor]] = {}  # by owner
        self._stops: list[Callable[[], None]] = []

    def open_disk(self, budget: Budget, local_size: int) -> None:
        """Open the disk that a budget names, unless there is one. State that a failed disk can no longer hold moves to
        host memory, inside this rank's part of the budget; `local_size` ranks share the budget."""
        if self.disk is None:
            limit = limit_of(budget.host)
            fallback = Fallback(self.host, self.ledger, None if limit is None else limit // local_size)
            self.disk = Disk(
                budget.disk_path, self.ledger, limit=limit_of(budget.disk), fallback=fallback, pace=self.pace
            )

    def reserve(self, owner: str, tier: Tier, kind: Kind, num_bytes: int, *, item_bytes: int = 0) -> None:
        """Allocate the arena from which an owner's tensors of one kind are cut; the device needs no arena. With
        `item_bytes` an arena on disk packs its numbers, which have this size."""
        if num_bytes > 0 and tier is not Tier.DEVICE:
            arena = self.allocate_bytes(tier, kind, num_bytes, owner, item_bytes=item_bytes)
            self._arenas[owner, tier, kind] = arena

    def allocate(self, owner: str, tier: Tier, kind: Kind, numel: int, dtype: torch.dtype) -> TierTensor:
        """Return zeros in a tier. On host and disk they come from the arena reserved for owner and kind."""
        if tier is Tier.DEVICE:
            tensor = torch.zeros(numel, dtype=dtype, device=self.device)
            self.ledger.enter(kind, tensor.nbytes)
            self._on_device.setdefault((owner, kind), []).append(tensor)
            return TierTensor(numel, dtype, tier, tensor)
        arena = (owner, tier, kind)
        start = self._used[arena]
        self._used[arena] += padded(numel * dtype.itemsize)
        return TierTensor.cut(self._arenas[arena], start, numel, dtype, self.disk)

    def free(self, owner: str, kind: Kind) -> None:
        """Free an owner's memory of one kind; its tensors must not be used any more."""
        self.exchange(owner, kind, {})()

    def exchange(self, owner: str, kind: Kind, arenas: Mapping[Tier, torch.Tensor | Extent]) -> Callable[[], None]:
        """Let an owner's tensors of one kind come from other arenas from now on. Return a function that frees the old
        arenas, to be called when they are no longer used."""
        on_device = self._on_device.pop((owner, kind), [])
        before = []
        for tier in (Tier.HOST, Tier.DISK):
            self._used.pop((owner, tier, kind), None)
            memory = self._arenas.pop((owner, tier, kind), None)
            if memory is not None:
                before.append(memory)
            if tier in arenas:
                self._arenas[owner, tier, kind] = arenas[tier]

        def give_back() -> None:
            for tensor in on_device:
                self.ledger.leave(kind, tensor.nbytes)
            for memory in before:
                self.free_bytes(memory)

        return give_back

    def arena_of(self, owner: str, tier: Tier, kind: Kind) -> torch.Tensor | Extent | None:
        """Return the arena that an owner's tensors of one kind are cut from; None if it has none in the tier."""
        return self._arenas.get((owner, tier, kind))

    def join(self, memory: torch.Tensor | Extent, other: TierAllocator) -> None:
        """Hold an arena of another allocator, or of another owner, until it is freed here too."""
        if isinstance(memory, Extent):
            assert self.disk is not None
            self.disk.join(memory)
        else:
            self.host.join(memory, other.host)

    def holders_of(self, memory: torch.Tensor | Extent) -> Holders:
        """Return who holds an arena."""
        return memory.holders if isinstance(memory, Extent) else self.host.holders_of(memory)

    def device_tensors(self) -> list[tuple[Kind, torch.Tensor]]:
        """Return what owners have on the device."""
        return [(kind, tensor) for (_, kind), tensors in self._on_device.items() for tensor in tensors]

    def allocate_bytes(
        self, tier: Tier, kind: Kind, num_bytes: int, owner: str = "", *, item_bytes: int = 0
    ) -> torch.Tensor | Extent:
        if tier is Tier.HOST:
            return self.host.allocate(num_bytes, kind)
        assert self.disk is not None
        return self.disk.allocate(num_bytes, kind, owner, item_bytes=item_bytes)

    def free_bytes(self, memory: torch.Tensor | Extent) -> None:
        if isinstance(memory, Extent):
            assert self.disk is not None
            self.disk.free(memory)
        else:
            self.host.free(memory)

    def before_close(self, stop: Callable[[], None]) -> None:
        """Call `stop` before anything is given back: it ends a thread that uses the memory."""
        if stop not in self._stops:
            self._stops.append(stop)

    def forget_stop(self, stop: Callable[[], None]) -> None:
        """Do not call it: its thread has ended."""
        self._stops.remove(stop)

    def close(self) -> None:
        """Give back everything off the device."""
        for stop in self._stops:
            stop()
        self._arenas.clear()
        if self.disk is not None:
            self.disk.close()
        self.host.free_all()

    def close_aside(self) -> None:
        """Do the same from any thread, even from one that `close` waits for: the garbage collector runs anywhere."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:
            threading.Thread(target=self.close).start()


class Uploader:
    """Uploads tier tensors to the device, from the disk through a few buffers of host memory.

    The loop runs far ahead of the device, and work that the device has not reached may still read the target. A copy
    that entered the stream at once would delay everything behind it, updates above all. So a thread queues the copy
    when the device has reached it. If nothing else uses the link, the caller queues it, and the copy waits in the
    stream. Each buffer has its own thread, so that the disk reads the next tensor while the last one leaves.
    `largest_on_disk` is the longest tensor that is kept there, in bytes.
    """

    def __init__(self, allocator: TierAllocator, streams: Streams, *, largest_on_disk: int) -> None:
        self._allocator = allocator
        self._streams = streams
        num_buffers = NUM_BUFFERS if largest_on_disk else 0
        self._workers = [
            Worker("the upload of parameters to the device", allocator.device) for _ in range(max(1, num_buffers))
        ]
        for worker in self._workers:
            allocator.before_close(worker.stop)
        self._buffers = [allocator.host.allocate(largest_on_disk, Kind.BUFFERS) for _ in range(num_buffers)]
        self._buffer_events: list[Transfer] = [Done() for _ in self._buffers]  # when each may be filled again
        self._turns = itertools.cycle(range(num_buffers))

    @staticmethod
    def buffer_bytes(largest_on_disk: int) -> int:
        """Return the bytes of host memory that an uploader takes."""
        return NUM_BUFFERS * largest_on_disk

    def upload(self, source: TierTensor, target: torch.Tensor, name: str, *, at_once: bool = False) -> Transfer:
        """Start filling `target`, which is on the device and free after the work in the current stream, with the
        parameters of the group `name`. With `at_once` nothing else uses the stream up."""
        if source.tensor is not None:
            if source.tensor.data_ptr() == target.data_ptr():
                return Done()
            if source.tier is Tier.DEVICE or target.device.type == "cpu":
                target.copy_(source.tensor)
                return Done()
        ready = record_event(target.device)
        transfer = Work()
        if at_once and source.tensor is not None:
            return self._put(source, source.tensor, target, name, ready)
        turn = next(self._turns) if source.tensor is None else None

        def copy() -> None:
            values = source.tensor
            if turn is not None:
                self._buffer_events[turn].synchronize()
                values = self._buffers[turn][: source.numel * source.dtype.itemsize]
                source.start_read(0, values).wait()
                values = values.view(source.dtype)
            assert values is not None
            if not at_once:
                ready.synchronize()
            transfer.event = self._put(source, values, target, name, ready)
            if turn is not None:
                self._buffer_events[turn] = transfer.event
                if target.device.type == "cpu":
                    poison(self._buffers[turn])

        return self._workers[turn or 0].submit(copy, ready=Done() if at_once else ready, work=transfer)

    def _put(
        self, source: TierTensor, values: torch.Tensor, target: torch.Tensor, name: str, ready: Transfer
    ) -> Transfer:
        """Put the copy of `values` into the stream, behind `ready`."""
        events = self._allocator.ledger.events
        way = (source.tier.value, Tier.DEVICE.value)
        with (
            self._streams.up.after(ready),
            events.within("transfer", "up", name, target.nbytes, way=way, device=target.device),
        ):
            target.copy_(values, non_blocking=True)
            return self._streams.up.record_event()
