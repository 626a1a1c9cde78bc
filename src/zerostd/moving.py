"""Another plan while training goes on: between two steps, states and gradients of groups go to other homes, one group
at a time, so that the memory this takes is one group's. Parameters stay where they are. Values do not change by a bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from zerostd.errors import MisuseError
from zerostd.optimizers.early import Early
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.routes import Routes
from zerostd.optimizers.states import carry_states
from zerostd.parameters import Flat
from zerostd.parameters.building import move_flat
from zerostd.parameters.homes import FlatPlan, plan_flats
from zerostd.planning import Plan
from zerostd.policy import Tier, parse_bytes
from zerostd.proposing import homes_of, sizes_of
from zerostd.runtime import Runtime
from zerostd.settings import check_world, rules_for
from zerostd.tiers.debug import DEBUG
from zerostd.tiers.disk import Disk

__all__ = ["begin_early", "make_routes", "move"]


def make_routes(runtime: Runtime, inner: torch.optim.Optimizer) -> Routes | None:
    """The routes to states off the device; None if there are none there."""
    if not any(group.is_updated_later for group in runtime.groups):
        return None
    roads = runtime.roads
    return Routes(inner, runtime.groups, roads.stores, roads.lanes, num_threads=roads.num_threads)


def begin_early(runtime: Runtime, optimizer: ZeroOptimizer) -> None:
    """Let updates begin inside backward, if it is known which is the last pass of a step and nothing else is waited
    for."""
    settings, (_, placement) = runtime.settings, runtime.settings.decided
    updater = optimizer._updater
    optimizer.early, runtime.backward.on_ready = None, None
    optimizer.counts_in_groups = optimizer.counts_in_groups_with(updater.routes)
    knows_the_end = updater.routes is not None and settings.accumulate is not None and runtime.loss_scale is None
    waits = DEBUG.is_serial or optimizer.counts_in_groups
    if knows_the_end and not waits and (settings.max_grad_norm is None or placement.speculate):
        is_on_trial = settings.max_grad_norm is not None
        optimizer.early = Early(updater, runtime.gradients, runtime, optimizer.terms, is_on_trial=is_on_trial)
        runtime.backward.on_ready = optimizer.early.ready


@torch.no_grad()
def move(runtime: Runtime, plan: Plan) -> list[str]:
    """Obey another plan from the next step on. Returns the names of the groups that moved. Every rank must call it,
    between optimizer.zero_grad() and the next backward."""
    optimizer = runtime.optimizer
    if optimizer is None:
        raise MisuseError("moving to another plan needs the optimizer: pass it to prepare")
    if any(slot.parameter.grad is not None for slot in runtime.backward.slots) or runtime.backward.is_running:
        raise MisuseError("moving to another plan while there are gradients: do it after optimizer.zero_grad()")
    settings = runtime.settings.obeying(plan, sizes_of(runtime.roads.found))
    check_world(settings, runtime.world)
    rules = rules_for(settings, runtime.world, homes_of(plan, runtime.roads.found))
    plans = plan_flats(runtime.roads.found, rules)
    changed = [
        (group, flat, wanted)
        for group, flats in zip(runtime.groups, plans, strict=True)
        for flat, wanted in zip(group.flats, flats, strict=True)
        if not _is_as(flat, wanted)
    ]
    for _, flat, wanted in changed:
        if flat.rest.tier is not wanted.parameters:
            raise MisuseError(
                f"the new plan has the parameters of {wanted.owner!r} on the {wanted.parameters.value}, and they are "
                f"on the {flat.rest.tier.value}: only states and gradients move while training goes on"
            )
    optimizer.synchronize()
    runtime.gatherer.finish_all()
    for group in runtime.groups:
        group.updates.clear()
    updater = optimizer._updater
    if updater.routes is not None:
        updater.routes.close()
    ground = replace(runtime.roads.ground, rules=rules)
    if ground.stores.disk is None and any(_is_on_disk(wanted) for _, _, wanted in changed):
        limit = None if settings.budget.disk is None else parse_bytes(settings.budget.disk)
        ground.stores.disk = Disk(settings.budget.disk_path, ground.ledger, limit=limit)
    for _, flat, wanted in sorted(changed, key=lambda one: _on_device(one[2]) - _on_device_now(one[1])):
        carry_states(updater, flat, lambda flat=flat, wanted=wanted: move_flat(flat, wanted, ground))  # type: ignore[misc]
    runtime.roads = replace(runtime.roads, ground=ground)
    runtime.settings = settings
    updater.moved(runtime.groups, make_routes(runtime, updater.inner))
    begin_early(runtime, optimizer)
    runtime.hooks.renew()
    runtime.backward.learn_again()
    return list(dict.fromkeys(group.name for group, _, _ in changed))


def _is_as(flat: Flat, wanted: FlatPlan) -> bool:
    """Whether a flat is as a plan wants it."""
    if flat.gradient is None:
        return flat.rest.tier is wanted.parameters
    on_host = flat.gradient.host is not None
    return (
        flat.rest.tier is wanted.parameters
        and on_host == (wanted.gradients is Tier.HOST)
        and tuple(shelf.portion for shelf in flat.shelves) == wanted.portions
        and all(bool(shelf.spare) == (shelf.portion.tier is Tier.HOST) for shelf in flat.shelves if shelf.spare)
    )


def _is_on_disk(plan: FlatPlan) -> bool:
    return any(portion.tier is Tier.DISK for portion in plan.portions)


def _on_device(plan: FlatPlan) -> int:
    return sum(portion.numel for portion in plan.portions if portion.tier is Tier.DEVICE)


def _on_device_now(flat: Flat) -> int:
    return sum(shelf.portion.numel for shelf in flat.shelves if shelf.portion.tier is Tier.DEVICE)
