"""Transfers: bytes on their way from one tier to another, and how to wait for them."""

from __future__ import annotations

import threading
import warnings
from typing import Protocol, runtime_checkable

from zerostd.errors import StorageError, ZerostdError

__all__ = ["AllOf", "Done", "QueuedTransfer", "Transfer", "Work"]


@runtime_checkable
class Transfer(Protocol):
    """Bytes on their way. Until it is done the target holds anything and the source must stay as it is."""

    def wait(self) -> None:
        """Return when the bytes can be used; raise what went wrong. Calling it again is free."""

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, without blocking."""


class Done(Transfer):
    """A transfer that was over before it began."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def is_done(self) -> bool:
        """Always."""
        return True


class AllOf(Transfer):
    """Transfers that are over when all of them are."""

    def __init__(self, *parts: Transfer) -> None:
        self.parts = parts

    def wait(self) -> None:
        """For one after the other."""
        for part in self.parts:
            part.wait()

    def is_done(self) -> bool:
        """Whether none would block."""
        return all(part.is_done() for part in self.parts)


class Work(Transfer):
    """A transfer that other threads carry out in `num_parts` parts, each of which ends in `finish` or `fail`.

    It is done when the last part has ended, failed ones too: after `wait` no thread touches the memory any more.
    """

    def __init__(self, num_parts: int = 1) -> None:
        self._error: BaseException | None = None
        self._was_told = False  # whether anybody saw the error
        self._parts_left = num_parts
        self._lock = threading.Lock()
        self._done = threading.Event()

    def finish(self) -> None:
        """One part has ended well."""
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """One part has failed; the first error is the one `wait` raises."""
        self._end(error)

    def wait(self) -> None:
        """Return when all parts have ended; raise the first error, with its cause, every time."""
        self._done.wait()
        error = self._error
        if error is None:
            return
        self._was_told = True
        if isinstance(error, ZerostdError):  # a new one each time: a raised error collects tracebacks
            raise type(error)(*error.args) from error.__cause__ or error
        raise StorageError(f"the work behind a transfer failed: {error!r}") from error

    def is_done(self) -> bool:
        """Whether all parts have ended."""
        return self._done.is_set()

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._parts_left -= 1
            if self._parts_left == 0:
                self._done.set()

    def __del__(self) -> None:
        if self._error is not None and not self._was_told:
            warnings.warn(f"a transfer failed and nobody waited for it: {self._error}", RuntimeWarning, stacklevel=2)


class QueuedTransfer(Transfer):
    """A thread's work that ends by putting something into a lane."""

    def __init__(self) -> None:
        self.work: Work | None = None
        self.mark: Transfer = Done()

    def wait(self) -> None:
        """Hold the host until the thread is done, then the current stream until the lane is."""
        assert self.work is not None
        self.work.wait()
        self.mark.wait()

    def is_done(self) -> bool:
        """Whether the thread is done."""
        return self.work is not None and self.work.is_done()
