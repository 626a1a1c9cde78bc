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
from zerostd.planning.costs import GroupCost
from zerostd.planning.demands import WHOLE, GroupShares, states_of
from zerostd.planning.linear import Array, Infeasible
from zerostd.planning.program import GIGA, ScheduleProgram, optimise
from zerostd.planning.request import PlanRequest
from zerostd.policy import Tier

SAME = 1e-6  # of a share
MARGINS = (0.0, 1e-7, 1e-6)  # of all bytes, that whole numbers leave free of each tier: they are not quite whole


def optimise_whole(request: PlanRequest, costs: Sequence[GroupCost]) -> tuple[float, list[GroupShares]]:
    """Return what `optimise` does, with groups that do one thing each as a whole. Raises Infeasible."""
    try:
        step_s, relaxed = optimise(request, costs)
    except Infeasible:
        if not request.chooses:
            raise
        return _optimise_near(request, costs, [GroupShares() for _ in costs])  # the choices are not all there are
    whole = _spread(costs, [_rounded(share) for share in relaxed], relaxed)
    if not request.chooses and all(_is_same(*pair) for pair in zip(whole, relaxed, strict=True)):
        return step_s, [states_of(*pair) for pair in zip(relaxed, whole, strict=True)]
    try:
        return optimise(request, costs, fixed=whole)
    except Infeasible:
        return _optimise_near(
            request, costs, [_with_activations_of(*pair) for pair in zip(relaxed, whole, strict=True)]
        )


def _is_same(whole: GroupShares, relaxed: GroupShares) -> bool:
    return all(abs(getattr(whole, name) - getattr(relaxed, name)) < SAME for name in WHOLE)


def _with_activations_of(share: GroupShares, whole: GroupShares) -> GroupShares:
    return replace(share, activations_recomputed=whole.activations_recomputed, activations_host=whole.activations_host)


def _optimise_near(
    request: PlanRequest, costs: Sequence[GroupCost], wanted: Sequence[GroupShares]
) -> tuple[float, list[GroupShares]]:
    """Take the whole shares nearest to these that fit."""
    total = sum(cost.updated * request.model.state_bytes + cost.parameters + cost.gradients for cost in costs)
    for margin in MARGINS:
        whole = _nearest(request, costs, wanted, int(margin * total))
        with contextlib.suppress(Infeasible):
            return optimise(request, costs, fixed=whole)
    raise Infeasible("no whole groups fit")


def _rounded(share: GroupShares) -> GroupShares:
    """Move each to the place that has most of it."""
    on_device = 1 - share.parameters_host - share.parameters_disk
    on_disk = share.parameters_disk > max(share.parameters_host, on_device)
    kept = 1 - share.activations_recomputed - share.activations_host
    is_sent = share.activations_host > max(share.activations_recomputed, kept)
    return replace(
        share,
        parameters_host=float(not on_disk and share.parameters_host > on_device),
        parameters_disk=float(on_disk),
        gradients_host=float(share.gradients_host > 0.5),
        activations_recomputed=float(not is_sent and share.activations_recomputed > kept),
        activations_host=float(is_sent),
    )


def _spread(
    costs: Sequence[GroupCost], rounded: Sequence[GroupShares], wanted: Sequence[GroupShares]
) -> list[GroupShares]:
    """Where all groups should do something with a part of their activations, let some do it with all of theirs, at even
    distances: as many bytes up to each of them as were wanted."""
    owed_recomputed = 0.0  # bytes that were wanted so far and are not done yet
    owed_host = 0.0
    spread = []
    for cost, share, want in zip(costs, rounded, wanted, strict=True):
        size = 0.0 if cost.activations is None else cost.activations.kept
        if not size:
            spread.append(share)
            continue
        owed_recomputed += size * want.activations_recomputed
        owed_host += size * want.activations_host
        may_recompute = want.activations_recomputed > SAME
        may_send = want.activations_host > SAME
        sends = may_send and (not may_recompute or owed_host > owed_recomputed)
        owed = owed_host if sends else owed_recomputed
        keeps = 1.0 - (want.activations_recomputed + want.activations_host)
        is_due = (may_recompute or may_send) and (owed > size / 2 or keeps < SAME)
        if is_due and sends:
            owed_host -= size
        elif is_due:
            owed_recomputed -= size
        spread.append(
            replace(share, activations_recomputed=float(is_due and not sends), activations_host=float(is_due and sends))
        )
    return spread


def _nearest(
    request: PlanRequest, costs: Sequence[GroupCost], wanted: Sequence[GroupShares], spare: int
) -> list[GroupShares]:
    """Return the whole shares that fit and are nearest to these, in bytes; `spare` are left free of each tier."""
    fixed = {tier: request.fixed.get(tier, 0) + spare * (tier in request.limits) for tier in Tier}
    program, _ = _bytes_program(replace(request, fixed=fixed), costs, {})
    demands = program.demands
    sizes = {
        "parameters_host": demands.parameters,
        "parameters_disk": demands.parameters,
        "gradients_host": demands.gradients,
        "activations_recomputed": demands.kept,
        "activations_host": demands.kept,
    }
    distance: dict[int, float] = {}
    for name, size in sizes.items():  # of whole numbers x, |x - w| is w + x (1 - 2 w)
        factors = 1.0 - 2.0 * numpy.array([getattr(share, name) for share in wanted])
        distance |= zip(program.columns[name].tolist(), (factors * size / GIGA).tolist(), strict=True)
    return [_rounded(share) for share in program.shares(program.linear.minimise(distance, _whole(program)))]


def missing_bytes(
    request: PlanRequest, costs: Sequence[GroupCost], *, is_whole: bool = False, of: Collection[Tier] = tuple(Tier)
) -> dict[Tier, float]:
    """Return how many bytes the tiers `of` lack when there is no solution, the fewest in all: for any shares, or with
    `is_whole` for groups that do one thing each. Raises Infeasible if more of these tiers does not help."""
    program, short = _bytes_program(request, costs, dict.fromkeys(of, -1.0))
    solution = program.linear.minimise(dict.fromkeys(short, 1.0), _whole(program) if is_whole else None)
    return {tier: float(solution.values[column]) * GIGA for tier, column in zip(of, short, strict=True)}


def most_room(request: PlanRequest, costs: Sequence[GroupCost]) -> float:
    """Return the most bytes of the device that whole groups can leave free; below 0 if they do not fit at all."""
    program, (spare,) = _bytes_program(request, costs, {Tier.DEVICE: 1.0})
    try:
        return float(program.linear.minimise({spare: -1.0}, _whole(program)).values[spare]) * GIGA
    except Infeasible:
        return -1.0


def _whole(program: ScheduleProgram) -> Array:
    return numpy.concatenate([program.columns[name] for name in WHOLE])


def _bytes_program(
    request: PlanRequest, costs: Sequence[GroupCost], beside: Mapping[Tier, float]
) -> tuple[ScheduleProgram, list[int]]:
    """Return the constraints about bytes, and for each tier in `beside` a variable that counts there with this factor,
    in units of GIGA: -1.0 for what a tier lacks, 1.0 for what is left of it."""
    program = ScheduleProgram(request, costs, any_choice(request, costs), has_times=False)
    linear = program.linear
    activations = [cost.activations for cost in costs if cost.activations is not None]
    more: dict[Tier, dict[int, float]] = {tier: {} for tier in Tier}
    if activations:  # what one group needs while it runs
        inside = linear.variables(1)
        buffers = linear.variables(1)
        more[Tier.DEVICE] = {int(inside[0]): 1.0, int(buffers[0]): 1.0}
        every = numpy.zeros(len(activations), int)
        peak = (numpy.array([cost.peak for cost in activations]) + staying(activations)) / GIGA
        again = (numpy.array([cost.inside for cost in activations]) + staying(activations)) / GIGA - peak
        linear.each_at_most([(program.columns["activations_recomputed"], again), (inside[every], -1.0)], -peak)
        largest = numpy.array([cost.largest for cost in activations]) * NUM_BUFFERS / GIGA
        linear.each_at_most([(program.columns["activations_host"], largest), (buffers[every], -1.0)], 0.0)
    columns = [linear.variable() for _ in beside]
    for (tier, factor), column in zip(beside.items(), columns, strict=True):
        more[tier][column] = factor
    program.limit(more)
    return program, columns
