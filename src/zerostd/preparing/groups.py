"""Build the flat buffers of groups from a plan, each with the values of this rank.

One group at a time is moved, so the extra memory is one group's. State off the device is cut from arenas that were
reserved before the first group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from zerostd.engine.runtime import Resources
from zerostd.kernels import Moment
from zerostd.parameters.blueprints import Member
from zerostd.parameters.disk_gradient import DiskGradient
from zerostd.parameters.flat import Flat
from zerostd.parameters.gradient import Gradient, HostGradientCopy
from zerostd.parameters.host_gradient import HostGradient
from zerostd.parameters.passing_gradient import PassingGradient
from zerostd.parameters.secondary import SecondaryShard
from zerostd.parameters.state_shard import HIGH, LOW, CodedTensor, StateShard
from zerostd.policy import Kind, Route, Tier
from zerostd.preparing.homes import Columns, FlatPlan
from zerostd.sharding import Portion
from zerostd.tiers import TierAllocator, TierTensor
from zerostd.tiers.extents import Extent

ValueOf = Callable[[Member], torch.Tensor | None]  # None: they come later
Arenas = Mapping[Tier, torch.Tensor | Extent]  # memory off the device for the states of one flat


def make_flat(plan: FlatPlan, resources: Resources, value_of: ValueOf) -> Flat:
    """Flatten parameters, keep this rank's part, and free the rest. `value_of` gives a parameter's first values."""
    allocator = resources.allocator
    parameters = [member.parameter for member in plan.members]
    shards = [_make_shard(plan, portion, allocator) for portion in plan.portions]
    specs = [member.spec for member in plan.members]
    flat = Flat(plan.layout, parameters, plan.dtype, allocator, plan.region, shards, specs)
    has_values = True
    for position, member in enumerate(plan.members):
        value = value_of(member)
        flat.adopt(position, value)
        has_values = value is not None
    rest: TierTensor | None = None
    if plan.gives_back:
        rest = allocator.allocate(plan.owner, plan.parameters, Kind.PARAMETERS, plan.rest_numel, plan.dtype)
    flat.keep(rest, is_sharded=plan.rules.shards(Kind.PARAMETERS), has_values=has_values)
    if resources.node_wires is not None:
        flat.secondary = SecondaryShard(plan.secondary_numel, plan.dtype, resources.node_wires)
    if plan.is_trained:
        flat.gradient = make_gradient(plan, resources)
        if isinstance(flat.gradient, HostGradient):
            flat.gradient.reserve_landing()
    return flat


def reserve_states(plan: FlatPlan, allocator: TierAllocator) -> Arenas:
    """Take the memory off the device that the states of a flat will need; any thread may call it."""
    sizes = {tier: size for (tier, kind), size in plan.demand().items() if kind is Kind.OPTIMIZER_STATES}
    return {
        tier: allocator.allocate_bytes(tier, Kind.OPTIMIZER_STATES, size, plan.owner)
        for tier, size in sizes.items()
        if size and tier is not Tier.DEVICE
    }


def move_flat(flat: Flat, plan: FlatPlan, resources: Resources, arenas: Arenas) -> Callable[[], None]:
    """Move masters and room for states to the places in `plan`, which differs in nothing else, into memory that
    `reserve_states` allocated. Masters are copied straight from the old place to the new; the caller moves the states.
    The gradient keeps its values. Return a function that frees the old memory."""
    allocator = resources.allocator
    before = flat.state_shards
    give_back = allocator.exchange(plan.owner, Kind.OPTIMIZER_STATES, arenas)
    flat.state_shards = tuple(_make_shard(plan, portion, allocator) for portion in plan.portions)
    flat.share_masters()
    for shard in flat.state_shards:
        for old in before:
            _copy_master(old, shard)
    assert flat.gradient is not None
    flat.gradient.change_host_copy(_make_host_copy(plan, resources))
    return give_back


def _copy_master(old: StateShard, shard: StateShard) -> None:
    """Copy the part of an old shard's master that lies in a new one. Split masters are copied half by half, because
    joining them on the host takes longer than the copy. The half that the parameters hold stays where it is."""
    start = max(old.start, shard.start)
    stop = min(old.stop, shard.stop)
    if start >= stop or (shard.holds_parameters and not shard.is_split):
        return
    source = slice(start - old.start, stop - old.start)
    target = slice(start - shard.start, stop - shard.start)
    if not (old.is_split and shard.is_split):
        shard.master.write(target, old.master.read(source))
        return
    for name in (LOW,) if shard.holds_parameters else (HIGH, LOW):
        shard.tensors[name].write(target, old.tensors[name].read(source))


def make_masters(flat: Flat, plan: FlatPlan, resources: Resources) -> None:
    """Give masters to a flat that had none, as `plan` says: there is an optimizer now."""
    allocator = resources.allocator
    kept = flat.rest.read(slice(0, flat.rest.numel))
    values = kept if flat.is_sharded else kept[flat.region]
    for (tier, kind), num_bytes in plan.demand().items():
        if kind is Kind.OPTIMIZER_STATES:
            allocator.reserve(plan.owner, tier, kind, num_bytes)
    flat.state_shards = tuple(_make_shard(plan, portion, allocator) for portion in plan.portions)
    flat.share_masters()
    for shard in flat.state_shards:
        if not shard.holds_parameters:
            shard.master.write(slice(0, shard.numel), values[shard.region])
    if flat.gradient is not None and flat.gradient.tier is plan.gradients:
        flat.gradient.change_host_copy(_make_host_copy(plan, resources))


def _make_shard(plan: FlatPlan, portion: Portion, allocator: TierAllocator) -> StateShard:
    take = partial(allocator.allocate, plan.owner, portion.tier, Kind.OPTIMIZER_STATES)

    def allocate(columns: Columns) -> dict[str, TierTensor]:
        return {name: allocate_column(dtype) for name, dtype in columns.items()}

    def allocate_column(dtype: torch.dtype | Moment) -> TierTensor:
        if isinstance(dtype, Moment):
            return CodedTensor(take(dtype.num_elements(portion.numel), dtype.dtype), dtype, portion.numel)
        return take(portion.numel, dtype)

    columns = allocate(plan.columns(portion))
    has_spare = plan.rules.placement.speculate and portion.tier is Tier.HOST
    spare = allocate(plan.columns(portion, is_spare=True)) if has_spare else {}
    holds = plan.holds_parameters(portion)
    return StateShard(portion.start, portion.stop, portion.tier, portion.route, columns, spare, holds_parameters=holds)


def make_gradient(plan: FlatPlan, resources: Resources) -> Gradient:
    """Return an empty gradient for a flat, in the tier that `plan` says."""
    basis = (plan.layout, plan.region, plan.gradient_dtype, resources.allocator)
    keep_whole = plan.rules.keeps_whole_gradients
    gradient: Gradient
    staging = resources.staging if plan.rules.has_own_memory else None
    if plan.gradients is Tier.DEVICE:
        kind = Gradient if plan.rules.placement.keep_gradients else PassingGradient
        gradient = kind(*basis, keep_whole=keep_whole, host_copy=_make_host_copy(plan, resources))
    elif plan.gradients is Tier.HOST:
        gradient = HostGradient(*basis, keep_whole=keep_whole, streams=resources.streams, staging=staging)
    else:
        gradient = DiskGradient(
            *basis,
            keep_whole=keep_whole,
            streams=resources.streams,
            staging=staging,
            owner=plan.owner,
            windows=resources.windows,
        )
    if plan.rules.sums_gradients:
        gradient.use_sum()
    if isinstance(gradient, HostGradient):
        gradient.reserve()
    gradient.give_back()
    return gradient


def _make_host_copy(plan: FlatPlan, resources: Resources) -> HostGradientCopy | None:
    """Return the host's copy of what the CPU reads, if the gradient is kept on a device with its own memory."""
    parts = [slice(portion.start, portion.stop) for portion in plan.portions if portion.route is Route.CPU]
    if not plan.rules.has_own_memory or plan.gradients is not Tier.DEVICE or not parts:
        return None
    dtype = plan.gradient_dtype
    rests_in = torch.promote_types(dtype, torch.float32) if plan.rules.sums_gradients else dtype
    return HostGradientCopy(parts, rests_in, resources.allocator.host, resources.streams)
