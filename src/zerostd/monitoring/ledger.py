"""The ledger: bytes by tier and kind, now and at peak, and bytes sent by verb, of this rank; and leaks.

Code that allocates or frees bytes enters them here; nothing is estimated. `Memory` is what users get. Leaks are bytes
that were allocated during a step and are still there after the next one, with their place.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import sys
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerostd.monitoring.events import Events
from zerostd.monitoring.retrying import Retries
from zerostd.monitoring.texts import plain_seconds
from zerostd.policy import Kind, Tier

OURS = str(Path(__file__).parents[1])
NUM_FIRST = 2  # steps that may allocate what stays
NUM_KEPT = 3  # steps after which a graph should have gone
MOST_HOOKS = 4096  # looked at, of one step
log = logging.getLogger("zerostd")


@dataclass(frozen=True)
class Memory:
    """Holds the bytes of one rank by tier and kind, now and at peak; the bytes sent; and how gradients are kept."""

    now: dict[str, dict[str, int]]
    peak: dict[str, dict[str, int]]
    sent: dict[str, int]
    gradients: str
    retries: dict[str, int] = field(default_factory=dict)  # reads and writes of files that were made again
    coded: dict[str, tuple[int, int]] = field(default_factory=dict)  # by kind: bytes of the numbers, and of their codes
    unpacking_s: float = 0.0  # of processor time, in which packed numbers were unpacked
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)  # by kind: bytes shared, and bytes counted here

    def total(self, tier: str = "device") -> int:
        """Return the bytes of model state in a tier: parameters, gradients and optimizer states, without buffers."""
        return sum(size for kind, size in self.now.get(tier, {}).items() if kind != Kind.BUFFERS)

    def __str__(self) -> str:
        rows = [f"{'tier':<8}{'kind':<18}{'now':>12}{'peak':>12}"]
        for tier, kinds in self.peak.items():
            for kind, peak in kinds.items():
                now = self.now.get(tier, {}).get(kind, 0)
                rows.append(f"{tier:<8}{kind:<18}{now / 2**20:>8.1f} MiB{peak / 2**20:>8.1f} MiB")
        rows.append(f"gradients are kept in {self.gradients}")
        for kind, (size, held) in self.coded.items():
            sizes = f"{size / 2**20:.1f} MiB are coded in {held / 2**20:.1f} MiB"
            rows.append(f"{kind} of {sizes} ({size / max(1, held):.2f} to 1)")
        for kind, (size, counted) in self.shared.items():
            sizes = f"{size / 2**20:.1f} MiB are shared with equal parameters"
            rows.append(f"{kind} of {sizes}, {counted / 2**20:.1f} MiB of them counted here")
        if self.unpacking_s:
            rows.append(f"unpacking took {plain_seconds(self.unpacking_s)} of processor time")
        rows += [f"retried {count} times: {what}" for what, count in self.retries.items()]
        return "\n".join(rows)


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
    """The blocks that were allocated and not freed since `start`.

    A block that is freed is known by its tier, kind, size and the group at work; of several such blocks the newest
    counts as freed. `reporting` starts the search, asks after each step, and stops it.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._ignoring = threading.local()  # `.is_on` where this thread allocates for later steps
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
        self._is_on = False
        self._open.clear()

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Do not count memory that this thread allocates in a `with` block: a pool keeps its memory for the next
        pass."""
        self._ignoring.is_on = True
        try:
            yield
        finally:
            self._ignoring.is_on = False

    def enter(self, tier: Tier, kind: Kind, num_bytes: int, group: str) -> None:
        if self._is_on and not getattr(self._ignoring, "is_on", False):
            leak = Leak(tier, kind, num_bytes, group, _where(), self._step)
            with self._lock:
                self._open.setdefault((tier, kind, num_bytes), []).append(leak)

    def leave(self, tier: Tier, kind: Kind, num_bytes: int, group: str) -> None:
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


class KeptGraphs:
    """Reports, once, a graph of autograd that outlives its step: the user keeps a loss or an output in a list. A hook
    that a forward left in the graph lives as long as the graph does."""

    def __init__(self) -> None:
        self._hooks: dict[int, deque[tuple[weakref.ref[Any], str]]] = {}  # of each step, with the group it follows
        self._step = 0
        self._next: float = 0  # step in which to look
        self._pause = 1

    def add(self, hook: Callable[..., None], group: str) -> None:
        self._hooks.setdefault(self._step, deque(maxlen=MOST_HOOKS)).append((weakref.ref(hook), group))

    def begin(self, step: int) -> None:
        """Look at the graphs of steps that are long over; each is looked at once."""
        self._step = step
        old = [hook for number in list(self._hooks) if number <= step - NUM_KEPT for hook in self._hooks.pop(number)]
        if step < self._next or not any(hook() for hook, _ in old):
            return
        gc.collect()  # a cycle may hold it, which is nobody's fault; that takes long, so it is seldom done
        self._next = step + self._pause
        self._pause *= 2
        groups = [group for hook, group in old if hook() is not None]
        if groups:
            self._next = math.inf
            log.warning(
                f"an autograd graph up to group {groups[-1]!r}, made at least {NUM_KEPT} steps ago, is still alive in "
                f"step {step + 1} and holds memory: your code keeps one of its tensors, such as a loss in a list or a "
                "sum. Keep loss.item() or loss.detach() instead. This is reported once per model"
            )


@dataclass
class Ledger:
    """Counts the bytes of one prepared model. Disk threads enter what they move; one thread enters everything else."""

    now: Counter[tuple[Tier, Kind]] = field(default_factory=Counter)
    peak: Counter[tuple[Tier, Kind]] = field(default_factory=Counter)
    held: Counter[Tier] = field(default_factory=Counter)  # bytes of all kinds, now
    most: Counter[Tier] = field(default_factory=Counter)  # and at most, since the peak was reset
    sent: Counter[str] = field(default_factory=Counter)  # bytes this rank put on the wire, by verb
    gradient_form: str = "none yet"
    unpacking_s: float = 0.0  # of processor time, in which packed tiles became numbers
    events: Events = field(default_factory=Events)
    leaks: Leaks = field(default_factory=Leaks)
    retries: Retries = field(default_factory=Retries)
    watchers: list[Callable[[Tier], None]] = field(default_factory=list)  # called before bytes of a tier change
    _group: str = ""  # at work
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def work_on(self, group: str) -> None:
        """Charge all memory entered from now on to a group."""
        self._group = group

    def enter(self, kind: Kind, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        for watch in self.watchers:
            watch(tier)
        with self._lock:
            self.now[tier, kind] += num_bytes
            self.peak[tier, kind] = max(self.peak[tier, kind], self.now[tier, kind])
            self.held[tier] += num_bytes
            self.most[tier] = max(self.most[tier], self.held[tier])
        self.leaks.enter(tier, kind, num_bytes, self._group)

    def leave(self, kind: Kind, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        for watch in self.watchers:
            watch(tier)
        with self._lock:
            self.now[tier, kind] -= num_bytes
            self.held[tier] -= num_bytes
        self.leaks.leave(tier, kind, num_bytes, self._group)

    def note_unpacking(self, seconds: float) -> None:
        """Note what unpacking took, in any thread."""
        with self._lock:
            self.unpacking_s += seconds

    def memory(
        self, coded: dict[str, tuple[int, int]] | None = None, shared: dict[str, tuple[int, int]] | None = None
    ) -> Memory:
        """Return what users see. The caller supplies `coded` and `shared`."""
        with self._lock:
            now = _nested(self.now)
            peak = _nested(self.peak)
        counts = self.retries.counts
        return Memory(
            now, peak, dict(self.sent), self.gradient_form, counts, coded or {}, self.unpacking_s, shared or {}
        )


@contextlib.contextmanager
def explain_out_of_memory(ledger: Ledger) -> Iterator[None]:
    """Add to an out-of-memory error of the device what zerostd kept where."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{error}\nzerostd held at that moment:\n{ledger.memory()}\nMake room: keep more on the host or disk in "
            "Placement, use a smaller batch, or recompute activations"
        ) from error


def _nested(book: Counter[tuple[Tier, Kind]]) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for (tier, kind), size in sorted(book.items()):
        out.setdefault(tier.value, {})[kind.value] = size
    return out


def _where() -> str:
    """Return the innermost line of zerostd outside this bookkeeping, and the innermost line of the user."""
    ours = ""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        path = frame.f_code.co_filename
        if path.startswith(OURS):
            if not ours and path != __file__:
                ours = f"zerostd{path[len(OURS) :]}:{line}"
        elif "site-packages" not in path and not path.startswith("<"):
            return f"{ours}, called from {path}:{line}" if ours else f"{path}:{line}"
    return ours
