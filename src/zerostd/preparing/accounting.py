"""The bytes that a model will take of each tier, by kind, at their peak: known before anything is allocated.

Model state is what `preparing/homes.py` lays out. Working memory is counted by the rules of the parts that allocate it:
gathered groups, and buffers that gradients and states pass through. Activations are not included.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerostd.communication.coded_wires import FED_BACK, wires_class
from zerostd.optimizers.passing import PassingGradients
from zerostd.optimizers.resident_updater import ResidentUpdater
from zerostd.optimizers.updater import OffloadUpdater, PassingStates
from zerostd.parameters.host_gradient import NUM_STAGING, Staging
from zerostd.policy import Kind, Tier
from zerostd.preparing.homes import Demand, FlatPlan, Rules, demand
from zerostd.scheduling.gathering import largest_neighbours
from zerostd.tiers import Uploader
from zerostd.tiers.disk import Disk
from zerostd.tiers.extents import Extent


def predict(plans: Sequence[Sequence[FlatPlan]], rules: Rules) -> dict[Tier, dict[Kind, int]]:
    """Return everything but activations, by tier and kind."""
    trained = [plan for group in plans for plan in group if plan.is_trained]
    need = reserved(plans)
    need[Tier.DEVICE, Kind.BUFFERS] += _slots(plans)[Tier.DEVICE] + _wires(trained, rules)
    in_backward = _gathered(plans, rules) + _passing(trained, rules) + staging_bytes(trained, rules)
    resident = [sum(map(_resident, group)) for group in plans]
    off = (Tier.HOST, Tier.DISK) if rules.has_own_memory else (Tier.DISK,)
    comes_up = [(plan.gradient_dtype, plan.gradients in off) for plan in trained]
    split = [sum(_resident(plan) for plan in group if plan.is_split) for group in plans]
    in_step = ResidentUpdater.buffer_bytes(resident, comes_up, split, is_coded=bool(rules.moments))
    in_backward += _secondary(trained)
    frozen = [plan for group in plans for plan in group if not plan.is_trained]
    need[Tier.DEVICE, Kind.BUFFERS] += _secondary(frozen)
    if rules.placement.keep_gradients:
        need[Tier.DEVICE, Kind.BUFFERS] += max(in_backward, in_step)  # each is given back before the other is taken
    else:
        need[Tier.DEVICE, Kind.BUFFERS] += in_backward + in_step
        root, *others = [sum(map(_gradient_bytes, group)) for group in plans]
        need[Tier.DEVICE, Kind.GRADIENTS] += PassingGradients.most_bytes(root, others)
    counted: dict[Tier, dict[Kind, int]] = {}
    for (tier, kind), size in sorted(need.items()):
        if size:
            counted.setdefault(tier, {})[kind] = size
    return counted


def _resident(plan: FlatPlan) -> int:
    """Return the elements whose states are on the device."""
    return sum(portion.numel for portion in plan.portions if portion.tier is Tier.DEVICE)


def _gradient_bytes(plan: FlatPlan) -> int:
    """Return the bytes in which a gradient is kept."""
    numel = plan.layout.numel if plan.rules.keeps_whole_gradients else plan.numel
    return numel * plan.gradient_dtype.itemsize if plan.is_trained else 0


def reserved(plans: Sequence[Sequence[FlatPlan]]) -> Demand:
    """Return the bytes of model state, and of the host memory through which state on disk passes."""
    need = demand(plans)
    need[Tier.HOST, Kind.BUFFERS] += _host_buffers(plans)
    return need


def _host_buffers(plans: Sequence[Sequence[FlatPlan]]) -> int:
    """Return the bytes of host memory that state on disk needs: for transfers, for unpacking and for checksums."""
    slots = _slots(plans)[Tier.HOST]
    extents = [
        num_bytes
        for group in plans
        for plan in group
        for (tier, _), num_bytes in plan.demand().items()
        if tier is Tier.DISK and num_bytes
    ]
    checksums = sum(map(Extent.checksum_bytes, extents))
    packers = Disk.packer_bytes() if any(plan.packed_bytes for group in plans for plan in group) else 0
    gradients = (plan.demand()[Tier.DISK, Kind.GRADIENTS] for group in plans for plan in group)
    return slots + Uploader.buffer_bytes(largest_on_disk(plans)) + sum(Staging.sizes(gradients)) + checksums + packers


def largest_on_disk(plans: Sequence[Sequence[FlatPlan]]) -> int:
    """Return the bytes of the longest parameters that are kept on disk."""
    on_disk = [plan for group in plans for plan in group if plan.parameters is Tier.DISK]
    return max((plan.rest_numel * plan.dtype.itemsize for plan in on_disk), default=0)


def _slots(plans: Sequence[Sequence[FlatPlan]]) -> dict[Tier, int]:
    """Return the bytes for states that pass through the device, or come from disk, by the tier they are in."""
    return OffloadUpdater.buffer_bytes(
        [
            PassingStates(portion, plan.columns(portion), plan.staged(portion))
            for group in plans
            for plan in group
            for portion in plan.portions
        ]
    )


def _gathered(plans: Sequence[Sequence[FlatPlan]], rules: Rules) -> int:
    """Count the root, gathered during all of forward, and the largest neighbours: the group that computes, groups on
    their way, and in backward the previous group, which awaits its last gradients. Without an optimizer, the first
    groups of the next pass follow the last one."""
    root, *others = [
        sum(plan.layout.numel * plan.dtype.itemsize for plan in group if plan.gives_back) for group in plans
    ]
    return root + largest_neighbours(others, repeats=not rules.has_optimizer)


def _secondary(plans: Sequence[FlatPlan]) -> int:
    """Return the bytes of the secondary shards of flats."""
    return sum(plan.secondary_numel * plan.dtype.itemsize for plan in plans)


def _wires(trained: Sequence[FlatPlan], rules: Rules) -> int:
    """Return the bytes of receive buffers for gradients, and of what their codes lose."""
    if rules.size * rules.num_replicas == 1:
        return 0
    largest = max((plan.layout.numel * plan.gradient_dtype.itemsize for plan in trained), default=0)
    wires = wires_class(rules.placement)
    receive = wires.buffer_bytes(largest, rules.size, rules.num_replicas, has_streams=rules.has_own_memory)
    lost = 0
    if rules.placement.bits("reduce") == FED_BACK:
        lost = sum(plan.layout.numel * plan.gradient_dtype.itemsize for plan in trained)
    return receive + lost


def _passing(trained: Sequence[FlatPlan], rules: Rules) -> int:
    """Return the bytes that gradients are staged in where they are not kept whole."""
    if rules.size * rules.num_replicas == 1 or rules.keeps_whole_gradients:
        return 0
    return sum(Staging.sizes(plan.layout.numel * plan.gradient_dtype.itemsize for plan in trained))


def staging_bytes(trained: Sequence[FlatPlan], rules: Rules) -> int:
    """Return the bytes of the device that gradients pass through on their way to host or disk."""
    if not rules.has_own_memory:
        return 0
    off = [plan for plan in trained if plan.gradients is not Tier.DEVICE]
    largest = max((plan.numel * plan.gradient_dtype.itemsize for plan in off), default=0)
    return NUM_STAGING * largest * (2 if rules.sums_gradients else 1)
