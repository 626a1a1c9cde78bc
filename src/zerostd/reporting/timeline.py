"""One step, lane by lane: bars from start to end. Where a lane has too many, neighbours are drawn as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from zerostd.reporting.numbers import MOST_DRAWN, Steps, step_seconds
from zerostd.reporting.records import EventLine, Run, StepLine

LANES = ("loop", "compute", "gradients", "up", "down", "update", "cpu", "disk", "wire")  # shown in this order
MOST_BARS = 3000  # of one step
LEAST_BARS = 40  # of one lane, whatever the number of lanes
MOST_LANES = 16
MOST_TRACKS = 4  # bars of one lane above each other
NEVER = float("-inf")

Events = Mapping[int, Sequence[EventLine]]  # of one step, by rank


def timelines(run: Run, steps: Steps) -> dict[str, Any]:
    """Return the typical step of those with events and the longest, ready to be drawn."""
    events: dict[int, dict[int, list[EventLine]]] = {}
    for log in run.ranks:
        for event in log.of(EventLine):
            events.setdefault(event.step, {}).setdefault(log.rank, []).append(event)
    chosen: dict[int, str] = {}
    if events:
        seconds = {step: _seconds(ranks, steps.get(step)) for step, ranks in events.items()}
        middle = median(seconds.values())
        typical = min(seconds, key=lambda step: (abs(seconds[step] - middle), step))
        longest = max(seconds, key=lambda step: (seconds[step], -step))
        chosen[typical] = "typical" if len(events) > 1 else "only"
        chosen.setdefault(longest, "longest")
    return {
        "events": sum(len(lines) for ranks in events.values() for lines in ranks.values()),
        "steps_with_events": len(events),
        "steps": [
            {"step": step, "why": why, **drawn_step(events[step], steps.get(step, {}))} for step, why in chosen.items()
        ],
    }


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds in which at least one of the spans (start, end) goes on."""
    seconds = 0.0
    reached = NEVER
    for start, end in sorted(spans):
        seconds += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return seconds


def _seconds(ranks: Events, step: Mapping[int, StepLine] | None) -> float:
    """Return how long a step took; without its lines, the seconds from the first start to the last end."""
    if step is not None:
        return step_seconds(step)
    events = [event for lines in ranks.values() for event in lines]
    return max(event.end for event in events) - min(event.start for event in events)


def drawn_step(ranks: Events, steps: Mapping[int, StepLine]) -> dict[str, Any]:
    """Return the rows of one step and the bars in them; without the lines of its ranks, it ends with its last bar."""
    shown = sorted(ranks)[:MOST_DRAWN]
    lines = [steps[rank] for rank in shown if rank in steps]
    begin = min([line.start for line in lines] or [event.start for rank in shown for event in ranks[rank]])
    lanes = [(rank, lane, events) for rank in shown for lane, events in _by_lane(ranks[rank])]
    most = max(LEAST_BARS, MOST_BARS // len(lanes))
    rows: list[dict[str, Any]] = [
        {
            "rank": rank,
            "lane": lane,
            "busy_s": covered_seconds((event.start, event.end) for event in events),
            "bytes": sum(event.bytes for event in events),
            "events": len(events),
            "bars": _with_tracks([_bar(neighbours, begin) for neighbours in _joined(events, most)]),
        }
        for rank, lane, events in lanes
    ]
    bars = [bar for row in rows for bar in row["bars"]]
    end = max([bar["end"] for bar in bars] + [line.end - begin for line in lines])
    return {
        "seconds": step_seconds(steps) if steps else end,
        "from_s": min(0.0, *(bar["start"] for bar in bars)),
        "to_s": end,
        "events": sum(row["events"] for row in rows),
        "bars": len(bars),
        "ranks_left_out": len(ranks) - len(shown),
        "rows": rows,
    }


def _by_lane(events: Sequence[EventLine]) -> list[tuple[str, list[EventLine]]]:
    """Return the lanes in the order they are shown, each with its events by time."""
    lanes: dict[str, list[EventLine]] = {}
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        lanes.setdefault(event.lane, []).append(event)
    names = [lane for lane in LANES if lane in lanes] + sorted(lanes.keys() - set(LANES))
    return [(name, lanes[name]) for name in names[:MOST_LANES]]


def _joined(events: list[EventLine], most: int) -> Iterable[list[EventLine]]:
    """Return each event alone, or those that start in the same stretch of time together."""
    if len(events) <= most:
        return [[event] for event in events]
    begin = events[0].start
    length = max(event.end for event in events) - begin
    stretches: dict[int, list[EventLine]] = {}
    for event in events:
        stretch = int((event.start - begin) / length * most) if length else 0
        stretches.setdefault(stretch, []).append(event)
    return stretches.values()


def _bar(events: list[EventLine], begin: float) -> dict[str, Any]:
    first = events[0]
    names = {event.name for event in events}
    groups = {event.group for event in events}
    return {
        "start": first.start - begin,
        "end": max(event.end for event in events) - begin,
        "name": first.name if len(names) == 1 else "several",
        "group": first.group if len(groups) == 1 else "",
        "way": " to ".join(tier for tier in (first.tier, first.to) if tier),
        "bytes": sum(event.bytes for event in events),
        "events": len(events),
    }


def _with_tracks(bars: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bars with their tracks: where bars of one lane overlap, they are drawn above each other."""
    ends = [NEVER] * MOST_TRACKS
    for bar in bars:
        free = [track for track, end in enumerate(ends) if end <= bar["start"]]
        track = free[0] if free else ends.index(min(ends))
        ends[track] = max(ends[track], bar["end"])
        bar["track"] = track
    return bars
