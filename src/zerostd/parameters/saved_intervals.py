"""Which elements of a model this rank saves: named intervals of the tensors it keeps.

Every element of every parameter belongs to one rank: its own slice of each flat, also where all ranks hold the whole.
Checkpoints save these intervals; `optimizers/states.py` gives those of states and gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from zerostd.parameters.flat import Flat
from zerostd.policy import Tier
from zerostd.sharding import Piece
from zerostd.tiers import TierTensor


@dataclass(frozen=True)
class SavedInterval:
    """Elements [start, stop) of one tensor, flattened, which begin at `offset` of a tier tensor."""

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
        """The dtype it is kept in."""
        return self.column.dtype

    def read(self, low: int, high: int, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return elements [low, high) of the interval; those on disk are read into `memory`, if it is given."""
        return self.column.read(slice(self.offset + low, self.offset + high), memory)


def tensor_interval(kind: str, of: str, tensor: torch.Tensor) -> SavedInterval:
    """Return a copy of a whole tensor as one interval."""
    flat = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
    column = TierTensor(flat.numel(), flat.dtype, Tier.HOST, flat)
    return SavedInterval(kind, of, tuple(tensor.shape), 0, flat.numel(), column, 0)


def owned_pieces(flat: Flat, rank: int, pieces: Iterable[Piece] | None = None) -> Iterator[tuple[Piece, int, int]]:
    """Yield the pieces of a trained flat's region that this rank saves, each with the part [low, high) it saves."""
    mine = flat.layout.shard(rank)
    for piece in flat.layout.pieces(flat.region) if pieces is None else pieces:
        place = flat.region.start + piece.offset
        low = max(mine.start, place)
        high = min(mine.stop, place + piece.numel)
        if low < high:
            yield piece, low - place, high - place


def value_intervals(flat: Flat, rank: int, group: str) -> Iterator[SavedInterval]:
    """Yield the values of a flat's parameters, at the precision they are kept in. Rank 0 saves the empty ones."""
    intervals = flat.layout.intervals
    kept = flat.state_shards[0].master if flat.state_shards else flat.rest
    for interval in intervals if rank == 0 else ():
        if not interval.numel:
            yield SavedInterval("parameter", interval.name, interval.shape, 0, 0, kept, 0, group=group)

    def values(piece: Piece, start: int, stop: int, column: TierTensor, offset: int) -> SavedInterval:
        interval = intervals[piece.index]
        return SavedInterval("parameter", interval.name, interval.shape, start, stop, column, offset, group=group)

    if not flat.state_shards:
        mine = flat.layout.shard(rank)
        begin = mine.start if flat.is_sharded else 0
        for piece in flat.layout.pieces(mine):
            yield values(piece, piece.start, piece.stop, flat.rest, mine.start + piece.offset - begin)
        return
    for piece, low, high in owned_pieces(flat, rank):
        for shard in flat.state_shards:
            overlap = shard.overlap(piece.offset + low, piece.offset + high)
            if overlap is not None:
                here, there = overlap
                first = piece.start + low
                yield values(piece, first + there.start, first + there.stop, shard.master, here.start)
