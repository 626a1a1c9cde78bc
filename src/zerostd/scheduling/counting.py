"""What autograd saves in each group's forward, counted only in passes for which it is asked.

A pack hook counts each saved tensor and passes it on to the next pack hook, such as that of torch's checkpointing. So
the bytes that a recomputed group would keep are counted, although it keeps nothing. Each storage counts once, in the
group that saves it first; parameters and buffers do not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from zerostd.compat import saved_tensor_hooks
from zerostd.scheduling.tensors import tensors_in


@dataclass
class GroupBytes:
    """Bytes of one group's activations in one pass."""

    kept: int = 0  # saved in its forward
    boundary: int = 0  # of its inputs: what stays if it is recomputed


class CountedBytes(NamedTuple):
    """Bytes of all groups' activations in one pass."""

    left: int  # on the device, for backward
    inside: int  # beside them, while a group is recomputed
    leaving: int  # of the group that has most on its way to the host

    @property
    def total(self) -> int:
        """The most bytes on the device, without those on their way to the host."""
        return self.left + self.inside


class ActivationCounter:
    """Counts the activations of groups in one pass."""

    def __init__(self, is_ours: Callable[[torch.UntypedStorage], bool]) -> None:
        self.is_on = False
        self.groups: dict[str, GroupBytes] = {}  # by name, of the last pass that was counted
        self.recomputed: set[nn.Module] = set()  # modules that keep their inputs only
        self._running = contextlib.ExitStack()  # in the group that runs and keeps its activations
        self._is_ours = is_ours  # whether a storage is a parameter's or a buffer's
        self._seen: set[StorageWeakRef] = set()
        self._seen_inputs: set[StorageWeakRef] = set()

    def begin(self) -> None:
        """Begin a forward of the root. An interrupted forward may not have ended."""
        self._running.close()
        self._seen.clear()
        self._seen_inputs.clear()
        if self.is_on:
            self.groups = {}

    def enter(self, group: str, inputs: Any) -> None:
        """Begin the forward of a group that is not recomputed."""
        if self.is_on:
            self._running.enter_context(self.within(group))
            for tensor in tensors_in(inputs):
                self.take_input(group, tensor)

    def leave(self) -> None:
        """End the forward of a group."""
        self._running.close()

    @contextlib.contextmanager
    def within(self, group: str) -> Iterator[None]:
        """Count what is saved in a `with` block, if counting is on."""
        if not self.is_on or not torch.is_grad_enabled():
            yield
            return
        size = self.groups.setdefault(group, GroupBytes())
        packing = saved_tensor_hooks()

        def pack(tensor: torch.Tensor) -> object:
            size.kept += self._new_bytes(tensor, self._seen)
            return tensor.detach() if packing is None else packing[0](tensor)

        with saved_tensors_hooks(pack, (lambda kept: kept) if packing is None else packing[1]):
            yield

    def take_input(self, group: str, tensor: torch.Tensor) -> None:
        """Count an input of a group."""
        if self.is_on:
            self.groups.setdefault(group, GroupBytes()).boundary += self._new_bytes(tensor, self._seen_inputs)

    def _new_bytes(self, tensor: torch.Tensor, seen: set[StorageWeakRef]) -> int:
        """Return the bytes of a tensor's storage, if it was not seen yet."""
        if tensor.layout is not torch.strided or self._is_ours(tensor.untyped_storage()):
            return 0
        storage = tensor.untyped_storage()
        ref = StorageWeakRef(storage)
        if ref in seen:
            return 0
        seen.add(ref)
        return storage.nbytes()
