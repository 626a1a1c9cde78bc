"""The part of a matrix that `make test` runs; the rest is marked `full`, and run by `make test-all`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=tuple[Hashable, ...])


def pairwise(cases: Sequence[Case]) -> set[Case]:
    """Return some of the cases, the same ones each time, in which every two values that occur together in a case do."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    left = set[Any]().union(*pairs.values())
    chosen = set[Case]()
    while left:
        best = max(pairs, key=lambda case: len(pairs[case] & left))  # the first one of these
        chosen.add(best)
        left -= pairs[best]
    return chosen


def marked(cases: Sequence[Case]) -> list[Any]:
    """Return parameters for pytest, those outside the sample with the mark `full`."""
    chosen = pairwise(cases)
    return [pytest.param(*case, marks=() if case in chosen else pytest.mark.full) for case in cases]
