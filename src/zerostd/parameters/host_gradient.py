"""Gradients and host memory: the two ways in which the host may hold a gradient, or a part of it.

A `HostGradientCopy` is the host's copy of those parts of a gradient that the CPU reads for its update; the gradient
itself rests on the device. A `HostGradient` keeps a gradient on the host altogether. Where the device has memory of its
own, the gradient lands in staging on the device, where its norm is taken, and goes down from there; a later pass brings
it up again to add to it. `Gradient` calls both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerostd.monitoring import Ledger
from zerostd.parameters.staging import Staging
from zerostd.policy import Kind, Tier
from zerostd.tiers import Done, Streams, Transfer, record_event
from zerostd.tiers.debug import poison
from zerostd.tiers.host import Host

UP = (Tier.HOST.value, Tier.DEVICE.value)
DOWN = (Tier.DEVICE.value, Tier.HOST.value)


class HostGradientCopy:
    """Parts of one gradient on the host."""

    parts: tuple[slice, ...]  # of the region
    arrived: Transfer  # the last copy

    def __init__(self, parts: Sequence[slice], dtype: torch.dtype, host: Host, streams: Streams) -> None:
        self.parts = tuple(parts)
        self.arrived = Done()
        self._host = host
        self._streams = streams
        self._is_current = False  # until the gradient changes
        self._is_overwritten = False  # by new parameters, which take the same way back
        self._copies = [self._allocate(part.stop - part.start, dtype) for part in parts]

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._host.allocate(numel * dtype.itemsize, Kind.BUFFERS).view(dtype)

    def send(self, gradient: torch.Tensor) -> None:
        """Start copying the parts down; free if they are there already."""
        if self._is_current:
            return
        if self._copies and self._copies[0].dtype != gradient.dtype:  # a second pass has made it an fp32 sum
            for index, copy in enumerate(self._copies):
                self._host.free(copy)
                self._copies[index] = self._allocate(copy.numel(), gradient.dtype)
        size = sum(copy.nbytes for copy in self._copies)
        within = self._host.events.within("transfer", "gradients", "", size, way=DOWN, device=gradient.device)
        with self._streams.gradients.after(record_event(gradient.device)), within:
            for part, copy in zip(self.parts, self._copies, strict=True):
                copy.copy_(gradient[part], non_blocking=True)
            self.arrived = self._streams.gradients.record_event()
        self._is_current = True

    def copy_of(self, part: slice) -> torch.Tensor:
        """Return the copy of elements of the region, all of which lie in one of the parts."""
        for whole, copy in zip(self.parts, self._copies, strict=True):
            if whole.start <= part.start and part.stop <= whole.stop:
                return copy[part.start - whole.start : part.stop - whole.start]
        raise AssertionError(f"elements {part.start} to {part.stop} have no copy on the host")

    def overwrite(self, part: slice) -> torch.Tensor:
        """Return `copy_of(part)` to somebody who has read it and writes something else there."""
        self._is_overwritten = True
        return self.copy_of(part)

    def drop_overwritten(self) -> None:
        """Expect no gradient any more in a copy that was overwritten."""
        if self._is_overwritten:
            self._is_current = False
            self._is_overwritten = False

    def expire(self) -> None:
        """Expect that the gradient has changed: the next `send` copies it again."""
        self._is_current = False

    def close(self) -> None:
        """Give the host's memory back."""
        self.arrived.synchronize()
        for copy in self._copies:
            self._host.free(copy)
        self._copies = []


class HostGradient:
    """Keeps one gradient on the host. Without staging, device and host have the same memory: nothing is copied."""

    norm: torch.Tensor | None  # on the device, of what landed last; None if it is not known or not current
    arrived: Transfer  # the last copy down

    def __init__(self, host: Host, streams: Streams, ledger: Ledger, staging: Staging | None) -> None:
        self.norm = None
        self.arrived = Done()
        self._host = host
        self._ledger = ledger
        self._streams = streams
        self._staging = staging
        self._landing = 0  # the staging buffer that was opened last

    @property
    def comes_up(self) -> bool:
        """Whether the device has memory of its own, so that the gradient must be brought up to be used there."""
        return self._staging is not None

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory for the gradient."""
        return self._host.allocate(numel * dtype.itemsize, Kind.GRADIENTS).view(dtype)

    def free(self, rest: torch.Tensor) -> None:
        """Give back what `allocate` returned."""
        self._host.free(rest)

    def reserve(self, num_bytes: int) -> None:
        """Make staging large enough for a gradient of so many bytes."""
        if self._staging is not None:
            self._staging.reserve(num_bytes, self._host.device, self._ledger)

    def open_landing(self, rest: torch.Tensor, *, accumulate: bool) -> torch.Tensor:
        """Return memory on the device to land in; with `accumulate` it holds the gradient already."""
        staging = self._staging
        if staging is None:
            return rest
        self.reserve(rest.nbytes)
        self._landing = staging.take_turn()
        buffer = staging.buffer(self._landing, rest.numel(), rest.dtype)
        staging.free(self._landing).wait()
        if accumulate:
            within = self._host.events.within("transfer", "gradients", "", rest.nbytes, way=UP, device=buffer.device)
            with (
                self._streams.gradients.after(record_event(buffer.device)),
                within,
            ):  # in `up` it would hold up parameters
                buffer.copy_(rest, non_blocking=True)
                arrived = self._streams.gradients.record_event()
            arrived.wait()
        return buffer

    def close_landing(self, buffer: torch.Tensor, rest: torch.Tensor) -> None:
        """Take the norm of what landed, and start its way down."""
        if self._staging is None:
            return
        self.norm = torch.linalg.vector_norm(buffer, dtype=torch.promote_types(buffer.dtype, torch.float32)).float()
        within = self._host.events.within("transfer", "gradients", "", rest.nbytes, way=DOWN, device=buffer.device)
        with self._streams.gradients.after(record_event(buffer.device)), within:
            rest.copy_(buffer, non_blocking=True)
            poison(buffer)
            self.arrived = self._streams.gradients.record_event()
            self._staging.occupy(self._landing, until=self.arrived)

    def bring(self, part: torch.Tensor, target: torch.Tensor) -> None:
        """Bring a part up as it is and convert it there: one copy that does both would hold the host."""
        staging = self._staging
        if staging is None:
            target.copy_(part)
            return
        number = staging.take_turn()
        buffer = staging.buffer(number, part.numel(), part.dtype)
        within = self._host.events.within("transfer", "gradients", "", part.nbytes, way=UP, device=buffer.device)
        with self._streams.gradients.after(staging.free(number)), within:
            buffer.copy_(part, non_blocking=True)
            arrived = self._streams.gradients.record_event()
        arrived.wait()
        target.copy_(buffer)
        staging.occupy(number, until=record_event(buffer.device))
