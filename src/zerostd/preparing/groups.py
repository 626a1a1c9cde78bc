"""From plans to groups of flat buffers, each holding what this rank should.

One group at a time is moved, so the extra memory is one group's. What rests off the device comes from arenas that were
reserved before the first group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zerostd.monitoring import Ledger
from zerostd.parameters.blueprints import Blueprint, Member
from zerostd.parameters.flat import Flat
from zerostd.parameters.gradient import Gradient
from zerostd.parameters.group import Group
from zerostd.parameters.host_gradient import HostGradient, HostGradientCopy, Staging
from zerostd.parameters.state_shard import MASTER, StateShard
from zerostd.policy import Kind, Route, Tier
from zerostd.preparing.homes import FlatPlan, Rules, demand_of
from zerostd.sharding import Portion
from zerostd.tiers import Streams, TierAllocator, TierTensor

__all__ = ["Ground", "make_group", "move_flat"]

ValueOf = Callable[[Member], torch.Tensor]


@dataclass(frozen=True)
class Ground:
    """What groups are built on."""

    rules: Rules
    device: torch.device
    ledger: Ledger
    stores: TierAllocator
    streams: Streams
    staging: Staging  # for gradients that rest on the host


def make_group(blueprint: Blueprint, index: int, plans: Sequence[FlatPlan], ground: Ground, value_of: ValueOf) -> Group:
    """Flatten, take this rank's part, and let the rest go. `value_of` gives a parameter's first values."""
    flats = [_make_flat(plan, ground, value_of) for plan in plans]
    return Group(blueprint.name, index, blueprint.modules, flats)


def _make_flat(plan: FlatPlan, ground: Ground, value_of: ValueOf) -> Flat:
    rules, dtype = ground.rules, plan.dtype
    flat = Flat(plan.layout, [m.parameter for m in plan.members], dtype, ground.device, ground.ledger)
    flat.region = plan.region
    if plan.is_trained:
        flat.state_shards = tuple(_make_shard(plan, portion, ground) for portion in plan.portions)
    for position, member in enumerate(plan.members):
        flat.take(position, value_of(member))
    is_sharded = rules.shards(Kind.PARAMETERS)
    rest: TierTensor | None = None
    if is_sharded or plan.parameters is not Tier.DEVICE:
        rest = ground.stores.column(plan.owner, plan.parameters, Kind.PARAMETERS, plan.rest_numel(rules), dtype)
    flat.settle(rules.rank, rest, is_sharded=is_sharded)
    if plan.is_trained:
        flat.gradient = _make_gradient(plan, ground)
    return flat


def move_flat(flat: Flat, plan: FlatPlan, ground: Ground) -> None:
    """Let masters, room for states and gradients be where `plan` says from now on, which differs in nothing else.
    Masters keep their values; states are the caller's, and no gradient may be wanted."""
    masters = [shard.read_master().to("cpu", copy=True) for shard in flat.state_shards]
    region = torch.cat(masters) if masters else torch.empty(0)
    del masters
    if flat.gradient is not None:
        flat.gradient.close()
    ground.stores.free(plan.owner, Kind.OPTIMIZER_STATES)
    for (tier, kind), num_bytes in demand_of(plan, ground.rules).items():
        if kind is Kind.OPTIMIZER_STATES:
            ground.stores.reserve(plan.owner, tier, kind, num_bytes)
    flat.state_shards = tuple(_make_shard(plan, portion, ground) for portion in plan.portions)
    flat.share_masters()
    for shard in flat.state_shards:
        if not shard.holds_parameters:
            shard.master.write(slice(0, shard.portion.numel), region[shard.portion.start : shard.portion.stop])
    flat.gradient = _make_gradient(plan, ground)


def _make_shard(plan: FlatPlan, portion: Portion, ground: Ground) -> StateShard:
    rules, states = ground.rules, plan.columns(portion, ground.rules)

    def column(dtype: torch.dtype) -> TierTensor:
        return ground.stores.column(plan.owner, portion.tier, Kind.OPTIMIZER_STATES, portion.numel, dtype)

    shares = plan.shares_master(portion, rules)
    columns = {} if shares else {MASTER: column(plan.master_dtype)}
    columns |= {name: column(dtype) for name, dtype in states.items()}
    spare: dict[str, TierTensor] = {}
    if rules.speculates and portion.tier is Tier.HOST:
        spare = {MASTER: column(plan.master_dtype)} | {name: column(dtype) for name, dtype in states.items()}
    return StateShard(portion, columns, spare, holds_parameters=shares)


def _make_gradient(plan: FlatPlan, ground: Ground) -> Gradient:
    rules = ground.rules
    dtype = plan.gradient_dtype(rules)
    keep_whole = rules.size > 1 and not rules.shards(Kind.GRADIENTS)
    gradient = Gradient(
        plan.layout, plan.region, keep_whole=keep_whole, dtype=dtype, device=ground.device, ledger=ground.ledger
    )
    host = ground.stores.host
    if plan.gradients is Tier.HOST:
        gradient.host = host
        if rules.has_own_memory:
            gradient.keeper = HostGradient(ground.staging, ground.streams, ground.ledger)
    elif rules.has_own_memory:
        parts = [slice(p.start, p.stop) for p in plan.portions if p.route is Route.CPU]
        if parts:
            rests_in = torch.promote_types(dtype, torch.float32) if rules.sums_gradients else dtype
            gradient.mirror = HostGradientCopy(parts, rests_in, host, ground.streams)
    if rules.sums_gradients:
        gradient.use_sum()
    if gradient.host is not None:
        num_bytes = gradient.current.nbytes  # taken now: pinning in the middle of a step would hold it up
        if gradient.keeper is not None:
            ground.staging.reserve(num_bytes, ground.device, ground.ledger)
    return gradient
