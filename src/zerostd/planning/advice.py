"""What a plan's notes and a refusal say: how many bytes are missing in which tier, and what would change that.

In: a request that cannot be solved, or a solution. Out: sentences for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zerostd.monitoring.texts import size_text
from zerostd.planning.activations import activation_bytes, way_of
from zerostd.planning.costs import GroupCost
from zerostd.planning.demands import GroupShares
from zerostd.planning.linear import Infeasible
from zerostd.planning.plan import Plan
from zerostd.planning.request import PlanRequest
from zerostd.planning.rounding import missing_bytes, most_room
from zerostd.planning.solution import Solution
from zerostd.policy import Tier

FEW = 1000.0  # bytes, within the solver's tolerance
WORTH_SAYING = 0.02  # of a step
SPARE = 1e-5  # of model state, asked for beyond what is missing: whole numbers are found with some tolerance


def explain_missing(request: PlanRequest, costs: Sequence[GroupCost]) -> str:
    """Return a sentence about what is missing, and one about what would fit."""
    least = {tier: size for tier, size in missing_bytes(request, costs).items() if size > FEW}
    whole = _in_whole_groups(request, costs, tuple(Tier)) or least
    whole = whole or dict.fromkeys(request.limits, _spare(request, costs))
    limits = ", ".join(f"{size_text(size)} of the {tier.value}" for tier, size in request.limits.items())
    if least:
        where = f"at least {_of_tiers(least)} is missing"
    else:
        largest = max(cost.gathered for cost in costs)
        where = f"{_of_tiers(whole)} is missing, since groups move as a whole (the largest has {int(largest)} bytes)"
    return (
        f"no placement fits {request.model.numel / 1e9:.4g} B parameters at stage {request.stage.value} on "
        f"{request.world_size} rank(s) into {limits} each: {where}. What would fit: "
        + "; or ".join(_changes(request, costs, whole))
    )


def _changes(request: PlanRequest, costs: Sequence[GroupCost], whole: Mapping[Tier, float]) -> Iterator[str]:
    """Yield what would fit, the smallest change first."""
    yield _larger(request, whole)
    for tier in request.limits:
        alone = _in_whole_groups(request, costs, (tier,)) if {*whole} != {tier} else {}
        if alone:
            yield _larger(request, alone)
    if Tier.DISK not in request.limits and _would_help(request, costs, Tier.HOST):  # more of what is not the device
        yield "a disk: Budget(disk=..., disk_path=...)"
    yield from _fewer_activations(request, costs)
    if request.world_size == 1 or request.stage < 3:
        yield "more ranks" if request.stage == 3 else "stage=3"


def _would_help(request: PlanRequest, costs: Sequence[GroupCost], tier: Tier) -> bool:
    """Return whether less is missing elsewhere with more of a tier."""
    plenty = replace(request, limits={**request.limits, tier: 1 << 60})
    missing = sum(missing_bytes(request, costs).values())
    return sum(missing_bytes(plenty, costs).values()) < missing - FEW


def _in_whole_groups(request: PlanRequest, costs: Sequence[GroupCost], of: Sequence[Tier]) -> dict[Tier, float]:
    """Return the bytes that are enough for groups that move as a whole; empty if more of these tiers does not help."""
    try:
        missing = missing_bytes(request, costs, is_whole=True, of=of)
    except Infeasible:
        return {}
    return {tier: size + _spare(request, costs) for tier, size in missing.items() if size > FEW}


def _spare(request: PlanRequest, costs: Sequence[GroupCost]) -> float:
    return FEW + SPARE * sum(cost.updated * request.model.state_bytes + cost.parameters for cost in costs)


def _fewer_activations(request: PlanRequest, costs: Sequence[GroupCost]) -> Iterator[str]:
    """Yield how many samples would fit, and whether recomputing would do."""
    model = request.model
    activations = model.activations()
    if request.chooses or model.samples is None:
        if activations:
            more = "" if request.chooses or model.recomputes else ", or recomputed activations"
            yield f"fewer samples in a pass{more}"
        return
    fixed = max(0, request.fixed.get(Tier.DEVICE, 0) - activations)
    room = most_room(replace(request, fixed={**request.fixed, Tier.DEVICE: fixed}), costs)
    samples = int(model.samples * min(1.0, room / activations)) if activations else 0
    if 0 < samples < model.samples:
        yield f"{samples} samples in a pass instead of {model.samples}"
    recomputed = recomputed_bytes(request)
    if recomputed is not None:
        enough = "" if recomputed <= room else ": not enough by itself"
        yield f"recomputed activations, which take {size_text(activations - recomputed)} less{enough}"


def recomputed_bytes(request: PlanRequest) -> int | None:
    """Return the bytes of activations if all groups recomputed them; None: some do already, or it is not known."""
    model = request.model
    if model.recomputes or model.recomputed or not model.knows_activations:
        return None
    return replace(model, groups=model.measured_groups, recomputes=True, activation_bytes=None).activations()


def about_activations(solution: Solution) -> Iterator[str]:
    """Yield the bytes and seconds of activations that are not kept."""
    costs = solution.costs
    kept, _ = activation_bytes(costs, [GroupShares()] * len(costs))
    held, sent = activation_bytes(costs, solution.shares)
    again_s = solution.request.accumulate * sum(
        cost.activations.again_s
        for cost, share in zip(costs, solution.shares, strict=True)
        if cost.activations is not None and way_of(share) == "recompute"
    )
    if held < kept:
        prices = []
        if again_s > 0:
            prices.append(f"{again_s:.3g} s of arithmetic a step")
        if sent > 0:
            prices.append(f"{size_text(sent)} of the host, over the link and back in every pass")
        instead = f"{size_text(held)} of the device instead of {size_text(kept)}"
        yield f"Activations take {instead}, for {' and '.join(prices)}."


def if_most_are_clipped(plan: Plan, without_s: float) -> Iterator[str]:
    """Yield what to do where a plan speculates and the best that does not takes `without_s`."""
    if (plan.predicted.clipped_s or 0.0) > without_s * (1 + WORTH_SAYING):
        yield (
            f"Without speculating each step takes {without_s:.3g} s, clipped or not: if most are, leave accumulate= "
            "out of prepare."
        )


def _of_tiers(sizes: Mapping[Tier, float]) -> str:
    return " and ".join(f"{size_text(size)} ({int(size)} bytes) of the {tier.value}" for tier, size in sizes.items())


def _larger(request: PlanRequest, by: Mapping[Tier, float]) -> str:
    each = " for each rank" if request.ranks_beside > 1 else ""
    parts = [f"Budget({tier.value}=...) larger by {size_text(size)} ({int(size)} bytes)" for tier, size in by.items()]
    return " and ".join(parts) + each
