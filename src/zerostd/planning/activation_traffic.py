"""Activations on their way to the host and back, in the simulation. The rules are those of tiers/parcels.py, but that
one group's at most are leaving where another sends its own next, as the program has it: there two may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from zerostd.planning.activations import NUM_BUFFERS, way_of
from zerostd.planning.costs import GroupCost
from zerostd.planning.demands import GroupShares

__all__ = ["ActivationTraffic"]


ALIKE = 0.01  # of their bytes, that groups differ in which are taken for the same


class ActivationTraffic:
    """Activations that rest on the host: on their way there, and wanted back. Those of other groups stay, and make
    room for them: before they are there in forward, and when backward has passed them. How much they leave is known of
    groups that are like one that sends its own, and of those that leave their inputs only."""

    def __init__(self, found: Sequence[GroupCost], shares: Sequence[GroupShares]) -> None:
        left = [_left(cost, share) for cost, share in zip(found, shares, strict=True)]
        ways = [way_of(share) for share in shares]
        self.sizes = [size if way == "host" else 0.0 for size, way in zip(left, ways, strict=True)]
        known = {size for size in self.sizes if size}
        self.stays = [
            None if way == "host" else size if way == "recompute" or _is_like(size, known) else 0.0
            for size, way in zip(left, ways, strict=True)
        ]
        self.leaving: list[int] = []  # groups, in order; the first is on its way
        self.gone = [False] * len(found)
        self.wanted: list[int] = []
        self.num_to_come = 0  # groups that send nothing
        self.to_come = self.freed = self.held = 0.0  # bytes of those, of groups passed in backward, of the one it is in
        self.begin()

    def begin(self) -> None:
        """A forward begins."""
        self._count_from(0)
        self.freed = self.held = 0.0

    def _count_from(self, group: int) -> None:
        staying = [size for size in self.stays[group:] if size is not None]
        self.num_to_come, self.to_come = len(staying), sum(staying)

    def leave(self, group: int) -> None:
        """Its forward is done."""
        self._count_from(group + 1)
        if self.sizes[group]:
            self.gone[group] = True
            self.leaving.append(group)

    def has_room(self, group: int) -> bool:
        """Whether what is leaving may do so while groups from this one on run: if it is no more than will stay of
        them. Otherwise only the last one's is, or two while groups run that send nothing, none when the last did."""
        if sum(self.sizes[one] for one in self.leaving) <= self.to_come:
            return True
        if group and self.stays[group - 1] is not None:
            num_staying = sum(size is not None for size in self.stays)
            return len(self.leaving) <= math.ceil(NUM_BUFFERS * self.num_to_come / num_staying)
        return group == len(self.sizes) or len(self.leaving) < NUM_BUFFERS

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


def _is_like(size: float, known: set[float]) -> bool:
    return any(abs(size - one) <= ALIKE * one for one in known)


def _left(cost: GroupCost, share: GroupShares) -> float:
    """Bytes of activations that a forward of a group leaves, wherever."""
    if cost.activations is None:
        return 0.0
    return cost.activations.boundary if way_of(share) == "recompute" else cost.activations.kept
