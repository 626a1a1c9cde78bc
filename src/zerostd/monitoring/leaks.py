"""Leaks: bytes that were taken during a step and are still there after the next one, with the place that took them.

Whoever allocates enters it in the ledger; while somebody records, the ledger passes it on to here. What is given back
is known by its tier, kind, size and the group at work; of several such the newest counts as gone.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from zerostd.policy import Kind, Tier

__all__ = ["POOL", "Leak", "Leaks"]

OURS = str(Path(__file__).parents[1])
SELF = (str(Path(__file__)), str(Path(__file__).with_name("ledger.py")))
POOL = "(pool)"  # at work: a pool, which keeps what it takes for the next pass
NUM_FIRST = 2  # steps that may take what stays


@dataclass(frozen=True)
class Leak:
    """Some bytes that stay."""

    tier: Tier
    kind: Kind
    num_bytes: int
    group: str
    where: str  # file:line of ours, and of the user's code that called it
    step: int  # in which they were taken


class Leaks:
    """What is open, since it was made."""

    step: int  # that is under way

    def __init__(self, step: int) -> None:
        self.step = self._first = step
        self._open: dict[tuple[Tier, Kind, int], list[Leak]] = {}
        self._lock = threading.Lock()

    def enter(self, tier: Tier, kind: Kind, num_bytes: int, group: str) -> None:
        """Bytes were allocated."""
        if group == POOL:
            return
        leak = Leak(tier, kind, num_bytes, group, _where(), self.step)
        with self._lock:
            self._open.setdefault((tier, kind, num_bytes), []).append(leak)

    def leave(self, tier: Tier, kind: Kind, num_bytes: int, group: str) -> None:
        """Bytes were freed."""
        with self._lock:
            found = self._open.get((tier, kind, num_bytes))
            if found:
                found.remove(next((leak for leak in reversed(found) if leak.group == group), found[-1]))

    def after(self, step: int) -> list[Leak]:
        """What was taken in the step before this one and is still there, now that it is over. It is told once."""
        self.step = step + 1
        with self._lock:
            stays = [leak for found in self._open.values() for leak in found if leak.step == step - 1]
        return [leak for leak in stays if leak.step > self._first + NUM_FIRST]

    def forget(self, step: int) -> None:
        """Another plan: what is there is meant to be."""
        with self._lock:
            self._open.clear()
        self._first = self.step = step


def _where() -> str:
    """The innermost line of ours that is not about books, and the innermost of others behind it."""
    frame, ours = sys._getframe(1), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(OURS):
            if not ours and path not in SELF:
                ours = f"zerostd{path[len(OURS) :]}:{frame.f_lineno}"
        elif "site-packages" not in path and not path.startswith("<"):
            place = f"{path}:{frame.f_lineno}"
            return f"{ours}, called from {place}" if ours else place
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ours
