"""What is done with activations until backward: groups keep them, recompute them from their inputs, or send them to the
host and have them back.

What a group leaves is linear in its shares. What it needs while it runs is not: a recomputed group keeps all of it for
a moment, and what goes to the host leaves by way of buffers for two groups, however few groups do so. A linear program
would let all groups do it by half to halve that. So it is asked several times, each time with other groups allowed and
room for the largest of them: these are the choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from zerostd.planning.costs import Activations, GroupCost, PlanRequest
from zerostd.planning.demands import GroupShares
from zerostd.planning.linear import Array

__all__ = [
    "NUM_BUFFERS",
    "ActivationChoice",
    "activation_bytes",
    "activation_choices",
    "any_choice",
    "choice_of",
    "staying",
    "way_of",
]

NUM_BUFFERS = 2  # groups whose activations are on the device, where they rest on the host
MOST_SIZES = 3  # of groups, up to which others than kept activations are tried


@dataclass(frozen=True)
class ActivationChoice:
    """Which group_costs may do what, and the bytes of the device that they need for it while they run."""

    recomputed: Array  # 1.0 or 0.0
    sent: Array
    must: bool  # no cost may keep them
    beside: float

    @property
    def changes(self) -> bool:
        """Whether anything else than keeping them may be done."""
        return bool(self.recomputed.any() or self.sent.any())


def activation_choices(request: PlanRequest, found: Sequence[GroupCost]) -> list[ActivationChoice]:
    """Those worth trying, keeping everything first; where there is no choice, one that says so."""
    if not request.chooses:
        nothing = numpy.zeros(len(found))
        return [ActivationChoice(nothing, nothing, False, 0.0)]
    if "keep" not in request.ways:
        every = numpy.ones(len(found))
        return [_choice(found, every * ("recompute" in request.ways), every * ("host" in request.ways), must=True)]
    parts = _parts(found)
    kept, boundary = numpy.array([one.kept for one in parts]), numpy.array([one.boundary for one in parts])
    nothing = numpy.zeros(len(found))
    made, most = [_choice(found, nothing, nothing)], dict[tuple[str, ...], float]()
    for small in _up_to_sizes(parts):
        for ways in (("recompute",), ("host",), ("recompute", "host")):
            if not request.ways.issuperset(ways):
                continue
            recomputed = small * (kept > boundary) * ("recompute" in ways)
            sent = small * (kept > 0) * ("host" in ways)
            choice = _choice(found, recomputed, sent)
            left = numpy.where(sent > 0, 0.0, numpy.where(recomputed > 0, boundary, kept)).sum() + choice.beside
            if choice.changes and left < most.get(ways, math.inf):  # else larger groups cost more than they save
                most[ways] = left
                made.append(choice)
    return made


def choice_of(found: Sequence[GroupCost], shares: Sequence[GroupShares]) -> ActivationChoice:
    """The one that given whole shares need, and no more."""
    if not _parts(found):
        nothing = numpy.zeros(len(found))
        return ActivationChoice(nothing, nothing, False, 0.0)
    recomputed = numpy.array([share.activations_recomputed > 0.5 for share in shares], float)
    return _choice(found, recomputed, numpy.array([share.activations_host > 0.5 for share in shares], float))


def any_choice(request: PlanRequest, found: Sequence[GroupCost]) -> ActivationChoice:
    """All that may be done, without what groups need for it while they run."""
    every = numpy.full(len(found), float(request.chooses))
    must = request.chooses and "keep" not in request.ways
    return ActivationChoice(every * ("recompute" in request.ways), every * ("host" in request.ways), must, 0.0)


def staying(parts: Sequence[Activations]) -> float:
    """Bytes of the device that groups keep which have no choice."""
    return sum(one.staying for one in parts)


def _choice(found: Sequence[GroupCost], recomputed: Array, sent: Array, *, must: bool = False) -> ActivationChoice:
    parts = _parts(found)
    inside = max(one.inside if again else one.peak for one, again in zip(parts, recomputed, strict=True))
    buffers = NUM_BUFFERS * max(one.largest * goes for one, goes in zip(parts, sent, strict=True))
    return ActivationChoice(recomputed, sent, must, inside + buffers + staying(parts))


def _up_to_sizes(parts: Sequence[Activations]) -> Iterator[Array]:
    """Loads whose groups are no larger than some size, for a few sizes and at last for all."""
    largest = numpy.array([one.largest for one in parts])
    sizes = numpy.unique(numpy.round(largest[largest > 0], -1))
    if len(sizes) > MOST_SIZES:
        places = numpy.linspace(0, len(sizes) - 1, MOST_SIZES + 1)[1:]
        sizes = sizes[places.astype(int)]
    for size in sizes:
        yield (largest <= size + 10).astype(float)


def activation_bytes(found: Sequence[GroupCost], shares: Sequence[GroupShares]) -> tuple[float, float]:
    """Of the device and of the host in one pass, for given whole shares; none where there is no choice."""
    device = host = 0.0
    for one, share in zip(_parts(found), shares, strict=False):
        way = way_of(share)
        device += {"keep": one.kept, "recompute": one.boundary, "host": 0.0}[way]
        host += one.kept if way == "host" else 0.0
    return device + choice_of(found, shares).beside, host


def way_of(share: GroupShares) -> str:
    """What a group does with its activations."""
    if share.activations_recomputed > 0.5:
        return "recompute"
    return "host" if share.activations_host > 0.5 else "keep"


def _parts(found: Sequence[GroupCost]) -> list[Activations]:
    return [cost.activations for cost in found if cost.activations is not None]
