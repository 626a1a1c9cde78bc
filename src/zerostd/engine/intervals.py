"""Where a prepared model keeps what it saves and loads: the values of each parameter, its states and its gradient.

Intervals are elements of one flattened tensor. If a parameter is a DTensor, this rank has a box of a larger tensor, and
the interval says which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerostd.optimizers.spans import UpdateSpans
from zerostd.optimizers.updater import Updater
from zerostd.parameters import Flat
from zerostd.parameters.state_shard import SplitTensor
from zerostd.policy import Tier
from zerostd.sharding import Interval, Piece
from zerostd.sharding.boxes import Stretch
from zerostd.tiers import TierTensor


@dataclass(frozen=True)
class SavedInterval:
    """Elements [start, stop) of one tensor, flattened, which begin at `offset` of a tier tensor: saved from there, and
    loaded to there."""

    kind: str
    of: str
    shape: tuple[int, ...]
    start: int
    stop: int
    column: TierTensor
    offset: int
    state: str = ""
    group: str = ""  # whose update changes it
    whole: tuple[int, ...] | None = None  # shape of the tensor that `shape` is a box of; None: it is whole
    origin: tuple[int, ...] = ()  # where the box begins

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that is saved."""
        return self.shape if self.whole is None else self.whole

    @property
    def stretch(self) -> Stretch:
        """Which elements of the tensor these are."""
        return Stretch(self.origin, self.shape, self.start, self.stop)

    @property
    def dtype(self) -> torch.dtype:
        return self.column.dtype

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)  # of the tier tensor

    def copied(self) -> SavedInterval:
        """Return the interval with a copy of the present values in new host memory. The copy is complete when the work
        that is queued on the device is done, and later work does not change it."""
        halves = self.column if isinstance(self.column, SplitTensor) and self.column.tier is not Tier.DISK else None
        values = self.read(0, self.stop - self.start) if halves is None else halves.high.read(self.place)
        copy = torch.empty_like(values, device="cpu", pin_memory=values.device.type != "cpu")
        copy.copy_(values, non_blocking=True)
        column = TierTensor(copy.numel(), copy.dtype, Tier.HOST, copy)
        if halves is not None:  # what users can write to is the upper half
            column = SplitTensor(column, halves.low.part(self.place))
        return replace(self, column=column, offset=0)

    def read(self, low: int, high: int, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return elements [low, high) of the interval; those on disk are read into `memory`, if it is given."""
        return self.column.read(slice(self.offset + low, self.offset + high), memory)


def saved_interval(
    kind: str, of: Interval, piece: Piece, column: TierTensor, offset: int, *, state: str = "", group: str = ""
) -> SavedInterval:
    """Return a part of a parameter, or of something with its shape, as it is saved."""
    place = (piece.start, piece.stop, column, offset, state, group)
    return SavedInterval(kind, of.name, of.shape, *place, of.whole, of.origin)


def tensor_interval(kind: str, of: str, tensor: torch.Tensor, state: str = "") -> SavedInterval:
    """Return a copy of a whole tensor as one interval."""
    flat = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
    column = TierTensor(flat.numel(), flat.dtype, Tier.HOST, flat)
    return SavedInterval(kind, of, tuple(tensor.shape), 0, flat.numel(), column, 0, state)


def pieces_in(mine: slice, flat: Flat, pieces: Iterable[Piece] | None = None) -> list[Piece]:
    """Return the parts of pieces of a trained flat's region that lie in `mine`; of all pieces if none are given."""
    pieces = flat.layout.pieces(flat.region) if pieces is None else pieces
    parts = [piece.within(mine.start - flat.region.start, mine.stop - flat.region.start) for piece in pieces]
    return [part for part in parts if part is not None]


def value_intervals(flat: Flat, mine: slice, group: str) -> Iterator[SavedInterval]:
    """Yield where values of a flat's parameters are kept, at full precision, as far as they lie in `mine`: this rank's
    shard, the region, or all of the flat. Parameters without elements lie at its start."""
    intervals = flat.layout.intervals
    empty = [Piece(index, 0, 0, 0) for index, interval in enumerate(intervals) if not (mine.start or interval.numel)]
    if flat.state_shards:
        owned = pieces_in(mine, flat)
        places = [(piece, flat.state_shards[0].master, 0) for piece in empty]
        for shard in flat.state_shards:
            places += [(part, shard.master, here.start) for part, here in shard.parts(owned)]
    else:
        begin = 0 if flat.is_sharded else mine.start
        places = [(piece, flat.rest, begin + piece.offset) for piece in (*empty, *flat.layout.pieces(mine))]
    for piece, column, offset in places:
        yield saved_interval("parameter", intervals[piece.index], piece, column, offset, group=group)


def kept_values(flat: Flat, rank: int) -> Iterator[SavedInterval]:
    """Yield where this rank keeps values of a flat's parameters. Masters are these values where there are any."""
    mine = flat.region
    if not flat.state_shards:  # frozen: every rank has all of it, or its shard
        mine = flat.layout.shard(rank) if flat.is_sharded else slice(0, flat.layout.numel)
    return value_intervals(flat, mine, group="")


def state_intervals(spans: UpdateSpans, mine: slice, group: str) -> Iterator[SavedInterval]:
    """Yield where the long states of a trained flat's parameters are kept, as far as they lie in `mine`."""
    for span in spans:
        states = spans.long_states(span)
        for part in pieces_in(mine, spans.flat, span.pieces):
            of = spans.flat.layout.intervals[part.index]
            for name, (tensor, origin) in states.items():
                offset = part.offset - origin
                yield saved_interval("state", of, part, tensor, offset, state=name, group=group)


def gradient_intervals(
    flat: Flat, mine: slice, group: str, dtypes: Collection[torch.dtype] = ()
) -> Iterator[SavedInterval]:
    """Yield where the gradients of a flat's parameters are kept, as far as they lie in `mine`, in a form that loses
    nothing of these dtypes. Parameters without elements lie at its start."""
    gradient = flat.gradient
    assert gradient is not None
    if any(torch.promote_types(dtype, gradient.rest_dtype) != gradient.rest_dtype for dtype in dtypes):
        gradient.use_sum()
    gradient.take_memory()
    tensor = gradient.tier_tensor()
    intervals = flat.layout.intervals
    empty = [Piece(index, 0, 0, 0) for index, interval in enumerate(intervals) if not (mine.start or interval.numel)]
    for part in (*empty, *pieces_in(mine, flat)):
        yield saved_interval("gradient", intervals[part.index], part, tensor, part.offset, group=group)


def scalar_states(updater: Updater, rank: int) -> dict[str, dict[str, Any]]:
    """Return scalar states, such as counts of steps, by name of parameter, as far as this rank owns any of it."""
    by_name: dict[str, dict[str, Any]] = {}
    for flat, spans in updater.spans.items():
        owned = {piece.index for piece in pieces_in(flat.layout.shard(rank), flat)}
        for span in spans:
            scalars = {
                key: value.detach().cpu() if isinstance(value, torch.Tensor) else value
                for key, value in spans.scalar_states(span).items()
            }
            if scalars:
                names = [flat.layout.intervals[piece.index].name for piece in span.pieces if piece.index in owned]
                by_name |= dict.fromkeys(names, scalars)
    return by_name


def updated_intervals(flat: Flat) -> list[tuple[str, Stretch]]:
    """Return the elements of each parameter that this rank updates, by name."""
    pairs = [(flat.layout.intervals[piece.index], piece) for piece in flat.layout.pieces(flat.region)]
    return [(of.name, Stretch(of.origin, of.shape, piece.start, piece.stop)) for of, piece in pairs]
