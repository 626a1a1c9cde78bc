"""The outer search: how the samples of a step are divided into passes, and at which stage. It is told how to solve one
of them, and says which is the best and what became of the others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from zerostd.errors import PrepareError
from zerostd.policy import Stage

__all__ = ["Refused", "SolvedLayout", "StepLayout", "divisions", "shortest", "table", "try_all"]

MOST_TRIED = 8
ALMOST = 0.01
SHORTEST = re.compile(r"[^:.]*(?:[.]\d[^:.]*)* is missing")  # what of a refusal goes into the table

Found = TypeVar("Found")


@dataclass(frozen=True)
class StepLayout:
    """One way to make a step."""

    samples: int | None  # in one pass; None: not known
    accumulate: int | None  # passes; None: one, and prepare is not told
    stage: Stage


@dataclass(frozen=True)
class SolvedLayout(Generic[Found]):
    """One that was solved."""

    option: StepLayout
    seconds: float
    found: Found


@dataclass(frozen=True)
class Refused:
    """One that was not."""

    option: StepLayout
    error: PrepareError


def divisions(batch: int, most: int = MOST_TRIED) -> list[tuple[int, int]]:
    """Samples in a pass and passes, whose product is the batch: all there are, the largest passes first, or of many
    some, at even distances on a scale of powers."""
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    if len(sizes) > most:
        wanted = [math.log(batch) * place / (most - 1) for place in range(most)]
        sizes = sorted({min(sizes, key=lambda size: abs(math.log(size) - one)) for one in wanted})
    return [(size, batch // size) for size in reversed(sizes)]


def try_all(
    options: Iterable[StepLayout], solve: Callable[[StepLayout], Found], seconds: Callable[[Found], float]
) -> tuple[list[SolvedLayout[Found]], list[Refused]]:
    """What became of each. Raises the last refusal if nothing fits."""
    fits, refused = list[SolvedLayout[Found]](), list[Refused]()
    for option in options:
        try:
            found = solve(option)
        except PrepareError as error:
            refused.append(Refused(option, error))
        else:
            fits.append(SolvedLayout(option, seconds(found), found))
    if refused and not fits:
        raise refused[-1].error
    return fits, refused


def shortest(fits: Sequence[SolvedLayout[Found]]) -> SolvedLayout[Found]:
    """The shortest, but at the same stage a pass of more samples for almost the same time."""
    best = min(fits, key=lambda one: one.seconds)
    same = [one for one in fits if one.option.stage is best.option.stage and one.seconds <= best.seconds * (1 + ALMOST)]
    return max(same, key=lambda one: (one.option.samples or 0, -one.seconds))


def table(fits: Sequence[SolvedLayout[Found]], refused: Sequence[Refused], chosen: StepLayout) -> str:
    """The divisions of a batch that were tried, in lines; of each the best stage."""
    ends: dict[tuple[int, int], str] = {}
    for no in refused:
        ends[_passes(no.option)] = _shortly(str(no.error))
    for one in sorted(fits, key=lambda one: -one.seconds):
        ends[_passes(one.option)] = f"{one.seconds:.3g} s a step"
    samples, passes = _passes(chosen)
    lines = [f"A step of {samples * passes} samples is made in passes of {samples}: accumulate={passes}. Tried:"]
    return "\n".join(
        [*lines, *(f"  {size} x {count}: {ends[size, count]}" for size, count in sorted(ends, reverse=True))]
    )


def _passes(option: StepLayout) -> tuple[int, int]:
    return option.samples or 1, option.accumulate or 1


def _shortly(refused: str) -> str:
    """The part of a refusal that says what is missing."""
    found = SHORTEST.search(refused)
    return found.group().strip() if found else refused
