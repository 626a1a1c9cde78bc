"""The ledger: bytes by tier and kind, now and at peak, and bytes sent by verb, of this rank.

Whoever allocates enters it here, whoever frees takes it out; nobody estimates. `Memory` is what users get.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from zerostd.monitoring.events import Events
from zerostd.monitoring.leaks import Leaks
from zerostd.policy import Kind, Tier


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by tier, then kind: now and at peak; bytes sent; and how gradients are kept."""

    now: dict[str, dict[str, int]]
    peak: dict[str, dict[str, int]]
    sent: dict[str, int]
    gradients: str

    def total(self, tier: str = "device") -> int:
        """Return the model-state bytes now in a tier: parameters, gradients and optimizer states, without buffers."""
        return sum(size for kind, size in self.now.get(tier, {}).items() if kind != Kind.BUFFERS)

    def __str__(self) -> str:
        rows = [f"{'tier':<8}{'kind':<18}{'now':>12}{'peak':>12}"]
        for tier, kinds in self.peak.items():
            for kind, peak in kinds.items():
                now = self.now.get(tier, {}).get(kind, 0)
                rows.append(f"{tier:<8}{kind:<18}{now / 2**20:>8.1f} MiB{peak / 2**20:>8.1f} MiB")
        rows.append(f"gradients rest as {self.gradients}")
        return "\n".join(rows)


@dataclass
class Ledger:
    """The books of one prepared model. Single-threaded: hooks and steps run on one thread at a time."""

    now: Counter[tuple[Tier, Kind]] = field(default_factory=Counter)
    peak: Counter[tuple[Tier, Kind]] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)  # bytes this rank put on the wire, by verb
    gradient_form: str = "none yet"
    events: Events = field(default_factory=Events)
    leaks: Leaks = field(default_factory=Leaks)
    _group: str = ""  # at work

    def work_on(self, group: str) -> None:
        """Attribute what is entered from now on to a group."""
        self._group = group

    def enter(self, kind: Kind, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Enter bytes that were allocated."""
        self.now[tier, kind] += num_bytes
        self.leaks.enter(tier, kind, num_bytes, self._group)
        self.peak[tier, kind] = max(self.peak[tier, kind], self.now[tier, kind])

    def leave(self, kind: Kind, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Take out bytes that were freed."""
        self.now[tier, kind] -= num_bytes
        self.leaks.leave(tier, kind, num_bytes, self._group)

    def record_sent(self, verb: str, num_bytes: int) -> None:
        """Enter a collective that put `num_bytes` of this rank on the wire."""
        self.sent[verb] += num_bytes

    def memory(self) -> Memory:
        """Return the books as plain data."""
        return Memory(_nested(self.now), _nested(self.peak), dict(self.sent), self.gradient_form)


@contextlib.contextmanager
def explain_out_of_memory(ledger: Ledger) -> Iterator[None]:
    """Add to an out-of-memory error of the device what zerostd kept where."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{error}\nzerostd held at that moment:\n{ledger.memory()}\nMake room with a larger host or disk share in "
            "Placement, a smaller batch, or recomputed activations"
        ) from error


def _nested(book: Counter[tuple[Tier, Kind]]) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for (tier, kind), size in sorted(book.items()):
        out.setdefault(tier.value, {})[kind.value] = size
    return out
