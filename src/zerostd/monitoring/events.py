"""Events: what happened when, in which lane of the timeline, for which group, and how many bytes it moved.

Rooms that move or compute something put a span around it; `reporting` takes the spans of the steps it records. Its ends
are timestamps of the stream the work runs in, so nothing waits for them: they become seconds when the device has passed
them. Spans carry the same names into torch's profiler. While nobody records, a span costs two comparisons.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from zerostd.compat import is_profiling
from zerostd.monitoring.timestamps import Timestamp

HOST = torch.device("cpu")  # its timestamps are the host's clock
NOTHING = contextlib.nullcontext()  # in place of a span that nobody wants


@dataclass(eq=False)
class Span:
    """Something that took time, from one moment to another."""

    name: str  # gather, release, reduce, transfer, update, wait, forward, backward
    lane: str  # compute, up, down, gradients, update, cpu, disk, wire
    group: str
    num_bytes: int
    cause: str  # of a wait
    step: int
    begun: Timestamp
    ended: Timestamp | None = None
    way: tuple[str, str] | None = None  # tiers, from and to


class Events:
    """The spans of one prepared model on one rank."""

    is_on: bool  # whether those of this step are recorded
    step: int  # under way

    def __init__(self) -> None:
        self.is_on = False
        self.step = 0
        self._recorded = (-1, -1)  # the last recorded steps: what they asked for may run later
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def choose(self, step: int, *, is_on: bool) -> None:
        """Begin a step, and say whether its events are recorded."""
        self.step = step
        self.is_on = is_on
        if is_on:
            self._recorded = (self._recorded[1], step)

    def wants(self, step: int | None) -> bool:
        """Return whether work is recorded that was asked for in `step`; None: that runs now."""
        return self.is_on if step is None else step in self._recorded

    def begin(
        self,
        name: str,
        lane: str,
        group: str = "",
        num_bytes: int = 0,
        *,
        cause: str = "",
        device: torch.device = HOST,
        step: int | None = None,
    ) -> Span | None:
        """Return a span that begins now and ends with `end`, None if nobody records.

        The work runs in the current stream of `device`; HOST: the calling thread does it. `step` asked for it, and may
        be over.
        """
        if not self.wants(step):
            return None
        return Span(name, lane, group, num_bytes, cause, self.step if step is None else step, Timestamp(device))

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
        step: int | None = None,
    ) -> AbstractContextManager[None]:
        """Return a span that begins now and ends with a `with` block, which is a range of torch's profiler too.

        `way` names the tiers that bytes move between; the other arguments are those of `begin`.
        """
        if not self.wants(step) and not is_profiling():
            return NOTHING
        span = self.begin(name, lane, group, num_bytes, device=device, step=step)
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
