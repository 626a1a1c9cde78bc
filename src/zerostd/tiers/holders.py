"""Holders: models that store equal bytes once, in host memory or in an extent.

The memory is freed when the last holder leaves. One ledger counts its bytes: that of the first holder. A single holder
may write to it; a holder that shares it with others makes a copy first (`shared_tensors.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from zerostd.monitoring.ledger import Ledger
from zerostd.policy import Kind, Tier

Entry = tuple[Kind, int, Tier]  # as a ledger takes it


class Holders:
    """The ledgers of those that hold the same memory; the first one counts it. `entries` returns what it counts."""

    def __init__(self, ledger: Ledger, entries: Callable[[], Sequence[Entry]]) -> None:
        self._first = ledger
        self._ledgers = [ledger]
        self._entries = entries
        self._lock = threading.Lock()  # models may be released in any thread

    @property
    def first(self) -> Ledger:
        """The ledger that counts the bytes."""
        return self._first

    @property
    def num(self) -> int:
        return len(self._ledgers)

    def has(self, ledger: Ledger) -> bool:
        return any(other is ledger for other in self._ledgers)

    def join(self, ledger: Ledger) -> None:
        """Add a holder, which counts nothing for as long as those before it stay."""
        with self._lock:
            assert self._ledgers, "the memory was freed"
            self._ledgers.append(ledger)

    def pass_on(self, ledger: Ledger) -> None:
        """Let another holder count the bytes, if there is one: this holder is about to leave."""
        with self._lock:
            self._take_out(ledger)
            self._ledgers.append(ledger)

    def leave(self, ledger: Ledger) -> bool:
        """Take a holder out; return whether nobody holds the memory any more."""
        with self._lock:
            self._take_out(ledger)
            if self._ledgers:
                return False
            for entry in self._entries():
                ledger.leave(*entry)
            return True

    def _take_out(self, ledger: Ledger) -> None:
        del self._ledgers[next(index for index, other in enumerate(self._ledgers) if other is ledger)]
        if not self._ledgers or self._ledgers[0] is self._first:
            return
        heir = self._ledgers[0]
        with heir.leaks.ignored():
            for entry in self._entries():
                self._first.leave(*entry)
                heir.enter(*entry)
        self._first = heir
