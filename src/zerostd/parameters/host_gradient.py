"""A gradient that is kept on the host.

Where the device has memory of its own, the gradient lands in staging on the device, where its norm is taken, and goes
down from there; a later pass brings it up again to add to it. Without staging, device and host have the same memory and
nothing is copied. The reducer uses `Staging` too, on the way to the wires.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from zerostd.monitoring import Ledger
from zerostd.parameters.gradient import DOWN, Gradient, vector_norm
from zerostd.policy import Kind, Tier
from zerostd.tiers import Done, Streams, Transfer, record_event
from zerostd.tiers.debug import poison

UP = (Tier.HOST.value, Tier.DEVICE.value)
NUM_STAGING = 2


class Staging:
    """`NUM_STAGING` buffers on the device that gradients pass through in turn: one fills while another empties. The
    first takes the largest gradient that passes, the second any other. `give_back` gives their memory back until the
    next one passes."""

    def __init__(self) -> None:
        self._memories: list[torch.Tensor] = []
        self._free: list[Transfer] = []  # by buffer: when what passes through it has left
        self._turn = 0
        self._ledger: Ledger | None = None

    def reserve(self, sizes: Sequence[int], device: torch.device, ledger: Ledger) -> None:
        """Grow the buffers to at least these sizes."""
        if self._memories and all(memory.nbytes >= s for memory, s in zip(self._memories, sizes, strict=True)):
            return
        self.give_back()
        self._ledger = ledger
        self._memories = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        ledger.enter(Kind.BUFFERS, sum(sizes))

    @staticmethod
    def sizes(passing: Iterable[int]) -> list[int]:
        """Return the bytes of the buffers for gradients of these sizes."""
        return [*sorted(passing, reverse=True), *([0] * NUM_STAGING)][:NUM_STAGING]

    def take(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.Tensor, Transfer]:
        """Return the number of the next buffer, a tensor in it, and the transfer after which it may be written."""
        self._turn = (self._turn + 1) % NUM_STAGING
        if self._memories[self._turn].nbytes < numel * dtype.itemsize:
            self._turn = 0
        memory = self._memories[self._turn]
        if memory.untyped_storage().nbytes() == 0:
            assert self._ledger is not None
            memory.untyped_storage().resize_(memory.nbytes)
            self._ledger.enter(Kind.BUFFERS, memory.nbytes)
        return self._turn, memory[: numel * dtype.itemsize].view(dtype), self._free[self._turn]

    def occupy(self, number: int, until: Transfer) -> None:
        """Keep a buffer from being written until a transfer is over."""
        self._free[number] = until

    def empty(self) -> None:
        """Forget the buffers. The gradients that pass next make them as large as they need."""
        self.give_back()
        self._memories = []

    def give_back(self) -> None:
        """Free the memory. Gradients in it must have left before another tensor can use it."""
        for free in self._free:
            free.wait()
        self._free = [Done() for _ in range(NUM_STAGING)]
        for memory in self._memories:
            assert self._ledger is not None
            self._ledger.leave(Kind.BUFFERS, memory.untyped_storage().nbytes())
            memory.untyped_storage().resize_(0)


@dataclass(eq=False, repr=False, kw_only=True)
class HostGradient(Gradient):
    """One flat gradient, which is kept on the host."""

    tier = Tier.HOST
    streams: Streams
    staging: Staging | None  # None: the device has no memory of its own
    _landing: int = field(init=False, default=0)  # the staging buffer that was opened last
    _norm: torch.Tensor | None = field(init=False, default=None)  # of what landed last, on the device; None: unknown

    def __post_init__(self) -> None:
        super().__post_init__()
        self.comes_up = self.staging is not None
        self._events = self.allocator.host.events

    def give_back(self) -> None:
        """Keep the memory: pinning it again would delay every step."""

    def take_memory(self) -> None:
        """Do nothing: the memory is there."""

    def _allocate_rest(self, dtype: torch.dtype) -> torch.Tensor:
        return self.allocator.host.allocate(self.numel * dtype.itemsize, Kind.GRADIENTS).view(dtype)

    def _free(self, tensor: torch.Tensor) -> None:
        self.allocator.host.free(tensor)

    def reserve(self) -> None:
        """Allocate host memory now: pinning memory in the middle of a step would delay the step. From any thread."""
        self._kept()

    def reserve_landing(self) -> None:
        """Let staging be large enough for this gradient."""
        if self.staging is not None:
            sizes = [self._kept().nbytes] * NUM_STAGING
            self.staging.reserve(sizes, self.allocator.device, self.allocator.ledger)

    def open_landing(self, *, accumulate: bool) -> torch.Tensor:
        """Return memory on the device to land in; with `accumulate` it holds the gradient already."""
        rest = super().open_landing(accumulate=accumulate)
        if self.staging is None:
            return rest
        self.reserve_landing()
        self._landing, buffer, free = self.staging.take(rest.numel(), rest.dtype)
        free.wait()
        if accumulate:  # in the stream of gradients: in `up` it would hold up parameters
            within = self._events.within("transfer", "gradients", "", rest.nbytes, way=UP, device=buffer.device)
            with self.streams.gradients.after(record_event(buffer.device)), within:
                buffer.copy_(rest, non_blocking=True)
                arrived = self.streams.gradients.record_event()
            arrived.wait()
        return buffer

    def close_landing(self, landed: torch.Tensor) -> None:
        """Take the norm of the gradient that landed, and start copying it down."""
        if self.staging is None:
            return
        rest = self.current
        self._norm = vector_norm(landed, 2.0)
        within = self._events.within("transfer", "gradients", "", rest.nbytes, way=DOWN, device=landed.device)
        with self.streams.gradients.after(record_event(landed.device)), within:
            rest.copy_(landed, non_blocking=True)
            poison(landed)
            self.arrived = self.streams.gradients.record_event()
            self.staging.occupy(self._landing, until=self.arrived)

    def changed(self) -> None:
        """Forget the norm."""
        self._norm = None

    def norm(self, order: float, part: slice | None = None) -> torch.Tensor:
        """Return the norm of the region, or of a part of it. The norm of the gradient that landed last is known."""
        if part is None and self._norm is not None and order == 2.0:
            return self._norm
        return super().norm(order, part)

    def copy_to(self, target: torch.Tensor, region: slice) -> None:
        """Send a part to the device and convert it there: a copy that does both would block the host."""
        part = self.current[region]
        if self.staging is None:
            target.copy_(part)
            return
        number, buffer, free = self.staging.take(part.numel(), part.dtype)
        within = self._events.within("transfer", "gradients", "", part.nbytes, way=UP, device=buffer.device)
        with self.streams.gradients.after(free), within:
            buffer.copy_(part, non_blocking=True)
            arrived = self.streams.gradients.record_event()
        arrived.wait()
        target.copy_(buffer)
        self.staging.occupy(number, until=record_event(buffer.device))
