"""Saved storages: memory that autograd saved for backward, which may leave the device and return.

A `SavedStorage` is one storage, whatever tensors lie in it, so it travels once. `GroupActivations` are those that one
forward of a group has left: they leave together and come back together. offloading.py decides when; `ActivationCopies`
copies them to host memory or disk and back. The loop runs ahead of the device, so a thread puts copies into the streams
when the device has reached them. Copies that were queued at once would delay the work behind them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from zerostd.compat import version_of
from zerostd.policy import Kind, Tier
from zerostd.tiers.allocator import TierAllocator, TierTensor
from zerostd.tiers.pool import Pool
from zerostd.tiers.transfer import AllOf, Done, Streams, Transfer, record_event
from zerostd.tiers.worker import Work, Worker

SPOILT = -1  # instead of a version
NUM_STAGED = 2  # groups that staging is in use for, at most

TensorLayout = tuple[torch.dtype, torch.Size, tuple[int, ...], int]  # dtype, size, stride and offset in a storage


@dataclass(eq=False)
class SavedStorage:
    """One storage: all of its bytes are `here` while it is on the device, and a copy is in a block of a pool."""

    here: torch.Tensor | None
    num_bytes: int
    left: torch.Tensor | None  # the tensor that was saved, until it is gone
    version: int  # of that one
    block: TierTensor | None = None
    own_slice: torch.Tensor | None = None  # instead of a block: this rank's slice, on the device
    sent: Transfer = field(default_factory=Done)  # from the device
    written: Transfer = field(default_factory=Done)  # to its block, if that is on disk
    arrival: Transfer = field(default_factory=Done)
    is_sent: bool = False  # what the device does from now on comes after that
    leaving: torch.Tensor | None = None  # its bytes, if they are not used any more before they are sent
    is_whole: bool = True  # slices of other ranks are here too
    num_users: int = 0  # groups that have it here

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedStorage:
        """Return the storage that a tensor lies in."""
        here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return cls(here, here.nbytes, tensor.detach(), version_of(tensor))

    @property
    def has_copy(self) -> bool:
        """Whether there is a copy of it, or one is on its way."""
        return self.block is not None or self.own_slice is not None

    def is_spoilt(self) -> bool:
        """Return whether it was changed in place after it was saved."""
        if self.left is not None and version_of(self.left) != self.version:
            self.version = SPOILT
        return self.version == SPOILT

    def tensor(self, layout: TensorLayout) -> torch.Tensor:
        """Return a tensor in these bytes, which are here."""
        assert self.here is not None
        dtype, size, stride, offset = layout
        tensor = torch.empty(0, dtype=dtype, device=self.here.device)
        return tensor.set_(self.here.untyped_storage(), offset, size, stride)


@dataclass(eq=False)
class GroupActivations:
    """The activations that one forward of a group has left."""

    name: str
    tier: Tier
    before: weakref.ref[GroupActivations] | None  # left before it in the same pass, so it is used after it
    storages: dict[SavedStorage, None] = field(default_factory=dict)  # in order
    is_here: bool = True

    def chain(self) -> Iterator[GroupActivations]:
        """Yield these activations and those that were left before them, the latest first."""
        activations: GroupActivations | None = self
        while activations is not None:
            yield activations
            activations = None if activations.before is None else activations.before()

    def add(self, storage: SavedStorage) -> None:
        """Let a storage travel with the others."""
        if storage not in self.storages:
            self.storages[storage] = None
            storage.num_users += 1

    def wait_sent(self) -> None:
        """Wait until the copies that are leaving have left the device."""
        for sent in dict.fromkeys(storage.sent for storage in self.storages):
            sent.wait()
        for storage in self.storages:
            storage.is_sent = True

    def wait_arrival(self) -> None:
        """Wait until the storage has come back."""
        for arrival in dict.fromkeys(storage.arrival for storage in self.storages):
            arrival.wait()

    def forget(self) -> None:
        """Free its bytes on the device: they are not used any more, or a copy of them exists."""
        self.wait_arrival()  # what comes in must not meet what is put there next
        for storage in self.storages:
            storage.num_users -= 1
            if storage.num_users == 0 and storage.has_copy:  # a backward inside of its forward comes too early
                storage.is_spoilt()  # asked while it can be seen
                storage.leaving = None if storage.is_sent else storage.here  # a graph that is kept uses the copy
                storage.here = None
                storage.left = None
        self.is_here = False


def num_bytes_of(several: Iterable[GroupActivations]) -> int:
    """Return the bytes that they have, or would have, on the device; a storage they share counts once."""
    storages = dict.fromkeys(storage for activations in several for storage in activations.storages)
    return sum(storage.num_bytes for storage in storages)


class ActivationCopies:
    """Pools of blocks in each tier, and the thread that copies to them. `limits`: bytes that each tier has for them."""

    def __init__(self, allocator: TierAllocator, streams: Streams, limits: Mapping[Tier, int | None]) -> None:
        self.device = allocator.device
        self._allocator = allocator
        self._streams = streams
        self.pools = {tier: Pool(allocator, tier, Kind.ACTIVATIONS, limit) for tier, limit in limits.items()}
        self._staging = Pool(allocator, Tier.HOST, Kind.BUFFERS)  # on the way to the disk and back
        self._passing: deque[tuple[Transfer, list[TierTensor]]] = deque()  # staging that is in use until then
        self._last_up: Transfer = Done()
        self.worker = Worker("the offloader of activations", self.device)
        allocator.before_close(self.worker.stop)

    def start_out(self, name: str, tier: Tier, storages: list[SavedStorage], sources: list[torch.Tensor]) -> Transfer:
        """Start copying `sources`, the bytes to keep of each storage, to blocks of a tier."""
        blocks = self.pools[tier].take([source.nbytes for source in sources])
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
                for storage in storages:
                    storage.written.wait()
                pairs = zip(blocks, sources, strict=True)
                AllOf(*[block.start_read(0, _memory(source)) for block, source in pairs]).wait()
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
        """Free staging when the bytes in it have left. Runs on the worker."""
        while len(self._passing) >= NUM_STAGED:
            transfer, _ = self._passing.popleft()
            transfer.synchronize()


def _memory(block: TierTensor) -> torch.Tensor:
    assert block.tensor is not None
    return block.tensor
