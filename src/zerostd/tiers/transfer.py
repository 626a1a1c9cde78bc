"""Transfers: work in flight that fills or reads memory, and the three ways to ask for its end.

Whoever starts a copy, a read of the disk, a collective or an update gets a `Transfer`. `wait` is for the loop: it puts
the current stream behind the transfer and holds the host only where there is no stream. `synchronize` is for threads
and for code that reads the memory on the host.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod

from zerostd.errors import StorageError, ZerostdError


class Transfer(ABC):
    """Bytes on their way. Until they arrive the target holds anything and the source must stay as it is."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the current stream can use the bytes; raise what went wrong. Calling it again is free."""

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether `wait` would return, or raise, without holding the host."""

    def synchronize(self) -> None:
        """Hold the host until the bytes have arrived. Differs from `wait` only for events of a stream."""
        self.wait()

    def has_arrived(self) -> bool:
        """Return whether the bytes have arrived. Differs from `is_done` only for events of a stream."""
        return self.is_done()


class Done(Transfer):
    """A transfer that was over before it began."""

    def wait(self) -> None:
        """Return at once."""

    def is_done(self) -> bool:
        """Return True."""
        return True


class AllOf(Transfer):
    """Several transfers as one."""

    def __init__(self, *parts: Transfer) -> None:
        self.parts = parts

    def wait(self) -> None:
        """Wait for one after the other."""
        for part in self.parts:
            part.wait()

    def is_done(self) -> bool:
        """Return whether all are done."""
        return all(part.is_done() for part in self.parts)

    def synchronize(self) -> None:
        """Hold the host until all have arrived."""
        for part in self.parts:
            part.synchronize()

    def has_arrived(self) -> bool:
        """Return whether all have arrived."""
        return all(part.has_arrived() for part in self.parts)


class Work(Transfer):
    """A transfer that other threads carry out in `num_parts` parts, each of which ends in `finish` or `fail`.

    It is done when the last part has ended, failed ones too: after `wait` no thread touches the memory any more.
    """

    def __init__(self, num_parts: int = 1) -> None:
        self._error: BaseException | None = None
        self._is_reported = False  # whether anybody saw the error
        self._parts_left = num_parts
        self._lock = threading.Lock()
        self._done = threading.Event()

    def finish(self) -> None:
        """End one part well."""
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """End one part with an error; `wait` raises the first one."""
        self._end(error)

    def wait(self) -> None:
        """Return when all parts have ended; raise the first error, with its cause, every time."""
        self._done.wait()
        error = self._error
        if error is None:
            return
        self._is_reported = True
        if isinstance(error, ZerostdError):  # a new one each time: a raised error collects tracebacks
            raise type(error)(*error.args) from error.__cause__ or error
        raise StorageError(f"the work behind a transfer failed: {error!r}") from error

    def is_done(self) -> bool:
        """Return whether all parts have ended."""
        return self._done.is_set()

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._parts_left -= 1
            if self._parts_left == 0:
                self._done.set()

    def __del__(self) -> None:
        if self._error is not None and not self._is_reported:
            warnings.warn(f"a transfer failed and nobody waited for it: {self._error}", RuntimeWarning, stacklevel=2)


class QueuedTransfer(Transfer):
    """Work of a thread that ends by putting a copy into a stream."""

    def __init__(self) -> None:
        self.work: Work | None = None
        self.event: Transfer = Done()  # behind the copy; recorded by the thread

    def wait(self) -> None:
        """Hold the host until the thread is done, then put the current stream behind the copy."""
        assert self.work is not None
        self.work.wait()
        self.event.wait()

    def is_done(self) -> bool:
        """Return whether the thread is done."""
        return self.work is not None and self.work.is_done()
