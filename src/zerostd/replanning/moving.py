"""Another plan while training goes on: between two steps, states and gradients of groups go to other homes, one group
at a time, so that the memory this takes is one group's. Parameters stay where they are. Values do not change by a bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerostd.engine.runtime import Runtime
from zerostd.errors import MisuseError
from zerostd.optimizers.states import replace_states, take_states
from zerostd.parameters import Flat
from zerostd.parameters.state_shard import StateShard
from zerostd.planning import Plan
from zerostd.policy import Tier
from zerostd.preparing.building import begin_backward_updates, make_offload_updater
from zerostd.preparing.groups import move_flat
from zerostd.preparing.homes import FlatPlan, plan_flats
from zerostd.preparing.options import check_world, rules_for
from zerostd.preparing.proposing import sizes_of
from zerostd.sharding import Portion


@torch.no_grad()
def move(runtime: Runtime, plan: Plan) -> list[str]:
    """Obey another plan from the next step on, and return the names of the groups that moved. Every rank must call it,
    between optimizer.zero_grad() and the next backward."""
    optimizer = runtime.optimizer
    if optimizer is None:
        raise MisuseError("moving to another plan needs the optimizer: pass it to prepare")
    if any(trained.parameter.grad is not None for trained in runtime.backward.trained) or runtime.backward.is_running:
        raise MisuseError("moving to another plan while there are gradients: do it after optimizer.zero_grad()")
    settings = runtime.settings.obeying(plan, sizes_of(runtime.blueprints))
    check_world(settings, runtime.world)
    rules = rules_for(settings, runtime.world, runtime.blueprints)
    plans = plan_flats(runtime.blueprints, rules)
    changed = [
        (group, flat, wanted)
        for group, flats in zip(runtime.groups, plans, strict=True)
        for flat, wanted in zip(group.flats, flats, strict=True)
        if not _is_as(flat, wanted, speculates=plan.speculate)
    ]
    for _, flat, wanted in changed:
        if flat.rest.tier is not wanted.parameters:
            raise MisuseError(
                f"the new plan has the parameters of {wanted.owner!r} on the {wanted.parameters.value}, and they are "
                f"on the {flat.rest.tier.value}: only states and gradients move while training goes on"
            )
    optimizer.synchronize()
    runtime.gatherer.wait_all()
    for group in runtime.groups:
        group.wait_updates()
        group.commit_edits()
    updater = optimizer.updater
    if updater.offload is not None:
        updater.offload.close()
    resources = runtime.resources
    goes_to_disk = any(portion.tier is Tier.DISK for _, _, wanted in changed for portion in wanted.portions)
    if goes_to_disk:
        resources.allocator.open_disk(settings.budget, runtime.world.local_size)
    changed.sort(key=lambda change: _on_device(change[2].portions) - _on_device(change[1].state_shards))
    for _, flat, wanted in changed:  # what leaves the device comes first
        states = take_states(updater, flat)
        move_flat(flat, wanted, resources)
        replace_states(updater, flat, states)
    runtime.settings = settings
    updater.moved(make_offload_updater(runtime, updater.inner))
    begin_backward_updates(runtime, optimizer)
    runtime.hooks.renew()
    runtime.backward.order_is_learnt = False
    return list(dict.fromkeys(group.name for group, _, _ in changed))


def _is_as(flat: Flat, wanted: FlatPlan, *, speculates: bool) -> bool:
    """Return whether a flat is as a plan wants it."""
    if flat.rest.tier is not wanted.parameters:
        return False
    if flat.gradient is None:
        return True
    return (
        (flat.gradient.tier is Tier.HOST) == (wanted.gradients is Tier.HOST)
        and tuple(shard.portion for shard in flat.state_shards) == wanted.portions
        and all(bool(shard.spare) == (speculates and shard.tier is Tier.HOST) for shard in flat.state_shards)
    )


def _on_device(parts: Sequence[Portion | StateShard]) -> int:
    return sum(part.numel for part in parts if part.tier is Tier.DEVICE)
