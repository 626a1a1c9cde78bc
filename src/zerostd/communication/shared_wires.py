"""Wires between gloo ranks of one host: large slices pass through memory that the ranks share, small ones and all
messages that say "written" through gloo's sockets.

The inputs are flat buffers, as in wires.py, and the result is a `Transfer`. A rank has a segment that all ranks of its
process group map. To reduce, each rank writes its slices into the segments of the others, and sums what is in its own.
To gather, each rank writes its slice into its own segment, and the others copy it from there. When one byte from every
rank has come in over gloo, all have written. So time limits, and errors that name a rank, work as in every other
collective, and no rank waits actively. The mean has the order of ranks, so bits are those of `Wires`.

[Note: slots] A segment has two slots for reduces and two for gathers, used in turn. A rank lands a collective before it
starts the next of its kind. So a rank that starts the one after that knows, from the bytes of the last one, that every
rank has landed the collective that used this slot before.

[Note: no file] A segment is an anonymous file, which other ranks open through /proc and close when it is mapped. It has
no name, so nothing is left behind, whenever a process is killed.
"""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

from zerostd.communication.wires import Collective, Wires
from zerostd.communication.world import World
from zerostd.kernels import copy_past_caches
from zerostd.monitoring import Ledger
from zerostd.policy import Kind
from zerostd.tiers import Transfer

SMALLEST_BYTES = 8 << 20  # of a flat buffer, over all ranks: smaller ones are faster over sockets, or hardly slower
NUM_SLOTS = 2  # see [Note: slots]

log = logging.getLogger("zerostd")


class SharedWires(Wires):
    """The collectives of one prepared model: those of `Wires`, through shared memory where ranks can and it pays."""

    def __init__(self, world: World, ledger: Ledger, entry: str = "reduce", *, sums: bool = False) -> None:
        super().__init__(world, ledger, entry, sums=sums)
        self._segments: list[torch.Tensor] = []  # bytes, by rank; none: all goes through sockets
        self._slot_bytes = 0  # of a slot for reduces; one for gathers has those of a slice
        self._num_reduces = 0  # so far
        self._num_gathers = 0
        self._gathered: Collective | None = None  # the last gather through shared memory

    @classmethod
    def buffer_bytes(cls, largest: int, num_shards: int, num_replicas: int = 1, *, has_streams: bool) -> int:
        """Return the bytes of receive buffers, and of this rank's segments as if all ranks were of one host."""
        received = super().buffer_bytes(largest, num_shards, num_replicas, has_streams=has_streams)
        if has_streams:
            return received
        for num_bytes, num_ranks in ((largest, num_shards), (largest // num_shards, num_replicas)):
            if num_bytes >= SMALLEST_BYTES and num_ranks > 1:
                received += _segment_bytes(num_bytes, num_ranks) - num_bytes
        return received

    def _reserve_received(self, largest: int) -> int:
        if largest >= SMALLEST_BYTES and self.world.num_shards > 1 and len(self._hosts) == 1 and "" not in self._hosts:
            self._segments = self._map(largest)
            self._slot_bytes = largest
        return 0 if self._segments else super()._reserve_received(largest)

    def _map(self, largest: int) -> list[torch.Tensor]:
        """Make this rank's segment and map everyone's; none on all ranks if that fails on one. All of them call it."""
        num_bytes = _segment_bytes(largest, self.world.num_shards)
        segments: list[torch.Tensor] = []
        path = problem = ""
        file = -1
        try:
            file = os.memfd_create("zerostd")
            os.fchmod(file, 0o600)
            os.posix_fallocate(file, 0, num_bytes)
            path = f"/proc/{os.getpid()}/fd/{file}"
        except OSError as error:
            problem = f"no {num_bytes} bytes of shared memory: {error}"
        paths = self._collect_texts(path)
        try:
            segments = [torch.from_file(other, True, num_bytes, dtype=torch.uint8) for other in paths if all(paths)]
        except RuntimeError as error:
            problem = f"no access to the shared memory of another rank: {error}"
        problems = [text for text in self._collect_texts(problem) if text]  # and all have opened it
        if file >= 0:
            os.close(file)
        if problems:
            if self.world.rank == 0:
                log.warning("ranks of one host send data through sockets, which is slower: %s", problems[0])
            return []
        self.ledger.enter(Kind.BUFFERS, num_bytes)
        return segments

    def _collect_texts(self, text: str) -> list[str]:
        texts = [""] * self.world.num_shards
        with self.world.waiting():
            dist.all_gather_object(texts, text, group=self._channels.reduce)
        return texts

    def _received(self, num_bytes: int) -> torch.Tensor:
        if not self._segments:
            return super()._received(num_bytes)
        self._num_reduces += 1
        return self._slots()[self.world.shard_rank][:num_bytes]

    def _slots(self) -> list[torch.Tensor]:
        """Return where each rank receives in the present reduce."""
        start = self._num_reduces % NUM_SLOTS * self._slot_bytes
        return [segment[start : start + self._slot_bytes] for segment in self._segments]

    def _gather_slots(self) -> list[torch.Tensor]:
        """Return where each rank shows its slice in the present gather."""
        size = self._slot_bytes // self.world.num_shards
        start = NUM_SLOTS * self._slot_bytes + self._num_gathers % NUM_SLOTS * size
        return [segment[start : start + size] for segment in self._segments]

    def _send(self, full: torch.Tensor, received: torch.Tensor) -> dist.Work:
        if not self._carries(full):
            return super()._send(full, received)
        slices = full.view(self.world.num_shards, -1).view(torch.uint8)
        for slot, part in zip(self._slots(), slices, strict=True):
            copy_past_caches(part, slot[self.world.shard_rank * part.nbytes :][: part.nbytes])
        return self._say_written(self._channels.reduce)

    def _spread(self, full: torch.Tensor, shard: torch.Tensor, verb: str) -> Transfer:
        if not self._carries(full):
            return super()._spread(full, shard, verb)
        is_gather = verb == "gather"
        if is_gather and self._gathered is not None:
            self._gathered.land()  # see [Note: slots]
        self.ledger.sent[verb] += shard.nbytes * (self.world.num_shards - 1)
        self._num_gathers += is_gather
        shown = [slot[: shard.nbytes] for slot in (self._gather_slots() if is_gather else self._slots())]
        copy_past_caches(shard, shown[self.world.shard_rank])
        slices = full.view(self.world.num_shards, -1)
        work = self._say_written(self._gathering if is_gather else self._channels.reduce)

        def finish() -> None:
            for part, theirs in zip(slices, shown, strict=True):
                if part.data_ptr() != shard.data_ptr():
                    copy_past_caches(theirs, part)

        collective = Collective(self.world, [work], finish)
        if is_gather:
            self._gathered = collective
        return collective

    def _carries(self, full: torch.Tensor) -> bool:
        return SMALLEST_BYTES <= full.nbytes <= self._slot_bytes and bool(self._segments)

    def _say_written(self, group: dist.ProcessGroup) -> dist.Work:
        """Send a byte to each rank. A rank that has a byte from all others knows that all have written."""
        written = torch.zeros(self.world.num_shards, dtype=torch.uint8)
        with self.world.waiting():
            work: dist.Work = dist.all_to_all_single(torch.empty_like(written), written, group=group, async_op=True)
        return work


def _segment_bytes(largest: int, num_ranks: int) -> int:
    return NUM_SLOTS * (largest + largest // num_ranks)
