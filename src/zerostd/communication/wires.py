"""The bulk collectives: gather a flat buffer from its slices, reduce one to the mean, or the sum, of its slices.

The inputs are flat buffers of the layout's length and this rank's slice of them; the result is a `Transfer`. Nothing is
copied in or out. Two wirings of the same verbs: gloo for the CPU, nccl for devices with streams; between CPU ranks of
one host, shared_wires.py. Every byte this rank sends is entered in the ledger.

[Note: gloo] gloo's own all-gather passes slices around a ring and its reduce-scatter is an all-reduce; a broadcast per
slice and an all-to-all with a sum in rank order move the same bytes in a third of the time, and the sum has one
order whatever the timing. Between hosts a ring it is: a broadcast takes slices to a host for each of its ranks, and a
ring once.

[Note: streams] On a device gathers and reduces have a stream each: in backward the next gather does not wait for the
last reduce. A reduce writes straight to the gradient's home, unless it is added to what is there.

[Note: replicas] Where the model state has several replicas, a gradient is reduced to slices among the ranks that share
one replica, and each slice is then averaged over replicas. Only slices cross from replica to replica.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from zerostd.communication.world import Channels, World, thread_budget
from zerostd.errors import PrepareError
from zerostd.kernels import sum_slices
from zerostd.monitoring import Ledger
from zerostd.policy import Kind
from zerostd.tiers import Done, StreamEvent, Transfer, record_event

Start = Callable[[], Transfer]  # of a collective
WriteMean = Callable[..., None]  # (out, *, accumulate): writes the mean of received slices to `out`, or adds it
# Torch 2.13 deprecates the names that older releases have.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
REPLICAS = "replicas"  # the ledger's entry for bytes from replica to replica


class Collective(Transfer):
    """Collectives of gloo in flight, and the work that follows them in this thread: a sum, or another collective.

    If one fails, it and those behind it stay in flight: gloo may still write to their memory when other ranks go on.
    Every later wait raises, too, so nobody frees that memory, or takes what is there for values."""

    def __init__(
        self, world: World, works: list[dist.Work], finish: Callable[[], Transfer | None] | None = None
    ) -> None:
        self.world = world
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
        with self.world.waiting() as wait:
            while self._works:
                if self.world.link is None:
                    wait(self._works[0])
                else:  # messages between two ranks, which do not say whether they have arrived
                    self._works[0].wait()
                del self._works[0]
        if self._finish is not None:
            self._next = self._finish()
            self._finish = None
        if isinstance(self._next, Collective) and self._next._finish is not None:
            self._next.land()


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as twice as many real ones, in the same memory: not every backend sums complex numbers."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


class Wires:
    """The collectives of one prepared model. In a world of one they return at once."""

    gather_entry: ClassVar[str] = "gather"  # of the ledger, for the bytes of parameters

    def __init__(self, world: World, ledger: Ledger, entry: str = "reduce", *, sums: bool = False) -> None:
        self.world = world
        self.ledger = ledger
        self.sums = sums  # gradients of ranks are added up, not averaged
        self.is_alone = world.is_alone  # no gradient is to be sent
        self._entry = entry  # of the ledger, for the bytes of gradients
        self.in_backward = False  # gathers are those of a backward pass
        self.rounds_weights = False  # on their way to a forward or a backward
        self.feeds_back = False  # `feed` takes a tensor for what coding loses of a gradient
        self._num_threads = thread_budget(world.local_size)
        self._receive = torch.empty(0, dtype=torch.uint8, device=world.device)
        self._receiving: Collective | None = None  # the last one that uses the receive buffer; without streams
        self._largest_slice = 0  # bytes of the largest gradient that is received
        has_streams = world.device.type != "cpu" and not world.is_alone
        # See [Note: streams]. Compute waits for gathers, so they come first.
        self._gathers = torch.Stream(world.device, priority=-1) if has_streams else None
        self._reduces = torch.Stream(world.device) if has_streams else None
        replicas = None if world.channels is None else world.channels.replicas
        # See [Note: replicas].
        self._across = None if replicas is None else self._like(world.inside(replicas), ledger, REPLICAS)

    def _like(self, world: World, ledger: Ledger, entry: str) -> Self:
        """Return wires of the same kind between other ranks."""
        return type(self)(world, ledger, entry, sums=self.sums)

    @property
    def _channels(self) -> Channels:
        assert self.world.channels is not None
        return self.world.channels

    @property
    def _operation(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.SUM if self.sums else dist.ReduceOp.AVG

    @functools.cached_property
    def _hosts(self) -> set[str]:
        """The hosts of the ranks that share a replica, see `host_name`."""
        return {self._channels.peers.hosts[rank] for rank in dist.get_process_group_ranks(self._channels.reduce)}

    @property
    def _gathering(self) -> dist.ProcessGroup:
        return self._channels.regather if self.in_backward else self._channels.gather

    @classmethod
    def buffer_bytes(cls, largest: int, num_shards: int, num_replicas: int = 1, *, has_streams: bool) -> int:
        """Return the bytes of receive buffers; the largest flat buffer that will be reduced has `largest`."""
        if num_shards * num_replicas == 1:
            return 0
        mine = largest // num_shards
        if has_streams:
            return mine
        across = mine + cls._exchanged_bytes(mine)  # the slice that replicas average, and what they send
        return cls._exchanged_bytes(largest) + (across if num_replicas > 1 else 0)

    @staticmethod
    def _exchanged_bytes(num_bytes: int) -> int:
        """Return the bytes that gloo receives while a buffer of `num_bytes` is exchanged."""
        return num_bytes

    def reserve(self, largest: int) -> None:
        """Allocate receive buffers."""
        mine = largest // self.world.num_shards
        self._largest_slice = mine
        if self._reduces is not None:  # the buffer is made when a gradient is first added to another
            return
        if self._across is not None:
            self._across.reserve(mine)
        self._reserve(self._reserve_received(largest) + (mine if self._across is not None else 0))

    def _reserve_received(self, largest: int) -> int:
        """Return the bytes of the receive buffer for gloo."""
        return self._exchanged_bytes(largest)

    def _reserve(self, num_bytes: int) -> None:
        """Make the receive buffer at least this large."""
        if num_bytes > self._receive.nbytes:
            self.ledger.leave(Kind.BUFFERS, self._receive.nbytes)
            self._receive = torch.empty(num_bytes, dtype=torch.uint8, device=self.world.device)
            self.ledger.enter(Kind.BUFFERS, num_bytes)

    def gather(self, full: torch.Tensor, shard: torch.Tensor | None = None) -> Transfer:
        """Start filling `full` with the slices of all shards; `shard` is mine, by default my slice of `full`."""
        if self.world.num_shards == 1:
            return Done()
        full = as_real(full)
        shard = self._mine(full) if shard is None else as_real(shard)
        if self._gathers is not None:
            self.ledger.sent[self.gather_entry] += shard.nbytes * (self.world.num_shards - 1)
            group = self._gathering
            return self._on_stream(self._gathers, group, lambda: all_gather(full, shard, group=group))
        return self._spread(full, shard, self.gather_entry)

    def gather_weights(self, full: torch.Tensor, shard: torch.Tensor) -> Transfer:
        """Start filling `full` for a forward or a backward, which may take rounded values from coded wires."""
        return self.gather(full, shard)

    def feed(self, full: torch.Tensor, lost: torch.Tensor | None) -> None:
        """Take into account what coding has lost of a gradient so far, before it is reduced: here nothing."""

    def reduce(self, full: torch.Tensor, land: torch.Tensor, *, accumulate: bool = False) -> Transfer:
        """Start writing the mean over ranks of my slice of `full` to `land`, or adding it. `full` must stay untouched
        until the wait; one reduce is in flight at a time, the next waits for it."""
        full = as_real(full)
        land = as_real(land)
        if self._reduces is None:
            return self._collect(full, land, accumulate=accumulate)
        received = land
        if accumulate or land.dtype != full.dtype:
            self._reserve(self._largest_slice)
            received = self._receive[: full.nbytes // self.world.num_shards].view(full.dtype)

        def run() -> None:
            self._reduce_slice(full, received)
            if accumulate:
                land.add_(received)
            elif received is not land:
                land.copy_(received)

        return self._on_stream(
            self._reduces, self._channels.reduce, run
        )  # the next reduce is ordered behind this one by the stream

    def reduce_everywhere(self, full: torch.Tensor) -> Transfer:
        """Start replacing `full` by its mean over ranks: reduce my slice, then send everyone's slices to everyone."""
        full = as_real(full)
        mine = self._mine(full)
        if self._reduces is None:
            return self._collect(full, mine, then=lambda: self._spread(full, mine, self._entry))
        return self._on_stream(self._reduces, self._channels.reduce, lambda: self._average(full))

    def _mine(self, full: torch.Tensor) -> torch.Tensor:
        return full.view(self.world.num_shards, -1)[self.world.shard_rank]

    def _average(self, full: torch.Tensor) -> None:
        """Replace `full` by its mean over ranks, on the current stream."""
        mine = self._mine(full)
        num_bytes = mine.nbytes * (self.world.num_shards - 1)
        self.ledger.sent[self._entry] += num_bytes
        if self._across is None:
            self.ledger.sent[self._entry] += num_bytes
            dist.all_reduce(full, self._operation, group=self._channels.reduce)
        else:
            self._reduce_slice(full, mine)
            all_gather(full, mine, group=self._channels.reduce)

    def _reduce_slice(self, full: torch.Tensor, mine: torch.Tensor) -> None:
        """Write the mean of my slice to `mine`, which may be that slice of `full`, on the current stream."""
        self.ledger.sent[self._entry] += mine.nbytes * (self.world.num_shards - 1)
        reduce_scatter(mine, full, op=self._operation, group=self._channels.reduce)
        if self._across is not None:
            self._across._average(mine)

    def _collect(
        self, full: torch.Tensor, land: torch.Tensor, *, accumulate: bool = False, then: Start | None = None
    ) -> Transfer:
        """Sum everyone's version of my slice, by gloo, and start what comes `then`; see [Note: gloo]."""
        size = self.world.num_shards
        if self._receiving is not None:
            self._receiving.land()
        work, write_mean = self._exchange(full)

        def finish() -> Transfer | None:
            if self._across is None:
                write_mean(land, accumulate=accumulate)
                return None if then is None else then()
            mine = self._receive[self._receive.nbytes - full.nbytes // size :].view(full.dtype)
            write_mean(mine, accumulate=False)
            averaged = self._across.reduce_everywhere(mine)

            def finish_average() -> Transfer | None:
                averaged.wait()
                if accumulate:
                    land.add_(mine)
                else:
                    land.copy_(mine)
                return None if then is None else then()

            return Collective(self.world, [], finish_average)

        self._receiving = Collective(self.world, [work], finish)
        return self._receiving

    def _exchange(self, full: torch.Tensor) -> tuple[dist.Work, WriteMean]:
        """Send each rank its slice of `full`, by gloo; return that, and what writes the mean of what has come in."""
        size = self.world.num_shards
        self.ledger.sent[self._entry] += full.nbytes // size * (size - 1)
        incoming = self._received(full.nbytes)
        received = incoming.view(full.dtype)
        work = self._send(full, incoming)
        factor = 1.0 if self.sums else 1.0 / size

        def write_mean(out: torch.Tensor, *, accumulate: bool) -> None:
            sum_slices(received, size, factor, out, accumulate=accumulate, num_threads=self._num_threads)

        return work, write_mean

    def _received(self, num_bytes: int) -> torch.Tensor:
        """Return the bytes that the next exchange writes to."""
        return self._receive[:num_bytes]

    def _send(self, full: torch.Tensor, received: torch.Tensor) -> dist.Work:
        """Start sending each rank its slice of `full`, and receiving."""
        sent = full.view(torch.uint8)  # gloo has no all-to-all for every dtype
        with self.world.waiting():
            work: dist.Work = dist.all_to_all_single(received, sent, group=self._channels.reduce, async_op=True)
        return work

    def _spread(self, full: torch.Tensor, shard: torch.Tensor, verb: str) -> Transfer:
        """Send everyone's slice to everyone, by gloo; see [Note: gloo]."""
        self.ledger.sent[verb] += shard.nbytes * (self.world.num_shards - 1)
        group = self._gathering if verb == self.gather_entry else self._channels.reduce
        slices = full.view(self.world.num_shards, -1)
        mine = slices[self.world.shard_rank]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        works: list[dist.Work | None]
        with self.world.waiting():
            if len(self._hosts) > 1:
                works = [all_gather(full.view(torch.uint8), mine.view(torch.uint8), group=group, async_op=True)]
            else:
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
            self._expect_current(self.world.channels.scalars)
            self.ledger.sent["scalars"] += value.nbytes
        return value

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send rank 0's values to all, in place, one message per dtype: first to each replica, then inside it."""
        if self.world.channels is None:
            return
        if self._across is not None and self.world.shard_rank == 0:
            self._across.broadcast(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            with self.world.waiting():
                dist.broadcast(flat.view(torch.uint8), group_src=0, group=self.world.channels.broadcast)
            self._expect_current(self.world.channels.broadcast)
            for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def _expect_current(self, group: dist.ProcessGroup) -> None:
        """Note a collective in the current stream."""
        if self._gathers is not None:
            self._channels.peers.expect(record_event(self.world.device), group)

    def _on_stream(self, stream: torch.Stream, group: dist.ProcessGroup, run: Callable[[], object]) -> Transfer:
        """Run collectives of nccl in a stream, after the work in the current stream. `group` is the one they are of."""
        stream.wait_stream(torch.accelerator.current_stream(self.world.device))
        with stream, self.world.waiting():
            run()
        event = StreamEvent(stream, self.world.device)
        self._channels.peers.expect(event, group)
        return event


class NodeWires(Wires):
    """The gathers of one prepared model inside this rank's node, from the secondary shards that its ranks keep. What
    they bring has come over the wires between all ranks, so it travels as it is, whatever those code."""

    gather_entry = "node"

    def __init__(self, wires: Wires) -> None:
        """Take the wires between all ranks, which know the pass that runs."""
        channels = wires.world.channels
        assert channels is not None and channels.node is not None and channels.node_regather is not None
        super().__init__(wires.world.inside(channels.node, channels.node_regather), wires.ledger)
        self._everywhere = wires

    @property
    def _gathering(self) -> dist.ProcessGroup:
        return self._channels.regather if self._everywhere.in_backward else self._channels.gather


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
