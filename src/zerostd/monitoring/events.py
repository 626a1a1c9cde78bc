"""Events: what happened and when, in which lane of the timeline, for which group, with how many bytes.

Rooms that move or compute something put a span around it; `reporting` takes the spans of the steps it records. The ends
of a span are timestamps of the stream in which the work runs, so nothing waits: they become seconds when the device has
passed them. Spans carry the same names into torch's profiler. Unrecorded spans cost two comparisons.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import torch

from zerostd.compat import is_profiling

HOST = torch.device("cpu")  # its timestamps are the host's clock
NOW = -1  # instead of the number of a step: the one under way
NOTHING = contextlib.nullcontext()  # in place of a span that nobody wants


class Timestamp:
    """A moment of a stream, by default of the device's current one; on the CPU, of the host's clock."""

    def __init__(self, device: torch.device, stream: torch.Stream | None = None) -> None:
        self._time = time.perf_counter()
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device, enable_timing=True, blocking=True)
            self._event.record(stream or torch.accelerator.current_stream(device))

    @classmethod
    def of_idle(cls, device: torch.device) -> Timestamp:
        """Return a moment at which the device is idle, so that its clock and the host's can be compared."""
        if device.type == "cpu":
            return cls(device)
        torch.accelerator.synchronize(device)
        moment = cls(device)
        torch.accelerator.synchronize(device)
        return moment

    def has_passed(self) -> bool:
        return self._event is None or self._event.query()

    def after(self, earlier: Timestamp) -> float:
        """Return the seconds since another moment, negative if that is later; hold the host until both have passed. The
        seconds are the device's where both moments are of a stream, else the host's."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3

    def since(self, earlier: Timestamp) -> float:
        """Return the seconds since an earlier time; always above 0, so that rates can be computed."""
        return max(self.after(earlier), 1e-9)


@dataclass(eq=False)
class Span:
    """Something that took time, from one moment to another."""

    name: str  # gather, release, reduce, transfer, update, wait, forward, backward
    lane: str  # compute, up, down, gradients, update, cpu, disk, wire
    group: str
    num_bytes: int
    step: int
    begun: Timestamp
    ended: Timestamp | None = None
    cause: str = ""  # of a wait
    way: tuple[str, str] | None = None  # tiers, from and to


class Events:
    """The spans of one prepared model on one rank."""

    def __init__(self) -> None:
        self.is_on = False  # whether those of this step are recorded
        self.step = 0  # under way
        self._recorded = (-1, -1)  # the last recorded steps: what they asked for may run later
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def choose(self, step: int, *, is_on: bool) -> None:
        """Begin a step, and say whether its events are recorded."""
        self.step = step
        self.is_on = is_on
        if is_on:
            self._recorded = (self._recorded[1], step)

    def wants(self, step: int) -> bool:
        """Return whether work that `step` requested is recorded."""
        return self.is_on if step == NOW else step in self._recorded

    def begin(
        self, name: str, lane: str, group: str, num_bytes: int, device: torch.device = HOST, step: int = NOW
    ) -> Span | None:
        """Return a span that begins now and ends with `end`, None if nothing is recorded. The work runs in the current
        stream of `device`; HOST: the calling thread does it. `step` requested the work, and may be over."""
        if not self.wants(step):
            return None
        return Span(name, lane, group, num_bytes, self.step if step == NOW else step, Timestamp(device))

    def end(self, span: Span | None, device: torch.device = HOST) -> None:
        """End a span in the device's current stream, and keep it; from any thread."""
        if span is not None:
            span.ended = Timestamp(device)
            with self._lock:
                self._spans.append(span)

    def within(
        self,
        name: str,
        lane: str,
        group: str = "",
        num_bytes: int = 0,
        *,
        way: tuple[str, str] | None = None,
        device: torch.device = HOST,
        step: int = NOW,
    ) -> AbstractContextManager[None]:
        """Return a span that begins now and ends with a `with` block, which is a range of torch's profiler too. `way`
        names the tiers that bytes move between; the other arguments are those of `begin`."""
        if not self.wants(step) and not is_profiling():
            return NOTHING
        span = self.begin(name, lane, group, num_bytes, device, step)
        if span is not None:
            span.way = way
        return self._around(span, device, f"zerostd {name} {group}".rstrip())

    @contextlib.contextmanager
    def _around(self, span: Span | None, device: torch.device, label: str) -> Iterator[None]:
        with torch.profiler.record_function(label) if is_profiling() else NOTHING:
            try:
                yield
            finally:
                self.end(span, device)

    def take(self) -> list[Span]:
        """Return the spans that have ended since the last call."""
        with self._lock:
            spans = self._spans
            self._spans = []
        return spans


class LoopPhase(enum.Enum):
    OUTSIDE = "what is not ours: data, logging, other models"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    WAITING = "waiting, inside one of these, for updates, parameters or other ranks"


class LoopTimer:
    """Turns marks of the loop into seconds by phase, between `start` and `stop`, and into spans while recording.

    Scheduling and the engine mark where one phase ends and the next begins. Seconds are those of the device's current
    stream, so timing delays nothing; on the CPU they are those of the loop. Off, a mark costs two comparisons.
    """

    def __init__(self, device: torch.device, events: Events) -> None:
        self._device = device
        self._events = events
        self._phase = LoopPhase.OUTSIDE
        self._group = ""  # at work
        self._span: Span | None = None
        self._periods: list[list[tuple[LoopPhase, Timestamp]]] = []  # marks from cut to cut; empty: off

    def mark(self, phase: LoopPhase, cause: str = "") -> LoopPhase:
        """Begin a phase, which for waiting has a cause; return the phase before."""
        before = self._phase
        self._phase = phase
        if before is phase:
            return before
        if self._periods:
            self._periods[-1].append((phase, Timestamp(self._device)))
        if self._events.is_on:
            if LoopPhase.WAITING not in (phase, before):
                self._group = ""
            self._begin_span(cause)
        return before

    def at(self, group: str) -> None:
        """Begin the work of a group."""
        if self._events.is_on:
            self._group = group
            self._begin_span()

    def _begin_span(self, cause: str = "") -> None:
        self._events.end(self._span, self._device)
        self._span = None
        if self._phase is not LoopPhase.OUTSIDE:
            name = "wait" if self._phase is LoopPhase.WAITING else self._phase.name.lower()
            self._span = self._events.begin(name, "compute", self._group, 0, self._device)
            if self._span is not None:
                self._span.cause = cause

    def start(self) -> None:
        self._periods = [[(self._phase, Timestamp(self._device))]]

    def cut(self) -> None:
        """Count what follows separately, if the timer runs."""
        if self._periods:
            mark = (self._phase, Timestamp(self._device))
            self._periods[-1].append(mark)
            self._periods.append([mark])

    def stop(self) -> list[dict[LoopPhase, float]]:
        """Stop the timer; return seconds by phase, from cut to cut, when the device has come to this point."""
        self.cut()
        seconds = [dict.fromkeys(LoopPhase, 0.0) for _ in self._periods[:-1]]
        for spent, marks in zip(seconds, self._periods, strict=False):
            for (phase, begun), (_, ended) in pairwise(marks):
                spent[phase] += ended.since(begun)
        self._periods = []
        return seconds
