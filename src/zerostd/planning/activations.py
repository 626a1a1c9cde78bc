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

from zerostd.planning.costs import ActivationCost, GroupCost
from zerostd.planning.demands import GroupShares
from zerostd.planning.linear import Array
from zerostd.planning.request import PlanRequest

NUM_BUFFERS = 2  # groups whose activations are on the device, where they are kept on the host
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
        """Whether anything else than keeping them may be done."""
        return bool(self.recomputed.any() or self.sent.any())


def activation_choices(request: PlanRequest, costs: Sequence[GroupCost]) -> list[ActivationChoice]:
    """Return the choices worth trying, keeping everything first; the only one where the plan does not choose."""
    nothing = numpy.zeros(len(costs))
    if not request.chooses:
        return [ActivationChoice(nothing, nothing)]
    if "keep" not in request.ways:
        every = numpy.ones(len(costs))
        return [_choice(costs, every * ("recompute" in request.ways), every * ("host" in request.ways), must=True)]
    activations = _activations(costs)
    kept = numpy.array([cost.kept for cost in activations])
    boundary = numpy.array([cost.boundary for cost in activations])
    choices = [_choice(costs, nothing, nothing)]
    least: dict[tuple[str, ...], float] = {}  # bytes of the device, by ways
    for small in _up_to_sizes(activations):
        for ways in (("recompute",), ("host",), ("recompute", "host")):
            if not request.ways.issuperset(ways):
                continue
            recomputed = small * (kept > boundary) * ("recompute" in ways)
            sent = small * (kept > 0) * ("host" in ways)
            choice = _choice(costs, recomputed, sent)
            left = numpy.where(sent > 0, 0.0, numpy.where(recomputed > 0, boundary, kept)).sum() + choice.beside
            if choice.changes and left < least.get(ways, math.inf):  # else larger groups cost more than they save
                least[ways] = left
                choices.append(choice)
    return choices


def choice_of(costs: Sequence[GroupCost], shares: Sequence[GroupShares]) -> ActivationChoice:
    """Return the choice that given whole shares need, and no more."""
    if not _activations(costs):
        nothing = numpy.zeros(len(costs))
        return ActivationChoice(nothing, nothing)
    recomputed = numpy.array([share.activations_recomputed > 0.5 for share in shares], float)
    return _choice(costs, recomputed, numpy.array([share.activations_host > 0.5 for share in shares], float))


def any_choice(request: PlanRequest, costs: Sequence[GroupCost]) -> ActivationChoice:
    """Return all that may be done, without what groups need for it while they run."""
    every = numpy.full(len(costs), float(request.chooses))
    must = request.chooses and "keep" not in request.ways
    return ActivationChoice(every * ("recompute" in request.ways), every * ("host" in request.ways), must)


def staying(activations: Sequence[ActivationCost]) -> float:
    """Return the bytes of the device that groups keep which have no choice."""
    return sum(cost.staying for cost in activations)


def _choice(costs: Sequence[GroupCost], recomputed: Array, sent: Array, *, must: bool = False) -> ActivationChoice:
    activations = _activations(costs)
    inside = max(cost.inside if again else cost.peak for cost, again in zip(activations, recomputed, strict=True))
    buffers = NUM_BUFFERS * max(cost.largest * goes for cost, goes in zip(activations, sent, strict=True))
    return ActivationChoice(recomputed, sent, must, inside + buffers + staying(activations))


def _up_to_sizes(activations: Sequence[ActivationCost]) -> Iterator[Array]:
    """Yield the groups that are no larger than some size, for a few sizes and at last for all."""
    largest = numpy.array([cost.largest for cost in activations])
    sizes = numpy.unique(numpy.round(largest[largest > 0], -1))
    if len(sizes) > MOST_SIZES:
        places = numpy.linspace(0, len(sizes) - 1, MOST_SIZES + 1)[1:]
        sizes = sizes[places.astype(int)]
    for size in sizes:
        yield (largest <= size + 10).astype(float)


def activation_bytes(costs: Sequence[GroupCost], shares: Sequence[GroupShares]) -> tuple[float, float]:
    """Return the bytes of the device and of the host in one pass, for given whole shares."""
    device = 0.0
    host = 0.0
    for cost, share in zip(_activations(costs), shares, strict=False):
        match way_of(share):
            case "keep":
                device += cost.kept
            case "recompute":
                device += cost.boundary
            case "host":
                host += cost.kept
    return device + choice_of(costs, shares).beside, host


def way_of(share: GroupShares) -> str:
    """Return what a group does with its activations."""
    if share.activations_recomputed > 0.5:
        return "recompute"
    return "host" if share.activations_host > 0.5 else "keep"


def _activations(costs: Sequence[GroupCost]) -> list[ActivationCost]:
    return [cost.activations for cost in costs if cost.activations is not None]
