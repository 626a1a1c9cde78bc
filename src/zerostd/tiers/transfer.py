"""Transfers: work in flight that fills or reads memory, how to wait for it, and the streams of the device.

A call that starts a copy, a read of the disk, a collective or an update returns a `Transfer`. `wait` is for the loop:
it lets the current stream wait for the transfer, and blocks the host only if there is no stream. `synchronize` is for
threads and for code that reads the memory on the host.

On a GPU a `Stream` is a torch stream: work put into it runs beside everything else. On the CPU work is done as it is
put in, so every event has been reached. The code that uses streams is the same for both.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch


class Transfer(ABC):
    """Bytes on their way. Until they arrive, the content of the target is undefined and the source must not change."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the current stream can use the bytes; raise what went wrong. Calling it again is free."""

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether `wait` would return, or raise, without holding the host."""

    def synchronize(self) -> None:
        """Block the host until the bytes have arrived. Differs from `wait` only for events of a stream."""
        self.wait()

    def has_arrived(self) -> bool:
        """Return whether the bytes have arrived. Differs from `is_done` only for events of a stream."""
        return self.is_done()


class Done(Transfer):
    """A transfer that was over before it began."""

    def wait(self) -> None:
        return

    def is_done(self) -> bool:
        return True


class AllOf(Transfer):
    """Several transfers as one."""

    def __init__(self, *parts: Transfer) -> None:
        self.parts = parts

    def wait(self) -> None:
        for part in self.parts:
            part.wait()

    def is_done(self) -> bool:
        return all(part.is_done() for part in self.parts)

    def synchronize(self) -> None:
        for part in self.parts:
            part.synchronize()

    def has_arrived(self) -> bool:
        return all(part.has_arrived() for part in self.parts)


class StreamEvent(Transfer):
    """The end of the work in a stream of the device at the time of creation."""

    def __init__(self, stream: torch.Stream, device: torch.device) -> None:
        self._device = device
        self.event = torch.Event(device, blocking=True)  # a thread that waits sleeps; else it keeps a core busy
        self.event.record(stream)

    def wait(self) -> None:
        """Let later work in the current stream wait for the event; the host continues."""
        torch.accelerator.current_stream(self._device).wait_event(self.event)

    def is_done(self) -> bool:
        return True  # `wait` never holds the host

    def synchronize(self) -> None:
        self.event.synchronize()

    def has_arrived(self) -> bool:
        return self.event.query()


class Stream:
    """A stream of the device that runs beside its current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device, priority=-1) if device.type != "cpu" else None

    @contextlib.contextmanager
    def after(self, *transfers: Transfer) -> Iterator[None]:
        """Put the work of a `with` block into this stream, behind `transfers`."""
        with contextlib.nullcontext() if self.stream is None else self.stream:
            for transfer in transfers:
                transfer.wait()
            yield

    def record_event(self) -> Transfer:
        """Return an event after the work that is in this stream now."""
        return Done() if self.stream is None else StreamEvent(self.stream, self.device)


def record_event(device: torch.device) -> Transfer:
    """Return an event after the work that is in the current stream now."""
    if device.type == "cpu":
        return Done()
    return StreamEvent(torch.accelerator.current_stream(device), device)


class Streams:
    """The streams of one prepared model. The two directions of a link work at the same time, so each has its own.

    A device's copy engine stays with a stream for as long as that has work: a second stream of the same direction waits
    until the first is idle. So there is one stream up and one down, and work enters them only when it can begin.
    Gradients have a separate stream: they are queued before they are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self.up = Stream(device)  # host to device
        self.down = Stream(device)  # device to host: states and parameters
        self.gradients = Stream(device)  # gradients: device to host, and up again when a later pass adds to them
        self.update = Stream(device)  # arithmetic on the device
