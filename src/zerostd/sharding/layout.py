"""Flat layouts: where each parameter lies in its group's buffer, and which slice of it a rank owns.

Parameters lie one after another, without gaps unless each has to start aligned; the end is padded, so that every rank's
slice has the same length and starts aligned. Each parameter keeps its name and its interval, so resharding is 1-D
interval arithmetic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

ALIGNMENT = 64  # elements: a slice starts on a cache line in every dtype, and kernels see whole vectors


@dataclass(frozen=True)
class Interval:
    """One parameter's place in the flat buffer, in elements."""

    name: str
    offset: int
    shape: tuple[int, ...]
    whole: tuple[int, ...] | None = None  # shape of the tensor that this is a box of; None: it is whole
    origin: tuple[int, ...] = ()  # where the box begins

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, of which the parameter may be a box."""
        return self.shape if self.whole is None else self.whole

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of one parameter inside a region: elements [start, stop) of the parameter, at `offset` of the region."""

    index: int  # of the parameter in its layout
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.numel)  # of the region

    def place_from(self, origin: int) -> slice:
        """Return its place in something that begins at element `origin` of the region."""
        return slice(self.offset - origin, self.offset - origin + self.numel)

    def within(self, start: int, stop: int) -> Self | None:
        """Return the part of it that lies in [start, stop) of the region; None if nothing does."""
        low = max(self.offset, start)
        high = min(self.offset + self.numel, stop)
        if low >= high:
            return None
        first = self.start + low - self.offset
        return type(self)(self.index, first, first + high - low, low)


@dataclass(frozen=True)
class Layout:
    """Intervals of one flat buffer over `num_shards` equal slices."""

    intervals: tuple[Interval, ...]
    numel: int  # with the padding, elements that belong to no parameter
    num_shards: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.num_shards

    @cached_property
    def gaps(self) -> tuple[slice, ...]:
        """The elements that belong to no parameter: behind those that do not end aligned, and at the end."""
        ends = [0, *[interval.end for interval in self.intervals]]
        starts = [*[interval.offset for interval in self.intervals], self.numel]
        return tuple([slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start])

    @property
    def padding(self) -> int:
        return self.numel - sum(interval.numel for interval in self.intervals)

    def shard(self, rank: int) -> slice:
        """Return the slice that `rank` owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def piece_of(self, index: int, region: slice) -> Piece | None:
        """Return the part of one parameter inside `region`; None if it has no elements there."""
        interval = self.intervals[index]
        low = max(interval.offset, region.start)
        high = min(interval.end, region.stop)
        if low >= high:
            return None
        return Piece(index, low - interval.offset, high - interval.offset, low - region.start)

    def pieces(self, region: slice) -> tuple[Piece, ...]:
        """Return the parts of all parameters that have elements inside `region`, in order."""
        return tuple(piece for index in range(len(self.intervals)) if (piece := self.piece_of(index, region)))


def make_layout(
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    num_shards: int,
    itemsize: int,
    *,
    num_replicas: int = 1,
    alignment: int = 1,
) -> Layout:
    """Lay parameters of `itemsize` bytes per element out, each from a multiple of `alignment` elements on. Parameters
    whose length keeps the next one on a 16-byte boundary come first, in the given order, so that matrices start
    aligned. A slice is a multiple of `num_replicas` long: replicas average it in equal parts."""
    per_boundary = max(1, 16 // itemsize)
    ordered = sorted(parameters, key=lambda item: math.prod(item[1]) % per_boundary != 0)
    intervals = []
    offset = 0
    for name, shape in ordered:
        intervals.append(Interval(name, offset, tuple(shape)))
        offset = -(-intervals[-1].end // alignment) * alignment
    unit = ALIGNMENT * num_shards * num_replicas
    return Layout(tuple(intervals), -(-offset // unit) * unit, num_shards)
