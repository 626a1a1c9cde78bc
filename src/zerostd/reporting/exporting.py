"""A run for other viewers: a trace for chrome://tracing and Perfetto, scalars for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerostd.errors import NotSupportedError
from zerostd.reporting.records import EventLine, MemoryLine, QualityLine, RankLog, Run, SecondsLine, StepLine
from zerostd.reporting.timeline import LANES


def trace_of(run: Run) -> str:
    """Return the events as JSON: one process a rank, one thread a lane, times in microseconds since the run began."""
    entries: list[dict[str, Any]] = []
    for log in run.ranks:
        events = log.of(EventLine)
        used = {event.lane for event in events}
        lanes = [*LANES, *sorted(used - set(LANES))]
        threads = {lane: number for number, lane in enumerate(lanes, start=1)}
        entries.append(_name("process_name", log.rank, 0, f"{run.name}, rank {log.rank}"))
        entries.append(_name("thread_name", log.rank, 0, "steps"))
        entries += [_name("thread_name", log.rank, threads[lane], lane) for lane in lanes if lane in used]
        for step in log.of(StepLine):
            loss = {"loss": step.loss} if step.loss is not None else {}
            entries.append(_slice(f"step {step.step}", log.rank, 0, step, loss))
        for event in events:
            label = f"{event.name} {event.group}".rstrip()
            details: dict[str, Any] = {"step": event.step, "bytes": event.bytes}
            if event.to:
                details |= {"from": event.tier or "", "to": event.to}
            entries.append(_slice(label, log.rank, threads[event.lane], event, details))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": entries}, allow_nan=True) + "\n"


def _slice(name: str, rank: int, thread: int, line: StepLine | EventLine, args: dict[str, Any]) -> dict[str, Any]:
    start = round(line.start * 1e6, 1)
    length = round((line.end - line.start) * 1e6, 1)
    return {"name": name, "ph": "X", "pid": rank, "tid": thread, "ts": start, "dur": length, "args": args}


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def write_scalars(run: Run, folder: Path) -> list[Path]:
    """Write event files that `tensorboard --logdir` shows, a folder for each rank, and return the folders.

    Raises:
        NotSupportedError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise NotSupportedError(
            f"writing TensorBoard files needs its package, which cannot be imported ({error}): pip install "
            "'zerostd[tensorboard]'"
        ) from error
    folders = []
    for log in run.ranks:
        path = folder / run.name / f"rank-{log.rank}"
        writer = SummaryWriter(path)
        for name, step, value in _scalars(log):
            writer.add_scalar(name, value, step)
        writer.close()
        folders.append(path)
    return folders


def _scalars(log: RankLog) -> Iterator[tuple[str, int, float]]:
    """Yield (name, step, value) of every number that one rank wrote."""
    for step in log.of(StepLine):
        yield "time/step_s", step.step, step.seconds
        for name in ("loss", "grad_norm", "lr"):
            if (value := getattr(step, name)) is not None:
                yield f"training/{name}", step.step, value
        for name in ("samples", "tokens"):
            if (value := getattr(step, name)) is not None and step.seconds > 0:
                yield f"speed/{name}_per_s", step.step, value / step.seconds
    for quality in log.of(QualityLine):
        yield f"quality/{quality.name}", quality.step, quality.value
    for memory in log.of(MemoryLine):
        for tier, kinds in memory.bytes.items():
            for kind, size in kinds.items():
                yield f"memory/{tier}/{kind}", memory.step, float(size)
        for name in ("allocated", "most_allocated", "reserved"):
            if (value := getattr(memory, name)) is not None:
                yield f"memory/device/{name}", memory.step, float(value)
    for line in log.of(SecondsLine):
        for name, seconds in line.seconds.items():
            yield f"{line.kind}/{name}_s", line.step, seconds
