"""A watch over the loop: how long it computes and how long it waits, while somebody looks.

Seconds are those of the device's current stream where there is one, so that nothing is held up by looking; on the
processor they are the loop's own. Nobody looking or recording, which is the rule, a mark costs two comparisons.
"""

from __future__ import annotations

import enum
from itertools import pairwise

import torch

from zerostd.monitoring.events import Events, Span
from zerostd.monitoring.stamps import Stamp

__all__ = ["LoopPhase", "LoopTimer"]


class LoopPhase(enum.Enum):
    """What the loop does."""

    OUTSIDE = "what is not ours: data, logging, other models"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    WAITING = "waiting, inside one of these, for updates, parameters or other ranks"


class LoopTimer:
    """What the loop does from one mark to the next."""

    def __init__(self, device: torch.device, events: Events | None = None) -> None:
        self.doing = LoopPhase.OUTSIDE
        self.events = events or Events()
        self._device = device
        self._group = ""  # that is at work
        self._span: Span | None = None
        self._marks: list[tuple[LoopPhase, Stamp]] | None = None  # None: nobody looks
        self._cuts: list[int] = []  # places of marks

    def mark(self, doing: LoopPhase, cause: str = "") -> LoopPhase:
        """From now on the loop does this; of waiting, for what. Returns what it did before."""
        before, self.doing = self.doing, doing
        if before is doing:
            return before
        if self._marks is not None:
            self._marks.append((doing, Stamp(self._device)))
        if self.events.is_on:
            if LoopPhase.WAITING not in (doing, before):
                self._group = ""
            self._turn(cause)
        return before

    def at(self, group: str) -> None:
        """The loop has come to a group."""
        if self.events.is_on:
            self._group = group
            self._turn()

    def _turn(self, cause: str = "") -> None:
        self.events.end(self._span, self._device)
        self._span = None
        if self.doing is not LoopPhase.OUTSIDE:
            name = "wait" if self.doing is LoopPhase.WAITING else self.doing.name.lower()
            self._span = self.events.begin(name, "compute", self._group, cause=cause, device=self._device)

    def start(self) -> None:
        """Look from now on."""
        self._marks, self._cuts = [(self.doing, Stamp(self._device))], []

    def cut(self) -> None:
        """What follows is counted by itself."""
        if self._marks is not None:
            self._cuts.append(len(self._marks))
            self._marks.append((self.doing, Stamp(self._device)))

    def stop(self) -> list[dict[LoopPhase, float]]:
        """Look no more. Returns seconds by what was done, from cut to cut, when the device has come to this point."""
        self.cut()
        marks, self._marks = self._marks or [], None
        found = [dict.fromkeys(LoopPhase, 0.0)]
        for index, ((doing, begun), (_, ended)) in enumerate(pairwise(marks)):
            if index in self._cuts:
                found.append(dict.fromkeys(LoopPhase, 0.0))
            found[-1][doing] += ended.since(begun)
        return found
