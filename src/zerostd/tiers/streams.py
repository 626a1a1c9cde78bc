"""Streams of the device and the events between them, with one interface for devices with and without streams.

On a GPU a `Stream` is a torch stream: work put into it runs beside everything else. On the CPU work is done as it is
put in, so every event has been reached. The code that uses streams is the same for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerostd.tiers.transfer import Done, Transfer


class StreamEvent(Transfer):
    """The end of what is in a stream of the device when this is made."""

    def __init__(self, stream: torch.Stream, device: torch.device) -> None:
        self._device = device
        self._event = torch.Event(device, blocking=True)  # a thread that waits sleeps; else it keeps a core busy
        self._event.record(stream)

    def wait(self) -> None:
        """Put what enters the current stream from now on behind the event; the host goes on."""
        torch.accelerator.current_stream(self._device).wait_event(self._event)

    def is_done(self) -> bool:
        """Return True: `wait` never holds the host."""
        return True

    def synchronize(self) -> None:
        """Hold the host until the device has reached the event."""
        self._event.synchronize()

    def has_arrived(self) -> bool:
        """Return whether the device has reached the event."""
        return self._event.query()


class Stream:
    """A stream of the device that runs beside its current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device, priority=-1) if device.type != "cpu" else None

    @contextlib.contextmanager
    def after(self, *transfers: Transfer | None) -> Iterator[None]:
        """Put the work of a `with` block into this stream, behind `transfers`."""
        with contextlib.nullcontext() if self.stream is None else self.stream:
            for transfer in transfers:
                if transfer is not None:
                    transfer.wait()
            yield

    def record_event(self) -> Transfer:
        """Return an event behind what is in this stream now."""
        return Done() if self.stream is None else StreamEvent(self.stream, self.device)


def record_event(device: torch.device) -> Transfer:
    """Return an event behind what is in the current stream now."""
    if device.type == "cpu":
        return Done()
    return StreamEvent(torch.accelerator.current_stream(device), device)


@dataclass(frozen=True)
class Streams:
    """The streams of one prepared model. The two directions of a link work at the same time, so each has its own.

    A device's copy engine stays with a stream for as long as that has work: a second stream of the same direction gets
    its turn when the first has nothing to do. So there is one stream up and one down, and work enters them only when it
    can begin. Gradients have their own: they are put in before they are computed, and would hold up what is there.
    """

    up: Stream  # host to device
    down: Stream  # device to host: states and parameters
    gradients: Stream  # gradients: device to host, and up again when a later pass adds to them
    update: Stream  # arithmetic on the device

    @classmethod
    def make(cls, device: torch.device) -> Streams:
        """Create the streams of a device."""
        return cls(Stream(device), Stream(device), Stream(device), Stream(device))
