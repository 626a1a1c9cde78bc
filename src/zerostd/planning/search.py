"""The outer search: how the samples of a step are divided into passes, and at which stage.

In: layouts of a step and a function that solves one of them. Out: the best, and what became of the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from zerostd.errors import PrepareError
from zerostd.policy import Stage

MOST_TRIED = 8
ALMOST = 0.01
MISSING = re.compile(r"[^:.]*(?:[.]\d[^:.]*)* is missing")  # what of a refusal goes into the table

T = TypeVar("T")


@dataclass(frozen=True)
class StepLayout:
    """One way to make a step."""

    samples: int | None  # in one pass; None: not known
    accumulate: int | None  # passes; None: one, and prepare is not told
    stage: Stage

    @property
    def division(self) -> tuple[int, int]:
        """Samples in a pass, and passes."""
        return self.samples or 1, self.accumulate or 1


@dataclass(frozen=True)
class SolvedLayout(Generic[T]):
    """A layout that fits."""

    layout: StepLayout
    seconds: float
    solution: T


def divisions(batch: int, most: int = MOST_TRIED) -> list[tuple[int, int]]:
    """Return samples in a pass and passes, whose product is the batch: all there are, the largest passes first, or of
    many some, at even distances on a scale of powers."""
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    if len(sizes) > most:
        wanted = [math.log(batch) * place / (most - 1) for place in range(most)]
        sizes = sorted({min(sizes, key=lambda size: abs(math.log(size) - power)) for power in wanted})
    return [(size, batch // size) for size in reversed(sizes)]


def try_all(
    layouts: Iterable[StepLayout], solve: Callable[[StepLayout], T], seconds: Callable[[T], float]
) -> tuple[list[SolvedLayout[T]], list[tuple[StepLayout, PrepareError]]]:
    """Return the layouts that fit, and the others with their refusals. Raises the last refusal if nothing fits."""
    solved = list[SolvedLayout[T]]()
    refused = list[tuple[StepLayout, PrepareError]]()
    for layout in layouts:
        try:
            solution = solve(layout)
        except PrepareError as error:
            refused.append((layout, error))
        else:
            solved.append(SolvedLayout(layout, seconds(solution), solution))
    if refused and not solved:
        raise refused[-1][1]
    return solved, refused


def shortest(solved: Sequence[SolvedLayout[T]]) -> SolvedLayout[T]:
    """Return the shortest, but at the same stage a pass of more samples for almost the same time."""
    best = min(solved, key=lambda candidate: candidate.seconds)
    most = best.seconds * (1 + ALMOST)
    near = [each for each in solved if each.layout.stage is best.layout.stage and each.seconds <= most]
    return max(near, key=lambda candidate: (candidate.layout.samples or 0, -candidate.seconds))


def table(
    solved: Sequence[SolvedLayout[T]], refused: Sequence[tuple[StepLayout, PrepareError]], chosen: StepLayout
) -> str:
    """Return the divisions of a batch that were tried, in lines; of each the best stage."""
    outcomes = {layout.division: _shortly(str(error)) for layout, error in refused}
    for candidate in sorted(solved, key=lambda candidate: -candidate.seconds):
        outcomes[candidate.layout.division] = f"{candidate.seconds:.3g} s a step"
    samples, passes = chosen.division
    lines = [f"A step of {samples * passes} samples is made in passes of {samples}: accumulate={passes}. Tried:"]
    lines += [f"  {size} x {count}: {outcomes[size, count]}" for size, count in sorted(outcomes, reverse=True)]
    return "\n".join(lines)


def _shortly(refusal: str) -> str:
    """Return the part of a refusal that says what is missing."""
    match = MISSING.search(refusal)
    return match.group().strip() if match else refusal
