"""Plans that trials have chosen, kept in the cache for the next start: by model, machine and options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zerostd.communication import World
from zerostd.engine.settings import Settings
from zerostd.measuring.identity import machine_name, versions
from zerostd.measuring.machine import cached, read_cached, write_cached
from zerostd.parameters.blueprints import Blueprint
from zerostd.planning import Plan


def _plan_file(settings: Settings, blueprints: Sequence[Blueprint], world: World) -> Path:
    """Return the file that holds the plan of this model on this machine with these options."""
    members = [(group.name, member) for group in blueprints for member in group.members]
    model = [[group, each.name, list(each.parameter.shape), str(each.dtype)] for group, each in members]
    options = [line for line in settings.describe() if not line.startswith(("plan ", "stage ", "placement "))]
    budget = [str(settings.budget.device), str(settings.budget.host), str(settings.budget.disk)]
    machine = [machine_name(world.device), versions(world.device), world.num_shards, world.num_replicas]
    return cached("plan", [model, options, budget, sorted(settings.states), machine])


def remember(plan: Plan, settings: Settings, blueprints: Sequence[Blueprint], world: World) -> None:
    """Keep a plan that was measured."""
    write_cached(_plan_file(settings, blueprints, world), plan.to_json(), "the plan", "the next run plans again")


def recall(settings: Settings, blueprints: Sequence[Blueprint], world: World) -> Plan | None:
    """Return the plan that was kept; None if there is none that can be used."""
    file = _plan_file(settings, blueprints, world)
    return read_cached(file, Plan.load, "planning again, because the cached plan cannot be used")
