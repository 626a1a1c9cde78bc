"""What was busy, what the loop waited for, rank by rank; and what was not given back."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from zerostd.reporting.reading import RankLog, Run
from zerostd.reporting.records import Leak, Step
from zerostd.reporting.thinning import finite

__all__ = ["by_rank", "leaks", "utilisation", "waiting"]

RESOURCES = ("device", "cpu", "up", "down", "disk", "wire")  # shown in this order, others after them
CAUSES = ("updates", "parameters", "gradients")
MOST_NAMES = 24  # of causes, of resources
MOST_LEAKS = 200  # rows


def utilisation(run: Run) -> list[dict[str, Any]]:
    """Busy seconds over seconds of the steps they were counted in, all ranks together."""
    return [
        {"name": name, "share": _share(total, seconds), "busy_s": total, "steps_s": seconds}
        for name, (total, seconds, _) in _totals(run.ranks, "busy", RESOURCES).items()
    ]


def waiting(run: Run) -> list[dict[str, Any]]:
    """By cause: seconds a step, and their share of it, all ranks together; the step with the longest."""
    made = []
    for name, (total, seconds, count) in _totals(run.ranks, "waiting", CAUSES).items():
        longest, step, rank = max(
            (line.seconds.get(name, 0.0), -line.step, -log.rank) for log in run.ranks for line in log.seconds("waiting")
        )
        made.append(
            {
                "cause": name,
                "mean_s": total / count if count else None,
                "share": _share(total, seconds),
                "longest_s": longest,
                "longest_step": -step,
                "longest_rank": -rank,
            }
        )
    return made


def by_rank(run: Run) -> list[dict[str, Any]]:
    """Each rank's own median step, waiting and end."""
    made = []
    for log in run.ranks:
        seconds = [step.seconds for step in log.of(Step)]
        waits = _totals((log,), "waiting", CAUSES)
        made.append(
            {
                "rank": log.rank,
                "steps": len(seconds),
                "step_s": median(seconds) if seconds else None,
                "waiting_share": sum(_share(total, steps) or 0.0 for total, steps, _ in waits.values())
                if waits
                else None,
                "has_ended": log.has_ended,
                "unreadable": log.num_unreadable + log.is_torn,
            }
        )
    return made


def leaks(run: Run) -> list[dict[str, Any]]:
    """Leaks of one group, kind and place together; the largest first."""
    found: dict[tuple[str, str, str], list[tuple[int, Leak]]] = {}
    for log in run.ranks:
        for leak in log.of(Leak):
            found.setdefault((leak.group, leak.what, leak.where), []).append((log.rank, leak))
    made: list[dict[str, Any]] = [
        {
            "group": group,
            "what": what,
            "where": where,
            "times": len(some),
            "bytes": max(leak.bytes for _, leak in some),
            "first_step": min(leak.step for _, leak in some),
            "ranks": len({rank for rank, _ in some}),
        }
        for (group, what, where), some in found.items()
    ]
    return sorted(made, key=lambda row: -row["bytes"])[:MOST_LEAKS]


def _totals(logs: tuple[RankLog, ...], kind: str, order: tuple[str, ...]) -> dict[str, tuple[float, float, int]]:
    """By name: its seconds, the seconds of the steps that have such a line, and how many those are."""
    totals: dict[str, float] = {}
    steps_s, count = 0.0, 0
    for log in logs:
        lengths = {step.step: step.seconds for step in log.of(Step)}
        lines: Mapping[int, Mapping[str, float]] = {line.step: line.seconds for line in log.seconds(kind)}
        for step, seconds in lines.items():
            if step not in lengths:
                continue  # without its length it has no share
            steps_s, count = steps_s + lengths[step], count + 1
            for name, value in seconds.items():
                totals[name] = totals.get(name, 0.0) + value
    names = [name for name in order if name in totals] + sorted(totals.keys() - set(order))
    return {name: (totals[name], steps_s, count) for name in names[:MOST_NAMES]}


def _share(part: float, whole: float) -> float | None:
    return finite(part / whole) if whole > 0 else None
