"""The way of a resting column to the device: at once from the device, over a lane from the host, by way of a few
buffers of host memory and a thread from the disk."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zerostd.policy import Kind, Tier
from zerostd.tiers.column import Column, Stores
from zerostd.tiers.debug import DEBUG
from zerostd.tiers.lanes import Lanes, mark_here, synchronize
from zerostd.tiers.transfer import Done, Relay, Transfer
from zerostd.tiers.worker import Worker

__all__ = ["Inbound"]

NUM_BUFFERS = 2


@dataclass
class _Buffer:
    memory: torch.Tensor
    free: Transfer = field(default_factory=Done)


class Inbound:
    """Brings columns to the device. `largest_on_disk` is the longest one that rests there, in bytes."""

    def __init__(self, stores: Stores, lanes: Lanes, *, largest_on_disk: int) -> None:
        self._lanes = lanes
        self._turn = 0
        self._buffers: list[_Buffer] = []
        self._worker: Worker | None = None
        if largest_on_disk:
            self._worker = Worker("the reader of parameters from disk", stores.device)
            stores.stop_users.append(self._worker.stop)
            for _ in range(NUM_BUFFERS):
                self._buffers.append(_Buffer(stores.host.allocate(largest_on_disk, Kind.BUFFERS)))

    def bring(self, column: Column, place: torch.Tensor) -> Transfer:
        """Start filling `place`, which is on the device and free for what is in the current stream now."""
        if column.tensor is None:
            return self._from_disk(column, place)
        if column.tensor.data_ptr() == place.data_ptr():
            return Done()
        if column.tier is Tier.DEVICE or place.device.type == "cpu":
            place.copy_(column.tensor)
            return Done()
        with self._lanes.up.after(mark_here(place.device)):
            place.copy_(column.tensor, non_blocking=True)
            return self._lanes.up.mark()

    def _from_disk(self, column: Column, place: torch.Tensor) -> Transfer:
        assert self._worker is not None
        self._turn = (self._turn + 1) % NUM_BUFFERS
        buffer, ready, relay = self._buffers[self._turn], mark_here(place.device), Relay()
        memory = buffer.memory[: column.numel * column.dtype.itemsize]

        def job() -> None:
            synchronize(buffer.free)
            column.start_read(0, memory).wait()
            with self._lanes.up.after(ready):
                place.copy_(memory.view(column.dtype), non_blocking=True)
                if place.device.type == "cpu":
                    DEBUG.poison(memory)
                relay.mark = buffer.free = self._lanes.up.mark()

        relay.work = self._worker.submit(job)
        return relay
