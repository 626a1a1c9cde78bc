"""Wires that carry small integers: half the bytes of 16-bit numbers, or a quarter. Lossy, so only on request.

Parameters that a forward or a backward gathers are coded by the rank that keeps them. Every rank, including that one,
computes with the decoded values, so all have the same weights. Stored parameters stay exact, and so does every other
gather (checkpoints, reads by users). A gradient is cut into slices, each is coded and sent to its rank, which adds the
decoded slices in fp32, in rank order. Where all ranks want all of it, the mean is coded again and sent to everyone.

[Note: feedback] The rounding error of a coded gradient can be kept and added to the next gradient, so that nothing is
lost for good; codes of 4 bits need that. The error takes as much memory as the gradient before it is sharded.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.distributed as dist

from zerostd.communication.shared_wires import SharedWires
from zerostd.communication.wires import Collective, Wires, WriteMean, all_gather
from zerostd.communication.world import World
from zerostd.kernels import coded_bytes, decode_blocks, encode_blocks
from zerostd.monitoring import Ledger
from zerostd.policy import Placement
from zerostd.tiers import Transfer

CODECS = {"gather": ("int8",), "reduce": ("int8", "int4")}  # by what travels coded
CODED = (torch.bfloat16, torch.float16, torch.float32)  # others travel as they are
FED_BACK = 4  # bits of a gradient's codes: so few that what is lost is kept, see [Note: feedback]
MEAN_BITS = 8  # of a mean that is coded again: what that loses is not kept
NUM_COPIES = 2  # of coded gradients: sent and received
ALIGNMENT = 8  # bytes: behind coded gradients lie numbers of any dtype


class CodedWires(Wires):
    """The collectives of a prepared model whose parameters, gradients or both travel coded."""

    def __init__(
        self,
        world: World,
        ledger: Ledger,
        entry: str = "reduce",
        *,
        gather_bits: int | None = None,
        reduce_bits: int | None = None,
    ) -> None:
        self._gather_bits = gather_bits
        self._reduce_bits = reduce_bits
        super().__init__(world, ledger, entry)
        self.rounds_weights = gather_bits is not None
        self.feeds_back = reduce_bits == FED_BACK

    def _like(self, world: World, ledger: Ledger, entry: str) -> Self:
        return type(self)(world, ledger, entry, reduce_bits=self._reduce_bits and MEAN_BITS)

    @classmethod
    def buffer_bytes(cls, largest: int, num_shards: int, num_replicas: int = 1, *, has_streams: bool) -> int:
        """Return the bytes of buffers: also with streams, what is sent and received."""
        if num_shards * num_replicas == 1 or not has_streams:
            return super().buffer_bytes(largest, num_shards, num_replicas, has_streams=has_streams)
        across = cls._exchanged_bytes(largest // num_shards) if num_replicas > 1 else 0
        return cls._exchanged_bytes(largest) + across

    @staticmethod
    def _exchanged_bytes(num_bytes: int) -> int:
        """Return the bytes of the buffers for sending and receiving: 16-bit numbers give most codes."""
        return -(-NUM_COPIES * coded_bytes(num_bytes // 2, 8) // ALIGNMENT) * ALIGNMENT

    def gather_weights(self, full: torch.Tensor, shard: torch.Tensor) -> Transfer:
        """Start filling `full` with the coded slices of all shards."""
        bits = self._gather_bits
        if bits is None or self.world.num_shards == 1 or full.dtype not in CODED:
            return self.gather(full, shard)
        return self._spread_coded(full, shard, bits, "gather")

    def feed(self, full: torch.Tensor, lost: torch.Tensor | None) -> None:
        """Add what earlier steps `lost` to `full`, replace it by its decoded values, and keep what is lost now."""
        if lost is None or self._reduce_bits is None or not self._codes(full):
            return
        full += lost
        coded = torch.empty(coded_bytes(full.numel(), self._reduce_bits), dtype=torch.uint8, device=full.device)
        encode_blocks(full, self._reduce_bits, coded, num_threads=self._num_threads)
        lost.copy_(full)
        decode_blocks(coded, self._reduce_bits, full, num_threads=self._num_threads)
        lost.sub_(full).nan_to_num_(0.0, 0.0, 0.0)  # an overflow is not carried into the next step

    def reduce(self, full: torch.Tensor, land: torch.Tensor, *, accumulate: bool = False) -> Transfer:
        """Reduce as `Wires.reduce` does, after decoding."""
        if self._reduces is None or not self._codes(full):
            return super().reduce(full, land, accumulate=accumulate)
        self._reserve(self._exchanged_bytes(self._largest_slice * self.world.num_shards))
        return self._on_stream(
            self._reduces, self._channels.reduce, lambda: self._write_mean(full, land, accumulate=accumulate)
        )

    def _codes(self, full: torch.Tensor) -> bool:
        return self._reduce_bits is not None and self.world.num_shards > 1 and full.dtype in CODED

    def _write_mean(self, full: torch.Tensor, land: torch.Tensor, *, accumulate: bool) -> None:
        """Write or add the mean of my slice, on the current stream."""
        work, write_mean = self._exchange(full)
        work.wait()
        if self._across is None:
            write_mean(land, accumulate=accumulate)
            return
        mine = torch.empty(full.numel() // self.world.num_shards, dtype=full.dtype, device=full.device)
        write_mean(mine, accumulate=False)
        self._across._average(mine)
        if accumulate:
            land.add_(mine)
        else:
            land.copy_(mine)

    def _average(self, full: torch.Tensor) -> None:
        if not self._codes(full):
            super()._average(full)
            return
        mine = self._mine(full)
        self._reserve(self._exchanged_bytes(full.nbytes))
        self._write_mean(full, mine, accumulate=False)
        coded = self._encode(mine, MEAN_BITS, self._entry)
        all_gather(coded.view(-1), coded[self.world.shard_rank], group=self._channels.reduce)
        _decode_slices(coded, MEAN_BITS, full, self._num_threads)

    def _exchange(self, full: torch.Tensor) -> tuple[dist.Work, WriteMean]:
        if not self._codes(full):
            return super()._exchange(full)
        bits = self._reduce_bits
        assert bits is not None
        size = self.world.num_shards
        slices = full.view(size, -1)
        num_bytes = coded_bytes(slices.shape[1], bits)
        self.ledger.sent[self._entry] += num_bytes * (size - 1)
        received = self._receive[: size * num_bytes]
        sent = self._receive[size * num_bytes : 2 * size * num_bytes].view(size, -1)
        for values, coded in zip(slices, sent, strict=True):
            encode_blocks(values, bits, coded, num_threads=self._num_threads)
        with self.world.waiting():
            work = dist.all_to_all_single(received, sent.view(-1), group=self._channels.reduce, async_op=True)

        def write_mean(out: torch.Tensor, *, accumulate: bool) -> None:
            decode_blocks(received, bits, out, num_slices=size, accumulate=accumulate, num_threads=self._num_threads)

        return work, write_mean

    def _spread(self, full: torch.Tensor, shard: torch.Tensor, verb: str) -> Transfer:
        if verb == "gather" or not self._codes(full):
            return super()._spread(full, shard, verb)
        return self._spread_coded(full, shard, MEAN_BITS, verb)

    def _encode(self, shard: torch.Tensor, bits: int, verb: str) -> torch.Tensor:
        """Return a buffer for the coded slices of all ranks, a row for each, that contains the slice of this rank."""
        size = self.world.num_shards
        num_bytes = coded_bytes(shard.numel(), bits)
        self.ledger.sent[verb] += num_bytes * (size - 1)
        coded = torch.empty((size, num_bytes), dtype=torch.uint8, device=shard.device)
        encode_blocks(shard, bits, coded[self.world.shard_rank], num_threads=self._num_threads)
        return coded

    def _spread_coded(self, full: torch.Tensor, shard: torch.Tensor, bits: int, verb: str) -> Transfer:
        """Send everyone's coded slice to everyone, and write what the codes say."""
        group = self._gathering if verb == "gather" else self._channels.reduce
        if self._gathers is not None:

            def run() -> None:
                coded = self._encode(shard, bits, verb)
                all_gather(coded.view(-1), coded[self.world.shard_rank], group=group)
                _decode_slices(coded, bits, full, self._num_threads)

            return self._on_stream(self._gathers, group, run)
        coded = self._encode(shard, bits, verb)
        with self.world.waiting():
            works = [dist.broadcast(part, group_src=r, group=group, async_op=True) for r, part in enumerate(coded)]

        def finish() -> None:
            _decode_slices(coded, bits, full, self._num_threads)

        return Collective(self.world, [work for work in works if work is not None], finish)


def wires_class(placement: Placement) -> type[Wires]:
    """Return the kind of wires that a placement asks for."""
    return CodedWires if CODECS.keys() & placement.codec.keys() else SharedWires


def make_wires(placement: Placement, world: World, ledger: Ledger, *, sums: bool) -> Wires:
    """Return the wires that a placement asks for. Coded gradients are averaged, never summed."""
    if wires_class(placement) is SharedWires:
        return SharedWires(world, ledger, sums=sums)
    return CodedWires(world, ledger, gather_bits=placement.bits("gather"), reduce_bits=placement.bits("reduce"))


def _decode_slices(coded: torch.Tensor, bits: int, full: torch.Tensor, num_threads: int) -> None:
    for part, values in zip(coded, full.view(len(coded), -1), strict=True):
        decode_blocks(part, bits, values, num_threads=num_threads)
