"""The way of a resting column to the device: at once from the device, over a lane from the host, and from the disk by
way of a few buffers of host memory.

The place that a column goes to may still be read by work that the device has not come to, and the loop runs far ahead
of the device. Put into the lane at once, the copy would hold up everything behind it, updates above all. So a thread
puts it in when the device is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zerostd.policy import Kind, Tier
from zerostd.tiers.debug import DEBUG
from zerostd.tiers.streams import Streams, record_event
from zerostd.tiers.tier_tensor import TierAllocator, TierTensor
from zerostd.tiers.transfer import Done, QueuedTransfer, Transfer
from zerostd.tiers.worker import Worker

__all__ = ["Uploader"]

NUM_BUFFERS = 2


@dataclass
class _Buffer:
    memory: torch.Tensor
    free: Transfer = field(default_factory=Done)


class Uploader:
    """Brings columns to the device. `largest_on_disk` is the longest one that rests there, in bytes."""

    def __init__(self, stores: TierAllocator, streams: Streams, *, largest_on_disk: int) -> None:
        self._stores = stores
        self._lanes = streams
        self._turn = 0
        self._buffers: list[_Buffer] = []
        self._made: Worker | None = None
        if largest_on_disk:
            for _ in range(NUM_BUFFERS):
                self._buffers.append(_Buffer(stores.host.allocate(largest_on_disk, Kind.BUFFERS)))

    def bring(self, column: TierTensor, place: torch.Tensor, name: str = "") -> Transfer:
        """Start filling `place`, which is on the device and free for what is in the current stream now. Events call it
        by its name."""
        if column.tensor is not None:
            if column.tensor.data_ptr() == place.data_ptr():
                return Done()
            if column.tier is Tier.DEVICE or place.device.type == "cpu":
                place.copy_(column.tensor)
                return Done()
        ready, relay, events = record_event(place.device), QueuedTransfer(), self._stores.ledger.events
        buffer = self._next_buffer() if column.tensor is None else None

        def job() -> None:
            source = column.tensor if buffer is None else _read(column, buffer)
            assert source is not None
            ready.synchronize()
            way = (column.tier.value, Tier.DEVICE.value)
            with (
                self._lanes.up.after(),
                events.within("transfer", "up", name, place.nbytes, way=way, device=place.device),
            ):
                place.copy_(source, non_blocking=True)
                relay.event = self._lanes.up.record_event()
            if buffer is not None:
                buffer.free = relay.event
                if place.device.type == "cpu":
                    DEBUG.poison(buffer.memory)

        relay.work = self._worker.submit(job, ready=ready)
        return relay

    @property
    def _worker(self) -> Worker:
        if self._made is None:
            self._made = Worker("the carrier of parameters to the device", self._stores.device)
            self._stores.stop_users.append(self._made.stop)
        return self._made

    def _next_buffer(self) -> _Buffer:
        self._turn = (self._turn + 1) % NUM_BUFFERS
        return self._buffers[self._turn]


def _read(column: TierTensor, buffer: _Buffer) -> torch.Tensor:
    """The column in the buffer's memory, when that is free."""
    buffer.free.synchronize()
    memory = buffer.memory[: column.numel * column.dtype.itemsize]
    column.start_read(0, memory).wait()
    return memory.view(column.dtype)
