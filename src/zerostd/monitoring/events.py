"""Events: what happened when, in which lane, for which group, and how many bytes it moved.

Nobody recording, which is the rule, a span costs two comparisons. While somebody does, its two ends are stamps: events
of a device's stream where the work runs in one, the clock elsewhere. Nothing waits for them: they are turned into
seconds later, when the device has passed them. Spans carry the same names into torch's profiler, if that is running.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from zerostd.compat import is_profiling
from zerostd.monitoring.stamps import Stamp

__all__ = ["HOST", "Clock", "Events", "Span"]

HOST = torch.device("cpu")  # whose stamps are the clock's


@dataclass(eq=False)
class Span:
    """From one moment to another."""

    name: str  # gather, release, reduce, transfer, update, wait, forward, backward
    lane: str  # compute, up, down, gradients, update, cpu, disk, wire
    group: str
    num_bytes: int
    way: tuple[str, str] | None  # tiers, from and to
    step: int
    begun: Stamp
    ended: Stamp | None = None
    cause: str = ""  # of a wait


class _Nothing:
    """In place of a span that nobody wants."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


NOTHING = _Nothing()


class _Within:
    """A span around a block, on one thread."""

    def __init__(self, events: Events, span: Span | None, device: torch.device, label: str) -> None:
        self._events, self._span, self._device = events, span, device
        self._range = torch.profiler.record_function(label) if is_profiling() else None

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._span is not None:
            self._span.ended = Stamp(self._device)
            self._events.add(self._span)
        if self._range is not None:
            self._range.__exit__(kind, error, at)


class Events:
    """Of one prepared model on one rank."""

    is_on: bool
    step: int  # that is under way

    def __init__(self) -> None:
        self.is_on = False
        self.step = 0
        self._recorded = (-1, -1)  # the last steps of which events were wanted: what they asked for may run later
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def choose(self, step: int, *, is_on: bool) -> None:
        """A step begins; whether its events are wanted."""
        self.step, self.is_on = step, is_on
        if is_on:
            self._recorded = (self._recorded[1], step)

    def wants(self, step: int | None) -> bool:
        """Whether something is to be recorded that runs now, or that was asked for in that step."""
        return self.is_on if step is None else step in self._recorded

    def begin(self, name: str, lane: str, group: str = "", num_bytes: int = 0, **more: Any) -> Span | None:
        """A span that ends elsewhere, with `end`; None if nobody records. `more`: way, cause, the device whose current
        stream it runs in, if any, and the step that asked for it, if it may be another one than this."""
        step = more.get("step")
        if not self.wants(step):
            return None
        stamp, step = Stamp(more.get("device", HOST)), self.step if step is None else step
        return Span(name, lane, group, num_bytes, more.get("way"), step, stamp, cause=more.get("cause", ""))

    def end(self, span: Span | None, device: torch.device = HOST) -> None:
        """It is over, as far as the device's current stream is concerned."""
        if span is not None:
            span.ended = Stamp(device)
            self.add(span)

    def within(self, name: str, lane: str, group: str = "", num_bytes: int = 0, **more: Any) -> _Within | _Nothing:
        """A span around a `with` block, also a range of torch's profiler."""
        if not self.wants(more.get("step")) and not is_profiling():
            return NOTHING
        span = self.begin(name, lane, group, num_bytes, **more)
        return _Within(self, span, more.get("device", HOST), f"zerostd {name} {group}".rstrip())

    def add(self, span: Span) -> None:
        """Keep a span that has ended; from any thread."""
        with self._lock:
            self._spans.append(span)

    def take(self) -> list[Span]:
        """Those kept since last time."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans


class Clock:
    """Seconds since it was made, of stamps on the host and on a device alike."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        self._zero = Stamp(device)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def seconds(self, stamp: Stamp) -> float:
        """When that was; waits for the device to get there."""
        return stamp.after(self._zero)
