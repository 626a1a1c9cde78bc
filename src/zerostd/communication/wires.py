"""The bulk collectives: gather a flat buffer from its slices, reduce one to the mean of its slices.

In come flat buffers as long as the layout says and this rank's slice of them; out comes a `Pending`. Nothing is
copied in or out. Two wirings of the same verbs: gloo for the CPU, nccl for devices with streams. Every byte this rank
sends is entered in the ledger.

[Note: gloo] gloo's own all-gather passes slices around a ring and its reduce-scatter is an all-reduce; a broadcast per
slice and an all-to-all with a sum in rank order move the same bytes in a third of the time, and the sum has one
order whatever the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from zerostd.communication.world import World, thread_budget
from zerostd.kernels import sum_slices
from zerostd.monitoring import Ledger
from zerostd.policy import Kind

__all__ = ["Done", "Pending", "Wires"]


class Pending(Protocol):
    """Work in flight. `wait` returns when its result may be used on the current stream; more than once is free."""

    def wait(self) -> None: ...


class Done:
    """Nothing to wait for."""

    def wait(self) -> None:
        return None


class Works:
    """torch works in flight, then a last action on this thread."""

    def __init__(self, works: list[dist.Work], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def then(self, action: Callable[[], None]) -> None:
        """Add an action behind the last one."""
        finish = self._finish

        def both() -> None:
            if finish is not None:
                finish()
            action()

        self._finish = both


class Relay:
    """Two works in a row: the second starts when the first has landed, at the latest in `wait`."""

    def __init__(self, first: Works, start_second: Callable[[], Pending]) -> None:
        self._first = first
        self._second: Pending | None = None
        first.then(lambda: setattr(self, "_second", start_second()))

    def wait(self) -> None:
        self._first.wait()
        assert self._second is not None
        self._second.wait()


class Event:
    """Work queued on a side stream."""

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)


class Wires:
    """Both verbs for one prepared model. A world of one has no wires: its verbs return at once."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.world = world
        self.ledger = ledger
        self._num_threads = thread_budget(world.local_size)
        self._receive = torch.empty(0, dtype=torch.uint8, device=world.device)
        self._receiving: Pending = Done()
        has_streams = world.device.type != "cpu"
        self._stream = torch.Stream(world.device) if has_streams and world.size > 1 else None

    def reserve(self, num_bytes: int) -> None:
        """Allocate the receive buffer, as large as the largest flat buffer that will be reduced."""
        slices = 1 if self._stream is None else self.world.size
        if self.world.size > 1:
            self._receive = torch.empty(num_bytes // slices, dtype=torch.uint8, device=self.world.device)
            self.ledger.enter(Kind.BUFFERS, self._receive.nbytes)

    def gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Fill `full` with the slices of all ranks; `shard` is mine and may be a view of its place in `full`."""
        world, channels = self.world, self.world.channels
        if channels is None:
            return Done()
        if self._stream is not None:
            self.ledger.record_sent("gather", shard.nbytes * (world.size - 1))
            return self._on_stream(lambda: dist.all_gather_into_tensor(full, shard, group=channels.gather))
        return self._spread(full, shard, "gather")

    def reduce(self, full: torch.Tensor, land: torch.Tensor, *, accumulate: bool = False) -> Pending:
        """The mean over ranks of my slice of `full`, written to `land` or added to it.

        `full` must stay untouched until the wait; one reduce is in flight at a time, the next waits for it.
        """
        world, channels = self.world, self.world.channels
        assert channels is not None
        if self._stream is None:  # on a stream the next reduce is ordered behind the last by itself
            self._receiving.wait()
        self.ledger.record_sent("reduce", full.nbytes // world.size * (world.size - 1))
        received = self._receive[: full.nbytes // (1 if self._stream is None else world.size)].view(full.dtype)
        if self._stream is not None:

            def run() -> None:
                dist.reduce_scatter_tensor(received, full, op=dist.ReduceOp.AVG, group=channels.reduce)
                if accumulate:
                    land.add_(received)
                else:
                    land.copy_(received)

            self._receiving = self._on_stream(run)
            return self._receiving
        work = dist.all_to_all_single(_bytes(received), _bytes(full), group=channels.reduce, async_op=True)
        self._receiving = Works(
            [work],
            lambda: sum_slices(
                received, world.size, 1.0 / world.size, land, accumulate=accumulate, num_threads=self._num_threads
            ),
        )
        return self._receiving

    def reduce_everywhere(self, full: torch.Tensor) -> Pending:
        """The mean over ranks of all of `full`, in place: reduce my slice, then everyone's slices to everyone."""
        channels, size = self.world.channels, self.world.size
        assert channels is not None
        mine = full.view(size, -1)[self.world.rank]
        if self._stream is not None:
            self.ledger.record_sent("reduce", 2 * mine.nbytes * (size - 1))
            return self._on_stream(lambda: dist.all_reduce(full, dist.ReduceOp.AVG, group=channels.reduce))
        reduced = self.reduce(full, mine)
        assert isinstance(reduced, Works)
        return Relay(reduced, lambda: self._spread(full, mine, "reduce"))

    def _spread(self, full: torch.Tensor, shard: torch.Tensor, verb: str) -> Pending:
        """Everyone's slice to everyone, by gloo; see [Note: gloo]."""
        world, channels = self.world, self.world.channels
        assert channels is not None
        self.ledger.record_sent(verb, shard.nbytes * (world.size - 1))
        group = channels.gather if verb == "gather" else channels.reduce
        slices = full.view(world.size, -1)
        if slices[world.rank].data_ptr() != shard.data_ptr():
            slices[world.rank].copy_(shard)
        works = [dist.broadcast(slices[r], group_src=r, group=group, async_op=True) for r in range(world.size)]
        return Works([work for work in works if work is not None])

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a small tensor over ranks, in place, on the current stream."""
        if self.world.channels is not None:
            dist.all_reduce(value, group=self.world.channels.reduce)
            self.ledger.record_sent("scalars", value.nbytes)
        return value

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """The maximum of a small tensor over ranks, in place, on the current stream."""
        if self.world.channels is not None:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.world.channels.reduce)
            self.ledger.record_sent("scalars", value.nbytes)
        return value

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Rank 0's values to all, in place, one message per dtype."""
        if self.world.channels is None:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            dist.broadcast(flat, group_src=0, group=self.world.channels.gather)
            for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def _on_stream(self, run: Callable[[], object]) -> Pending:
        assert self._stream is not None
        device = self.world.device
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            run()
        return Event(self._stream.record_event(), device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """gloo has no all-to-all for every dtype; it has one for bytes."""
    return tensor.view(torch.uint8)
