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
