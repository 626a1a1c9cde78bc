"""A run's events as a trace that chrome://tracing and Perfetto read: one process a rank, one thread a lane."""

from __future__ import annotations

import json
from typing import Any

from zerostd.reporting.reading import Run
from zerostd.reporting.records import Event, Step

__all__ = ["trace_of"]

LANES = ("loop", "compute", "gradients", "up", "down", "update", "cpu", "disk", "wire")


def trace_of(run: Run) -> str:
    """The trace as JSON; times are in microseconds since the run began."""
    events: list[dict[str, Any]] = []
    for log in run.ranks:
        events.append(_name("process_name", log.rank, 0, f"{run.about.name}, rank {log.rank}"))
        found: list[Event] = log.records.get(Event, [])
        lanes = [*LANES, *sorted({event.lane for event in found} - set(LANES))]
        used = {event.lane for event in found}
        numbers = {lane: number for number, lane in enumerate(lanes, start=1)}
        events.append(_name("thread_name", log.rank, 0, "steps"))
        events += [_name("thread_name", log.rank, numbers[lane], lane) for lane in lanes if lane in used]
        for step in log.records.get(Step, []):
            told = {"loss": step.loss} if step.loss is not None else {}
            events.append(_slice(f"step {step.step}", log.rank, 0, step.start, step.end) | {"args": told})
        for event in found:
            way = {"from": event.tier, "to": event.to} if event.to else {}
            told = {"step": event.step, "bytes": event.bytes, **way}
            label = f"{event.name} {event.group}".rstrip()
            events.append(_slice(label, log.rank, numbers[event.lane], event.start, event.end) | {"args": told})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=True) + "\n"


def _slice(name: str, rank: int, lane: int, start: float, end: float) -> dict[str, Any]:
    times = {"ts": round(start * 1e6, 1), "dur": round((end - start) * 1e6, 1)}
    return {"name": name, "ph": "X", "pid": rank, "tid": lane, **times}


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
