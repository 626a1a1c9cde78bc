"""Recording: what happens while a model trains, as lines in a run directory (docs/run-directory.md).

Every step leaves a line of its length and one of memory. Events cost more, so they are recorded in one step of `every`:
on average less than a hundredth of a step. Numbers that are still on the device, such as a loss, are written when they
have arrived, so recording delays nothing. Each rank writes its own file.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from torch import nn

from zerostd.engine.runtime import Runtime, runtime_of
from zerostd.errors import MisuseError, StorageError, is_whole
from zerostd.measuring.identity import machine_name, versions
from zerostd.monitoring.decoding import path_of
from zerostd.monitoring.events import HOST, Span, Timestamp
from zerostd.parameters.observing import StepObserver
from zerostd.reporting import records
from zerostd.reporting.records import RANK_FILE
from zerostd.reporting.timeline import covered_seconds

EVERY = 20
NUM_FIRST = 3  # a step of this number is recorded too: the first ones are not like the others
DIGITS = 7  # of seconds, behind the point
COMPUTES = ("forward", "backward", "step")
OF_STEP = ("loss", "samples", "tokens", "grad_norm", "lr")  # fields of a step's line, in order; others are qualities

log = logging.getLogger("zerostd")


def record(model: nn.Module, path: str | os.PathLike[str], *, every: int = EVERY) -> Recording:
    """Record steps, memory and the events of some steps, until `close()` or the end of the `with` block. `zerostd
    report` turns the run directory into a page.

    Collective: every rank must call it. Each rank writes its own file; all must share a file system.

    Args:
        model: The module that prepare was called on.
        path: The run directory to create. It must not hold another run.
        every: Record the events of one step in this many, and of the third step.
    """
    runtime = runtime_of(model, "record")
    if not is_whole(every, 1):
        raise MisuseError(f"every={every!r} must be a whole number of steps, 1 or more")
    if any(isinstance(observer, Recording) for observer in runtime.observers):
        raise MisuseError("this model is already being recorded: close that recording first")
    folder = path_of(path, "path", MisuseError)
    names = sorted(file.name for file in folder.glob("*"))
    ours = [name for name in names if name == "run.json" or RANK_FILE.fullmatch(name)]
    taken = runtime.gatherer.control.collect(ours)
    if any(taken):
        raise MisuseError(f"{folder} already holds another run ({taken[0] or taken[-1]}): name a new directory")
    return Recording(runtime, folder, every=every)


class PendingNumber:
    """A number that may still be on the device."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._arrived: Timestamp | None = None
        if not isinstance(value, torch.Tensor):
            try:
                self._value = float(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise MisuseError(f"{value!r} cannot be recorded: log numbers, or tensors of one element") from error
            return
        if value.numel() != 1:
            raise MisuseError(f"a number to record has shape {tuple(value.shape)}: log one value per step")
        value = value.detach().reshape(())
        if value.device.type == "cpu":
            self._value = value.clone()
        else:
            host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value = host.copy_(value, non_blocking=True)
            self._arrived = Timestamp(value.device)

    def has_arrived(self) -> bool:
        """Return whether the host has the value, so that `float` of this does not wait."""
        return self._arrived is None or self._arrived.has_passed()

    def __float__(self) -> float:
        return float(self._value)


@dataclass
class _Step:
    """One step whose line is still to be written."""

    number: int
    begun: Timestamp
    ended: Timestamp
    numbers: dict[str, PendingNumber] = field(default_factory=dict)
    has_events: bool = False

    def is_over(self, spans: list[Span]) -> bool:
        """Return whether the device has finished the step, including its spans."""
        stamps = [self.ended, *(span.ended for span in spans if span.ended is not None)]
        have_passed = all(stamp.has_passed() for stamp in stamps)
        return have_passed and all(number.has_arrived() for number in self.numbers.values())


class Recording(StepObserver):
    """Records one prepared model on this rank, from `zerostd.record` to `close`."""

    def __init__(self, runtime: Runtime, path: Path, *, every: int) -> None:
        self.path = path
        self.every = every
        self._runtime = runtime
        self._device = runtime.world.device
        self._steps: list[_Step] = []  # the last one may still get numbers
        self._spans: list[Span] = []  # of steps that are not written yet; updates end in the step after theirs
        self.waited: float | None = None  # part of the recorded steps so far in which the loop waited
        self._waits = (0.0, 0.0)  # seconds of these waits, and of these steps
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{path} cannot be created: {error.strerror}; name another directory") from error
        if runtime.world.rank == 0:
            _write_info(runtime, path)
        self._file = (path / f"rank-{runtime.world.rank}.jsonl").open("w", encoding="utf-8")
        self._zero = Timestamp.of_idle(self._device)
        self._plan = runtime.settings.plan
        self._leaks = runtime.ledger.leaks
        self._start()

    def _start(self) -> None:
        self._runtime.observers.append(self)
        self._begun = Timestamp(self._device)
        self._leaks.start(self._runtime.backward.passes.num_steps + 1)
        self._choose_next(self._runtime.backward.passes.num_steps)

    def reopen(self) -> None:
        """Go on with a recording that was closed, in the same files: the next epoch of a loop."""
        if self._file.closed:
            self._file = Path(self._file.name).open("a", encoding="utf-8")  # noqa: SIM115
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, **numbers: Any) -> None:
        """Record numbers of the last step: `loss`, `samples`, `tokens`, `lr`, and any other name as a metric. Tensors
        may be on the device."""
        if self._file.closed:
            raise MisuseError("log() on a closed recording: start a new one with zerostd.record")
        if not self._steps:
            raise MisuseError("log() before the first optimizer.step(): log numbers after a step")
        self._steps[-1].numbers |= {name: PendingNumber(value) for name, value in numbers.items() if value is not None}

    def close(self) -> None:
        """Write the remaining lines and stop. The run then counts as complete."""
        if self._file.closed:
            return
        self._runtime.ledger.events.choose(-1, is_on=False)
        self._leaks.stop()
        self._runtime.observers.remove(self)
        self._runtime.finish_updates()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._spans += self._runtime.ledger.events.take()
        self._write_steps(all_of_them=True)
        self._write_line(records.EndLine(Timestamp(self._device).after(self._zero)))
        self._file.close()

    # Between steps

    def after_step(self) -> None:
        """Keep the numbers of the step that was taken, and write earlier steps that the device has finished."""
        now = Timestamp(self._device)
        events = self._runtime.ledger.events
        step = _Step(self._runtime.backward.passes.num_steps, self._begun, now, has_events=events.is_on)
        optimizer = self._runtime.optimizer
        if optimizer is not None and optimizer.grad_norm is not None:
            step.numbers["grad_norm"] = PendingNumber(optimizer.grad_norm)
        if optimizer is not None and "lr" in optimizer.param_groups[0]:
            step.numbers["lr"] = PendingNumber(optimizer.param_groups[0]["lr"])
        self._steps.append(step)
        self._spans += events.take()
        self._write_memory(step.number)
        self._write_leaks(step.number)
        plan = self._runtime.settings.plan
        if plan is not self._plan:
            self._plan = plan
            self._leaks.start(step.number + 1)
            if plan is not None:
                revisions = [note for note in plan.notes if note.startswith("Revised after step")]
                reason = revisions[-1] if revisions else "a candidate, tried in real steps"
                self._write_line(records.PlanLine(step.number, json.loads(plan.to_json()), reason))
        self._begun = now
        self._choose_next(step.number)
        self._write_steps()

    def _choose_next(self, done: int) -> None:
        events = self._runtime.ledger.events
        events.choose(done + 1, is_on=done + 1 == NUM_FIRST or (done + 1) % self.every == 0)

    def _write_steps(self, *, all_of_them: bool = False) -> None:
        """Write the steps that the device has passed. The newest waits for its numbers, and one with events for those
        that end in the step after it."""
        while self._steps:
            step = self._steps[0]
            spans = [span for span in self._spans if span.step == step.number]
            has_more_to_come = len(self._steps) <= (2 if step.has_events else 1)
            if not all_of_them and (has_more_to_come or not step.is_over(spans)):
                break
            self._steps.pop(0)
            self._write_step(step, spans)
        waiting = {step.number for step in self._steps}
        newest = max(waiting, default=0)
        self._spans = [span for span in self._spans if span.step in waiting or span.step > newest]
        self._file.flush()

    def _write_step(self, step: _Step, spans: list[Span]) -> None:
        start = self._moment(step.begun)
        end = self._moment(step.ended)
        numbers = {name: float(number) for name, number in step.numbers.items()}
        self._write_line(records.StepLine(step.number, start, end, *(numbers.pop(name, None) for name in OF_STEP)))
        for name, value in numbers.items():
            self._write_line(records.QualityLine(step.number, name, value))
        if not step.has_events:
            return
        zero = self._zero
        timed = [(span, span.begun.after(zero), span.ended.after(zero)) for span in spans if span.ended]
        waiting = {"updates": 0.0, "parameters": 0.0}
        busy: dict[str, list[tuple[float, float]]] = {}
        for span, begun, ended in sorted(timed, key=lambda item: item[1]):
            times = (round(begun, DIGITS), round(ended, DIGITS))
            line = records.EventLine(step.number, span.name, span.lane, *times, span.group)
            line.tier, line.to = span.way or (None, None)
            line.bytes = span.num_bytes
            line.cause = span.cause or None
            self._write_line(line)
            if span.name == "wait":
                waiting[span.cause] = waiting.get(span.cause, 0.0) + ended - begun
            elif span.lane != "compute":
                busy.setdefault(span.lane, []).append((begun, ended))
            elif span.name in COMPUTES:
                busy.setdefault("device", []).append((begun, ended))
        most = end - start  # no more than the line of the step says
        waited_s, steps_s = self._waits
        self._waits = (waited_s + sum(waiting.values()), steps_s + most)
        self.waited = min(1.0, self._waits[0] / max(self._waits[1], 1e-9))
        covered = {lane: min(most, covered_seconds(times)) for lane, times in busy.items()}
        self._write_line(records.SecondsLine("waiting", step.number, waiting))
        self._write_line(records.SecondsLine("busy", step.number, covered))

    def _write_memory(self, step: int) -> None:
        memory = self._runtime.memory()
        line = records.MemoryLine(step, self._moment(Timestamp(HOST)), memory.now, memory.peak)
        line.retries = memory.retries
        line.coded = memory.coded
        line.unpacking = memory.unpacking_s
        if self._device.type != "cpu":
            line.allocated = torch.accelerator.memory_allocated(self._device)
            line.most_allocated = torch.accelerator.max_memory_allocated(self._device)
            line.reserved = torch.accelerator.memory_reserved(self._device)
        self._write_line(line)

    def _write_leaks(self, step: int) -> None:
        for leak in self._leaks.after(step):
            line = records.LeakLine(leak.step, leak.group, leak.kind.value, leak.tier.value, leak.num_bytes, leak.where)
            self._write_line(line)
            log.warning(
                "%d bytes of %s of group %r on the %s, allocated in step %d, are still held after the next step: %s",
                *(line.bytes, line.what, line.group, line.tier, line.step, line.where),
            )

    def _write_line(self, line: records.Line) -> None:
        self._file.write(json.dumps(msgspec.to_builtins(line)) + "\n")

    def _moment(self, moment: Timestamp) -> float:
        return round(moment.after(self._zero), DIGITS)


def _write_info(runtime: Runtime, path: Path) -> None:
    """Write run.json: what the run is."""
    settings = runtime.settings
    layouts = [flat.layout for group in runtime.groups for flat in group.flats]
    num_parameters = sum(layout.numel - layout.padding for layout in layouts)
    info = records.RunInfo(
        format=records.FORMAT,
        zerostd=versions(runtime.world.device)["zerostd"],
        begun=datetime.now().isoformat(timespec="seconds"),
        world_size=runtime.world.size,
        command=" ".join(sys.argv),
        model=records.Named(type(runtime.model).__name__, num_parameters),
        machine=records.Named(machine_name(runtime.world.device)),
        settings={
            "stage": int(settings.decided[0]),
            "precision": settings.precision.name,
            "accumulate": settings.accumulate,
            "max_grad_norm": settings.max_grad_norm,
        },
        plan=None if settings.plan is None else json.loads(settings.plan.to_json()),
    )
    (path / "run.json").write_text(json.dumps(msgspec.to_builtins(info), indent=1) + "\n", encoding="utf-8")
