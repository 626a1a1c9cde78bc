"""What of a model this rank must keep so that it can go on elsewhere: named intervals of columns.

Every element of every parameter is some rank's: its own slice of each flat, also where all ranks have the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from zerostd.parameters.flat import Flat
from zerostd.policy import Tier
from zerostd.sharding import Piece
from zerostd.tiers import TierTensor

__all__ = ["Record", "owned_pieces", "tensor_record", "value_records"]


@dataclass(frozen=True)
class Record:
    """Elements [start, stop) of one tensor, flattened, lying at `offset` of a column."""

    kind: str
    of: str
    shape: tuple[int, ...]
    start: int
    stop: int
    column: TierTensor
    offset: int
    state: str = ""
    group: str = ""  # whose update changes it

    @property
    def dtype(self) -> torch.dtype:
        """As it is kept."""
        return self.column.dtype

    def read(self, low: int, high: int, memory: torch.Tensor | None = None) -> torch.Tensor:
        """A part of the interval, counted from its start, in memory; from disk in this memory, if it is given."""
        return self.column.read(slice(self.offset + low, self.offset + high), memory)


def tensor_record(kind: str, of: str, tensor: torch.Tensor) -> Record:
    """A whole tensor as it is now."""
    flat = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
    column = TierTensor(flat.numel(), flat.dtype, Tier.HOST, flat)
    return Record(kind, of, tuple(tensor.shape), 0, flat.numel(), column, 0)


def owned_pieces(flat: Flat, rank: int, pieces: Iterable[Piece] | None = None) -> Iterator[tuple[Piece, int, int]]:
    """Yield what of a trained flat's region, or of these pieces of it, a rank owns: pieces, with the part of each."""
    mine = flat.layout.shard(rank)
    for piece in flat.layout.pieces(flat.region) if pieces is None else pieces:
        place = flat.region.start + piece.offset
        low, high = max(mine.start, place), min(mine.stop, place + piece.numel)
        if low < high:
            yield piece, low - place, high - place


def value_records(flat: Flat, rank: int, group: str) -> Iterator[Record]:
    """The values of a flat's parameters at the precision they are kept in. Those without elements are rank 0's."""
    intervals = flat.layout.intervals
    kept = flat.state_shards[0].master if flat.state_shards else flat.rest
    for interval in intervals if rank == 0 else ():
        if not interval.numel:
            yield Record("parameter", interval.name, interval.shape, 0, 0, kept, 0, group=group)

    def record(piece: Piece, start: int, stop: int, column: TierTensor, offset: int) -> Record:
        interval = intervals[piece.index]
        return Record("parameter", interval.name, interval.shape, start, stop, column, offset, group=group)

    if not flat.state_shards:
        mine = flat.layout.shard(rank)
        begin = mine.start if flat.is_sharded else 0
        for piece in flat.layout.pieces(mine):
            yield record(piece, piece.start, piece.stop, flat.rest, mine.start + piece.offset - begin)
        return
    for piece, low, high in owned_pieces(flat, rank):
        for shard in flat.state_shards:
            found = shard.overlap(piece.offset + low, piece.offset + high)
            if found is not None:
                here, there = found
                start, stop = piece.start + low + there.start, piece.start + low + there.stop
                yield record(piece, start, stop, shard.master, here.start)
