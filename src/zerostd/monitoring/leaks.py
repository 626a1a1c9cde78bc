"""Leaks: bytes that were allocated during a step and are still there after the next one, with the place that did it.

The ledger passes on everything that is allocated and freed. A block that is freed is known by its tier, kind, size and
the group at work; of several such blocks the newest counts as freed. `reporting` starts the search, asks after each
step, and stops it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerostd.policy import Kind, Tier

OURS = str(Path(__file__).parents[1])
SELF = (str(Path(__file__)), str(Path(__file__).with_name("ledger.py")))
NUM_FIRST = 2  # steps that may allocate what stays


@dataclass(frozen=True)
class Leak:
    """A block that was not freed."""

    tier: Tier
    kind: Kind
    num_bytes: int
    group: str
    where: str  # file:line of ours, and of the user's code that called it
    step: int  # in which it was allocated


class Leaks:
    """The blocks that were allocated and not freed since `start`."""

    def __init__(self) -> None:
        self._is_on = False
        self._first_step = 0
        self._step = 0  # under way
        self._open: dict[tuple[Tier, Kind, int], list[Leak]] = {}
        self._lock = threading.Lock()

    def start(self, step: int) -> None:
        """Search from `step` on, which begins; what was allocated before is meant to stay."""
        with self._lock:
            self._open.clear()
        self._first_step = step
        self._step = step
        self._is_on = True

    def stop(self) -> None:
        """End the search."""
        self._is_on = False
        self._open.clear()

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Leave out what is allocated in a `with` block: a pool keeps its memory for the next pass."""
        was_on = self._is_on
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = was_on

    def enter(self, tier: Tier, kind: Kind, num_bytes: int, group: str) -> None:
        """Note a block that was allocated."""
        if self._is_on:
            leak = Leak(tier, kind, num_bytes, group, _where(), self._step)
            with self._lock:
                self._open.setdefault((tier, kind, num_bytes), []).append(leak)

    def leave(self, tier: Tier, kind: Kind, num_bytes: int, group: str) -> None:
        """Strike out a block that was freed."""
        with self._lock:
            blocks = self._open.get((tier, kind, num_bytes))
            if blocks:
                blocks.remove(next((leak for leak in reversed(blocks) if leak.group == group), blocks[-1]))

    def after(self, step: int) -> list[Leak]:
        """Return what the step before `step` allocated and is still there, now that `step` is over."""
        self._step = step + 1
        if step - 1 <= self._first_step + NUM_FIRST:
            return []
        with self._lock:
            return [leak for blocks in self._open.values() for leak in blocks if leak.step == step - 1]


def _where() -> str:
    """Return the innermost line of ours that is not of this bookkeeping, and the innermost of the user's."""
    ours = ""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        path = frame.f_code.co_filename
        if path.startswith(OURS):
            if not ours and path not in SELF:
                ours = f"zerostd{path[len(OURS) :]}:{line}"
        elif "site-packages" not in path and not path.startswith("<"):
            return f"{ours}, called from {path}:{line}" if ours else f"{path}:{line}"
    return ours
