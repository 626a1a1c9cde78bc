"""Activations until backward: groups keep them, recompute them from their inputs, or send them to the host and back.

What a group leaves is linear in its shares. What it needs while it runs is not: a recomputed group keeps all of it for
a moment, and what goes to the host leaves by way of buffers for two groups. A linear program would let all groups do it
by half to halve that. So it is asked several times, each time with other groups allowed and room for the largest of
them: these are the choices. The traffic is what of them comes and goes in the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from zerostd.planning.demands import GroupShares
from zerostd.planning.linear import Array
from zerostd.planning.request import PlanRequest

NUM_BUFFERS = 2  # groups whose activations are on the device, where they are kept on the host
ALIKE = 0.01  # of their bytes, that groups differ in which are taken for the same
MOST_SIZES = 3  # of groups, up to which others than kept activations are tried


@dataclass(frozen=True)
class ActivationChoice:
    """Which groups may do what, and the bytes of the device that they need for it while they run."""

    recomputed: Array  # by group, 1.0 or 0.0
    sent: Array
    must: bool = False  # no group may keep them
    beside: float = 0.0

    @property
    def changes(self) -> bool:
        return bool(self.recomputed.any() or self.sent.any())


def activation_choices(request: PlanRequest) -> list[ActivationChoice]:
    """Return the choices worth trying, keeping everything first; the only one where the plan does not choose."""
    every = any_choice(request)
    if not request.chooses or every.must:
        return [every]
    nothing = numpy.zeros(len(request.costs))
    kept = numpy.array([cost.activations.kept for cost in request.costs])
    boundary = numpy.array([cost.activations.boundary for cost in request.costs])
    choices = [_choice(request, nothing, nothing)]
    least: dict[tuple[str, ...], float] = {}  # bytes of the device, by ways
    for small in _up_to_sizes(request):
        for ways in (("recompute",), ("host",), ("recompute", "host")):
            if not request.ways.issuperset(ways):
                continue
            recomputed = small * (kept > boundary) * ("recompute" in ways)
            sent = small * (kept > 0) * ("host" in ways)
            choice = _choice(request, recomputed, sent)
            left = numpy.where(sent > 0, 0.0, numpy.where(recomputed > 0, boundary, kept)).sum() + choice.beside
            if choice.changes and left < least.get(ways, math.inf):  # else larger groups cost more than they save
                least[ways] = left
                choices.append(choice)
    return choices


def choice_of(request: PlanRequest, shares: Sequence[GroupShares]) -> ActivationChoice:
    """Return the choice that given whole shares need."""
    ways = [way_of(share) for share in shares]
    recomputed = numpy.array([way == "recompute" for way in ways], float)
    return _choice(request, recomputed, numpy.array([way == "host" for way in ways], float))


def any_choice(request: PlanRequest) -> ActivationChoice:
    """Return all that may be done."""
    every = numpy.full(len(request.costs), float(request.chooses))
    must = request.chooses and "keep" not in request.ways
    return _choice(request, every * ("recompute" in request.ways), every * ("host" in request.ways), must=must)


def staying(request: PlanRequest) -> float:
    return sum(cost.activations.staying for cost in request.costs)


def _choice(request: PlanRequest, recomputed: Array, sent: Array, *, must: bool = False) -> ActivationChoice:
    activations = [cost.activations for cost in request.costs]
    inside = max(cost.inside if again else cost.peak for cost, again in zip(activations, recomputed, strict=True))
    buffers = NUM_BUFFERS * max(cost.largest * goes for cost, goes in zip(activations, sent, strict=True))
    return ActivationChoice(recomputed, sent, must, inside + buffers + staying(request))


def _up_to_sizes(request: PlanRequest) -> Iterator[Array]:
    """Yield the groups that are no larger than some size, for a few sizes and at last for all."""
    largest = numpy.array([cost.activations.largest for cost in request.costs])
    sizes = numpy.unique(numpy.round(largest[largest > 0], -1))
    if len(sizes) > MOST_SIZES:
        places = numpy.linspace(0, len(sizes) - 1, MOST_SIZES + 1)[1:]
        sizes = sizes[places.astype(int)]
    for size in sizes:
        yield (largest <= size + 10).astype(float)


def activation_bytes(request: PlanRequest, shares: Sequence[GroupShares]) -> tuple[float, float]:
    """Return the bytes of the device and of the host in one pass, for given whole shares."""
    ways = [(cost.activations, way_of(share)) for cost, share in zip(request.costs, shares, strict=True)]
    device = sum(activations.left(way) for activations, way in ways if way != "host")
    host = sum(activations.kept for activations, way in ways if way == "host")
    return device + choice_of(request, shares).beside, host


def again_seconds(request: PlanRequest, shares: Sequence[GroupShares]) -> float:
    """Return the arithmetic of one pass that is done again."""
    pairs = zip(request.costs, shares, strict=True)
    return sum(cost.activations.again_s for cost, share in pairs if way_of(share) == "recompute")


def way_of(share: GroupShares) -> str:
    if share.activations_recomputed > 0.5:
        return "recompute"
    return "host" if share.activations_host > 0.5 else "keep"


# -- in the simulation --


class ActivationTraffic:
    """Activations that are kept on the host: on their way there, and wanted back. Those of other groups stay, and make
    room for them: before they are there in forward, and when backward has passed them. The rules are those of
    scheduling/offloading.py, but that one group's at most are leaving where another sends its own next, as the program
    has it: there two may be."""

    def __init__(self, request: PlanRequest, shares: Sequence[GroupShares]) -> None:
        ways = [way_of(share) for share in shares]
        left = [cost.activations.left(way) for cost, way in zip(request.costs, ways, strict=True)]
        self.sizes = [size if way == "host" else 0.0 for size, way in zip(left, ways, strict=True)]
        self.stays: list[float | None] = []
        for size, way in zip(left, ways, strict=True):
            is_known = way == "recompute" or any(abs(size - sent) <= ALIKE * sent for sent in self.sizes if sent)
            self.stays.append(None if way == "host" else size if is_known else 0.0)
        self.leaving: list[int] = []  # groups, in order; the first is on its way
        self.gone = [False] * len(shares)
        self.wanted: list[int] = []
        self.begin()

    def begin(self) -> None:
        self.freed = 0.0  # bytes of groups passed in backward
        self.held = 0.0  # bytes of the group that backward is in

    def leave(self, group: int) -> None:
        if self.sizes[group]:
            self.gone[group] = True
            self.leaving.append(group)

    def has_room(self, group: int) -> bool:
        """Return whether what is leaving may do so while groups from this one on run: if it is no more than will stay
        of them. Otherwise only the last one's is, or two while groups run that send nothing, none when the last did."""
        to_come = [size for size in self.stays[group:] if size is not None]  # of groups that send nothing
        if sum(self.sizes[leaving] for leaving in self.leaving) <= sum(to_come):
            return True
        if group and self.stays[group - 1] is not None:
            num_staying = sum(size is not None for size in self.stays)
            return len(self.leaving) <= math.ceil(NUM_BUFFERS * len(to_come) / num_staying)
        return group == len(self.sizes) or len(self.leaving) < NUM_BUFFERS

    def want(self, group: int) -> None:
        """Backward comes to a group: what is away of it and of the next one is needed, more may come."""
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
        if job == "send":
            self.leaving.remove(group)
        else:
            self.wanted.remove(group)
            self.gone[group] = False
