"""Streams: ordered queues of work on the device, and the marks between them.

On a device with streams a lane is a stream of its own: work is put into it and goes on beside everything else, and a
mark is an event. On the processor work is done as it is put in, and every mark has been reached. The code that uses
streams is the same for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerostd.tiers.transfer import AllOf, Done, Transfer

__all__ = ["Stream", "StreamEvent", "Streams", "has_arrived", "record_event", "synchronize"]


class StreamEvent(Transfer):
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


class Stream:
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
        return Done() if self.stream is None else _record(self.stream, self.device)


def record_event(device: torch.device) -> Transfer:
    """The end of what is in the current stream now."""
    if device.type == "cpu":
        return Done()
    return _record(torch.accelerator.current_stream(device), device)


def _record(stream: torch.Stream, device: torch.device) -> StreamEvent:
    """A thread that waits for a blocking event sleeps; for others it would keep a core busy."""
    event = torch.Event(device, blocking=True)
    event.record(stream)
    return StreamEvent(event, device)


def has_arrived(transfer: Transfer) -> bool:
    """Whether a transfer is over, wherever it runs."""
    if isinstance(transfer, AllOf):
        return all(has_arrived(part) for part in transfer.parts)
    return transfer.event.query() if isinstance(transfer, StreamEvent) else transfer.is_done()


def synchronize(transfer: Transfer) -> None:
    """Hold the host until a transfer is over, wherever it runs."""
    if isinstance(transfer, AllOf):
        for part in transfer.parts:
            synchronize(part)
    elif isinstance(transfer, StreamEvent):
        transfer.event.synchronize()
    else:
        transfer.wait()


@dataclass(frozen=True)
class Streams:
    """The streams of one prepared model. The two directions of a link work at the same time, so each has its own.

    A device's copy engine stays with a stream for as long as that has work: a second stream of the same direction gets
    its turn when the first has nothing to do. So there is one lane up and one down, and work is put into them only when
    it can begin. Gradients have their own: they are put in before they are computed, and would hold up what is there.
    """

    up: Stream  # host to device
    down: Stream  # device to host: states and parameters
    gradients: Stream  # gradients: device to host, and up again when a later pass adds to them
    update: Stream  # arithmetic on the device

    @classmethod
    def make(cls, device: torch.device) -> Streams:
        """All streams of a device."""
        return cls(Stream(device), Stream(device), Stream(device), Stream(device))
