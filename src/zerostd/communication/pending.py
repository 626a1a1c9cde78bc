"""Collectives of a device that have not ended: what a rank waits for while its loop does something else.

A collective of nccl returns when it is queued. A rank that is missing shows only on the device, where the loop waits
for it inside any call of the user's, as in `loss.item()`. So the wires enter each collective here with the event behind
it, and a thread of `peers.py` looks at the oldest one. On the CPU nothing is entered: there a call raises by itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from zerostd.tiers import Transfer

ABORT_S = 5.0  # that a failure waits for the abort of process groups; it goes on behind


class QueuedCollective(NamedTuple):
    """A collective in a stream of the device."""

    what: str  # in words
    seconds: float  # on the clock of the process, when it was queued
    event: Transfer


class Pending:
    """The collectives of one prepared model that are queued on its device. Any thread may ask."""

    def __init__(self) -> None:
        self.groups: dict[Any, None] = {}  # process groups that were used, in order
        self._queued: deque[QueuedCollective] = deque()
        self._lock = threading.Lock()

    def add(self, what: str, event: Transfer, group: Any) -> None:
        """Enter a collective that was queued."""
        self.groups[group] = None
        with self._lock:
            self._queued.append(QueuedCollective(what, time.monotonic(), event))

    def oldest(self) -> QueuedCollective | None:
        """Return the oldest collective that has not ended."""
        with self._lock:
            self._queued = deque(collective for collective in self._queued if not _has_ended(collective.event))
            return self._queued[0] if self._queued else None


def _has_ended(event: Transfer) -> bool:
    try:
        return event.has_arrived()
    except RuntimeError:  # the device is lost: the loop's own calls raise that
        return True


def abort(groups: Iterable[Any]) -> None:
    """Abort process groups at the same time; see [Note: aborted communicators] of peers.py."""
    aborts = [threading.Thread(target=group.abort, name="zerostd abort", daemon=True) for group in groups]
    with contextlib.suppress(RuntimeError):  # Python is about to end and starts no threads
        for abort in aborts:
            abort.start()
        for abort in aborts:
            abort.join(ABORT_S)
