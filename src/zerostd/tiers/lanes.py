"""Lanes: ordered queues of work on the device, and the marks between them.

On a device with streams a lane is a stream of its own: work is put into it and goes on beside everything else, and a
mark is an event. On the processor work is done as it is put in, and every mark has been reached. The code that uses
lanes is the same for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerostd.tiers.transfer import Done, Transfer

__all__ = ["Lane", "Lanes", "Mark", "mark_here", "synchronize"]


class Mark(Transfer):
    """A point in a stream. `wait` orders the current stream behind it; the host goes on."""

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def wait(self) -> None:
        """What is put into the current stream from now on runs after the mark."""
        torch.accelerator.current_stream(self._device).wait_event(self.event)

    def is_done(self) -> bool:
        """The host never blocks."""
        return True


class Lane:
    """One ordered queue."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device, priority=-1) if device.type != "cpu" else None

    @contextlib.contextmanager
    def after(self, *transfers: Transfer | None) -> Iterator[None]:
        """Inside, work goes into this lane, behind `transfers`."""
        if self.stream is None:
            for transfer in transfers:
                if transfer is not None:
                    transfer.wait()
            yield
            return
        with self.stream:
            for transfer in transfers:
                if transfer is not None:
                    transfer.wait()
            yield

    def mark(self) -> Transfer:
        """The end of what is in the lane now."""
        return Done() if self.stream is None else Mark(self.stream.record_event(), self.device)


def mark_here(device: torch.device) -> Transfer:
    """The end of what is in the current stream now."""
    if device.type == "cpu":
        return Done()
    return Mark(torch.accelerator.current_stream(device).record_event(), device)


def synchronize(transfer: Transfer) -> None:
    """Hold the host until a transfer is over, wherever it runs."""
    if isinstance(transfer, Mark):
        transfer.event.synchronize()
    else:
        transfer.wait()


@dataclass(frozen=True)
class Lanes:
    """The lanes of one prepared model. The two directions of a link work at the same time, so each has its own; what
    the processor has updated goes up beside what is streamed, so that neither waits for the other's turn."""

    up: Lane  # host to device
    up_weights: Lane  # likewise, for new parameters from the processor
    down: Lane  # device to host
    update: Lane  # arithmetic on the device

    @classmethod
    def make(cls, device: torch.device) -> Lanes:
        """All lanes of a device."""
        return cls(Lane(device), Lane(device), Lane(device), Lane(device))
