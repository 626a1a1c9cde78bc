"""What autograd saved for backward, as storages: bytes of the device that may leave it and come back.

A `SavedStorage` is one storage, whatever tensors lie in it, so it travels once. `GroupActivations` are those that one
forward of a group has left: they leave together and come back together. offloading.py decides when.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from zerostd.compat import version_of
from zerostd.policy import Tier
from zerostd.tiers import Done, TierTensor, Transfer

SPOILT = -1  # instead of a version

TensorLayout = tuple[torch.dtype, torch.Size, tuple[int, ...], int]  # dtype, size, stride and offset in a storage


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """Return how a tensor lies in its storage."""
    return tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())


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
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        here = _tensor_in(storage, (torch.uint8, torch.Size([size]), (1,), 0), tensor.device)
        return cls(here, size, tensor.detach(), version_of(tensor))

    @property
    def has_copy(self) -> bool:
        """Whether there is a copy of it, or one is on its way."""
        return self.block is not None or self.own_slice is not None

    def is_spoilt(self) -> bool:
        """Return whether somebody changed it in place after it was saved."""
        if self.left is not None and version_of(self.left) != self.version:
            self.version = SPOILT
        return self.version == SPOILT

    def tensor(self, layout: TensorLayout) -> torch.Tensor:
        """Return a tensor in these bytes, which are here."""
        assert self.here is not None
        return _tensor_in(self.here.untyped_storage(), layout, self.here.device)


@dataclass(eq=False)
class GroupActivations:
    """What one forward of a group has left."""

    name: str
    tier: Tier
    before: weakref.ref[GroupActivations] | None  # left before it in the same pass, so it is used after it
    storages: dict[SavedStorage, None] = field(default_factory=dict)  # in order
    is_here: bool = True

    def chain(self) -> Iterator[GroupActivations]:
        """Yield these, and those left before them, the last ones first."""
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
        """Wait until what is coming back is here."""
        for arrival in dict.fromkeys(storage.arrival for storage in self.storages):
            arrival.wait()

    def forget(self) -> None:
        """Let its bytes leave the device: they are not used any more, or a copy of them is."""
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


def _tensor_in(storage: torch.UntypedStorage, layout: TensorLayout, device: torch.device) -> torch.Tensor:
    dtype, size, stride, offset = layout
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)
