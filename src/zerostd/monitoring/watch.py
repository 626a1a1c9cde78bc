"""A watch over the loop: how long it computes and how long it waits, while somebody looks.

Seconds are those of the device's current stream where there is one, so that nothing is held up by looking; on the
processor they are the loop's own. Nobody looking, which is the rule, a mark costs a comparison.
"""

from __future__ import annotations

import enum
import time
from itertools import pairwise

import torch

__all__ = ["Doing", "Stamp", "Watch"]


class Doing(enum.Enum):
    """What the loop does."""

    OUTSIDE = "what is not ours: data, logging, other models"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    WAITING = "waiting, inside one of these, for updates, parameters or other ranks"


class Stamp:
    """A moment of a stream, None being the current one: an event of the device, or the clock where work is done as it
    is put in."""

    def __init__(self, device: torch.device, stream: torch.Stream | None = None) -> None:
        self._time = time.perf_counter()
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device, enable_timing=True, blocking=True)
            self._event.record(stream or torch.accelerator.current_stream(device))

    def since(self, other: Stamp) -> float:
        """Seconds from the other moment to this one, which the host waits for."""
        if self._event is None or other._event is None:
            return max(self._time - other._time, 1e-9)
        self._event.synchronize()
        return max(other._event.elapsed_time(self._event) / 1e3, 1e-9)


class Watch:
    """What the loop does from one mark to the next."""

    def __init__(self, device: torch.device) -> None:
        self.doing = Doing.OUTSIDE
        self._device = device
        self._marks: list[tuple[Doing, Stamp]] | None = None  # None: nobody looks
        self._cuts: list[int] = []  # places of marks

    def mark(self, doing: Doing) -> Doing:
        """From now on the loop does this. Returns what it did before."""
        before, self.doing = self.doing, doing
        if self._marks is not None and before is not doing:
            self._marks.append((doing, Stamp(self._device)))
        return before

    def start(self) -> None:
        """Look from now on."""
        self._marks, self._cuts = [(self.doing, Stamp(self._device))], []

    def cut(self) -> None:
        """What follows is counted by itself."""
        if self._marks is not None:
            self._cuts.append(len(self._marks))
            self._marks.append((self.doing, Stamp(self._device)))

    def stop(self) -> list[dict[Doing, float]]:
        """Look no more. Returns seconds by what was done, from cut to cut, when the device has come to this point."""
        self.cut()
        marks, self._marks = self._marks or [], None
        found = [dict.fromkeys(Doing, 0.0)]
        for index, ((doing, begun), (_, ended)) in enumerate(pairwise(marks)):
            if index in self._cuts:
                found.append(dict.fromkeys(Doing, 0.0))
            found[-1][doing] += ended.since(begun)
        return found
