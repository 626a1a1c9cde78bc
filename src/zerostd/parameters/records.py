"""What of a model this rank must keep so that it can go on elsewhere: named intervals of columns.

Every element of every parameter is some rank's: its own slice of each flat, also where all ranks have the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerostd.parameters.flat import Flat
from zerostd.policy import Tier
from zerostd.sharding import Piece
from zerostd.tiers import Column

__all__ = ["Record", "owned_pieces", "tensor_record", "value_records"]


@dataclass(frozen=True)
class Record:
    """Elements [start, stop) of one tensor, flattened, lying at `offset` of a column."""

    kind: str
    of: str
    shape: tuple[int, ...]
    start: int
    stop: int
    column: Column
    offset: int
    state: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """As it is kept."""
        return self.column.dtype

    def read(self, low: int, high: int) -> torch.Tensor:
        """A part of the interval, counted from its start, in memory."""
        return self.column.read(slice(self.offset + low, self.offset + high))


def tensor_record(kind: str, of: str, tensor: torch.Tensor) -> Record:
    """A whole tensor that is in memory."""
    flat = tensor.detach().contiguous().view(-1)
    tier = Tier.HOST if tensor.device.type == "cpu" else Tier.DEVICE
    return Record(kind, of, tuple(tensor.shape), 0, flat.numel(), Column(flat.numel(), flat.dtype, tier, flat), 0)


def owned_pieces(flat: Flat, rank: int) -> Iterator[tuple[Piece, int, int]]:
    """What of a trained flat's region is this rank's to keep: pieces of parameters, with the part of each."""
    mine = flat.layout.shard(rank)
    for piece in flat.layout.pieces(flat.region):
        place = flat.region.start + piece.offset
        low, high = max(mine.start, place), min(mine.stop, place + piece.numel)
        if low < high:
            yield piece, low - place, high - place


def value_records(flat: Flat, rank: int) -> Iterator[Record]:
    """The values of a flat's parameters at the precision they are kept in."""
    intervals = flat.layout.intervals
    if not flat.shelves:
        mine = flat.layout.shard(rank)
        begin = mine.start if flat.is_sharded else 0
        for piece in flat.layout.pieces(mine):
            interval = intervals[piece.index]
            place = mine.start + piece.offset - begin
            yield Record("parameter", interval.name, interval.shape, piece.start, piece.stop, flat.rest, place)
        return
    for piece, low, high in owned_pieces(flat, rank):
        interval = intervals[piece.index]
        for shelf in flat.shelves:
            found = shelf.overlap(piece.offset + low, piece.offset + high)
            if found is not None:
                here, there = found
                start = piece.start + low + there.start
                stop = piece.start + low + there.stop
                yield Record("parameter", interval.name, interval.shape, start, stop, shelf.master, here.start)
