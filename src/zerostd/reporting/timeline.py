"""One step, lane by lane: bars from start to end. Where a lane has too many, neighbours are drawn as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from zerostd.reporting.reading import Run
from zerostd.reporting.records import Event, Step
from zerostd.reporting.speeds import step_seconds

__all__ = ["timelines"]

LANES = ("loop", "compute", "gradients", "up", "down", "update", "cpu", "disk", "wire")  # shown in this order
MOST_BARS = 3000  # of one step
LEAST_BARS = 40  # of one lane, whatever the number of lanes
MOST_RANKS, MOST_LANES = 8, 16
MOST_TRACKS = 4  # bars of one lane above each other
NEVER = float("-inf")


def timelines(run: Run, steps: Mapping[int, Mapping[int, Step]]) -> dict[str, Any]:
    """The typical step of those with events, and the longest; and how much was left out."""
    events: dict[int, dict[int, list[Event]]] = {}
    for log in run.ranks:
        for event in log.of(Event):
            events.setdefault(event.step, {}).setdefault(log.rank, []).append(event)
    if not events:
        return {"events": 0, "steps_with_events": 0, "steps": []}
    seconds = {step: step_seconds(steps[step]) if step in steps else _length(events[step]) for step in events}
    typical, longest = _typical(seconds), max(seconds, key=lambda step: (seconds[step], -step))
    chosen = {typical: "typical" if len(events) > 1 else "only"}
    chosen.setdefault(longest, "longest")
    return {
        "events": sum(len(some) for ranks in events.values() for some in ranks.values()),
        "steps_with_events": len(events),
        "steps": [
            {"step": step, "why": why, **_drawn(events[step], steps.get(step, {}))} for step, why in chosen.items()
        ],
    }


def _typical(seconds: Mapping[int, float]) -> int:
    """The step nearest to the median length."""
    middle = median(seconds.values())
    return min(seconds, key=lambda step: (abs(seconds[step] - middle), step))


def _length(ranks: Mapping[int, Sequence[Event]]) -> float:
    events = [event for some in ranks.values() for event in some]
    return max(event.end for event in events) - min(event.start for event in events)


def _drawn(ranks: Mapping[int, Sequence[Event]], steps: Mapping[int, Step]) -> dict[str, Any]:
    shown = sorted(ranks)[:MOST_RANKS]
    starts = [steps[rank].start for rank in shown if rank in steps]
    begin = min(starts or [event.start for rank in shown for event in ranks[rank]])
    lanes = [(rank, lane, some) for rank in shown for lane, some in _by_lane(ranks[rank])]
    most = max(LEAST_BARS, MOST_BARS // max(1, len(lanes)))
    rows = [_row(rank, lane, some, begin, most) for rank, lane, some in lanes]
    ends = [bar["end"] for row in rows for bar in row["bars"]]
    ends += [steps[rank].end - begin for rank in shown if rank in steps]
    return {
        "seconds": step_seconds(steps) if steps else max(ends),
        "from_s": min(0.0, *(bar["start"] for row in rows for bar in row["bars"])),
        "to_s": max(ends),
        "events": sum(row["events"] for row in rows),
        "bars": sum(len(row["bars"]) for row in rows),
        "ranks_left_out": len(ranks) - len(shown),
        "rows": rows,
    }


def _by_lane(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event.lane, []).append(event)
    names = [lane for lane in LANES if lane in found] + sorted(found.keys() - set(LANES))
    return [(name, sorted(found[name], key=lambda event: (event.start, event.end))) for name in names[:MOST_LANES]]


def _row(rank: int, lane: str, events: list[Event], begin: float, most: int) -> dict[str, Any]:
    bars = [_bar(some, begin) for some in _joined(events, most)]
    for bar, track in zip(bars, _tracks(bars), strict=True):
        bar["track"] = track
    return {
        "rank": rank,
        "lane": lane,
        "busy_s": _covered(events),
        "bytes": sum(event.bytes for event in events),
        "events": len(events),
        "bars": bars,
    }


def _joined(events: list[Event], most: int) -> Iterable[list[Event]]:
    """Each event alone, or those that start in the same stretch of time together."""
    if len(events) <= most:
        return [[event] for event in events]
    begin, length = events[0].start, max(event.end for event in events) - events[0].start
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(int((event.start - begin) / length * most) if length else 0, []).append(event)
    return found.values()


def _bar(events: list[Event], begin: float) -> dict[str, Any]:
    first, names, groups = events[0], {event.name for event in events}, {event.group for event in events}
    return {
        "start": first.start - begin,
        "end": max(event.end for event in events) - begin,
        "name": first.name if len(names) == 1 else "several",
        "group": first.group if len(groups) == 1 else "",
        "way": f"{first.tier} to {first.to}" if first.tier and first.to else first.tier or first.to,
        "bytes": sum(event.bytes for event in events),
        "events": len(events),
    }


def _tracks(bars: list[dict[str, Any]]) -> list[int]:
    """Where bars of one lane overlap, they are drawn above each other."""
    ends = [NEVER]
    found = []
    for bar in bars:
        free = [track for track, end in enumerate(ends) if end <= bar["start"]]
        if free:
            track = free[0]
        elif len(ends) < MOST_TRACKS:
            ends.append(NEVER)
            track = len(ends) - 1
        else:
            track = min(range(len(ends)), key=lambda one: ends[one])
        ends[track] = max(ends[track], bar["end"])
        found.append(track)
    return found


def _covered(events: list[Event]) -> float:
    """Seconds in which at least one of them goes on."""
    seconds, reached = 0.0, NEVER
    for event in events:
        seconds += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return seconds
