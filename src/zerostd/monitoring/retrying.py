"""Retries: system calls that failed temporarily are repeated a few times, and counted.

`tiers` and `checkpointing` make their reads and writes of files through it. The ledger owns it, users see the counts in
`zerostd.memory(model).retries`, and the page of a recorded run has a notice.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

PAUSES_S = (0.01, 0.1, 0.5)  # before the second try, the third and the fourth, which is the last
TRANSIENT = {  # errors that a later try may not see
    errno.EINTR,
    errno.EAGAIN,
    errno.EIO,  # a cable, a path of a fabric, a sector that the drive then moves
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ETIMEDOUT,
}
FULL = {errno.ENOSPC, errno.EDQUOT}

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("zerostd")


class Retries:
    """Repeats failed calls, and counts the retries by verb and reason. Any thread may use it."""

    def __init__(self, shared: Retries | None = None, clean: Callable[[], None] | None = None) -> None:
        self._counts: Counter[str] = Counter() if shared is None else shared._counts
        self._lock: threading.Lock = threading.Lock() if shared is None else shared._lock
        self._clean = clean  # called before another try where a file system is full

    def cleaning(self, clean: Callable[[], None]) -> Retries:
        """Return retries with the same counts that call `clean` before they try again where a file system is full."""
        return Retries(self, clean)

    @property
    def counts(self) -> dict[str, int]:
        """The number of retries, by verb and reason, such as 'reading: EIO'."""
        with self._lock:
            return dict(self._counts)

    def attempt(self, verb: str, where: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of the system. `verb` and `where` say what it does to which file. Raises the OSError if it is
        not transient, or if the last try fails too."""
        for pause_s in PAUSES_S:
            try:
                return function(*args, **kwargs)
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
                self.count(verb, errno.errorcode[error.errno], where)
                if self._clean is not None and error.errno in FULL:
                    self._clean()
            time.sleep(pause_s)
        return function(*args, **kwargs)

    def count(self, verb: str, reason: str, where: str) -> None:
        """Count a call that is made again. The first of its kind is logged."""
        kind = f"{verb}: {reason}"
        with self._lock:
            self._counts[kind] += 1
            is_first = self._counts[kind] == 1
        if is_first:
            log.warning("%s %s failed (%s) and is retried; further retries are only counted", verb, where, reason)
