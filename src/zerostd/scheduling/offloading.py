"""Parcels: bytes of the device that leave it for a while, and their way there and back.

A parcel is one storage, whatever tensors lie in it. Parcels travel in bundles, those that one forward of a group has
left. On the way out the device keeps two bundles, the one that is leaving and the one that was left last; on the way
back two again, the one that is used and the one that will be used next. Groups that keep theirs make room for more:
bundles may use what these are still going to fill in a forward, and what they have let go of in a backward. The loop
runs ahead of the device, so a thread puts copies into the streams when the device has come to them: put in at once,
they would hold up what is behind.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

import torch

from zerostd.compat import version_of
from zerostd.policy import Kind, Tier
from zerostd.tiers.allocator import TierAllocator
from zerostd.tiers.pool import Pool, PoolBlock
from zerostd.tiers.streams import Streams, record_event
from zerostd.tiers.transfer import AllOf, Done, QueuedTransfer, Transfer
from zerostd.tiers.worker import Worker

__all__ = ["ActivationOffloader", "GroupActivations", "Peers", "SavedStorage", "View"]

NUM_BUNDLES = 2  # on the device, on their way out, and again on their way back, whatever others keep
SPOILT = -1  # instead of a version
SLICE = 16  # bytes: slices begin where any number may


class Peers(Protocol):
    """Ranks that have the same bytes, so that each keeps a slice of them."""

    rank: int
    size: int

    def gather(self, full: torch.Tensor) -> None:
        """Fill `full`, in which this rank's slice is in its place, with the slices of all."""


@dataclass(frozen=True)
class View:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """As it lies now."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


@dataclass(eq=False)
class SavedStorage:
    """One storage: all of its bytes are `here` while it is on the device, and a copy rests in its room."""

    here: torch.Tensor | None
    num_bytes: int
    left: torch.Tensor | None  # the tensor that was left, until it is gone
    version: int  # of that one
    room: PoolBlock | None = None
    kept: torch.Tensor | None = None  # instead of a room: this rank's slice, on the device
    sent: Transfer = field(default_factory=Done)  # from the device
    written: Transfer = field(default_factory=Done)  # to its room, if that is on disk
    arrival: Transfer = field(default_factory=Done)
    is_sent: bool = False  # what the device does from now on comes after that
    leaving: torch.Tensor | None = None  # its bytes, if they are not used any more before they are sent
    is_whole: bool = True  # slices of other ranks are here too
    num_users: int = 0  # bundles that have it here

    @property
    def rests(self) -> bool:
        """Whether there is a copy of it, or one is on its way."""
        return self.room is not None or self.kept is not None

    def is_spoilt(self) -> bool:
        """Whether somebody changed it in place after it was left."""
        if self.left is not None and version_of(self.left) != self.version:
            self.version = SPOILT
        return self.version == SPOILT

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedStorage:
        """The storage that a tensor lies in."""
        storage = tensor.untyped_storage()
        whole = View(torch.uint8, torch.Size([storage.nbytes()]), (1,), 0)
        return cls(_see(storage, whole, tensor.device), storage.nbytes(), tensor.detach(), version_of(tensor))

    def show(self, view: View) -> torch.Tensor:
        """A tensor in these bytes."""
        assert self.here is not None
        return _see(self.here.untyped_storage(), view, self.here.device)


@dataclass(eq=False)
class GroupActivations:
    """What one forward of a group has left."""

    name: str
    tier: Tier
    before: weakref.ref[GroupActivations] | None  # left before it in the same pass, so it is wanted after it
    parcels: dict[SavedStorage, None] = field(default_factory=dict)  # in order
    is_here: bool = True

    def chain(self) -> Iterator[GroupActivations]:
        """This one, and those left before it, the last one first."""
        one: GroupActivations | None = self
        while one is not None:
            yield one
            one = None if one.before is None else one.before()

    def add(self, parcel: SavedStorage) -> None:
        """It is wanted together with the others."""
        if parcel not in self.parcels:
            self.parcels[parcel] = None
            parcel.num_users += 1

    def forget(self) -> None:
        """Its bytes need not be on the device any more."""
        for arrival in dict.fromkeys(parcel.arrival for parcel in self.parcels):
            arrival.wait()  # what comes in must not meet what is put there next
        for parcel in self.parcels:
            parcel.num_users -= 1
            if parcel.num_users == 0 and parcel.rests:  # a backward inside of its forward comes too early
                parcel.is_spoilt()  # asked while it can be seen
                parcel.leaving = None if parcel.is_sent else parcel.here  # a graph that is kept comes back for the copy
                parcel.here = parcel.left = None
        self.is_here = False


@dataclass
class _Staying:
    """What groups leave on the device that send nothing, as far as is known."""

    num_groups: int = 0
    num_bytes: int = 0


class ActivationOffloader:
    """Takes bundles off the device and brings them back. `limits`: bytes of each tier for what rests there."""

    def __init__(
        self, stores: TierAllocator, streams: Streams, limits: Mapping[Tier, int | None], peers: Peers | None
    ) -> None:
        self.peers = peers
        self._stores = stores
        self._lanes = streams
        self._pools = {tier: Pool(stores, tier, Kind.ACTIVATIONS, limit) for tier, limit in limits.items()}
        self._staging = Pool(stores, Tier.HOST, Kind.BUFFERS)  # on the way to the disk and back
        self._leaving: deque[weakref.ref[GroupActivations]] = deque()
        self._staying, self._staying_before = _Staying(), _Staying()  # in this pass and in the one before
        self._freed, self._held = 0, 0  # bytes of those that backward has passed, and of the one it is in
        self._used: GroupActivations | None = None
        self._wanted: list[GroupActivations] = []  # the one that is used, and those brought for later
        self._passing: deque[tuple[Transfer, list[PoolBlock]]] = deque()  # staging that is in use until then
        self._last_up: Transfer = Done()
        self._made: Worker | None = None

    def pool(self, tier: Tier) -> Pool:
        """Where bundles of a tier rest."""
        return self._pools[tier]

    def send(self, bundle: GroupActivations) -> None:
        """Let a bundle leave, for whose forward everything is in the current stream."""
        new = [parcel for parcel in bundle.parcels if not parcel.rests]
        if bundle.tier is Tier.DEVICE:
            for parcel in new:
                parcel.kept = self._mine(parcel).clone()
        elif new:
            sources = [self._mine(parcel) for parcel in new]
            rooms = self._pools[bundle.tier].take([source.nbytes for source in sources])
            for parcel, room in zip(new, rooms, strict=True):
                parcel.room = room
            sent = self._start_out(bundle, new, sources)
            for parcel in new:
                parcel.sent = sent
        self._leaving.append(weakref.ref(bundle))
        self._let_go(NUM_BUNDLES, 0 if bundle.tier is Tier.DISK else self._to_come)

    def begin(self) -> None:
        """Another pass. One without gradients passes nothing, and nothing is learnt from it."""
        if self._staying.num_groups:
            self._staying_before = self._staying
        self._staying = _Staying()
        self._leaving = deque(ref for ref in self._leaving if _is_here(ref()))

    def pass_by(self, size: int) -> None:
        """A group ran and kept so many bytes, as far as is known. When the last one of them has, nothing that left is
        here; until then the device does not wait for it, or only if what left is more than they are going to keep, or
        takes longer than they do."""
        now, before = self._staying, self._staying_before
        now.num_bytes += size
        now.num_groups += 1
        if before.num_groups:
            share = max(0.0, 1.0 - now.num_groups / before.num_groups)
            self._let_go(math.ceil(NUM_BUNDLES * share), self._to_come)

    def pass_back(self, bundle: GroupActivations | None, size: int) -> None:
        """The backward begins of a group that kept so many bytes, so those of the one before are free. The bundle that
        was left last before the group and others comes back, as far as there is room for them."""
        self._freed, self._held = self._freed + self._held, size
        self._bring_ahead([] if bundle is None else self._ahead(bundle, 0))

    @property
    def _to_come(self) -> int:
        """Bytes that groups are still going to keep in this pass, if it is like the one before."""
        now, before = self._staying, self._staying_before
        return max(0, before.num_bytes - now.num_bytes) if now.num_groups < before.num_groups else 0

    def _let_go(self, least: int, most: int) -> None:
        """Let go of what left first, until so few bundles or so few bytes are leaving."""
        while len(self._leaving) > least and _num_bytes(filter(_is_here, (ref() for ref in self._leaving))) > most:
            gone = self._leaving.popleft()()
            if gone is not None and gone.is_here and gone not in self._wanted:
                for sent in dict.fromkeys(parcel.sent for parcel in gone.parcels):
                    sent.wait()
                for parcel in gone.parcels:
                    parcel.is_sent = True
                gone.forget()

    def _ahead(self, bundle: GroupActivations, least: int) -> list[GroupActivations]:
        """Of a bundle and those behind it so many at least, those that are coming, and those that there is room for.
        One that has not left yet is none of them, nor one on disk: staging is for two."""
        found, size = list[GroupActivations](), 0
        for index, one in enumerate(bundle.chain()):
            size += _num_bytes([one])
            is_coming = one in self._wanted
            if index >= least and not is_coming and (size > self._freed or one.tier is Tier.DISK):
                break
            if index < least or is_coming or not one.is_here:
                found.append(one)
        return found

    def _bring_ahead(self, bundles: list[GroupActivations]) -> None:
        for one in bundles:
            if not one.is_here:
                self._bring(one)
        self._wanted += [one for one in bundles if one not in self._wanted]

    def want(self, bundle: GroupActivations) -> None:
        """A bundle is going to be used: it is here when this returns, and the one behind it is on its way."""
        if self._used is bundle:
            return
        wanted = self._ahead(bundle, NUM_BUNDLES)
        self._bring_ahead(wanted)
        for one in self._wanted:
            if one not in wanted:
                one.forget()
        self._used, self._wanted = bundle, wanted
        for arrival in dict.fromkeys(parcel.arrival for parcel in bundle.parcels):
            arrival.wait()
        for parcel in bundle.parcels:
            if not parcel.is_whole and self.peers is not None:
                assert parcel.here is not None
                self.peers.gather(parcel.here)
            parcel.is_whole = True
            if parcel.leaving is not None:  # it has arrived, so it was sent
                parcel.leaving, parcel.is_sent = None, True

    def settle(self) -> None:
        """Nothing that was brought back is in use any more."""
        wanted, self._wanted, self._used = self._wanted, [], None
        self._freed = self._held = 0
        for bundle in wanted:
            bundle.forget()

    def _bring(self, bundle: GroupActivations) -> None:
        """Start bringing back what is not here."""
        missing = [parcel for parcel in bundle.parcels if parcel.here is None]
        for parcel in bundle.parcels:
            parcel.num_users += 1
        bundle.is_here = True
        places = []
        for parcel in missing:
            size = parcel.num_bytes if self.peers is None else self._slice(parcel) * self.peers.size
            parcel.here = torch.empty(size, dtype=torch.uint8, device=self._stores.device)
            parcel.is_whole = self.peers is None
            places.append(self._mine(parcel))
            if parcel.kept is not None:
                places[-1].copy_(parcel.kept)
        if missing and bundle.tier is not Tier.DEVICE:
            arrival = self._start_in(bundle, missing, places)
            for parcel in missing:
                parcel.arrival = arrival

    def _start_out(
        self, bundle: GroupActivations, parcels: list[SavedStorage], sources: list[torch.Tensor]
    ) -> Transfer:
        device, relay, events, up = self._stores.device, QueuedTransfer(), self._stores.ledger.events, self._last_up
        ready, size, step = record_event(device), sum(source.nbytes for source in sources), events.step
        rooms = [parcel.room for parcel in parcels if parcel.room is not None]
        is_disk = bundle.tier is Tier.DISK
        staging = self._staging.take([source.nbytes for source in sources]) if is_disk else rooms

        def job() -> None:
            self._wait_for_staging()
            ready.synchronize()
            way = (Tier.DEVICE.value, Tier.HOST.value)
            span = events.within("transfer", "down", bundle.name, size, way=way, device=device, step=step)
            with self._lanes.down.after(up), span:
                for source, room in zip(sources, staging, strict=True):
                    assert room.memory.tensor is not None
                    room.memory.tensor.copy_(source, non_blocking=True)
                relay.event = self._lanes.down.record_event()
            if is_disk:
                relay.event.synchronize()
                for parcel, room, passing in zip(parcels, rooms, staging, strict=True):
                    assert passing.memory.tensor is not None
                    parcel.written = room.memory.start_write(0, passing.memory.tensor)
                self._passing.append((AllOf(*(parcel.written for parcel in parcels)), staging))

        relay.work = self._worker.submit(job, ready=ready)
        return relay

    def _start_in(self, bundle: GroupActivations, parcels: list[SavedStorage], places: list[torch.Tensor]) -> Transfer:
        device, relay, events = self._stores.device, QueuedTransfer(), self._stores.ledger.events
        ready, size, step = record_event(device), sum(place.nbytes for place in places), events.step
        sent = dict.fromkeys(parcel.sent for parcel in parcels)
        rooms = [parcel.room for parcel in parcels if parcel.room is not None]
        is_disk = bundle.tier is Tier.DISK
        staging = self._staging.take([place.nbytes for place in places]) if is_disk else rooms

        def job() -> None:
            self._wait_for_staging()
            if is_disk:
                _read(parcels, rooms, staging)
            ready.synchronize()
            way = (Tier.HOST.value, Tier.DEVICE.value)
            span = events.within("transfer", "up", bundle.name, size, way=way, device=device, step=step)
            with self._lanes.up.after(*sent), span:
                for place, room in zip(places, staging, strict=True):
                    assert room.memory.tensor is not None
                    place.copy_(room.memory.tensor, non_blocking=True)
                relay.event = self._last_up = self._lanes.up.record_event()
            if is_disk:
                self._passing.append((relay.event, staging))

        relay.work = self._worker.submit(job, ready=ready)
        return relay

    def _wait_for_staging(self) -> None:
        """On the worker: staging goes back when what passes through it has; it is in use for two bundles at most."""
        while len(self._passing) >= NUM_BUNDLES:
            transfer, _ = self._passing.popleft()
            transfer.synchronize()

    def _slice(self, parcel: SavedStorage) -> int:
        size = 1 if self.peers is None else self.peers.size
        return -(-parcel.num_bytes // (size * SLICE)) * SLICE if size > 1 else parcel.num_bytes

    def _mine(self, parcel: SavedStorage) -> torch.Tensor:
        """What this rank keeps of a parcel that is here."""
        assert parcel.here is not None
        rank, length = 0 if self.peers is None else self.peers.rank, self._slice(parcel)
        return parcel.here[: parcel.num_bytes][rank * length : (rank + 1) * length]

    @property
    def _worker(self) -> Worker:
        if self._made is None:
            self._made = Worker("the carrier of activations", self._stores.device)
            self._stores.before_close(self._made.stop)
        return self._made


def _is_here(bundle: GroupActivations | None) -> TypeGuard[GroupActivations]:
    return bundle is not None and bundle.is_here


def _num_bytes(bundles: Iterable[GroupActivations]) -> int:
    """What they have, or would have, on the device."""
    return sum(parcel.num_bytes for parcel in dict.fromkeys(parcel for one in bundles for parcel in one.parcels))


def _see(storage: torch.UntypedStorage, view: View, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=view.dtype, device=device).set_(storage, view.offset, view.size, view.stride)


def _read(parcels: Sequence[SavedStorage], rooms: Sequence[PoolBlock], staging: Sequence[PoolBlock]) -> None:
    """From the disk into host memory, all at once."""
    for parcel in parcels:
        parcel.written.wait()
    transfers = []
    for room, passing in zip(rooms, staging, strict=True):
        assert passing.memory.tensor is not None
        transfers.append(room.memory.start_read(0, passing.memory.tensor))
    for transfer in transfers:
        transfer.wait()
