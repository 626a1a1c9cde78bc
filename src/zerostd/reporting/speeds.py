"""How fast, and how good: step times, samples and tokens a second, losses, quality.

A step takes as long as its slowest rank. Its samples and tokens are those of all ranks, its loss is their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, median
from typing import Any

from zerostd.reporting.reading import Run
from zerostd.reporting.records import Quality, Step
from zerostd.reporting.thinning import finite, thin_extremes

__all__ = ["losses", "qualities", "speed", "step_seconds", "steps_of"]

MOST_QUALITIES = 12  # names


def steps_of(run: Run) -> dict[int, dict[int, Step]]:
    """Steps by number, then by rank."""
    found: dict[int, dict[int, Step]] = {}
    for log in run.ranks:
        for step in log.of(Step):
            found.setdefault(step.step, {})[log.rank] = step
    return dict(sorted(found.items()))


def step_seconds(ranks: Mapping[int, Step]) -> float:
    """How long a step took: its slowest rank."""
    return max(step.seconds for step in ranks.values())


def speed(steps: Mapping[int, Mapping[int, Step]]) -> dict[str, Any]:
    """Seconds of a step, and what that makes a second; medians over steps."""
    seconds = [step_seconds(ranks) for ranks in steps.values()]
    return {
        "steps": len(steps),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "step_s": median(seconds) if seconds else None,
        "shortest_s": min(seconds, default=None),
        "longest_s": max(seconds, default=None),
        "samples_per_s": _rate(steps, lambda step: step.samples),
        "tokens_per_s": _rate(steps, lambda step: step.tokens),
        "in_steps_s": sum(seconds),
        "first_to_last_s": _span(step for ranks in steps.values() for step in ranks.values()),
    }


def losses(steps: Mapping[int, Mapping[int, Step]]) -> dict[str, Any]:
    """The loss by step; points of a loss that is not finite are null."""
    points: list[tuple[int, float | None]] = []
    for number, ranks in steps.items():
        values = [step.loss for step in ranks.values() if step.loss is not None]
        if values:
            points.append((number, finite(_mean(values))))
    return {**_summary(points), "points": [list(point) for point in thin_extremes(points)]}


def qualities(run: Run) -> list[dict[str, Any]]:
    """Each quality by its name, in the order they first appear; of several ranks their mean."""
    found: dict[str, dict[int, list[float]]] = {}
    for log in run.ranks:
        for one in log.of(Quality):
            found.setdefault(one.name, {}).setdefault(one.step, []).append(one.value)
    made = []
    for name, by_step in list(found.items())[:MOST_QUALITIES]:
        points = [(step, finite(_mean(values))) for step, values in sorted(by_step.items())]
        made.append({"name": name, **_summary(points), "points": [list(point) for point in thin_extremes(points)]})
    return made


def _summary(points: list[tuple[int, float | None]]) -> dict[str, Any]:
    values = [(value, step) for step, value in points if value is not None]
    lowest = min(values, default=(None, None))
    highest = max(values, key=lambda value: value[0], default=(None, None))
    last_step, last = points[-1] if points else (None, None)
    return {
        "count": len(points),
        "not_finite": len(points) - len(values),
        "first": points[0][1] if points else None,
        "last": last,
        "last_step": last_step,
        "lowest": lowest[0],
        "lowest_step": lowest[1],
        "highest": highest[0],
        "highest_step": highest[1],
    }


def _mean(values: list[float]) -> float:
    """nan where there is one; nothing overflows into an error."""
    try:
        return fmean(values)
    except (OverflowError, ValueError):  # inf - inf
        return float("nan")


def _rate(steps: Mapping[int, Mapping[int, Step]], count: Callable[[Step], float | None]) -> float | None:
    """What a second brings: the median of the steps where somebody counted."""
    rates = []
    for ranks in steps.values():
        counts = [value for step in ranks.values() if (value := count(step)) is not None]
        seconds = step_seconds(ranks)
        if counts and seconds > 0:
            rates.append(sum(counts) / seconds)
    return finite(median(rates)) if rates else None


def _span(steps: Iterable[Step]) -> float:
    """From the first start to the last end."""
    all_steps = list(steps)
    return max(step.end for step in all_steps) - min(step.start for step in all_steps) if all_steps else 0.0
