"""Boxes: an interval of a flattened tensor as blocks of its rows and columns.

In: a shape and elements [start, stop) in row-major order. Out: offsets and sizes, as torch.distributed.checkpoint
describes parts of tensors. A tensor of n dimensions needs at most 2n - 1 boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """A block of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the box from the tensor."""
        return tuple(slice(low, low + size) for low, size in zip(self.offsets, self.sizes, strict=True))

    def shared(self, other: Box) -> Box | None:
        """Return the elements that two boxes have in common; None if there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + size_a, b + size_b)
            for a, size_a, b, size_b in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(end - low for low, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def moved(self, origin: tuple[int, ...], sign: int = 1) -> Box:
        """Return the box moved by `origin`, forward or with `sign=-1` back."""
        return Box(tuple(low + sign * by for low, by in zip(self.offsets, origin, strict=True)), self.sizes)


class Stretch(NamedTuple):
    """Elements [start, stop) of a flattened box of a tensor."""

    origin: tuple[int, ...]  # where the box begins; empty: it is the whole tensor
    shape: tuple[int, ...]  # of the box
    start: int
    stop: int

    def part(self, start: int, stop: int) -> Stretch:
        """Return other elements of the same box."""
        return self._replace(start=start, stop=stop)

    def is_of(self, other: Stretch) -> bool:
        """Return whether both are of one box."""
        return self.shape == other.shape and self.corner == other.corner

    @property
    def corner(self) -> tuple[int, ...]:
        return self.origin or (0,) * len(self.shape)

    def boxes(self) -> Iterator[tuple[int, Box]]:
        """Yield its boxes in the whole tensor, each with the number of elements before it."""
        before = 0
        for box in boxes_of(self.shape, self.start, self.stop):
            yield before, box.moved(self.corner)
            before += box.numel

    def shared(self, other: Stretch) -> Iterator[tuple[tuple[int, Box], tuple[int, Box], Box]]:
        """Yield the boxes that two stretches have in common, each with the boxes that it lies in."""
        for mine in self.boxes():
            for theirs in other.boxes():
                if (box := mine[1].shared(theirs[1])) is not None:
                    yield mine, theirs, box


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements [start, stop), in row-major order; each is contiguous there."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first = start // row
    if start % row:
        end = min(stop, (first + 1) * row)
        yield from _in_row(shape, first, start - first * row, end - first * row)
        first += 1
        start = end
    last = stop // row
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
        start = last * row
    if start < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of(shape[1:], start, stop):
        yield Box((index, *box.offsets), (1, *box.sizes))
