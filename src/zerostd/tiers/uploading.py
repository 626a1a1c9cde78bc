"""Uploads: the way of a tier tensor to the device, from the disk through a few buffers of host memory.

Work that the device has not come to may still read the target, and the loop runs far ahead of the device. Put into the
stream at once, the copy would hold up everything behind it, updates above all. So a thread puts it in when the device
is there.
"""

from __future__ import annotations

import itertools

import torch

from zerostd.policy import Kind, Tier
from zerostd.tiers.allocator import TierAllocator, TierTensor
from zerostd.tiers.debug import poison
from zerostd.tiers.transfer import Done, Streams, Transfer, record_event
from zerostd.tiers.worker import Work, Worker

NUM_BUFFERS = 2


class Uploader:
    """Uploads tensors to the device. `largest_on_disk` is the longest one that is kept there, in bytes."""

    def __init__(self, allocator: TierAllocator, streams: Streams, *, largest_on_disk: int) -> None:
        self._allocator = allocator
        self._streams = streams
        self._lazy_worker: Worker | None = None
        num_buffers = NUM_BUFFERS if largest_on_disk else 0
        self._buffers = [allocator.host.allocate(largest_on_disk, Kind.BUFFERS) for _ in range(num_buffers)]
        self._buffer_events: list[Transfer] = [Done() for _ in self._buffers]  # when each may be filled again
        self._turns = itertools.cycle(range(num_buffers))

    @staticmethod
    def buffer_bytes(largest_on_disk: int) -> int:
        """Return the bytes of host memory that an uploader takes."""
        return NUM_BUFFERS * largest_on_disk

    def upload(self, source: TierTensor, target: torch.Tensor, name: str = "") -> Transfer:
        """Start filling `target`, which is on the device and free behind what is in the current stream now.

        Events show the upload as one of the group `name`.
        """
        if source.tensor is not None:
            if source.tensor.data_ptr() == target.data_ptr():
                return Done()
            if source.tier is Tier.DEVICE or target.device.type == "cpu":
                target.copy_(source.tensor)
                return Done()
        ready = record_event(target.device)
        transfer = Work()
        events = self._allocator.ledger.events
        turn = next(self._turns) if source.tensor is None else None

        def copy() -> None:
            values = source.tensor if turn is None else self._read(source, turn)
            assert values is not None
            ready.synchronize()
            way = (source.tier.value, Tier.DEVICE.value)
            with (
                self._streams.up.after(),
                events.within("transfer", "up", name, target.nbytes, way=way, device=target.device),
            ):
                target.copy_(values, non_blocking=True)
                transfer.event = self._streams.up.record_event()
            if turn is not None:
                self._buffer_events[turn] = transfer.event
                if target.device.type == "cpu":
                    poison(self._buffers[turn])

        return self._worker.submit(copy, ready=ready, work=transfer)

    @property
    def _worker(self) -> Worker:
        if self._lazy_worker is None:
            self._lazy_worker = Worker("the upload of parameters to the device", self._allocator.device)
            self._allocator.before_close(self._lazy_worker.stop)
        return self._lazy_worker

    def _read(self, source: TierTensor, turn: int) -> torch.Tensor:
        """Read a tensor from disk into a buffer, when that is free."""
        self._buffer_events[turn].synchronize()
        memory = self._buffers[turn][: source.numel * source.dtype.itemsize]
        source.start_read(0, memory).wait()
        return memory.view(source.dtype)
