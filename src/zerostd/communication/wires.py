"""The bulk collectives: gather a flat buffer from its slices, reduce one to the mean of its slices.

In come flat buffers as long as the layout says and this rank's slice of them; out comes a `Transfer`. Nothing is
copied in or out. Two wirings of the same verbs: gloo for the CPU, nccl for devices with streams. Every byte this rank
sends is entered in the ledger.

[Note: gloo] gloo's own all-gather passes slices around a ring and its reduce-scatter is an all-reduce; a broadcast per
slice and an all-to-all with a sum in rank order move the same bytes in a third of the time, and the sum has one
order whatever the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerostd.communication.world import Channels, World, thread_budget
from zerostd.errors import PrepareError
from zerostd.kernels import sum_slices
from zerostd.monitoring import Ledger
from zerostd.policy import Kind
from zerostd.tiers import Done, StreamEvent, Transfer

Start = Callable[[], Transfer]  # of a collective


class Collective(Transfer):
    """Collectives of gloo in flight, and what this thread does when they have landed: sum, or start another one."""

    def __init__(
        self, world: World, works: list[dist.Work], finish: Callable[[], Transfer | None] | None = None
    ) -> None:
        self._world = world
        self._works = works
        self._finish = finish
        self._next: Transfer | None = None

    def wait(self) -> None:
        self.land()
        if self._next is not None:
            self._next.wait()

    def is_done(self) -> bool:
        if self._finish is not None or not all(work.is_completed() for work in self._works):
            return False
        return self._next is None or self._next.is_done()

    def land(self) -> None:
        """Hold the host until the receive buffer is free: what came in has been used, and the next is on its way."""
        works = self._works
        self._works = []
        with self._world.waiting():
            for work in works:
                work.wait()
        finish = self._finish
        self._finish = None
        if finish is not None:
            self._next = finish()


class Wires:
    """The collectives of one prepared model. In a world of one they return at once."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.world = world
        self.ledger = ledger
        self.in_backward = False  # gathers are those of a backward pass
        self._num_threads = thread_budget(world.local_size)
        self._receive = torch.empty(0, dtype=torch.uint8, device=world.device)
        self._receiving: Collective | None = None  # the last one that uses the receive buffer; without a stream
        has_stream = world.device.type != "cpu" and world.size > 1
        self._stream = torch.Stream(world.device) if has_stream else None

    @property
    def _channels(self) -> Channels:
        assert self.world.channels is not None
        return self.world.channels

    @property
    def _gathering(self) -> dist.ProcessGroup:
        return self._channels.regather if self.in_backward else self._channels.gather

    @staticmethod
    def buffer_bytes(largest: int, world_size: int, *, has_streams: bool) -> int:
        """Return the bytes of the receive buffer; the largest flat buffer that will be reduced has `largest`."""
        needed = largest // world_size if has_streams else largest
        return needed if world_size > 1 else 0

    def reserve(self, largest: int) -> None:
        """Allocate the receive buffer."""
        num_bytes = self.buffer_bytes(largest, self.world.size, has_streams=self._stream is not None)
        if num_bytes:
            self._receive = torch.empty(num_bytes, dtype=torch.uint8, device=self.world.device)
            self.ledger.enter(Kind.BUFFERS, num_bytes)

    def gather(self, full: torch.Tensor, shard: torch.Tensor | None = None) -> Transfer:
        """Start filling `full` with the slices of all ranks; `shard` is mine, by default my slice of `full`."""
        if self.world.channels is None:
            return Done()
        if shard is None:
            shard = full.view(self.world.size, -1)[self.world.rank]
        if self._stream is not None:
            self.ledger.sent["gather"] += shard.nbytes * (self.world.size - 1)
            return self._on_stream(lambda: dist.all_gather_into_tensor(full, shard, group=self._gathering))
        return self._spread(full, shard, "gather")

    def reduce(self, full: torch.Tensor, land: torch.Tensor, *, accumulate: bool = False) -> Transfer:
        """Start writing the mean over ranks of my slice of `full` to `land`, or adding it. `full` must stay untouched
        until the wait; one reduce is in flight at a time, the next waits for it."""
        if self._stream is None:
            return self._collect(full, land, accumulate=accumulate)
        num_bytes = full.nbytes // self.world.size
        self.ledger.sent["reduce"] += num_bytes * (self.world.size - 1)
        received = self._receive[:num_bytes].view(full.dtype)

        def run() -> None:
            dist.reduce_scatter_tensor(received, full, op=dist.ReduceOp.AVG, group=self._channels.reduce)
            if accumulate:
                land.add_(received)
            else:
                land.copy_(received)

        return self._on_stream(run)  # the next reduce is ordered behind this one by the stream

    def reduce_everywhere(self, full: torch.Tensor) -> Transfer:
        """Start replacing `full` by its mean over ranks: reduce my slice, then send everyone's slices to everyone."""
        mine = full.view(self.world.size, -1)[self.world.rank]
        if self._stream is not None:
            self.ledger.sent["reduce"] += 2 * mine.nbytes * (self.world.size - 1)
            return self._on_stream(lambda: dist.all_reduce(full, dist.ReduceOp.AVG, group=self._channels.reduce))
        return self._collect(full, mine, then=lambda: self._spread(full, mine, "reduce"))

    def _collect(
        self, full: torch.Tensor, land: torch.Tensor, *, accumulate: bool = False, then: Start | None = None
    ) -> Transfer:
        """Sum everyone's version of my slice, by gloo, and start what comes `then`; see [Note: gloo]."""
        size = self.world.size
        if self._receiving is not None:
            self._receiving.land()
        self.ledger.sent["reduce"] += full.nbytes // size * (size - 1)
        received = self._receive[: full.nbytes].view(full.dtype)
        sent = full.view(torch.uint8)  # gloo has no all-to-all for every dtype
        group = self._channels.reduce
        with self.world.waiting():
            work = dist.all_to_all_single(received.view(torch.uint8), sent, group=group, async_op=True)

        def finish() -> Transfer | None:
            sum_slices(received, size, 1.0 / size, land, accumulate=accumulate, num_threads=self._num_threads)
            return None if then is None else then()

        self._receiving = Collective(self.world, [work], finish)
        return self._receiving

    def _spread(self, full: torch.Tensor, shard: torch.Tensor, verb: str) -> Transfer:
        """Send everyone's slice to everyone, by gloo; see [Note: gloo]."""
        self.ledger.sent[verb] += shard.nbytes * (self.world.size - 1)
        group = self._gathering if verb == "gather" else self._channels.reduce
        slices = full.view(self.world.size, -1)
        mine = slices[self.world.rank]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        with self.world.waiting():
            works = [dist.broadcast(part, group_src=r, group=group, async_op=True) for r, part in enumerate(slices)]
        return Collective(self.world, [work for work in works if work is not None])

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small tensor over ranks, in place, on the current stream."""
        return self._reduce_scalars(value, dist.ReduceOp.SUM)

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """Return the maximum of a small tensor over ranks, in place, on the current stream."""
        return self._reduce_scalars(value, dist.ReduceOp.MAX)

    def _reduce_scalars(self, value: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.world.channels is not None:
            with self.world.waiting():
                dist.all_reduce(value, operation, group=self.world.channels.scalars)
            self.ledger.sent["scalars"] += value.nbytes
        return value

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send rank 0's values to all, in place, one message per dtype."""
        if self.world.channels is None:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            with self.world.waiting():
                dist.broadcast(flat.view(torch.uint8), group_src=0, group=self.world.channels.broadcast)
            for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def _on_stream(self, run: Callable[[], object]) -> Transfer:
        """Run collectives of nccl in the stream of the wires, behind what is in the current one."""
        assert self._stream is not None
        self._stream.wait_stream(torch.accelerator.current_stream(self.world.device))
        with self._stream, self.world.waiting():
            run()
        return StreamEvent(self._stream, self.world.device)


def wires_to_peers(group: Any, world: World, ledger: Ledger) -> Wires | None:
    """Return wires to the ranks that compute the same activations, each of which keeps a slice; None if alone."""
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise PrepareError(
            f"Placement(same_activations={group!r}) must be a process group that this rank is in, as "
            "torch.distributed.new_group returns it"
        )
    return Wires(world.inside(group), ledger) if dist.get_world_size(group) > 1 else None
