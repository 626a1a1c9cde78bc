"""What to tell when nothing fits: how many bytes are missing in which tier, and the smallest changes that would do; and
what to do where a plan counts on what may not come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zerostd.monitoring.texts import size_text
from zerostd.planning.costs import GroupCost, PlanRequest
from zerostd.planning.linear import Infeasible
from zerostd.planning.plan import Plan
from zerostd.planning.rounding import missing, room
from zerostd.policy import Tier

__all__ = ["explain_missing", "if_most_are_clipped", "recomputing"]

FEW = 1000.0  # bytes, within the solver's tolerance
WORTH_SAYING = 0.02  # of a step
SPARE = 1e-5  # of model state, asked for beyond what is missing: whole numbers are found with some tolerance


def explain_missing(request: PlanRequest, found: Sequence[GroupCost]) -> str:
    """One sentence of what is missing, and one of what would fit."""
    least = {tier: size for tier, size in missing(request, found).items() if size > FEW}
    whole = (
        _in_whole_groups(request, found, tuple(Tier)) or least or dict.fromkeys(request.limits, _spare(request, found))
    )
    limits = ", ".join(f"{size_text(size)} of the {tier.value}" for tier, size in request.limits.items())
    if least:
        where = f"at least {_of_tiers(least)} is missing"
    else:
        largest = max(cost.gathered for cost in found)
        where = f"{_of_tiers(whole)} is missing, since groups move as a whole (the largest has {int(largest)} bytes)"
    return (
        f"no placement fits {request.model.numel / 1e9:.4g} B parameters at stage {request.stage.value} on "
        f"{request.world_size} rank(s) into {limits} each: {where}. What would fit: "
        + "; or ".join(_advice(request, found, whole))
    )


def _advice(request: PlanRequest, found: Sequence[GroupCost], whole: Mapping[Tier, float]) -> Iterator[str]:
    """Changes, the smallest first."""
    yield _larger(request, whole)
    for tier in request.limits:
        alone = _in_whole_groups(request, found, (tier,)) if {*whole} != {tier} else {}
        if alone:
            yield _larger(request, alone)
    if Tier.DISK not in request.limits and _would_help(request, found, Tier.HOST):  # more of what is not the device
        yield "a disk: Budget(disk=..., disk_path=...)"
    yield from _fewer_activations(request, found)
    if request.world_size == 1 or request.stage < 3:
        yield "more ranks" if request.stage == 3 else "stage=3"


def _would_help(request: PlanRequest, found: Sequence[GroupCost], tier: Tier) -> bool:
    """Whether less is missing elsewhere with more of a tier."""
    now = sum(missing(request, found).values())
    return sum(missing(replace(request, limits={**request.limits, tier: 1 << 60}), found).values()) < now - FEW


def _in_whole_groups(request: PlanRequest, found: Sequence[GroupCost], of: Sequence[Tier]) -> dict[Tier, float]:
    """Bytes that are enough for groups that move as a whole; empty if more of these tiers does not help."""
    try:
        short = missing(request, found, is_whole=True, of=of)
    except Infeasible:
        return {}
    return {tier: size + _spare(request, found) for tier, size in short.items() if size > FEW}


def _spare(request: PlanRequest, found: Sequence[GroupCost]) -> float:
    return FEW + SPARE * sum(cost.updated * request.model.state_bytes + cost.parameters for cost in found)


def _fewer_activations(request: PlanRequest, found: Sequence[GroupCost]) -> Iterator[str]:
    """How many samples would fit, and whether recomputing would do."""
    now, model = request.model.activations(), request.model
    if request.chooses or model.samples is None:
        if now:
            yield "fewer samples in a pass" + (
                "" if request.chooses or model.recomputes else ", or recomputed activations"
            )
        return
    without = replace(request, fixed={**request.fixed, Tier.DEVICE: max(0, request.fixed.get(Tier.DEVICE, 0) - now)})
    left = room(without, found)
    most = int(model.samples * min(1.0, left / now)) if now else 0
    if 0 < most < model.samples:
        yield f"{most} samples in a pass instead of {model.samples}"
    again = recomputing(request)
    if again is not None:
        yield f"recomputed activations, which take {size_text(now - again)} less" + (
            "" if again <= left else ": not enough by itself"
        )


def recomputing(request: PlanRequest) -> int | None:
    """Bytes that activations would take if all groups recomputed them; None: some do, or it is not known."""
    model = request.model
    if model.recomputes or model.recomputed or not model.knows_activations:
        return None
    return replace(model, groups=model.measured_groups, recomputes=True, activation_bytes=None).activations()


def if_most_are_clipped(plan: Plan, without_s: float) -> Iterator[str]:
    """For a plan that speculates, where the best that does not takes so long."""
    if (plan.predicted.clipped_s or 0.0) > without_s * (1 + WORTH_SAYING):
        yield (
            f"Without speculating each step takes {without_s:.3g} s, clipped or not: if most are, leave accumulate= "
            "out of prepare."
        )


def _of_tiers(short: Mapping[Tier, float]) -> str:
    return " and ".join(f"{size_text(size)} ({int(size)} bytes) of the {tier.value}" for tier, size in short.items())


def _larger(request: PlanRequest, by: Mapping[Tier, float]) -> str:
    each = " for each rank" if request.ranks_beside > 1 else ""
    parts = [f"Budget({tier.value}=...) larger by {size_text(size)} ({int(size)} bytes)" for tier, size in by.items()]
    return " and ".join(parts) + each
