"""Gradients and host memory: the two ways in which the host may hold a gradient, or a part of it.

A `HostGradientCopy` is the host's copy of those parts of a gradient that the CPU reads for its update; the gradient
itself rests on the device. A `HostGradient` keeps a gradient on the host altogether. Where the device has memory of its
own, the gradient lands in staging on the device, where its norm is taken, and goes down from there; a later pass brings
it up again to add to it. `Gradient` calls both. `Staging` is also what the reducer has on the way to the wires.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerostd.monitoring import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers import Done, Streams, Transfer, record_event
from zerostd.tiers.debug import DEBUG
from zerostd.tiers.host import Host

UP = (Tier.HOST.value, Tier.DEVICE.value)
DOWN = (Tier.DEVICE.value, Tier.HOST.value)
NUM_STAGING = 2


class Staging:
    """`NUM_STAGING` buffers on the device that gradients pass through in turn: one fills while another empties. Each is
    as large as the largest gradient that passes."""

    def __init__(self) -> None:
        self._memories: list[torch.Tensor] = []
        self._free: list[Transfer] = []  # by buffer: when what passes through it has left
        self._turn = 0

    def reserve(self, num_bytes: int, device: torch.device, ledger: Ledger) -> None:
        """Make the buffers at least this large."""
        if self._memories and self._memories[0].nbytes >= num_bytes:
            return
        for free in self._free:
            free.wait()  # what is on its way must have left before the memory can be another tensor's
        ledger.leave(Kind.BUFFERS, sum(memory.nbytes for memory in self._memories))
        self._memories = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_STAGING)]
        self._free = [Done() for _ in range(NUM_STAGING)]
        ledger.enter(Kind.BUFFERS, num_bytes * NUM_STAGING)

    def take(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.Tensor, Transfer]:
        """Return the number of the next buffer, a tensor in it, and the transfer after which it may be written."""
        self._turn = (self._turn + 1) % NUM_STAGING
        buffer = self._memories[self._turn][: numel * dtype.itemsize].view(dtype)
        return self._turn, buffer, self._free[self._turn]

    def occupy(self, number: int, until: Transfer) -> None:
        """Keep a buffer from being written until a transfer is over."""
        self._free[number] = until


class HostGradientCopy:
    """Parts of one gradient on the host."""

    parts: tuple[slice, ...]  # of the region
    arrived: Transfer  # the last copy
    is_current: bool  # until the gradient changes; then the next `send` copies it again

    def __init__(self, parts: Sequence[slice], dtype: torch.dtype, host: Host, streams: Streams) -> None:
        self.parts = tuple(parts)
        self.arrived = Done()
        self._host = host
        self._streams = streams
        self.is_current = False
        self._is_overwritten = False  # by new parameters, which take the same way back
        self._copies = [self._allocate(part.stop - part.start, dtype) for part in parts]

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._host.allocate(numel * dtype.itemsize, Kind.BUFFERS).view(dtype)

    def send(self, gradient: torch.Tensor) -> None:
        """Start copying the parts down; free if they are there already."""
        if self.is_current:
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
        self.is_current = True

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
        """Expect no gradient in what was overwritten: all updates that read it have been started."""
        if self._is_overwritten:
            self.is_current = False
            self._is_overwritten = False

    def close(self) -> None:
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
        self.host = host
        self._ledger = ledger
        self._streams = streams
        self._staging = staging
        self._landing = 0  # the staging buffer that was opened last

    @property
    def comes_up(self) -> bool:
        """Whether the device has memory of its own, so that the gradient must be brought up to be used there."""
        return self._staging is not None

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.host.allocate(numel * dtype.itemsize, Kind.GRADIENTS).view(dtype)

    def reserve(self, num_bytes: int) -> None:
        """Make staging large enough for a gradient of so many bytes."""
        if self._staging is not None:
            self._staging.reserve(num_bytes, self.host.device, self._ledger)

    def open_landing(self, rest: torch.Tensor, *, accumulate: bool) -> torch.Tensor:
        """Return memory on the device to land in; with `accumulate` it holds the gradient already."""
        staging = self._staging
        if staging is None:
            return rest
        self.reserve(rest.nbytes)
        self._landing, buffer, free = staging.take(rest.numel(), rest.dtype)
        free.wait()
        if accumulate:  # in the stream of gradients: in `up` it would hold up parameters
            within = self.host.events.within("transfer", "gradients", "", rest.nbytes, way=UP, device=buffer.device)
            with self._streams.gradients.after(record_event(buffer.device)), within:
                buffer.copy_(rest, non_blocking=True)
                arrived = self._streams.gradients.record_event()
            arrived.wait()
        return buffer

    def close_landing(self, buffer: torch.Tensor, rest: torch.Tensor) -> None:
        """Take the norm of what landed, and start its way down."""
        if self._staging is None:
            return
        self.norm = vector_norm(buffer, 2.0)
        within = self.host.events.within("transfer", "gradients", "", rest.nbytes, way=DOWN, device=buffer.device)
        with self._streams.gradients.after(record_event(buffer.device)), within:
            rest.copy_(buffer, non_blocking=True)
            DEBUG.poison(buffer)
            self.arrived = self._streams.gradients.record_event()
            self._staging.occupy(self._landing, until=self.arrived)

    def bring(self, part: torch.Tensor, target: torch.Tensor) -> None:
        """Bring a part up as it is and convert it there: one copy that does both would hold the host."""
        staging = self._staging
        if staging is None:
            target.copy_(part)
            return
        number, buffer, free = staging.take(part.numel(), part.dtype)
        within = self.host.events.within("transfer", "gradients", "", part.nbytes, way=UP, device=buffer.device)
        with self._streams.gradients.after(free), within:
            buffer.copy_(part, non_blocking=True)
            arrived = self._streams.gradients.record_event()
        arrived.wait()
        target.copy_(buffer)
        staging.occupy(number, until=record_event(buffer.device))


def vector_norm(tensor: torch.Tensor, order: float) -> torch.Tensor:
    """Return a norm in fp32, computed in fp32 or wider."""
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, order, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm.float()
