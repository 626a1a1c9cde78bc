"""The bytes that a model will take of each tier, by kind, at their peak: known before anything is allocated.

Model state is what `parameters/homes.py` lays out. Working memory is what the parts take beside it, by the same rules
as they do: gathered groups, buffers that gradients and states pass through. Activations are not in here.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerostd.communication import Wires
from zerostd.optimizers import from_disk, routes, streamed
from zerostd.optimizers.tiles import tile_numel
from zerostd.parameters import host_gradient
from zerostd.policy import Kind, Route, Tier
from zerostd.preparing.homes import FlatPlan, Rules, demand
from zerostd.scheduling import reducing
from zerostd.sharding import Portion
from zerostd.tiers import Uploader

__all__ = ["host_buffers", "largest_on_disk", "predict"]


def predict(plans: Sequence[Sequence[FlatPlan]], rules: Rules, *, prefetch_depth: int) -> dict[Tier, dict[Kind, int]]:
    """Everything but activations, by tier and kind."""
    need = demand(plans, rules)
    need[Tier.HOST, Kind.BUFFERS] += host_buffers(plans, rules)
    need[Tier.DEVICE, Kind.BUFFERS] += (
        _gathered(plans, rules, prefetch_depth)
        + _wires(plans, rules)
        + _scratch(plans, rules)
        + _slots(plans, rules)
        + _staging(plans, rules)
    )
    found: dict[Tier, dict[Kind, int]] = {}
    for (tier, kind), size in sorted(need.items()):
        if size:
            found.setdefault(tier, {})[kind] = size
    return found


def host_buffers(plans: Sequence[Sequence[FlatPlan]], rules: Rules) -> int:
    """Host memory that what rests on disk passes through."""
    longest = max((p.numel for p in _portions(plans) if p.tier is Tier.DISK), default=0)
    widths = [4, *(dtype.itemsize for dtype in rules.states.values())]
    slots = from_disk.NUM_SLOTS * tile_numel(from_disk.TILE_NUMEL, longest) * sum(widths)
    return slots + Uploader.buffer_bytes(largest_on_disk(plans, rules))


def largest_on_disk(plans: Sequence[Sequence[FlatPlan]], rules: Rules) -> int:
    """Bytes of the longest parameters that rest on disk."""
    on_disk = [plan for group in plans for plan in group if plan.parameters is Tier.DISK]
    return max((plan.rest_numel(rules) * plan.dtype.itemsize for plan in on_disk), default=0)


def _portions(plans: Sequence[Sequence[FlatPlan]]) -> list[Portion]:
    return [portion for group in plans for plan in group for portion in plan.portions]


def _gathered(plans: Sequence[Sequence[FlatPlan]], rules: Rules, depth: int) -> int:
    """The root, which is there as long as forward lasts, with the group at work, those on their way, and in backward
    the one before, whose last gradients are still to come. Groups that stay gathered are passed over."""
    sizes = [
        sum(plan.layout.numel * plan.dtype.itemsize for plan in group if _gives_back(plan, rules)) for group in plans
    ]
    if not sizes:
        return 0
    root, others = sizes[0], [size for size in sizes[1:] if size]
    windows = [sum(others[start : start + depth + 2]) for start in range(len(others))]
    return root + max(windows, default=0)


def _gives_back(plan: FlatPlan, rules: Rules) -> bool:
    return rules.shards(Kind.PARAMETERS) or plan.parameters is not Tier.DEVICE


def _wires(plans: Sequence[Sequence[FlatPlan]], rules: Rules) -> int:
    """What gradients are received in, and staged in where they are not kept whole."""
    if rules.size == 1:
        return 0
    sizes = [
        plan.layout.numel * plan.gradient_dtype(rules).itemsize for group in plans for plan in group if plan.is_trained
    ]
    largest = max(sizes, default=0)
    receive = Wires.buffer_bytes(largest, rules.size, has_streams=rules.has_own_memory)
    return receive + (reducing.NUM_STAGING * largest if rules.shards(Kind.GRADIENTS) else 0)


def _scratch(plans: Sequence[Sequence[FlatPlan]], rules: Rules) -> int:
    """Gradients as an update on the device reads them."""
    trained = [plan for group in plans for plan in group if plan.is_trained]
    comes_up = rules.has_own_memory  # gradients from the host
    casts = any(
        plan.gradient_dtype(rules).itemsize < 4 or (comes_up and plan.gradients is Tier.HOST) for plan in trained
    )
    if not casts:
        return 0
    resident = [sum(p.numel for plan in group for p in plan.portions if p.tier is Tier.DEVICE) for group in plans]
    return 4 * max(resident, default=0)


def _slots(plans: Sequence[Sequence[FlatPlan]], rules: Rules) -> int:
    """Room on the device for states that pass through it."""
    total = 0
    for tier, most in ((Tier.HOST, routes.TILE_NUMEL), (Tier.DISK, from_disk.TILE_NUMEL)):
        found = [p for p in _portions(plans) if p.tier is tier]
        if not any(p.route is Route.STREAMED for p in found):
            continue
        longest = max(p.numel for p in found if tier is Tier.DISK or p.route is Route.STREAMED)
        widths = [4, *(dtype.itemsize for dtype in rules.states.values()), 4, 4]  # master, states, gradient, landing
        total += streamed.NUM_SLOTS * tile_numel(most, longest) * sum(widths)
    return total


def _staging(plans: Sequence[Sequence[FlatPlan]], rules: Rules) -> int:
    """Buffers on the device that gradients pass through on their way to the host."""
    if not rules.has_own_memory:
        return 0
    sizes = [
        (plan.region.stop - plan.region.start)
        * plan.gradient_dtype(rules).itemsize
        * (2 if rules.sums_gradients else 1)
        for group in plans
        for plan in group
        if plan.is_trained and plan.gradients is Tier.HOST
    ]
    return host_gradient.NUM_STAGING * max(sizes, default=0)
