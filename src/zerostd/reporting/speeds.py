"""Time and what it brought, step by step and rank by rank: step times, samples and tokens a second, losses, quality,
what was busy and what the loop waited for.

A step takes as long as its slowest rank. Its samples and tokens are those of all ranks, its loss is their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from zerostd.reporting.reading import RankLog, Run
from zerostd.reporting.records import QualityLine, StepLine
from zerostd.reporting.thinning import finite, thin_extremes

RESOURCES = ("device", "cpu", "up", "down", "disk", "wire")  # shown in this order, others after them
CAUSES = ("updates", "parameters", "gradients")
MOST_NAMES = 24  # of causes, of resources
MOST_QUALITIES = 12  # names

Steps = Mapping[int, Mapping[int, StepLine]]  # by number, then by rank


def steps_of(run: Run) -> Steps:
    """Return the steps by number, then by rank."""
    steps: dict[int, dict[int, StepLine]] = {}
    for log in run.ranks:
        for step in log.of(StepLine):
            steps.setdefault(step.step, {})[log.rank] = step
    return dict(sorted(steps.items()))


def step_seconds(step: Mapping[int, StepLine]) -> float:
    """Return how long a step took: as long as its slowest rank."""
    return max(line.seconds for line in step.values())


def speed(steps: Steps) -> dict[str, Any]:
    """Return the seconds of a step, and samples and tokens a second; medians over steps."""
    seconds = [step_seconds(step) for step in steps.values()]
    lines = [line for step in steps.values() for line in step.values()]
    return {
        "steps": len(steps),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "step_s": median(seconds) if seconds else None,
        "shortest_s": min(seconds, default=None),
        "longest_s": max(seconds, default=None),
        "samples_per_s": _rate(steps, lambda line: line.samples),
        "tokens_per_s": _rate(steps, lambda line: line.tokens),
        "in_steps_s": sum(seconds),
        "first_to_last_s": max(line.end for line in lines) - min(line.start for line in lines) if lines else 0.0,
    }


def _rate(steps: Steps, count: Callable[[StepLine], float | None]) -> float | None:
    """Return the median over the steps where some rank counted."""
    rates = []
    for step in steps.values():
        counts = [number for line in step.values() if (number := count(line)) is not None]
        seconds = step_seconds(step)
        if counts and seconds > 0:
            rates.append(sum(counts) / seconds)
    return finite(median(rates)) if rates else None


# -- losses and quality --


def losses(steps: Steps) -> dict[str, Any]:
    """Return the loss by step; points of a loss that is not finite are null."""
    values = {number: [line.loss for line in step.values() if line.loss is not None] for number, step in steps.items()}
    return _series({number: numbers for number, numbers in values.items() if numbers})


def qualities(run: Run) -> list[dict[str, Any]]:
    """Return each quality by its name, in the order they first appear; of several ranks their mean."""
    values: dict[str, dict[int, list[float]]] = {}
    for log in run.ranks:
        for line in log.of(QualityLine):
            values.setdefault(line.name, {}).setdefault(line.step, []).append(line.value)
    names = list(values)[:MOST_QUALITIES]
    return [{"name": name, **_series(dict(sorted(values[name].items())))} for name in names]


def _series(values: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Return points (step, mean of its values) and what stands out among them."""
    points = [(step, finite(_mean(numbers))) for step, numbers in values.items()]
    known = [(value, step) for step, value in points if value is not None]
    lowest, lowest_step = min(known, default=(None, None))
    highest, highest_step = max(known, key=lambda point: point[0], default=(None, None))
    last_step, last = points[-1] if points else (None, None)
    return {
        "count": len(points),
        "not_finite": len(points) - len(known),
        "first": points[0][1] if points else None,
        "last": last,
        "last_step": last_step,
        "lowest": lowest,
        "lowest_step": lowest_step,
        "highest": highest,
        "highest_step": highest_step,
        "points": [list(point) for point in thin_extremes(points)],
    }


def _mean(values: Iterable[float]) -> float:
    """Return the mean; nan where it is undefined or overflows."""
    try:
        return fmean(values)
    except (OverflowError, ValueError):  # inf - inf
        return float("nan")


# -- busy and waiting --


def utilisation(run: Run) -> list[dict[str, Any]]:
    """Return busy seconds over seconds of the steps they were counted in, all ranks together."""
    totals, steps_s, _ = _totals(run.ranks, "busy", RESOURCES)
    return [
        {"name": name, "share": _share(total, steps_s), "busy_s": total, "steps_s": steps_s}
        for name, total in totals.items()
    ]


def waiting(run: Run) -> list[dict[str, Any]]:
    """Return by cause the seconds a step and their share of it, all ranks together; and the longest wait."""
    totals, steps_s, count = _totals(run.ranks, "waiting", CAUSES)
    rows = []
    for name, total in totals.items():
        longest, step, rank = max(
            (line.seconds.get(name, 0.0), -line.step, -log.rank) for log in run.ranks for line in log.seconds("waiting")
        )
        rows.append(
            {
                "cause": name,
                "mean_s": total / count,
                "share": _share(total, steps_s),
                "longest_s": longest,
                "longest_step": -step,
                "longest_rank": -rank,
            }
        )
    return rows


def ranks(run: Run) -> list[dict[str, Any]]:
    """Return each rank's own median step, waiting and end."""
    rows = []
    for log in run.ranks:
        seconds = [step.seconds for step in log.of(StepLine)]
        waits, steps_s, _ = _totals([log], "waiting", CAUSES)
        rows.append(
            {
                "rank": log.rank,
                "steps": len(seconds),
                "step_s": median(seconds) if seconds else None,
                "waiting_share": sum(_share(total, steps_s) or 0.0 for total in waits.values()) if waits else None,
                "has_ended": log.has_ended,
                "unreadable": log.num_unreadable + log.is_torn,
            }
        )
    return rows


def _totals(logs: Iterable[RankLog], kind: str, order: Sequence[str]) -> tuple[dict[str, float], float, int]:
    """Return seconds by name, the seconds of the steps that have such a line, and how many those are."""
    totals: dict[str, float] = {}
    lengths = []
    for log in logs:
        steps = {step.step: step.seconds for step in log.of(StepLine)}
        lines = {line.step: line.seconds for line in log.seconds(kind)}  # the last one of a step counts
        for step, by_name in lines.items():
            if step not in steps:
                continue  # without its length it has no share
            lengths.append(steps[step])
            for name, seconds in by_name.items():
                totals[name] = totals.get(name, 0.0) + seconds
    names = [name for name in order if name in totals] + sorted(totals.keys() - set(order))
    return {name: totals[name] for name in names[:MOST_NAMES]}, sum(lengths), len(lengths)


def _share(part: float, whole: float) -> float | None:
    return finite(part / whole) if whole > 0 else None
