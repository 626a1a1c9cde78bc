"""A timer of the training loop: how long it computes and how long it waits.

Scheduling and the engine mark where one phase ends and the next begins. Seconds are those of the device's current
stream, so that timing holds nothing up; on the CPU they are the loop's own. Off, a mark costs two comparisons.
"""

from __future__ import annotations

import enum
from itertools import pairwise

import torch

from zerostd.monitoring.events import Events, Span
from zerostd.monitoring.timestamps import Timestamp


class LoopPhase(enum.Enum):
    """What the loop does."""

    OUTSIDE = "what is not ours: data, logging, other models"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    WAITING = "waiting, inside one of these, for updates, parameters or other ranks"


class LoopTimer:
    """Turns marks of the loop into seconds by phase, between `start` and `stop`, and into spans while recording."""

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
            self._span = self._events.begin(name, "compute", self._group, cause=cause, device=self._device)

    def start(self) -> None:
        """Start the timer."""
        self._periods = [[(self._phase, Timestamp(self._device))]]

    def cut(self) -> None:
        """Count what follows by itself, if the timer runs."""
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
