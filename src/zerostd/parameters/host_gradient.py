"""Gradients and host memory, on devices that have their own.

A `HostGradientCopy` is the host's copy of those parts of a gradient that the CPU will read for its update; the gradient
itself rests on the device. A `HostGradient` lets a gradient rest on the host altogether: it lands in one of a few
buffers on the device, where its norm is taken, and goes down from there; a later pass brings it up again to add to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zerostd.monitoring import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers import Done, Streams, Transfer, record_event
from zerostd.tiers.debug import DEBUG
from zerostd.tiers.host import Host

__all__ = ["HostGradient", "HostGradientCopy", "Staging"]

NUM_STAGING = 2
UP, DOWN = (Tier.HOST.value, Tier.DEVICE.value), (Tier.DEVICE.value, Tier.HOST.value)


class HostGradientCopy:
    """Parts of one gradient on the host. `is_current` until the gradient changes."""

    parts: tuple[slice, ...]  # of the region
    copies: list[torch.Tensor]  # one for each part, in the gradient's dtype
    arrived: Transfer

    def __init__(self, parts: Sequence[slice], dtype: torch.dtype, host: Host, streams: Streams) -> None:
        self.parts = tuple(parts)
        self.host = host
        self.streams = streams
        self.is_current = False
        self.is_overwritten = False  # by new parameters, which take the same way back
        self.arrived = Done()
        self.copies = [self._allocate(part.stop - part.start, dtype) for part in parts]

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.host.allocate(numel * dtype.itemsize, Kind.BUFFERS).view(dtype)

    def send(self, gradient: torch.Tensor) -> None:
        """Start copying the parts down; free if they are there already."""
        if self.is_current:
            return
        if self.copies and self.copies[0].dtype != gradient.dtype:  # a second pass has made it an fp32 sum
            for index, copy in enumerate(self.copies):
                self.host.free(copy)
                self.copies[index] = self._allocate(copy.numel(), gradient.dtype)
        size = sum(copy.nbytes for copy in self.copies)
        within = self.host.events.within("transfer", "gradients", "", size, way=DOWN, device=gradient.device)
        with self.streams.gradients.after(record_event(gradient.device)), within:
            for part, copy in zip(self.parts, self.copies, strict=True):
                copy.copy_(gradient[part], non_blocking=True)
            self.arrived = self.streams.gradients.record_event()
        self.is_current = True

    def close(self) -> None:
        """Give the host's memory back."""
        self.arrived.synchronize()
        for copy in self.copies:
            self.host.free(copy)
        self.copies = []

    def copy_of(self, part: slice) -> torch.Tensor:
        """The copy of elements of the region, all of which lie in one of the parts."""
        for whole, copy in zip(self.parts, self.copies, strict=True):
            if whole.start <= part.start and part.stop <= whole.stop:
                return copy[part.start - whole.start : part.stop - whole.start]
        raise AssertionError(f"elements {part.start} to {part.stop} have no copy on the host")


@dataclass(eq=False)
class Staging:
    """Buffers on the device that gradients pass through on their way down; one fills while another empties."""

    memories: list[torch.Tensor] = field(default_factory=list)
    free: list[Transfer] = field(default_factory=list)
    turn: int = 0

    def reserve(self, num_bytes: int, device: torch.device, ledger: Ledger) -> None:
        """Make the buffers at least this large."""
        if self.memories and self.memories[0].nbytes >= num_bytes:
            return
        for free in self.free:
            free.wait()  # what is on its way down must have left before the memory can be another tensor's
        ledger.leave(Kind.BUFFERS, sum(memory.nbytes for memory in self.memories))
        self.memories = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_STAGING)]
        self.free = [Done() for _ in range(NUM_STAGING)]
        ledger.enter(Kind.BUFFERS, num_bytes * NUM_STAGING)


class HostGradient:
    """Keeps one gradient on the host."""

    norm: torch.Tensor | None  # on the device, of what landed last; None if it has changed since
    kept: Transfer

    def __init__(self, staging: Staging, streams: Streams, ledger: Ledger) -> None:
        self.staging = staging
        self.streams = streams
        self.ledger = ledger
        self.norm = None
        self.kept = Done()
        self._slot = 0

    def open(self, rest: torch.Tensor, device: torch.device, *, accumulate: bool) -> torch.Tensor:
        """A buffer on the device to land in; with `accumulate` it holds what rests already."""
        staging = self.staging
        staging.reserve(rest.nbytes, device, self.ledger)
        self._slot = staging.turn = (staging.turn + 1) % NUM_STAGING
        buffer = staging.memories[self._slot][: rest.nbytes].view(rest.dtype)
        free = staging.free[self._slot]
        free.wait()
        if accumulate:
            within = self.ledger.events.within("transfer", "gradients", "", rest.nbytes, way=UP, device=device)
            with self.streams.gradients.after(record_event(device)), within:  # in `up` it would hold up parameters
                buffer.copy_(rest, non_blocking=True)
                mark = self.streams.gradients.record_event()
            mark.wait()
        return buffer

    def close(self, buffer: torch.Tensor, rest: torch.Tensor) -> None:
        """What landed goes down to where it rests."""
        self.norm = torch.linalg.vector_norm(buffer, dtype=torch.promote_types(buffer.dtype, torch.float32)).float()
        within = self.ledger.events.within("transfer", "gradients", "", rest.nbytes, way=DOWN, device=buffer.device)
        with self.streams.gradients.after(record_event(buffer.device)), within:
            rest.copy_(buffer, non_blocking=True)
            DEBUG.poison(buffer)
            self.kept = self.staging.free[self._slot] = self.streams.gradients.record_event()

    def bring(self, part: torch.Tensor, target: torch.Tensor) -> None:
        """Bring a part of what rests up, as it is, and convert it there: a copy that does both holds the host."""
        staging = self.staging
        slot = staging.turn = (staging.turn + 1) % NUM_STAGING
        buffer = staging.memories[slot][: part.nbytes].view(part.dtype)
        within = self.ledger.events.within("transfer", "gradients", "", part.nbytes, way=UP, device=buffer.device)
        with self.streams.gradients.after(staging.free[slot]), within:
            buffer.copy_(part, non_blocking=True)
            mark = self.streams.gradients.record_event()
        mark.wait()
        target.copy_(buffer)
        staging.free[slot] = record_event(buffer.device)
