"""From a model and what the user left open to a plan: what is free, what everything would take, and if it does not fit
on the device, what the machine can do and the planner's answer. All ranks get the same plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerostd.communication import Control, World
from zerostd.engine.settings import Settings
from zerostd.errors import PrepareError
from zerostd.measuring import load_or_measure
from zerostd.measuring.identity import free_bytes
from zerostd.measuring.model import state_widths
from zerostd.parameters.blueprints import Blueprint
from zerostd.planning import GroupProfile, MachineProfile, ModelProfile, Plan, PlanRequest, Prediction
from zerostd.planning.advice import if_most_are_clipped
from zerostd.planning.model import WAYS
from zerostd.planning.planner import Solution, evaluate, homes_by_group, model_state, place_states, plan_from, solve
from zerostd.planning.program import SLACK
from zerostd.planning.refitting import ObservedStep, refit
from zerostd.planning.request import WORTH_SPECULATING, limits_for, stages_of, threads_of
from zerostd.policy import Budget, Homes, Kind, Placement, Stage, Tier
from zerostd.preparing.accounting import predict
from zerostd.preparing.homes import plan_flats
from zerostd.preparing.options import check_placement, rules_for
from zerostd.scheduling.gathering import PREFETCH_DEPTH

__all__ = ["decide", "find_limits", "homes_of", "plan_for", "propose", "revise", "sizes_of"]

MOST_TRIES = 12
MOST_INSIDE = 3  # plans that fit, of which the shortest is taken
NEARLY = 0.002  # of a limit: so little over it needs no other plan, only a little room
WORTH_A_DISK = 0.02  # of all bytes and of a step: less is not worth the buffers and threads of a disk

log = logging.getLogger("zerostd")

Bytes = Mapping[Tier, Mapping[Kind, int]]


def decide(settings: Settings, found: Sequence[Blueprint], control: Control, *, has_optimizer: bool) -> Settings:
    """The settings with stage, placement and plan filled in. All ranks call it together."""
    world = control.world
    if settings.plan is None and settings.placement is not None:
        return replace(settings, stage=Stage.PARAMETERS if settings.stage is None else settings.stage)
    if settings.plan is None:
        limits = find_limits(replace(settings.budget, disk_path=None), world, _held(found, world), control)
        profile = profile_of(found, settings)
        plan = fitting(settings, found, world, limits)
        if plan is None:
            limits = find_limits(settings.budget, world, _held(found, world), control)
            machine = load_or_measure(world.device, disk_path=settings.budget.disk_path)
            plan = propose(settings, found, world, limits, profile, machine, has_optimizer=has_optimizer)
        plan = Plan.from_json(control.collect(plan.to_json())[0])
        if world.rank == 0:
            log.info("%s", plan.explain())
        return settings.obeying(plan, sizes_of(found))
    if settings.plan.world_size != world.size:
        raise PrepareError(
            f"the plan is for {settings.plan.world_size} rank(s), and this is one of {world.size}: plan again for that"
        )
    obeying = settings.obeying(settings.plan, sizes_of(found))
    check_placement(obeying, obeying.decided[1], has_optimizer=has_optimizer)
    return obeying


def plan_for(
    found: Sequence[Blueprint],
    settings: Settings,
    world: World,
    profile: ModelProfile | None,
    machine: MachineProfile | None,
    *,
    has_optimizer: bool,
) -> Plan:
    """A plan for a world that need not be here. Without a profile the batch is not known."""
    free = dict(machine.free) if machine is not None else None
    held = _held(found, world) if machine is None else 0
    limits = find_limits(settings.budget, world, held, free=free, knows_activations=profile is not None)
    if machine is None:
        plan = fitting(settings, found, world, limits) if profile is None else None
        if plan is not None:
            return plan
        machine = load_or_measure(world.device, disk_path=settings.budget.disk_path)
    profile = profile or profile_of(found, settings)
    return propose(settings, found, world, limits, profile, machine, has_optimizer=has_optimizer)


def homes_of(plan: Plan | None, found: Sequence[Blueprint]) -> dict[str, Homes] | None:
    """By name of group; None without a plan."""
    if plan is None:
        return None
    return {one.name: plan.homes_of(one.name) if one.members else Homes() for one in found}


def find_limits(
    budget: Budget,
    world: World,
    held: int,
    control: Control | None = None,
    *,
    free: Mapping[str, int] | None = None,
    knows_activations: bool = False,
) -> dict[Tier, int]:
    """Bytes that each rank may use of each tier: the budget's, or what is free less a margin, on the rank that has
    least. `held` bytes of the device are the model's own already; `free` is given for another machine."""
    if free is None:
        free = free_bytes(world.device, budget.disk_path)
    limits = limits_for(
        budget,
        free,
        world.local_size,
        is_host=world.device.type == "cpu",
        has_disk=budget.disk_path is not None or (budget.disk is not None and "disk" in free),
        held=held,
        knows_activations=knows_activations,
    )
    if control is None:
        return limits
    everywhere: list[dict[Tier, int]] = control.collect(limits)
    return {tier: min(one[tier] for one in everywhere) for tier in limits}


def fitting(settings: Settings, found: Sequence[Blueprint], world: World, limits: Mapping[Tier, int]) -> Plan | None:
    """The plan with everything on the device, at the first stage at which it fits; None if at none."""
    for stage in stages_of(settings.stage, world.size):
        trial = replace(settings, stage=stage, placement=Placement())
        rules = rules_for(trial, world)
        counted = predict(plan_flats(found, rules), rules, prefetch_depth=PREFETCH_DEPTH)
        if sum(counted.get(Tier.DEVICE, {}).values()) <= limits[Tier.DEVICE]:
            homes = {one.name: Homes() for one in found}
            note = "Everything fits on the device, so nothing has to move."
            return Plan(homes, stage, world.size, predicted=Prediction(bytes=counted), limits=limits, notes=(note,))
    return None


def propose(
    settings: Settings,
    found: Sequence[Blueprint],
    world: World,
    limits: Mapping[Tier, int],
    profile: ModelProfile,
    machine: MachineProfile,
    *,
    has_optimizer: bool = True,
) -> Plan:
    """The planner's answer, inside the limits by exact account."""
    plans, refused = [], []
    for stage in stages_of(settings.stage, world.size):
        task = _task(settings, world, limits, profile, machine, stage, has_optimizer=has_optimizer)
        try:
            plans.append(_inside(task, settings, found, world))
        except PrepareError as error:
            refused.append(error)
            continue
        if _may_speculate(settings, profile) and plans[-1].predicted.total(Tier.HOST):
            plans += _speculating(replace(task, speculates=True), settings, found, world, plans[-1])
    if not plans:
        raise refused[-1]
    best = min(plans, key=_seconds)
    without_s = min(_seconds(plan) for plan in plans if not plan.speculate)
    told = [*(str(error) for error in refused), *if_most_are_clipped(best, without_s)]
    return replace(best, notes=(*best.notes, *told))


def _task(
    settings: Settings,
    world: World,
    limits: Mapping[Tier, int],
    profile: ModelProfile,
    machine: MachineProfile,
    stage: Stage,
    *,
    has_optimizer: bool,
) -> PlanRequest:
    places = {Kind.PARAMETERS} | ({Kind.GRADIENTS, Kind.OPTIMIZER_STATES} if has_optimizer else set())
    return PlanRequest(
        model=profile,
        machine=machine,
        limits=limits,
        stage=stage,
        world_size=world.size,
        accumulate=settings.accumulate or 1,
        waits_for_norm=settings.max_grad_norm is not None
        or settings.accumulate is None
        or settings.precision.scales_loss,
        num_threads=threads_of(machine, world.local_size),
        can_place=frozenset(places),
        activations=frozenset() if profile.recomputed else frozenset(WAYS),  # one that recomputes itself is left alone
    )


def revise(
    settings: Settings,
    found: Sequence[Blueprint],
    world: World,
    limits: Mapping[Tier, int],
    machine: MachineProfile,
    seen: ObservedStep,
) -> tuple[Plan, Plan]:
    """The plan that is obeyed now with what it costs as steps were seen, and the best one with parameters where they
    are. The first may not fit into the limits; raises PrepareError if nothing does."""
    plan, (stage, _) = settings.plan, settings.decided
    assert plan is not None
    homes = homes_of(plan, found) or {}
    task = _task(settings, world, limits, profile_of(found, settings), machine, stage, has_optimizer=True)
    task = replace(
        task,
        accumulate=settings.accumulate or seen.num_passes,
        rests={name: one.parameters for name, one in homes.items()},
        speculates=plan.speculate,
    )
    planned = plan.predicted.bytes.get(Tier.DEVICE, {}).get(Kind.ACTIVATIONS)
    if seen.activation_bytes is None and planned is not None:  # nobody can see them, but they were counted on
        seen = replace(seen, activation_bytes=planned)
    task = refit(task, homes, seen)
    now = evaluate(replace(task, fixed=_beside(task)), homes)
    counted = _account(task, settings, found, world, homes, model_state(now))
    best = replace(_inside(task, settings, found, world), activations=plan.activations)
    return plan_from(now, homes, counted), best


def _may_speculate(settings: Settings, profile: ModelProfile) -> bool:
    knows = settings.accumulate is not None and settings.max_grad_norm is not None
    return knows and not settings.precision.scales_loss and (profile.samples or profile.forward_s) is not None


def _speculating(
    task: PlanRequest, settings: Settings, found: Sequence[Blueprint], world: World, without: Plan
) -> list[Plan]:
    """A plan that does, if it is worth its memory."""
    try:
        plan = _inside(task, settings, found, world)
    except PrepareError:
        return []
    is_worth = (plan.predicted.step_s or 0.0) < (1.0 - WORTH_SPECULATING) * (without.predicted.step_s or 0.0)
    return [plan] if is_worth else []


def _seconds(plan: Plan) -> float:
    """Of a step; without a time, the most that a resource has to do."""
    return plan.predicted.step_s or max(plan.predicted.busy.values(), default=0.0)


def _inside(task: PlanRequest, settings: Settings, found: Sequence[Blueprint], world: World) -> Plan:
    """The best plan that fits by exact account. A disk for next to nothing is left out, if it fits without."""
    plan = _closing_in(task, settings, found, world)
    on_disk, everything = plan.predicted.total(Tier.DISK), sum(plan.predicted.total(tier) for tier in Tier)
    if 0 < on_disk < WORTH_A_DISK * everything:
        without: dict[Tier, int] = {tier: limit for tier, limit in task.limits.items() if tier is not Tier.DISK}
        with contextlib.suppress(PrepareError):
            other = replace(_closing_in(replace(task, limits=without), settings, found, world), limits=task.limits)
            if (other.predicted.step_s or 0.0) <= (1 + WORTH_A_DISK) * (plan.predicted.step_s or 0.0):
                return other
    return plan


def _closing_in(task: PlanRequest, settings: Settings, found: Sequence[Blueprint], world: World) -> Plan:
    """Plan, count exactly, and plan again with that much less until it fits. What is beside the program's own bytes,
    such as buffers, depends on the answer; so first only the states of that answer are placed again. If they then cost
    time, another answer may be better: a few more are looked at."""
    fixed, totals = _beside(task), dict[Tier, int]()
    least, inside = dict(fixed), list[tuple[Solution, Bytes]]()
    for tries in range(MOST_TRIES):
        try:
            first = solve(replace(task, fixed=fixed))
        except PrepareError:
            if inside:
                break
            if tries == 0 or tries > MOST_TRIES // 2:
                raise
            fixed = {tier: (size + least.get(tier, 0)) // 2 for tier, size in fixed.items()}  # another may need less
            continue
        solution: Solution | None = first
        for _ in range(2):
            assert solution is not None
            homes = homes_by_group(solution)
            assumed = model_state(solution)
            counted = _account(task, settings, found, world, homes, assumed)
            totals = {tier: sum(counted.get(tier, {}).values()) for tier in Tier}
            before = solution.request.fixed
            beside = {tier: totals[tier] - sum(assumed.get(tier, {}).values()) + before.get(tier, 0) for tier in Tier}
            if all(totals[tier] <= task.limits.get(tier, 0) for tier in Tier):
                inside.append((solution, counted))
                break
            solution = place_states(
                solution, {tier: max(before.get(tier, 0), int(1.002 * size) + 1) for tier, size in beside.items()}
            )
            if solution is None:
                break
        if inside and (len(inside) >= MOST_INSIDE or inside[-1][0].cost_s <= first.cost_s * (1 + SLACK)):
            break
        for tier in Tier:  # what the program does not know of, as far as it was seen
            over, limit = totals[tier] - task.limits.get(tier, 0), task.limits.get(tier, 0)
            is_near = over < NEARLY * limit or tries > 1  # each answer is another one, and off by others or by more
            nearly = tries * over if over > 0 and is_near else 0
            fixed[tier] = max(fixed.get(tier, 0), int(1.002 * beside[tier]) + 1) + nearly
    if inside:
        best, counted = min(inside, key=lambda one: one[0].cost_s)
        return plan_from(best, homes_by_group(best), counted, _notes(task))
    beyond = {tier.value: size - task.limits.get(tier, 0) for tier, size in totals.items()}
    raise PrepareError(
        f"no placement was found whose bytes stay inside the limits: the last one is {beyond} bytes over. Give the "
        "tier that is over more, with Budget(...)"
    )


def _beside(task: PlanRequest) -> dict[Tier, int]:
    """Bytes that are there whatever is placed where: activations, if there is no choice about them."""
    return {Tier.DEVICE: 0 if task.chooses else task.model.activations()}


def _account(
    task: PlanRequest,
    settings: Settings,
    found: Sequence[Blueprint],
    world: World,
    homes: Mapping[str, Homes],
    assumed: Bytes,
) -> Bytes:
    """Exact bytes of given homes, with the activations that were assumed."""
    given = {one.name: homes.get(one.name, Homes()) for one in found}
    plan = Plan(given, task.stage, task.world_size, speculate=task.speculates)
    rules = rules_for(settings.obeying(plan, sizes_of(found)), world, given)
    counted = predict(plan_flats(found, rules), rules, prefetch_depth=PREFETCH_DEPTH)
    for tier in Tier:
        if activations := assumed.get(tier, {}).get(Kind.ACTIVATIONS, 0):
            counted.setdefault(tier, {})[Kind.ACTIVATIONS] = activations
    return counted


def _notes(task: PlanRequest) -> list[str]:
    notes = []
    if task.model.samples is None and task.model.forward_s is None:
        notes.append("The batch is not known, so time to compute is not in the plan and activations are not either.")
    if Tier.DISK not in task.limits:
        notes.append("The disk is not used: name a directory with Budget(disk_path=...) to let it be.")
    if task.waits_for_norm and task.accumulate == 1 and not task.speculates:
        notes.append(
            "Updates wait for the end of backward: gradients are clipped or scaled, or prepare was not told with "
            "accumulate= how many passes make a step."
        )
    return notes


def profile_of(found: Sequence[Blueprint], settings: Settings) -> ModelProfile:
    """What is known of a model that has not been tried."""
    members = [member for one in found for member in one.members]
    groups = []
    for one in found:
        trained = sum(member.parameter.numel() for member in one.members if member.options is not None)
        frozen = sum(member.parameter.numel() for member in one.members) - trained
        groups.append(GroupProfile(one.name, trained, frozen))
    widths: dict[str, Any] = state_widths(members, settings.precision, settings.states)
    return ModelProfile("model", tuple(groups), **widths)


def sizes_of(found: Sequence[Blueprint]) -> dict[str, float]:
    """Trained parameters by name of group."""
    return {
        one.name: float(sum(member.parameter.numel() for member in one.members if member.options is not None))
        for one in found
        if one.members
    }


def _held(found: Sequence[Blueprint], world: World) -> int:
    """Bytes of parameters that are on the device already."""
    on_device = [m.parameter for one in found for m in one.members if m.parameter.device == world.device]
    return sum(parameter.numel() * parameter.element_size() for parameter in on_device)
