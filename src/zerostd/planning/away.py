"""Activations on their way to the host and back, in the simulation. The rules are those of tiers/parcels.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerostd.planning.activations import NUM_BUFFERS, way_of
from zerostd.planning.costs import Load
from zerostd.planning.demands import Shares

__all__ = ["Away"]


class Away:
    """Activations that rest on the host: on their way there, and wanted back. Those of other groups stay, and make
    room for them: before they are there in forward, and when backward has passed them."""

    def __init__(self, found: Sequence[Load], shares: Sequence[Shares]) -> None:
        kept = [_left(load, share) for load, share in zip(found, shares, strict=True)]
        goes = [way_of(share) == "host" for share in shares]
        self.sizes = [size if away else 0.0 for size, away in zip(kept, goes, strict=True)]
        self.stays = [None if away else size for size, away in zip(kept, goes, strict=True)]
        self.leaving: list[int] = []  # groups, in order; the first is on its way
        self.gone = [False] * len(found)
        self.wanted: list[int] = []
        self.total = sum(size for size in self.stays if size is not None)  # bytes
        self.to_come = self.freed = self.held = 0.0  # of them: of groups to come, of those passed in backward, of this

    def begin(self) -> None:
        """A forward begins."""
        self.to_come = self.total
        self.freed = self.held = 0.0

    def leave(self, group: int) -> None:
        """Its forward is done."""
        self.to_come = sum(size for size in self.stays[group + 1 :] if size is not None)
        if self.sizes[group]:
            self.gone[group] = True
            self.leaving.append(group)

    def has_room(self, group: int) -> bool:
        """Whether what is leaving may do so while groups from this one on run: if it is no more than will stay of
        them. Otherwise those of the second group before it are gone, or all, if the one before it keeps its own."""
        if sum(self.sizes[one] for one in self.leaving) <= self.to_come:
            return True
        if group and self.total and self.stays[group - 1] is not None:
            return False
        return group == len(self.sizes) or group - NUM_BUFFERS not in self.leaving

    def is_back(self, group: int) -> bool:
        """Whether its backward can begin."""
        return not self.gone[group]

    def want(self, group: int) -> None:
        """Backward comes to a group: what is away of it and of the next one is needed, more of them may come."""
        stays = self.stays[group]
        if stays is not None:
            self.freed, self.held = self.freed + self.held, stays
        needed, size = NUM_BUFFERS if stays is None else 0, 0.0
        for one in range(group, -1, -1):
            size += self.sizes[one]
            if one <= group - needed and size > self.freed:
                break
            if self.gone[one] and one not in self.wanted:
                self.wanted.append(one)

    def jobs(self) -> Iterator[tuple[str, int]]:
        """What can be done now."""
        if self.leaving:
            yield "send", self.leaving[0]
        if self.wanted and self.wanted[0] not in self.leaving:
            yield "return", self.wanted[0]

    def done(self, name: str, group: int) -> None:
        """One of them is."""
        if name == "send":
            self.leaving.remove(group)
        else:
            self.wanted.remove(group)
            self.gone[group] = False


def _left(load: Load, share: Shares) -> float:
    """Bytes of activations that a forward of a group leaves, wherever."""
    if load.activations is None:
        return 0.0
    return load.activations.boundary if way_of(share) == "recompute" else load.activations.kept
