"""Places: where a rank is in its program, as it reports to the other ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Place:
    """Where a rank is in its program."""

    rank: int
    call: str = "zerostd.prepare()"  # the last one
    what: str = ""  # the collective that the call is in
    is_waiting: bool = False  # for other ranks
    num_steps: int = 0
    num_backwards: int = 0
    seconds: float = 0.0  # on the clock of its process, of the last change; in a message: since then
    verdict: str = ""  # who is to blame for a collective that failed, as this rank sees it
    end: str = ""  # why it left, if it has

    @property
    def counts(self) -> str:
        """How far its training has come, in words."""
        return f"with {self.num_backwards} backward passes and {self.num_steps} steps begun"

    @property
    def where(self) -> str:
        """The collective and the call it is in, in words."""
        return self.call if self.what in ("", self.call) else f"{self.what}, in {self.call}"

    def describe(self) -> str:
        """Return where the rank is, to follow its number."""
        if self.is_waiting:
            return f"waits in {self.where}, {self.counts}"
        return f"made its last call, {self.call}, {self.seconds:.1f} s ago, {self.counts}"

    def is_beside(self, other: Place) -> bool:
        """Return whether two ranks wait in the same collective, as far as can be seen."""
        mine = (self.is_waiting, self.what, self.num_steps, self.num_backwards)
        return mine == (other.is_waiting, other.what, other.num_steps, other.num_backwards)

    def is_apart_from(self, other: Place) -> bool:
        """Return whether one rank has begun more backward passes than the other, but fewer steps. Ranks that make the
        same calls never have. Parameter servers run no backward."""
        have_both = self.num_backwards > 0 and other.num_backwards > 0
        return have_both and (self.num_backwards - other.num_backwards) * (self.num_steps - other.num_steps) < 0
