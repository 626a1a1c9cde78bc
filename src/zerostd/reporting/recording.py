"""Recording: what happens while a model trains, as lines in a run directory (docs/run-directory.md).

Every step leaves a line of its length and one of memory. Events, which cost more, are taken of one step in `every`: an
average below a hundredth of a step. Numbers that are still on the device, such as a loss, are written when they are
there, so recording holds up nothing. Each rank writes its own file.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch
from torch import nn

from zerostd.engine.runtime import Runtime, runtime_of
from zerostd.errors import MisuseError
from zerostd.measuring.identity import machine_name, versions
from zerostd.monitoring.events import HOST, Span
from zerostd.monitoring.timestamps import Timestamp
from zerostd.parameters.observing import StepObserver

__all__ = ["EVERY", "FORMAT", "Number", "Recording", "record"]

FORMAT = 1
EVERY = 20
NUM_FIRST = 3  # a step of this number is recorded too: the first ones are not like the others
COMPUTES = ("forward", "backward", "step")

log = logging.getLogger("zerostd")


def record(model: nn.Module, path: str | os.PathLike[str], *, every: int = EVERY) -> Recording:
    """Write down what happens from now on, until `close()` or the end of the `with` block: steps, memory, and events of
    some steps. `zerostd report` makes a page of it.

    Collective: every rank must call it; each writes its own file, on one file system.

    Args:
        model: The module that prepare was called on.
        path: Of the run directory. It is made, and must not hold another run.
        every: Events are taken of one step in so many, and of the third.
    """
    runtime = runtime_of(model, "record")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise MisuseError(f"every={every!r} must be a whole number of steps, 1 or more")
    if any(isinstance(observer, Recording) for observer in runtime.observers):
        raise MisuseError("this model is being recorded already: close that recording first")
    folder = Path(path)
    taken = runtime.gatherer.control.collect(sorted(one.name for one in folder.glob("*") if _is_ours(one.name)))
    if any(taken):
        raise MisuseError(f"{folder} holds another run already ({taken[0] or taken[-1]}): name a new directory")
    return Recording(runtime, folder, every=every)


def _is_ours(name: str) -> bool:
    return name == "run.json" or (name.startswith("rank-") and name.endswith(".jsonl"))


class Number:
    """A number that may still be on the device."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._arrived: Timestamp | None = None
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise MisuseError(f"a number to record has the shape {tuple(value.shape)}: give one value a step")
            value = value.detach().reshape(())
            if value.device.type != "cpu":
                host = torch.empty((), dtype=value.dtype, pin_memory=True)
                self._value = host.copy_(value, non_blocking=True)
                self._arrived = Timestamp(value.device)
            else:
                self._value = value.clone()

    def is_there(self) -> bool:
        """Whether `get` would not wait."""
        return self._arrived is None or self._arrived.has_passed()

    def get(self) -> float:
        """Its value."""
        return float(self._value)


@dataclass
class _Step:
    """One step whose line is still to be written."""

    number: int
    begun: Timestamp
    ended: Timestamp
    numbers: dict[str, Number] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    has_events: bool = False

    def is_over(self) -> bool:
        """Whether the device has come past all of it."""
        stamps = [self.ended, *(span.ended for span in self.spans if span.ended is not None)]
        return all(stamp.has_passed() for stamp in stamps) and all(one.is_there() for one in self.numbers.values())


class Recording(StepObserver):
    """Of one prepared model on this rank, from `zerostd.record` to `close`."""

    path: Path

    def __init__(self, runtime: Runtime, path: Path, *, every: int) -> None:
        self.path = path
        self.every = every
        self._runtime = runtime
        self._device = runtime.world.device
        self._file: TextIO | None = None
        self._steps: list[_Step] = []  # the last one may still get numbers
        self._later: list[Span] = []  # of steps that have not ended
        self.waited: float | None = None  # part of the last recorded step in which the loop waited
        path.mkdir(parents=True, exist_ok=True)
        if runtime.world.rank == 0:
            _write_run(runtime, path)
        self._file = (path / f"rank-{runtime.world.rank}.jsonl").open("w", encoding="utf-8")
        runtime.observers.append(self)
        self._zero = Timestamp.of_idle(self._device)
        self._begun = Timestamp(self._device)
        self._plan = runtime.settings.plan
        self._leaks = runtime.ledger.leaks
        self._leaks.start(runtime.backward.passes.num_steps + 1)
        self._choose(runtime.backward.passes.num_steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def log(self, **numbers: Any) -> None:
        """Numbers of the step that was taken last: `loss`, `samples`, `tokens`, `lr`, and any other by its name, which
        counts as quality. Tensors may be on the device."""
        if self._file is None:
            raise MisuseError("log() on a recording that was closed")
        if not self._steps:
            raise MisuseError("log() before the first optimizer.step(): the numbers belong to a step that was taken")
        self._steps[-1].numbers |= {name: Number(value) for name, value in numbers.items() if value is not None}

    def close(self) -> None:
        """Write what is left and stop. The run counts as complete then."""
        if self._file is None:
            return
        self._runtime.ledger.events.choose(-1, is_on=False)
        self._leaks.stop()
        self._runtime.observers.remove(self)
        self._runtime.finish_updates()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._sort(self._runtime.ledger.events.take())
        self._write(last=True)
        self._line({"kind": "end", "time": Timestamp(self._device).after(self._zero)})
        self._file.close()
        self._file = None

    # Between steps

    def after_step(self) -> None:
        """A step was taken: what there is of it is kept, and what has been done of earlier ones is written."""
        now, events = Timestamp(self._device), self._runtime.ledger.events
        step = _Step(self._runtime.backward.passes.num_steps, self._begun, now, has_events=events.is_on)
        optimizer = self._runtime.optimizer
        if optimizer is not None and optimizer.grad_norm is not None:
            step.numbers["grad_norm"] = Number(optimizer.grad_norm)
        self._steps.append(step)
        self._sort(events.take())
        self._memory(step.number)
        self._look_for_leaks(step.number)
        if self._runtime.settings.plan is not self._plan:
            self._plan = self._runtime.settings.plan
            self._leaks.start(step.number + 1)
            self._revised(step.number)
        self._begun = now
        self._choose(step.number)
        self._write()

    def _choose(self, done: int) -> None:
        """Whether events of the next step are taken."""
        events = self._runtime.ledger.events
        events.choose(done + 1, is_on=done + 1 == NUM_FIRST or (done + 1) % self.every == 0)

    def _sort(self, spans: list[Span]) -> None:
        """To the steps they began in: updates end in the next one. What is left of a step that was written is lost."""
        steps = {step.number: step for step in self._steps}
        newest = max(steps, default=0)
        waiting, self._later = [*self._later, *spans], []
        for span in waiting:
            if span.step in steps:
                steps[span.step].spans.append(span)
            elif span.step > newest:
                self._later.append(span)

    def _write(self, *, last: bool = False) -> None:
        """Lines of steps that the device has come past; the newest waits for its numbers, and one with events for
        those that end in the step after it."""
        while self._steps:
            step, is_newest = self._steps[0], len(self._steps) == 1
            wait = len(self._steps) <= 2 and step.has_events
            if not last and (is_newest or wait or not step.is_over()):
                break
            self._steps.pop(0)
            for line in self._lines(step):
                self._line(line)
        assert self._file is not None
        self._file.flush()

    def _lines(self, step: _Step) -> Iterator[dict[str, Any]]:
        seconds = self._seconds
        numbers = {name: number.get() for name, number in step.numbers.items()}
        known = {name: numbers.pop(name, None) for name in ("loss", "samples", "tokens", "grad_norm", "lr")}
        yield {
            "kind": "step",
            "step": step.number,
            "start": _moment(seconds(step.begun)),
            "end": _moment(seconds(step.ended)),
            **known,
        }
        for name, value in numbers.items():
            yield {"kind": "quality", "step": step.number, "name": name, "value": value}
        if not step.has_events:
            return
        spans = [(span, seconds(span.begun), seconds(span.ended)) for span in step.spans if span.ended is not None]
        for span, start, end in sorted(spans, key=lambda one: one[1]):
            tier, to = span.way or (None, None)
            event = {"kind": "event", "step": step.number, "name": span.name, "group": span.group, "lane": span.lane}
            event |= {"tier": tier, "to": to, "bytes": span.num_bytes, "start": _moment(start), "end": _moment(end)}
            yield event | ({"cause": span.cause} if span.cause else {})
        waiting, lanes = dict.fromkeys(("updates", "parameters"), 0.0), dict[str, list[tuple[float, float]]]()
        for span, start, end in spans:
            if span.name == "wait":
                waiting[span.cause] = waiting.get(span.cause, 0.0) + end - start
            elif span.lane != "compute" or span.name in COMPUTES:
                lanes.setdefault("device" if span.lane == "compute" else span.lane, []).append((start, end))
        most = _moment(seconds(step.ended)) - _moment(seconds(step.begun))  # no more than the line of the step says
        self.waited = min(1.0, sum(waiting.values()) / max(most, 1e-9))
        yield {"kind": "waiting", "step": step.number, "seconds": waiting}
        yield {"kind": "busy", "step": step.number, "seconds": {k: min(most, _covered(v)) for k, v in lanes.items()}}

    def _seconds(self, moment: Timestamp) -> float:
        return moment.after(self._zero)

    def _memory(self, step: int) -> None:
        memory = self._runtime.ledger.memory()
        line: dict[str, Any] = {"kind": "memory", "step": step, "time": _moment(Timestamp(HOST).after(self._zero))}
        line |= {"bytes": memory.now, "peak": memory.peak}
        if self._device.type != "cpu":
            line["allocated"] = torch.accelerator.memory_allocated(self._device)
            line["most_allocated"] = torch.accelerator.max_memory_allocated(self._device)
            line["reserved"] = torch.accelerator.memory_reserved(self._device)
        self._line(line)

    def _look_for_leaks(self, step: int) -> None:
        for leak in self._leaks.after(step):
            line = {"kind": "leak", "step": leak.step, "group": leak.group, "what": leak.kind.value}
            self._line(line | {"tier": leak.tier.value, "bytes": leak.num_bytes, "where": leak.where})
            log.warning(
                "%d bytes of %s of group %r on the %s were taken in step %d and are still there after the next: %s",
                *(leak.num_bytes, leak.kind.value, leak.group, leak.tier.value, leak.step, leak.where),
            )

    def _revised(self, step: int) -> None:
        plan = self._plan
        if plan is not None:
            reason = plan.notes[-1] if plan.notes else ""
            self._line({"kind": "plan", "step": step, "reason": reason, "plan": json.loads(plan.to_json())})

    def _line(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")


def _moment(seconds: float) -> float:
    return round(seconds, 7)


def _write_run(runtime: Runtime, path: Path) -> None:
    """What the run is, once."""
    settings, plan = runtime.settings, runtime.settings.plan
    run = {
        "format": FORMAT,
        "zerostd": versions(runtime.world.device)["zerostd"],
        "begun": datetime.now().isoformat(timespec="seconds"),
        "world_size": runtime.world.size,
        "command": " ".join(sys.argv),
        "model": {"name": type(runtime.model).__name__, "parameters": _num_parameters(runtime)},
        "machine": {"name": machine_name(runtime.world.device)},
        "settings": {
            "stage": int(settings.decided[0]),
            "precision": settings.precision.name,
            "accumulate": settings.accumulate,
            "max_grad_norm": settings.max_grad_norm,
        },
        "plan": None if plan is None else json.loads(plan.to_json()),
    }
    (path / "run.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def _covered(parts: list[tuple[float, float]]) -> float:
    """Seconds that lie in any of the parts."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(parts):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _num_parameters(runtime: Runtime) -> int:
    return sum(flat.layout.numel - flat.layout.padding for group in runtime.groups for flat in group.flats)
