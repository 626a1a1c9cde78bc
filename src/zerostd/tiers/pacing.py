"""Priorities of transfers, and the pace of background work on a link that other transfers use.

A thread says what it works for: `with at(Priority.BACKGROUND)`. A `Disk` and a store serve the most urgent waiting
request first. Background work is done in tiles, and asks after each tile how long to pause. A tile that took t seconds
is followed by t * (1 / share - 1) without background work, if others have asked for the link in the last t / share
seconds. An idle link has no pauses, so background work that the loop waits for continues at full speed.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator
from contextvars import ContextVar

from zerostd.errors import PrepareError, is_number


class Priority(enum.IntEnum):
    """Who is served first."""

    URGENT = 0  # somebody waits
    PREFETCH = 1  # somebody will wait soon
    BACKGROUND = 2  # saves, averages


_PRIORITY: ContextVar[Priority] = ContextVar("priority", default=Priority.PREFETCH)  # of this thread


def current() -> Priority:
    """Return the priority of what this thread requests."""
    return _PRIORITY.get()


@contextlib.contextmanager
def at(priority: Priority) -> Iterator[None]:
    """Request with this priority inside the context, in this thread."""
    token = _PRIORITY.set(priority)
    try:
        yield
    finally:
        _PRIORITY.reset(token)


class LinkPace:
    """The pace of background work on one link. `share` is `Budget(background=...)`; None: it never stops."""

    def __init__(self, share: float | None = None) -> None:
        if share is not None and not (is_number(share) and 0 < share <= 1):
            raise PrepareError(
                f"Budget(background={share!r}) must be above 0 and at most 1: the part of the disk's time that "
                "background work may take while other transfers use it. None: no limit"
            )
        self._share = share
        self._asked_at = float("-inf")  # when others last asked for the link, or used it

    def ask(self) -> None:
        """Note that work other than background asks for the link, or uses it."""
        self._asked_at = time.monotonic()

    def pause(self, seconds: float, num_threads: int = 1) -> float:
        """Return how many seconds to stop after a tile of background work that took `seconds` until now. Several
        threads take the share together."""
        if self._share is None:
            return 0.0
        cycle = seconds * num_threads / self._share
        return cycle - seconds if time.monotonic() - self._asked_at < cycle else 0.0

    @contextlib.contextmanager
    def tile(self, num_threads: int = 1) -> Iterator[None]:
        """Run a tile of background work inside the context, and then pause for as long as this pace requires."""
        begun = time.monotonic()
        with at(Priority.BACKGROUND):
            yield
        time.sleep(self.pause(time.monotonic() - begun, num_threads))
