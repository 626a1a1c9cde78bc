"""Device memory set aside: tensors free their memory on the device for others, and their bytes wait on the host.

A tensor keeps its storage, and so do its views; only the memory of the storage goes and comes. Host memory is taken
once and kept for the next time, since registering it takes longer than a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerostd.errors import MisuseError
from zerostd.monitoring.ledger import explain_out_of_memory
from zerostd.policy import Kind, Tier
from zerostd.tiers.allocator import TierAllocator
from zerostd.tiers.host import padded
from zerostd.tiers.transfer import Streams, record_event


class Aside:
    """The device memory of one prepared model, while it is set aside."""

    def __init__(self, allocator: TierAllocator, streams: Streams) -> None:
        self._allocator = allocator
        self._streams = streams
        self._memory = torch.empty(0, dtype=torch.uint8)  # of the host; kept when everything is back
        self._out: list[tuple[Kind, torch.UntypedStorage, torch.Tensor, int]] = []  # with its place and its bytes
        self.is_out = False  # set aside, even if there was nothing on the device

    def put(self, kept: Sequence[tuple[Kind, torch.Tensor]], scratch: Sequence[torch.Tensor]) -> None:
        """Copy the memory of `kept` to the host, and give it and that of `scratch` back. Nothing may use them. Raises
        before anything is changed, if the host has no room."""
        device = self._allocator.device
        storages: dict[int, tuple[Kind, torch.UntypedStorage]] = {}
        for kind, tensor in kept:
            storages.setdefault(tensor.untyped_storage().data_ptr(), (kind, tensor.untyped_storage()))
        storages.pop(0, None)  # without memory
        for tensor in (tensor for _, tensor in kept):
            if not tensor.untyped_storage().resizable():
                raise MisuseError(
                    f"a numpy array uses the memory of a tensor with {tensor.nbytes} bytes, which cannot leave the "
                    "device: delete the array, or make it from a copy of the tensor"
                )
        self._reserve(sum(padded(storage.nbytes()) for _, storage in storages.values()))
        out = []
        start = 0
        with self._streams.down.after(record_event(device)):
            for kind, storage in storages.values():
                place = self._memory[start : start + storage.nbytes()]
                place.copy_(_bytes_of(storage, device), non_blocking=True)
                out.append((kind, storage, place, storage.nbytes()))
                start += padded(storage.nbytes())
            arrived = self._streams.down.record_event()
        arrived.synchronize()
        for tensor in scratch:
            if size := tensor.untyped_storage().nbytes():
                out.append((Kind.BUFFERS, tensor.untyped_storage(), self._memory[:0], size))
        self._out = out
        self.is_out = True
        ledger = self._allocator.ledger
        for kind, storage, place, size in out:
            storage.resize_(0)
            ledger.leave(kind, size)
            ledger.leave(Kind.BUFFERS, place.nbytes, Tier.HOST)
            ledger.enter(kind, place.nbytes, Tier.HOST)

    def bring(self) -> None:
        """Allocate memory on the device again and fill it. If there is not enough, nothing has changed. The first bytes
        come up while memory for the others is taken, which takes a tenth as long."""
        device = self._allocator.device
        ledger = self._allocator.ledger
        try:
            with explain_out_of_memory(ledger):
                for _, storage, place, size in self._out:
                    storage.resize_(size)
                    if place.numel():
                        with self._streams.up.after(record_event(device)):
                            _bytes_of(storage, device).copy_(place, non_blocking=True)
        except BaseException:
            self._streams.up.record_event().synchronize()  # the bytes on the host are as they were
            for _, storage, _, _ in self._out:
                storage.resize_(0)
            raise
        self._streams.up.record_event().wait()
        for kind, _, place, size in self._out:
            ledger.enter(kind, size)
            ledger.leave(kind, place.nbytes, Tier.HOST)
            ledger.enter(Kind.BUFFERS, place.nbytes, Tier.HOST)
        self._out = []
        self.is_out = False

    def _reserve(self, num_bytes: int) -> None:
        """Make the host memory at least this large."""
        if num_bytes <= self._memory.nbytes:
            return
        if self._memory.nbytes:
            self._allocator.host.free(self._memory)
            self._memory = self._memory[:0]
        self._memory = self._allocator.host.allocate(num_bytes, Kind.BUFFERS)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
