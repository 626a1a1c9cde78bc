"""Copies of saved storages, off the device to host memory or disk and back.

The offloader says what leaves and what comes back; here is how. The loop runs ahead of the device, so a thread puts
copies into the streams when the device has come to them: put in at once, they would hold up what is behind. On the way
to disk and back, bytes pass through staging in host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from zerostd.policy import Kind, Tier
from zerostd.scheduling.saved_storage import SavedStorage
from zerostd.tiers.allocator import Pool, TierAllocator, TierTensor
from zerostd.tiers.transfer import AllOf, Done, Streams, Transfer, record_event
from zerostd.tiers.worker import Work, Worker

NUM_STAGED = 2  # groups that staging is in use for, at most


class ActivationCopies:
    """Pools of blocks in each tier, and the thread that copies to them. `limits`: bytes that each tier has for them."""

    def __init__(self, allocator: TierAllocator, streams: Streams, limits: Mapping[Tier, int | None]) -> None:
        self.device = allocator.device
        self._allocator = allocator
        self._streams = streams
        self._pools = {tier: Pool(allocator, tier, Kind.ACTIVATIONS, limit) for tier, limit in limits.items()}
        self._staging = Pool(allocator, Tier.HOST, Kind.BUFFERS)  # on the way to the disk and back
        self._passing: deque[tuple[Transfer, list[TierTensor]]] = deque()  # staging that is in use until then
        self._last_up: Transfer = Done()
        self._started_worker: Worker | None = None

    def pool(self, tier: Tier) -> Pool:
        """Return the pool of a tier."""
        return self._pools[tier]

    @property
    def worker(self) -> Worker:
        """The thread, which is started when it is first needed."""
        if self._started_worker is None:
            self._started_worker = Worker("the offloader of activations", self.device)
            self._allocator.before_close(self._started_worker.stop)
        return self._started_worker

    def start_out(self, name: str, tier: Tier, storages: list[SavedStorage], sources: list[torch.Tensor]) -> Transfer:
        """Start copying `sources`, the bytes to keep of each storage, to blocks of a tier."""
        blocks = self._pools[tier].take([source.nbytes for source in sources])
        for storage, block in zip(storages, blocks, strict=True):
            storage.block = block
        transfer = Work()
        events = self._allocator.ledger.events
        step = events.step
        last_up = self._last_up
        ready = record_event(self.device)
        size = sum(source.nbytes for source in sources)
        is_disk = tier is Tier.DISK
        targets = self._staging.take([source.nbytes for source in sources]) if is_disk else blocks

        def job() -> None:
            self._wait_for_staging()
            ready.synchronize()
            way = (Tier.DEVICE.value, Tier.HOST.value)
            span = events.within("transfer", "down", name, size, way=way, device=self.device, step=step)
            with self._streams.down.after(last_up), span:
                for source, target in zip(sources, targets, strict=True):
                    _memory(target).copy_(source, non_blocking=True)
                transfer.event = self._streams.down.record_event()
            if is_disk:
                transfer.event.synchronize()
                for storage, block, target in zip(storages, blocks, targets, strict=True):
                    storage.written = block.start_write(0, _memory(target))
                self._passing.append((AllOf(*(storage.written for storage in storages)), targets))

        return self.worker.submit(job, ready=ready, work=transfer)

    def start_in(self, name: str, tier: Tier, storages: list[SavedStorage], places: list[torch.Tensor]) -> Transfer:
        """Start copying the blocks of storages back to `places` on the device."""
        transfer = Work()
        events = self._allocator.ledger.events
        step = events.step
        ready = record_event(self.device)
        size = sum(place.nbytes for place in places)
        sent = dict.fromkeys(storage.sent for storage in storages)
        blocks = [storage.block for storage in storages if storage.block is not None]
        is_disk = tier is Tier.DISK
        sources = self._staging.take([place.nbytes for place in places]) if is_disk else blocks

        def job() -> None:
            self._wait_for_staging()
            if is_disk:
                _read(storages, blocks, sources)
            ready.synchronize()
            way = (Tier.HOST.value, Tier.DEVICE.value)
            span = events.within("transfer", "up", name, size, way=way, device=self.device, step=step)
            with self._streams.up.after(*sent), span:
                for place, source in zip(places, sources, strict=True):
                    place.copy_(_memory(source), non_blocking=True)
                transfer.event = self._streams.up.record_event()
                self._last_up = transfer.event
            if is_disk:
                self._passing.append((transfer.event, sources))

        return self.worker.submit(job, ready=ready, work=transfer)

    def _wait_for_staging(self) -> None:
        """Give staging back when what passes through it has left. Runs on the worker."""
        while len(self._passing) >= NUM_STAGED:
            transfer, _ = self._passing.popleft()
            transfer.synchronize()


def _memory(block: TierTensor) -> torch.Tensor:
    assert block.tensor is not None
    return block.tensor


def _read(storages: Sequence[SavedStorage], blocks: Sequence[TierTensor], targets: Sequence[TierTensor]) -> None:
    """Read blocks from the disk into host memory, all at once."""
    for storage in storages:
        storage.written.wait()
    transfers = [block.start_read(0, _memory(target)) for block, target in zip(blocks, targets, strict=True)]
    for transfer in transfers:
        transfer.wait()
