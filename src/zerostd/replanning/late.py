"""An optimizer that is made after prepare: its states are placed before its first step creates them.

`attach_late` is called when that step begins. Gradients exist at that time, so only states are placed; the next forward
places everything by the memory of the first pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from zerostd.engine.runtime import Runtime
from zerostd.errors import PrepareError
from zerostd.measuring import load_or_measure
from zerostd.measuring.machine import from_first
from zerostd.optimizers.elementwise import find_states
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.planning import Plan
from zerostd.policy import Tier
from zerostd.preparing.budgets import least_limits
from zerostd.preparing.building import add_masters, attach_optimizer
from zerostd.preparing.proposing import PlanSearch
from zerostd.replanning.adapting import adapt
from zerostd.replanning.moving import move


def attach(runtime: Runtime, inner: torch.optim.Optimizer) -> ZeroOptimizer:
    """Take over an optimizer, and revise the plan from measured steps."""
    optimizer = attach_optimizer(runtime, inner)
    adapt(runtime)
    return optimizer


def attach_late(runtime: Runtime, inner: torch.optim.Optimizer) -> ZeroOptimizer:
    """Take over an optimizer, with its states where they fit. Raises PrepareError with what is missing. All ranks call
    it together."""
    plan = _plan_states(runtime, inner)
    add_masters(runtime, plan)
    optimizer = attach(runtime, inner)
    if plan is not None:
        move(runtime, plan)
    return optimizer


def _plan_states(runtime: Runtime, inner: torch.optim.Optimizer) -> Plan | None:
    """Return the plan with the states of an optimizer placed inside the limits; None if they fit on the device, or if
    the user placed them."""
    runtime.settings = replace(runtime.settings, states=find_states(inner))
    settings = replace(runtime.settings, has_optimizer=True)
    if settings.plan is None or not settings.plan.limits:
        return None
    world = runtime.world
    control = runtime.gatherer.control
    limits = least_limits(control, settings.budget, runtime.ledger.held[Tier.DEVICE])
    activations: int = max(control.collect(runtime.backward.activations.counted().total))  # of the passes to come
    beside: dict[Tier, int] = {**limits, Tier.DEVICE: limits[Tier.DEVICE] - activations}
    search = PlanSearch(settings, runtime.blueprints, world)
    if search.fits(settings.plan, beside):
        return None
    machine = load_or_measure(world.device, disk_path=settings.budget.disk_path, mesh=settings.mesh)
    try:
        return from_first(control, lambda: replace(search.place_states(beside, machine), limits=limits))
    except PrepareError as error:
        name = type(inner).__name__
        raise PrepareError(f"the states of {name}, made after prepare, do not fit beside the model: {error}") from error
