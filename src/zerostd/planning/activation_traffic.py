"""Activations on their way to the host and back, in the simulation. The rules are those of scheduling/offloading.py,
but that one group's at most are leaving where another sends its own next, as the program has it: there two may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from zerostd.planning.activations import NUM_BUFFERS, way_of
from zerostd.planning.costs import GroupCost
from zerostd.planning.demands import GroupShares

ALIKE = 0.01  # of their bytes, that groups differ in which are taken for the same


class ActivationTraffic:
    """Activations that are kept on the host: on their way there, and wanted back. Those of other groups stay, and make
    room for them: before they are there in forward, and when backward has passed them. How much they leave is known of
    groups that are like one that sends its own, and of those that leave their inputs only."""

    def __init__(self, costs: Sequence[GroupCost], shares: Sequence[GroupShares]) -> None:
        ways = [way_of(share) for share in shares]
        left = [_left(cost, way) for cost, way in zip(costs, ways, strict=True)]
        self.sizes = [size if way == "host" else 0.0 for size, way in zip(left, ways, strict=True)]
        known = {size for size in self.sizes if size}
        self.stays = [
            None if way == "host" else size if way == "recompute" or _is_like(size, known) else 0.0
            for size, way in zip(left, ways, strict=True)
        ]
        self.leaving: list[int] = []  # groups, in order; the first is on its way
        self.gone = [False] * len(costs)
        self.wanted: list[int] = []
        self.begin()

    def begin(self) -> None:
        """A forward begins."""
        self._count_from(0)
        self.freed = 0.0  # bytes of groups passed in backward
        self.held = 0.0  # bytes of the group that backward is in

    def _count_from(self, group: int) -> None:
        staying = [size for size in self.stays[group:] if size is not None]
        self.num_to_come = len(staying)  # groups that send nothing
        self.to_come = sum(staying)  # bytes of those

    def leave(self, group: int) -> None:
        """The forward of a group is done."""
        self._count_from(group + 1)
        if self.sizes[group]:
            self.gone[group] = True
            self.leaving.append(group)

    def has_room(self, group: int) -> bool:
        """Return whether what is leaving may do so while groups from this one on run: if it is no more than will stay
        of them. Otherwise only the last one's is, or two while groups run that send nothing, none when the last did."""
        if sum(self.sizes[leaving] for leaving in self.leaving) <= self.to_come:
            return True
        if group and self.stays[group - 1] is not None:
            num_staying = sum(size is not None for size in self.stays)
            return len(self.leaving) <= math.ceil(NUM_BUFFERS * self.num_to_come / num_staying)
        return group == len(self.sizes) or len(self.leaving) < NUM_BUFFERS

    def is_back(self, group: int) -> bool:
        """Return whether the backward of a group can begin."""
        return not self.gone[group]

    def want(self, group: int) -> None:
        """Backward comes to a group: what is away of it and of the next one is needed, more of them may come."""
        stays = self.stays[group]
        num_needed = NUM_BUFFERS
        if stays is not None:
            num_needed = 0
            self.freed += self.held
            self.held = stays
        size = 0.0
        for candidate in range(group, -1, -1):
            size += self.sizes[candidate]
            if candidate <= group - num_needed and size > self.freed:
                break
            if self.gone[candidate] and candidate not in self.wanted:
                self.wanted.append(candidate)

    def jobs(self) -> Iterator[tuple[str, int]]:
        """Yield what can be done now: "send" or "return", and the group."""
        if self.leaving:
            yield "send", self.leaving[0]
        if self.wanted and self.wanted[0] not in self.leaving:
            yield "return", self.wanted[0]

    def finish(self, job: str, group: int) -> None:
        """One of these jobs is done."""
        if job == "send":
            self.leaving.remove(group)
        else:
            self.wanted.remove(group)
            self.gone[group] = False


def _is_like(size: float, known: set[float]) -> bool:
    return any(abs(size - like) <= ALIKE * like for like in known)


def _left(cost: GroupCost, way: str) -> float:
    """Return the bytes of activations that a forward of a group leaves, wherever."""
    if cost.activations is None:
        return 0.0
    return cost.activations.boundary if way == "recompute" else cost.activations.kept
