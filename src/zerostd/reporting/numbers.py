"""Numbers of a run as plain data: speed, losses, quality, busy times, waits, memory, leaks.

`report` calls each function here with a `Run`. A step takes as long as its slowest rank; its samples and tokens are
those of all ranks, its loss is their mean. If there are too many points for a page, the outstanding ones are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any, TypeVar

from zerostd.policy import Kind, Tier
from zerostd.reporting.records import Bytes, EventLine, LeakLine, MemoryLine, QualityLine, RankLog, Run, StepLine

RESOURCES = ("device", "cpu", "up", "down", "disk", "wire")  # shown in this order, others after them
CAUSES = ("updates", "parameters", "gradients")
MOST_NAMES = 24  # of causes, of resources
MOST_QUALITIES = 12  # names
MOST_POINTS = 600  # of a line or an area
MOST_DRAWN = 8  # ranks

Steps = Mapping[int, Mapping[int, StepLine]]  # by number, then by rank
Point = tuple[int, float | None]  # step and value; a value of None is a gap
Item = TypeVar("Item")


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
        "samples_per_s": _rate(steps, "samples"),
        "tokens_per_s": _rate(steps, "tokens"),
        "in_steps_s": sum(seconds),
        "first_to_last_s": max(line.end for line in lines) - min(line.start for line in lines) if lines else 0.0,
    }


def _rate(steps: Steps, name: str) -> float | None:
    """Return the median of samples or tokens a second, over the steps where some rank counted them."""
    rates = _rates(steps, name)
    return finite(median(rates)) if rates else None


def _rates(steps: Steps, name: str) -> list[float]:
    rates = []
    for step in steps.values():
        counts = [number for line in step.values() if (number := getattr(line, name)) is not None]
        seconds = step_seconds(step)
        if counts and seconds > 0:
            rates.append(sum(counts) / seconds)
    return rates


def percent(value: float | None, base: float | None) -> float | None:
    """Return by how many percent a value differs from another."""
    return finite(100 * (value - base) / base) if value is not None and base else None


def step_times(steps: Steps) -> dict[str, Any]:
    """Return the seconds of each step."""
    return _curve({number: [step_seconds(step)] for number, step in steps.items()})


def losses(steps: Steps) -> dict[str, Any]:
    """Return the loss by step; points of a loss that is not finite are null. `spread` is the standard deviation of the
    last tenth of the steps."""
    values = _by_step(steps, "loss")
    known = [mean for step in sorted(values) if values[step] and (mean := _mean(values[step])) is not None]
    last = known[-max(2, len(known) // 10) :]
    return {**_curve(values), "spread": finite(stdev(last)) if len(last) > 1 else None}


def curves(steps: Steps) -> list[dict[str, Any]]:
    """Return the other numbers of steps that get a chart: gradient norm, learning rate, tokens or samples a second."""
    values = {"gradient norm": _by_step(steps, "grad_norm"), "learning rate": _by_step(steps, "lr")}
    for name in ("tokens", "samples"):
        rates = {number: _rates({number: step}, name) for number, step in steps.items()}
        if any(rates.values()):
            values[f"{name}/s"] = rates
            break
    return [{"name": name, **_curve(by_step)} for name, by_step in values.items() if any(by_step.values())]


def _by_step(steps: Steps, name: str) -> dict[int, list[float]]:
    return {
        number: [value for line in step.values() if (value := getattr(line, name)) is not None]
        for number, step in steps.items()
    }


def sent(run: Run) -> dict[str, Any]:
    """Return the bytes that collectives moved in a recorded step, all ranks together, and about how many in all."""
    totals: dict[int, int] = {}
    for log in run.ranks:
        for event in log.of(EventLine):
            totals[event.step] = totals.get(event.step, 0) + (event.bytes if event.lane == "wire" else 0)
    mean = sum(totals.values()) / len(totals) if totals else None
    num_steps = len(steps_of(run))
    return {"a_step": None if not mean else int(mean), "in_all": None if not mean else int(mean * num_steps)}


def qualities(run: Run) -> list[dict[str, Any]]:
    """Return each quality by its name, in the order they first appear; of several ranks their mean."""
    values: dict[str, dict[int, list[float]]] = {}
    for log in run.ranks:
        for line in log.of(QualityLine):
            values.setdefault(line.name, {}).setdefault(line.step, []).append(line.value)
    return [{"name": name, **_curve(values[name])} for name in list(values)[:MOST_QUALITIES]]


def _curve(values: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Return points (step, mean of its values) and what stands out among them; steps without values have none."""
    points = [(step, _mean(numbers)) for step, numbers in sorted(values.items()) if numbers]
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


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean; None where it is undefined or overflows."""
    try:
        return finite(fmean(values))
    except (OverflowError, ValueError):  # inf - inf
        return None


def utilisation(run: Run) -> Iterator[dict[str, Any]]:
    """Yield busy seconds over seconds of the steps they were counted in, all ranks together."""
    totals, steps_s, _ = _totals(run.ranks, "busy", RESOURCES)
    for name, total in totals.items():
        yield {"name": name, "share": _share(total, steps_s), "busy_s": total, "steps_s": steps_s}


def waiting(run: Run) -> Iterator[dict[str, Any]]:
    """Yield by cause the seconds a step and their share of it, all ranks together; and the longest wait."""
    totals, steps_s, count = _totals(run.ranks, "waiting", CAUSES)
    for name, total in totals.items():
        longest, step, rank = max(
            (line.seconds.get(name, 0.0), -line.step, -log.rank) for log in run.ranks for line in log.seconds("waiting")
        )
        yield {
            "cause": name,
            "mean_s": total / count,
            "share": _share(total, steps_s),
            "longest_s": longest,
            "longest_step": -step,
            "longest_rank": -rank,
        }


def ranks(run: Run) -> Iterator[dict[str, Any]]:
    """Yield each rank's own median step, waiting and end."""
    for log in run.ranks:
        seconds = [step.seconds for step in log.of(StepLine)]
        waits, steps_s, _ = _totals([log], "waiting", CAUSES)
        yield {
            "rank": log.rank,
            "steps": len(seconds),
            "step_s": median(seconds) if seconds else None,
            "waiting_share": sum(_share(total, steps_s) or 0.0 for total in waits.values()) if waits else None,
            "has_ended": log.has_ended,
            "unreadable": log.num_unreadable + log.is_torn,
        }


def _totals(logs: Iterable[RankLog], kind: str, order: Sequence[str]) -> tuple[dict[str, float], float, int]:
    """Return seconds by name, the seconds of the steps that have such a line, and how many those are."""
    totals: dict[str, float] = {}
    lengths = []
    for log in logs:
        steps = {step.step: step.seconds for step in log.of(StepLine)}
        lines = {line.step: line.seconds for line in log.seconds(kind)}  # the last one of a step counts
        for step, by_name in lines.items():
            if step in steps:  # without its length it has no share
                lengths.append(steps[step])
                for name, seconds in by_name.items():
                    totals[name] = totals.get(name, 0.0) + seconds
    names = [name for name in order if name in totals] + sorted(totals.keys() - set(order))
    return {name: totals[name] for name in names[:MOST_NAMES]}, sum(lengths), len(lengths)


def memory(run: Run) -> dict[str, Any]:
    """Return the peaks of each tier on the rank that holds most, the allocator's, and the areas of the first ranks."""
    lines_of = {
        log.rank: sorted(log.of(MemoryLine), key=lambda line: line.time) for log in run.ranks if log.of(MemoryLine)
    }
    lines = [line for rank_lines in lines_of.values() for line in rank_lines]
    books = {rank: peaks(rank_lines) for rank, rank_lines in lines_of.items()}
    areas = []
    for rank in list(lines_of)[:MOST_DRAWN]:
        tiers = [tier for tier in Tier if total(books[rank], tier)]
        areas.append({"rank": rank, "tiers": [_area(lines_of[rank], tier) for tier in tiers]})
    return {
        "peaks": [_peak(books, tier) for tier in Tier if any(total(book, tier) for book in books.values())],
        "allocated": allocator_peak(lines),
        "reserved": max((line.reserved for line in lines if line.reserved is not None), default=None),
        "lines": len(lines),
        "ranks": areas,
    }


def allocator_peak(lines: Iterable[MemoryLine]) -> int | None:
    """Return the most that the device's allocator had given out; None if no line has it."""
    sizes = (size for line in lines for size in (line.allocated, line.most_allocated))
    return max((size for size in sizes if size is not None), default=None)


def peaks(lines: Iterable[MemoryLine]) -> Bytes:
    """Return the most of each kind in each tier, each at its own moment."""
    most: Bytes = {}
    for line in lines:
        for book in (line.peak, line.bytes):
            for tier, kinds in book.items():
                row = most.setdefault(tier, {})
                for kind, size in kinds.items():
                    row[kind] = max(row.get(kind, 0), size)
    return most


def total(book: Bytes, tier: Tier) -> int:
    """Return the bytes of all kinds in a tier."""
    return sum(book.get(tier, {}).values())


def _peak(books: dict[int, Bytes], tier: Tier) -> dict[str, Any]:
    """Return the peaks of the rank that holds most of a tier: each kind at its own, and their sum, as plans count."""
    rank = max(books, key=lambda rank: total(books[rank], tier))
    kinds = {kind.value: books[rank][tier][kind] for kind in Kind if books[rank][tier].get(kind)}
    return {"tier": tier.value, "total": total(books[rank], tier), "rank": rank, "kinds": kinds}


def _area(lines: Sequence[MemoryLine], tier: Tier) -> dict[str, Any]:
    """Return the bytes that one rank held in a tier over time."""
    kept = thin_largest(lines, lambda line: total(line.bytes, tier))
    kinds = [kind for kind in Kind if any(line.bytes.get(tier, {}).get(kind) for line in lines)]
    return {
        "tier": tier.value,
        "kinds": [kind.value for kind in kinds],
        "times": [line.time for line in kept],
        "steps": [line.step for line in kept],
        "bytes": [[line.bytes.get(tier, {}).get(kind, 0) for line in kept] for kind in kinds],
        "peak": [total(line.peak, tier) for line in kept],
        "allocated": [line.allocated for line in kept] if tier is Tier.DEVICE else [],
        "reserved": [line.reserved for line in kept] if tier is Tier.DEVICE else [],
    }


def leaks(run: Run) -> list[dict[str, Any]]:
    """Return a row for each group, kind and place that leaked; the largest first."""
    places: dict[tuple[str, str, str], list[tuple[int, LeakLine]]] = {}
    for log in run.ranks:
        for leak in log.of(LeakLine):
            places.setdefault((leak.group, leak.what, leak.where), []).append((log.rank, leak))
    rows: list[dict[str, Any]] = [
        {
            "group": group,
            "what": what,
            "where": where,
            "times": len(lines),
            "bytes": max(leak.bytes for _, leak in lines),
            "first_step": min(leak.step for _, leak in lines),
            "ranks": len({rank for rank, _ in lines}),
        }
        for (group, what, where), lines in places.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def finite(value: float) -> float | None:
    """Return the number if JSON has it."""
    return value if math.isfinite(value) else None


def _share(part: float, whole: float) -> float | None:
    return finite(part / whole) if whole > 0 else None


def thin_extremes(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return the lowest, the highest and the first gap of each stretch of points; the first and the last point stay."""

    def choose(stretch: range) -> set[int]:
        known = [(value, index) for index in stretch if (value := points[index][1]) is not None]
        gaps = [index for index in stretch if points[index][1] is None]
        extremes = {min(known)[1], max(known)[1]} if known else set[int]()
        return {*extremes, *gaps[:1]}

    return _thin(points, most, 3, choose)


def thin_largest(items: Sequence[Item], size: Callable[[Item], float], most: int = MOST_POINTS) -> list[Item]:
    """Return the largest item of each stretch; the first and the last stay."""
    return _thin(items, most, 1, lambda stretch: [max(stretch, key=lambda index: size(items[index]))])


def _thin(items: Sequence[Item], most: int, num_chosen: int, choose: Callable[[range], Iterable[int]]) -> list[Item]:
    """Return the items that `choose` takes of each stretch, `num_chosen` of each; the first and the last stay."""
    if len(items) <= most:
        return list(items)
    kept = {0, len(items) - 1}
    num_stretches = max(1, (most - 2) // num_chosen)
    ends = [len(items) * part // num_stretches for part in range(num_stretches + 1)]
    for begin, end in itertools.pairwise(ends):
        kept.update(choose(range(begin, end)))
    return [items[index] for index in sorted(kept)]
