"""Fewer points where there are more than a page can show; what stands out stays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

MOST_POINTS = 600  # of a line or an area
Item = TypeVar("Item")


def thin_extremes(
    points: Sequence[tuple[int, float | None]], most: int = MOST_POINTS
) -> list[tuple[int, float | None]]:
    """Of each stretch of points the lowest and the highest, in their order; the first and the last stay.

    A point of None is a gap, and the first of a stretch stays.
    """
    if len(points) <= most:
        return list(points)
    kept = {0, len(points) - 1}
    for stretch in _stretches(len(points), max(1, (most - 2) // 3)):
        values = [(value, index) for index in stretch if (value := points[index][1]) is not None]
        kept.update({min(values)[1], max(values)[1]} if values else ())
        gap = next((index for index in stretch if points[index][1] is None), None)
        kept.update(() if gap is None else {gap})
    return [points[index] for index in sorted(kept)]


def thin_largest(items: Sequence[Item], size: Callable[[Item], float], most: int = MOST_POINTS) -> list[Item]:
    """Of each stretch of items the largest; the first and the last stay."""
    if len(items) <= most:
        return list(items)
    kept = {0, len(items) - 1}
    for stretch in _stretches(len(items), max(1, most - 2)):
        kept.add(max(stretch, key=lambda index: size(items[index])))
    return [items[index] for index in sorted(kept)]


def finite(value: float | None) -> float | None:
    """The number if JSON has it."""
    return value if value is not None and math.isfinite(value) else None


def _stretches(count: int, parts: int) -> list[range]:
    """0 to count in so many ranges, as equal as they can be."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends) if end > begin]
