"""Whole groups: the program takes shares of parameters, gradients and activations, but a group makes one choice for
each of them as a whole. Its shares are rounded. If they do not fit, an integer program about bytes finds the nearest
whole shares that do. Where nothing fits, a refusal says how many bytes are missing where, and what would help.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy

from zerostd.monitoring.texts import count_text, size_text
from zerostd.planning.demands import NUM_BUFFERS, STATES, WHOLE, GroupShares, any_choice, states_of
from zerostd.planning.linear import Array, Infeasible, Term
from zerostd.planning.program import GIGA, ScheduleProgram, optimise
from zerostd.planning.request import PlanRequest
from zerostd.policy import Tier

SAME = 1e-6  # of a share
FEW = 1000.0  # bytes, within the solver's tolerance
MARGINS = (0.0, 1e-7, 1e-6)  # of all bytes, that whole numbers leave free of each tier: they are not quite whole


def optimise_whole(request: PlanRequest) -> tuple[float, list[GroupShares]]:
    """Return what `optimise` does, with groups that do one thing each as a whole. Raises Infeasible."""
    try:
        step_s, relaxed = optimise(request)
    except Infeasible:
        if not request.chooses:
            raise
        return _optimise_near(request, [GroupShares() for _ in request.costs])  # the choices are not all there are
    whole = _spread(request, relaxed)
    pairs = list(zip(relaxed, whole, strict=True))
    moved = (abs(getattr(share, name) - getattr(to, name)) for share, to in pairs for name in WHOLE)
    if not request.chooses and all(distance < SAME for distance in moved):
        return step_s, [states_of(*pair) for pair in pairs]
    try:
        return optimise(request, whole)
    except Infeasible:
        wanted = [
            replace(share, activations_recomputed=to.activations_recomputed, activations_host=to.activations_host)
            for share, to in pairs
        ]
        return _optimise_near(request, wanted)


def _optimise_near(request: PlanRequest, wanted: Sequence[GroupShares]) -> tuple[float, list[GroupShares]]:
    total = sum(cost.updated * request.model.state_bytes + cost.parameters + cost.gradients for cost in request.costs)
    for margin in MARGINS:
        whole = _nearest(request, wanted, int(margin * total))
        with contextlib.suppress(Infeasible):
            return optimise(request, whole)
    raise Infeasible("no whole groups fit")


def _rounded(share: GroupShares) -> GroupShares:
    """Move each to the place that has most of it."""
    parameters = _larger_of(share.parameters_host, share.parameters_disk)
    activations = _larger_of(share.activations_recomputed, share.activations_host)
    whole = [*parameters, float(share.gradients_host > 0.5), *activations]
    return GroupShares(*(getattr(share, name) for name in STATES), *whole)


def _larger_of(first: float, second: float) -> tuple[float, float]:
    """Return which of two shares becomes the whole; neither, if the remainder is larger than both."""
    rest = 1 - first - second
    is_second = second > max(first, rest)
    return float(not is_second and first > rest), float(is_second)


def _spread(request: PlanRequest, wanted: Sequence[GroupShares]) -> list[GroupShares]:
    """Round shares. If groups should recompute or offload a part of their activations, some groups do so with all of
    theirs, at even distances, so that the bytes up to each group are as wanted."""
    owed = {"recompute": 0.0, "host": 0.0}  # bytes that were wanted so far and are not done yet
    spread = []
    for cost, want in zip(request.costs, wanted, strict=True):
        parts = {"recompute": want.activations_recomputed, "host": want.activations_host}
        size = cost.activations.kept
        for way, part in parts.items():
            owed[way] += size * part
        way = max((way for way in parts if size and parts[way] > SAME), key=owed.__getitem__, default="keep")
        if way != "keep" and owed[way] <= size / 2 and sum(parts.values()) <= 1 - SAME:
            way = "keep"
        if way != "keep":
            owed[way] -= size
        share = _rounded(want)
        if size:
            recomputed = float(way == "recompute")
            share = replace(share, activations_recomputed=recomputed, activations_host=float(way == "host"))
        spread.append(share)
    return spread


def _nearest(request: PlanRequest, wanted: Sequence[GroupShares], spare: int) -> list[GroupShares]:
    """Return the whole shares that fit and are nearest to these, in bytes; `spare` are left free of each tier."""
    fixed = {tier: request.fixed.get(tier, 0) + spare * (tier in request.limits) for tier in Tier}
    program, _ = _bytes_program(replace(request, fixed=fixed))
    demands = program.demands
    sizes = (demands.parameters, demands.parameters, demands.gradients, demands.kept, demands.kept)
    distance = []
    for name, size in zip(WHOLE, sizes, strict=True):  # of whole numbers x, |x - w| is w + x (1 - 2 w)
        factors = 1.0 - 2.0 * numpy.array([getattr(share, name) for share in wanted])
        distance.append((program.columns[name], factors * size / GIGA))
    return [_rounded(share) for share in program.shares(program.linear.minimise(distance, _whole(program)))]


def missing_bytes(request: PlanRequest, *, is_whole: bool = False) -> dict[Tier, float]:
    """Return the bytes that tiers lack, the fewest in all: for any shares, or with `is_whole` for groups that do one
    thing each."""
    program, short = _bytes_program(request, tuple(Tier))
    solution = program.linear.minimise([(short, 1.0)], _whole(program) if is_whole else None)
    lacks = zip(Tier, solution.values[short], strict=True)
    return {tier: float(lack) * GIGA for tier, lack in lacks if lack * GIGA > FEW}


def least_of(request: PlanRequest, tier: Tier) -> list[GroupShares]:
    """Return the whole groups that take the fewest bytes of a tier, regardless of its limit, while the other tiers keep
    theirs. Raises Infeasible if they cannot."""
    program, taken = _bytes_program(replace(request, limits={**request.limits, tier: 0}), [tier])
    solution = program.linear.minimise([(taken, 1.0)], _whole(program))
    return [_rounded(share) for share in program.shares(solution)]


def _whole(program: ScheduleProgram) -> Array:
    return numpy.concatenate([program.columns[name] for name in WHOLE])


def _bytes_program(request: PlanRequest, short: Collection[Tier] = ()) -> tuple[ScheduleProgram, Array]:
    """Return the constraints about bytes, and for each tier in `short` a variable for what it lacks, in units of
    GIGA."""
    program = ScheduleProgram(request, any_choice(request), has_times=False)
    linear = program.linear
    more: dict[Tier, list[Term]] = {tier: [] for tier in Tier}
    if request.chooses:  # what one group needs while it runs
        activations = [cost.activations for cost in request.costs]
        inside = linear.variables()
        buffers = linear.variables()
        more[Tier.DEVICE] = [(inside, 1.0), (buffers, 1.0)]
        peak = numpy.array([cost.peak for cost in activations]) / GIGA
        again = numpy.array([cost.inside for cost in activations]) / GIGA - peak
        of_each = numpy.repeat(inside, len(peak))
        linear.each_at_most([(program.columns["activations_recomputed"], again), (of_each, -1.0)], -peak)
        largest = numpy.array([cost.largest for cost in activations]) * NUM_BUFFERS / GIGA
        of_each = numpy.repeat(buffers, len(peak))
        linear.each_at_most([(program.columns["activations_host"], largest), (of_each, -1.0)], 0.0)
    columns = linear.variables(len(short))
    for tier, column in zip(short, columns, strict=True):
        more[tier].append((numpy.array([column]), -1.0))
    program.limit(more)
    return program, columns


# -- when nothing fits --


def explain_missing(request: PlanRequest, counted: Sequence[Mapping[Tier, float]]) -> str:
    """Return what a request is refused with; `counted` are the bytes that are enough, the fewest first."""
    least = counted[0] if counted else missing_bytes(request)
    limits = " and ".join(
        f"{size_text(size) if size else 'nothing'} of the {tier.value}" for tier, size in request.limits.items()
    )
    return (
        f"no placement fits {count_text(request.model.numel)} parameters at stage {request.stage.value} on "
        f"{request.world_size:,} rank{'s' * (request.world_size > 1)}, each with {limits}: at least "
        f"{_of_tiers(least) or 'a group'} is missing. What would fit: {'; or '.join(_changes(request, counted))}"
    )


def _changes(request: PlanRequest, larger: Sequence[Mapping[Tier, float]]) -> Iterator[str]:
    yield from (_larger(request, by) for by in larger)
    if Tier.DISK not in request.limits:
        plenty = replace(request, limits={**request.limits, Tier.HOST: 1 << 60})  # more of what is not the device
        if sum(missing_bytes(plenty).values()) < sum(missing_bytes(request).values()):
            yield "a disk: Budget(disk=..., disk_path=...)"
    if request.model.activations():
        recomputes = request.recomputes or request.model.recomputed
        yield "fewer samples in a pass" + ("" if recomputes else ", or recomputed activations")
    if request.world_size == 1 or request.stage < 3:
        yield "more ranks" if request.stage == 3 else "stage=3"


def _of_tiers(sizes: Mapping[Tier, float]) -> str:
    return " and ".join(f"{_in_bytes(size)} of the {tier.value}" for tier, size in sizes.items())


def _in_bytes(size: float) -> str:
    return f"{size_text(size)} ({int(size)} bytes)" if size >= 1024 else f"{int(size)} bytes"


def _larger(request: PlanRequest, by: Mapping[Tier, float]) -> str:
    each = " for each rank" if request.ranks_beside > 1 else ""
    parts = [f"Budget({tier.value}=...) larger by {_in_bytes(size)}" for tier, size in by.items()]
    return " and ".join(parts) + each
