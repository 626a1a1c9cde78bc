"""Whole groups: the program takes shares of parameters, gradients and activations, but a group does one thing with all
of its own. Its shares are rounded; where that does not fit, the nearest whole shares that do are looked for, with whole
numbers and about bytes alone, which is quick: any placement that fits has some step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy

from zerostd.planning.activations import NUM_BUFFERS, any_choice, staying
from zerostd.planning.costs import GroupCost, PlanRequest
from zerostd.planning.demands import WHOLE, GroupShares
from zerostd.planning.linear import Array, Infeasible
from zerostd.planning.program import GIGA, Optimum, ScheduleProgram, optimise
from zerostd.policy import Tier

__all__ = ["missing", "room", "settle"]

ACTIVATIONS = ("activations_recomputed", "activations_host")
SAME = 1e-6  # of a share
MARGINS = (0.0, 1e-7, 1e-6)  # of all bytes, that whole numbers leave free of each tier: they are not quite whole


def settle(request: PlanRequest, found: Sequence[GroupCost]) -> tuple[list[GroupShares], Optimum]:
    """What each group does as a whole, and the best of the rest for that. Raises Infeasible."""
    try:
        relaxed = optimise(request, found)
    except Infeasible:
        if not request.chooses:
            raise
        return _as_near(request, found, [GroupShares() for _ in found])  # the activation_choices are not all there are
    fixed = _spread(found, [_rounded(share) for share in relaxed.shares], relaxed.shares)
    pairs = list(zip(fixed, relaxed.shares, strict=True))
    if not request.chooses and all(abs(getattr(a, name) - getattr(b, name)) < SAME for a, b in pairs for name in WHOLE):
        return fixed, relaxed
    try:
        return fixed, optimise(request, found, fixed=fixed)
    except Infeasible:
        done = [{name: getattr(share, name) for name in ACTIVATIONS} for share in fixed]
        return _as_near(request, found, [replace(a, **b) for a, b in zip(relaxed.shares, done, strict=True)])


def _as_near(
    request: PlanRequest, found: Sequence[GroupCost], wanted: Sequence[GroupShares]
) -> tuple[list[GroupShares], Optimum]:
    """The whole shares nearest to these that fit, and the best of the rest."""
    total = sum(cost.updated * request.model.state_bytes + cost.parameters + cost.gradients for cost in found)
    for margin in MARGINS:
        fixed = _nearest(request, found, wanted, int(margin * total))
        with contextlib.suppress(Infeasible):
            return fixed, optimise(request, found, fixed=fixed)
    raise Infeasible("no whole groups fit")


def _rounded(share: GroupShares) -> GroupShares:
    """Each to the place that has most of it."""
    host, disk = share.parameters_host, share.parameters_disk
    on_disk = disk > max(host, 1 - host - disk)
    again, sent = share.activations_recomputed, share.activations_host
    is_sent = sent > max(again, 1 - again - sent)
    return replace(
        share,
        parameters_host=float(not on_disk and host > 1 - host - disk),
        parameters_disk=float(on_disk),
        gradients_host=float(share.gradients_host > 0.5),
        activations_recomputed=float(not is_sent and again > 1 - again - sent),
        activations_host=float(is_sent),
    )


def _spread(
    found: Sequence[GroupCost], fixed: Sequence[GroupShares], wanted: Sequence[GroupShares]
) -> list[GroupShares]:
    """Where all groups should do something with a part of their activations, some do it with all of theirs, at even
    distances: as many bytes up to each of them as were wanted."""
    owed = dict.fromkeys(ACTIVATIONS, 0.0)
    made = []
    for cost, share, want in zip(found, fixed, wanted, strict=True):
        size = 0.0 if cost.activations is None else cost.activations.kept
        for name in owed:
            owed[name] += size * getattr(want, name)
        may = [name for name in ACTIVATIONS if getattr(want, name) > SAME]
        first = max(may, key=lambda name: owed[name], default="")
        keeps = 1.0 - sum(getattr(want, name) for name in ACTIVATIONS)
        if first and size and (owed[first] > size / 2 or keeps < SAME):
            owed[first] -= size
            share = replace(share, **{name: float(name == first) for name in ACTIVATIONS})
        elif size:
            share = replace(share, **dict.fromkeys(ACTIVATIONS, 0.0))
        made.append(share)
    return made


def _nearest(
    request: PlanRequest, found: Sequence[GroupCost], wanted: Sequence[GroupShares], spare: int
) -> list[GroupShares]:
    """The whole shares that fit and are nearest to these, in bytes; so many are left free of each tier."""
    fixed = {tier: request.fixed.get(tier, 0) + spare * (tier in request.limits) for tier in Tier}
    program, _ = _about_bytes(replace(request, fixed=fixed), found, {})
    demands = program.demands
    sizes = {"parameters_host": demands.parameters, "parameters_disk": demands.parameters}
    sizes |= {"gradients_host": demands.gradients, **dict.fromkeys(ACTIVATIONS, demands.kept)}
    cost: dict[int, float] = {}
    for name, size in sizes.items():  # of whole numbers x, |x - w| is w + x (1 - 2 w)
        away = 1.0 - 2.0 * numpy.array([getattr(share, name) for share in wanted])
        cost |= zip(program.columns[name].tolist(), (away * size / GIGA).tolist(), strict=True)
    return [_rounded(share) for share in program.shares(program.linear.minimise(cost, _whole(program)))]


def missing(
    request: PlanRequest, found: Sequence[GroupCost], *, is_whole: bool = False, of: Collection[Tier] = tuple(Tier)
) -> dict[Tier, float]:
    """How many bytes tiers are short of, at the least in all, when there is no solution; with `is_whole` for groups
    that do one thing each, else for any shares. Raises Infeasible if more of the tiers named does not help."""
    program, short = _about_bytes(request, found, dict.fromkeys(of, -1.0))
    outcome = program.linear.minimise(dict.fromkeys(short, 1.0), _whole(program) if is_whole else None)
    return {tier: float(outcome.values[column]) * GIGA for tier, column in zip(of, short, strict=True)}


def room(request: PlanRequest, found: Sequence[GroupCost]) -> float:
    """Bytes of the device that whole groups can leave free at the most; below 0: they do not fit at all."""
    program, (spare,) = _about_bytes(request, found, {Tier.DEVICE: 1.0})
    try:
        return float(program.linear.minimise({spare: -1.0}, _whole(program)).values[spare]) * GIGA
    except Infeasible:
        return -1.0


def _whole(program: ScheduleProgram) -> Array:
    return numpy.concatenate([program.columns[name] for name in WHOLE])


def _about_bytes(
    request: PlanRequest, found: Sequence[GroupCost], beside: Mapping[Tier, float]
) -> tuple[ScheduleProgram, list[int]]:
    """The rows about bytes, and for each tier in `beside` a variable that counts there with this factor, in units of
    GIGA: -1.0 for what a tier is short of, 1.0 for what is left of it."""
    program = ScheduleProgram(request, found, any_choice(request, found), has_times=False)
    linear, parts = program.linear, [cost.activations for cost in found if cost.activations is not None]
    more: dict[Tier, dict[int, float]] = {tier: {} for tier in Tier}
    if parts:  # what one group needs while it runs
        inside, buffers = linear.variables(1), linear.variables(1)
        more[Tier.DEVICE] = {int(inside[0]): 1.0, int(buffers[0]): 1.0}
        every = numpy.zeros(len(parts), int)
        peak = (numpy.array([one.peak for one in parts]) + staying(parts)) / GIGA
        again = (numpy.array([one.inside for one in parts]) + staying(parts)) / GIGA - peak
        linear.each_at_most([(program.columns["activations_recomputed"], again), (inside[every], -1.0)], -peak)
        largest = numpy.array([one.largest for one in parts]) * NUM_BUFFERS / GIGA
        linear.each_at_most([(program.columns["activations_host"], largest), (buffers[every], -1.0)], 0.0)
    made = [linear.variable() for _ in beside]
    for (tier, factor), column in zip(beside.items(), made, strict=True):
        more[tier][column] = factor
    program.limit(more)
    return program, made
