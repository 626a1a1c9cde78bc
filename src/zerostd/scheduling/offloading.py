"""Offloading: when activations leave the device after forward, and when they return for backward.

In forward the device holds the activations of two groups: those that are leaving, and those of the last group that ran.
In backward it holds two again: those in use, and those that will be used next. Groups whose activations stay make room
for more: in forward, the memory that they will fill later; in backward, the memory that they have freed.
`Activations` calls at every group's forward and backward; `ActivationCopies` moves the bytes.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable

import torch

from zerostd.communication import Wires
from zerostd.policy import Tier
from zerostd.scheduling.saved_storage import ActivationCopies, GroupActivations, SavedStorage, num_bytes_of

NUM_GROUPS = 2  # on the device, on their way out, and again on their way back, whatever others keep
SLICE = 16  # bytes: slices begin where any number may


class ActivationOffloader:
    """Lets activations leave the device and brings them back. `peers` have the same ones, so each keeps a slice."""

    def __init__(self, copies: ActivationCopies, peers: Wires | None, *, may_stay: bool = False) -> None:
        self.copies = copies
        self.peers = peers
        self.may_stay = may_stay  # the planner lets them leave, not the user: what cannot leave stays
        self._leaving: deque[weakref.ref[GroupActivations]] = deque()
        self._staying: list[int] = []  # bytes kept by each group that sent nothing in this pass, as far as known
        self._staying_before: list[int] = []  # in the pass before
        self._freed = 0  # bytes of groups that backward has passed
        self._held = 0  # bytes of the group that backward is in
        self._used: GroupActivations | None = None
        self._wanted: list[GroupActivations] = []  # those that are used, and those brought for later

    # Forward

    def begin(self) -> None:
        """Begin another pass. A forward without gradients offloads nothing, and is not recorded."""
        if self._staying:
            self._staying_before = self._staying
        self._staying = []
        self._leaving = deque(ref for ref in self._leaving if _here([ref]))

    def send(self, activations: GroupActivations) -> None:
        """Let activations leave. All work of their forward is already in the current stream."""
        new = [storage for storage in activations.storages if not storage.has_copy]
        if activations.tier is Tier.DEVICE:
            for storage in new:
                storage.own_slice = self._own_part(storage).clone()
        elif new:
            sources = [self._own_part(storage) for storage in new]
            sent = self.copies.start_out(activations.name, activations.tier, new, sources)
            for storage in new:
                storage.sent = sent
        self._leaving.append(weakref.ref(activations))
        self._let_go(NUM_GROUPS, 0 if activations.tier is Tier.DISK else self._bytes_to_come)

    def pass_by(self, size: int) -> None:
        """Note that a group ran and kept this many bytes, if known. After the last such group, all offloaded
        activations have left. Before, the device waits only if more bytes are leaving than later groups keep."""
        self._staying.append(size)
        if self._staying_before:
            share = max(0.0, 1.0 - len(self._staying) / len(self._staying_before))
            self._let_go(math.ceil(NUM_GROUPS * share), self._bytes_to_come)

    @property
    def _bytes_to_come(self) -> int:
        """Bytes that the remaining groups of this pass will keep, if it is like the previous pass."""
        if len(self._staying) >= len(self._staying_before):
            return 0
        return max(0, sum(self._staying_before) - sum(self._staying))

    def _let_go(self, num_groups: int, num_bytes: int) -> None:
        """Free the oldest departures, until at most this many groups or bytes are leaving."""
        while len(self._leaving) > num_groups and num_bytes_of(_here(self._leaving)) > num_bytes:
            for activations in _here([self._leaving.popleft()]):
                if activations not in self._wanted:
                    activations.wait_sent()
                    activations.forget()

    # Backward

    def pass_back(self, activations: GroupActivations | None, size: int) -> None:
        """Note that the backward of a group begins that kept this many bytes, so the bytes of the group before are
        free. The activations that left last before that group come back, and more if there is room."""
        self._freed += self._held
        self._held = size
        self._bring_ahead([] if activations is None else self._ahead(activations, 0))

    def want(self, activations: GroupActivations) -> None:
        """Return when activations are here; by then, the activations used next are on their way."""
        if self._used is activations:
            return
        wanted = self._ahead(activations, NUM_GROUPS)
        self._bring_ahead(wanted)
        for earlier in self._wanted:
            if earlier not in wanted:
                earlier.forget()
        self._used = activations
        self._wanted = wanted
        activations.wait_arrival()
        for storage in activations.storages:
            if not storage.is_whole and self.peers is not None:
                assert storage.here is not None
                self.peers.gather(storage.here).wait()
            storage.is_whole = True
            if storage.leaving is not None:  # it has arrived, so it was sent
                storage.leaving = None
                storage.is_sent = True

    def end_backward(self) -> None:
        """Let go of everything that was brought back."""
        wanted = self._wanted
        self._wanted = []
        self._used = None
        self._freed = 0
        self._held = 0
        for activations in wanted:
            activations.forget()

    def _ahead(self, activations: GroupActivations, least: int) -> list[GroupActivations]:
        """Return the activations to bring back: at least this many from the given ones on, those that are coming, and
        those that fit. Not those that have not left yet, nor more on disk than staging holds."""
        ahead: list[GroupActivations] = []
        size = 0
        for index, following in enumerate(activations.chain()):
            size += num_bytes_of([following])
            is_coming = following in self._wanted
            if index >= least and not is_coming and (size > self._freed or following.tier is Tier.DISK):
                break
            if index < least or is_coming or not following.is_here:
                ahead.append(following)
        return ahead

    def _bring_ahead(self, ahead: list[GroupActivations]) -> None:
        for activations in ahead:
            if not activations.is_here:
                self._bring(activations)
        self._wanted += [activations for activations in ahead if activations not in self._wanted]

    def _bring(self, activations: GroupActivations) -> None:
        missing = [storage for storage in activations.storages if storage.here is None]
        for storage in activations.storages:
            storage.num_users += 1
        activations.is_here = True
        places = []
        for storage in missing:
            size = storage.num_bytes if self.peers is None else self._slice_bytes(storage) * self.peers.world.size
            storage.here = torch.empty(size, dtype=torch.uint8, device=self.copies.device)
            storage.is_whole = self.peers is None
            places.append(self._own_part(storage))
            if storage.own_slice is not None:
                places[-1].copy_(storage.own_slice)
        if missing and activations.tier is not Tier.DEVICE:
            arrival = self.copies.start_in(activations.name, activations.tier, missing, places)
            for storage in missing:
                storage.arrival = arrival

    # Slices

    def _slice_bytes(self, storage: SavedStorage) -> int:
        """Return the bytes of the slice that each of the peers keeps."""
        size = 1 if self.peers is None else self.peers.world.size
        return -(-storage.num_bytes // (size * SLICE)) * SLICE if size > 1 else storage.num_bytes

    def _own_part(self, storage: SavedStorage) -> torch.Tensor:
        assert storage.here is not None
        rank = 0 if self.peers is None else self.peers.world.rank
        length = self._slice_bytes(storage)
        return storage.here[: storage.num_bytes][rank * length : (rank + 1) * length]


def _here(refs: Iterable[weakref.ref[GroupActivations]]) -> list[GroupActivations]:
    """Return those that are alive and on the device."""
    alive = (ref() for ref in refs)
    return [activations for activations in alive if activations is not None and activations.is_here]
