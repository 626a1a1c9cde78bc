"""From a model and the options that the user left open to a plan.

`decide` is called by prepare, `plan_for` by `zerostd.plan`, `PlanSearch.revise` while training goes on. If everything
fits on the device, nothing is measured. Otherwise the planner proposes placements, their bytes are counted by the code
that will allocate them, and the shortest step that fits is taken. All ranks get the same plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zerostd.communication import Control, World
from zerostd.engine.settings import Settings
from zerostd.errors import PrepareError
from zerostd.measuring import load_or_measure
from zerostd.measuring.identity import free_bytes
from zerostd.measuring.model import untried_profile
from zerostd.parameters.blueprints import Blueprint
from zerostd.planning import MachineProfile, ModelProfile, Plan, PlanRequest, Prediction
from zerostd.planning.planner import if_most_are_clipped, place_states, plan_from, solve
from zerostd.planning.profiles import WAYS
from zerostd.planning.program import SLACK
from zerostd.planning.request import FOR_ACTIVATIONS, FOR_PASSES, WORTH_SPECULATING, limits_for, stages_of, threads_of
from zerostd.planning.solution import ObservedStep, Solution, evaluate, model_state, refit
from zerostd.planning.streaming import describe_pass, explain_pass, place_groups, predict_pass
from zerostd.policy import Budget, Homes, Kind, Placement, Stage, Tier, shards
from zerostd.preparing.accounting import predict
from zerostd.preparing.homes import plan_flats
from zerostd.preparing.options import check_placement, homes_of, rules_for

MOST_TRIES = 12
MOST_FITTING = 3  # placements that fit, of which the one with the shortest step is taken
NEARLY = 0.002  # of a limit: a placement that is over by less needs a little room, not another answer
WORTH_A_DISK = 0.02  # of all bytes, and of a step: less is not worth the buffers and threads of a disk
ROUNDING = 1.002  # the linear program keeps to its limits only this exactly

log = logging.getLogger("zerostd")

Bytes = Mapping[Tier, Mapping[Kind, int]]


def decide(settings: Settings, blueprints: Sequence[Blueprint], control: Control) -> Settings:
    """Return the settings with stage, placement and plan filled in. All ranks call it together."""
    if settings.plan is None and settings.placement is not None:
        return replace(settings, stage=Stage.PARAMETERS if settings.stage is None else settings.stage)
    world = control.world
    plan = settings.plan
    if plan is None:
        plan = _plan_together(settings, blueprints, control)
    elif plan.world_size != world.num_shards:
        raise PrepareError(
            f"the plan is for {plan.world_size} rank(s), and {world.num_shards} share this model: plan again for that"
        )
    obeying = settings.obeying(plan, sizes_of(blueprints))
    check_placement(obeying, obeying.decided[1])
    return obeying


def _plan_together(settings: Settings, blueprints: Sequence[Blueprint], control: Control) -> Plan:
    """Return the plan of the first rank, for what the rank with the least has."""
    world = control.world
    held = _held(blueprints, world)
    search = PlanSearch(settings, blueprints, world)

    def least(budget: Budget) -> dict[Tier, int]:
        by_rank: list[dict[Tier, int]] = control.collect(find_limits(budget, world, held, left=search.left))
        return {tier: min(limits[tier] for limits in by_rank) for tier in by_rank[0]}

    plan = search.all_on_device(least(replace(settings.budget, disk_path=None)))
    if plan is None and not search.updates:  # no rate decides what is kept where
        plan = search.stream(least(settings.budget), None, None)
    elif plan is None:
        limits = least(settings.budget)
        machine = load_or_measure(world.device, disk_path=settings.budget.disk_path, mesh=settings.mesh)
        plan = search.propose(limits, None, machine)
    plan = Plan.from_json(control.collect(plan.to_json())[0])
    if world.rank == 0:
        log.info("%s", plan.explain())
    return plan


def plan_for(
    blueprints: Sequence[Blueprint],
    settings: Settings,
    world: World,
    profile: ModelProfile | None,
    machine: MachineProfile | None,
) -> Plan:
    """Return a plan for a world that need not be here. Without a profile the batch is not known."""
    search = PlanSearch(settings, blueprints, world)
    left = search.left if profile is None else 0.0
    if machine is not None:
        return search.propose(find_limits(settings.budget, world, 0, machine.free, left=left), profile, machine)
    limits = find_limits(settings.budget, world, _held(blueprints, world), left=left)
    plan = search.all_on_device(limits) if profile is None else None
    if plan is not None:
        return plan
    return search.propose(limits, profile, load_or_measure(world.device, disk_path=settings.budget.disk_path))


def find_limits(
    budget: Budget,
    world: World,
    held: int,
    free: Mapping[str, int] | None = None,
    *,
    left: float = 0.0,
) -> dict[Tier, int]:
    """Return the bytes that this rank may use of each tier: the budget's, or what is free less a margin. `held` bytes
    of the device are the model's own already; `free` is given for another machine. `left` is the part that activations
    get, without a budget."""
    if free is None:
        free = free_bytes(world.device, budget.disk_path)
    return limits_for(
        budget,
        free,
        world.local_size,
        is_host=world.device.type == "cpu",
        has_disk=budget.disk_path is not None or (budget.disk is not None and "disk" in free),
        held=held,
        for_activations=left,
    )


class PlanSearch:
    """Finds plans for one model in one world."""

    def __init__(self, settings: Settings, blueprints: Sequence[Blueprint], world: World) -> None:
        self.settings = settings
        self.blueprints = blueprints
        self.world = world

    @property
    def updates(self) -> bool:
        """Whether anything of the model is updated."""
        return self.settings.has_optimizer and any(m.options is not None for g in self.blueprints for m in g.members)

    @property
    def left(self) -> float:
        """The part of the device that is left to activations while the batch is not known."""
        return FOR_ACTIVATIONS if self.updates else FOR_PASSES

    def all_on_device(self, limits: Mapping[Tier, int]) -> Plan | None:
        """Return the plan with everything on the device, at the first stage at which it fits; None if at none."""
        for stage in stages_of(self.settings.stage, self.world.num_shards):
            counted = self._predict(replace(self.settings, stage=stage, placement=Placement()))
            if sum(counted.get(Tier.DEVICE, {}).values()) <= limits[Tier.DEVICE]:
                homes = {group.name: Homes() for group in self.blueprints}
                note = "Everything fits on the device, so nothing has to move."
                prediction = Prediction(bytes=counted)
                return Plan(homes, stage, self.world.num_shards, predicted=prediction, limits=limits, notes=(note,))
        return None

    def propose(self, limits: Mapping[Tier, int], profile: ModelProfile | None, machine: MachineProfile) -> Plan:
        """Return the plan with the shortest step inside the limits, over all stages that are open. Without a profile
        nothing is known of the model's time and activations."""
        if not self.updates:
            return self.stream(limits, profile, machine)
        plans: list[Plan] = []
        refused: list[PrepareError] = []
        for stage in stages_of(self.settings.stage, self.world.num_shards):
            request = self._request(limits, profile, machine, stage)
            try:
                plan = self._best(request)
            except PrepareError as error:
                refused.append(error)
                continue
            plans += [plan, *self._speculative(request, plan)]
        if not plans:
            raise refused[-1]
        best = min(plans, key=_seconds)
        without_s = min(_seconds(plan) for plan in plans if not plan.speculate)
        notes = [str(error) for error in refused]
        notes += if_most_are_clipped(best, without_s)
        return replace(best, notes=(*best.notes, *notes))

    def stream(self, limits: Mapping[Tier, int], profile: ModelProfile | None, machine: MachineProfile | None) -> Plan:
        """Return the plan of a model that is not updated: what fits stays on the device, the rest is streamed."""
        activations = 0 if profile is None else profile.activations()
        refusal = ""
        for stage in stages_of(self.settings.stage, self.world.num_shards):
            is_whole = not shards(stage, Kind.PARAMETERS)
            num_ranks = 1 if is_whole else self.world.num_shards
            sizes = {group.name: _bytes_of(group) // num_ranks for group in self.blueprints}
            room = dict(limits)
            if is_whole and self.world.num_shards > 1:  # what is whole on every rank stays on the device
                room = {Tier.DEVICE: limits[Tier.DEVICE]}
            tiers: dict[str, Tier] = {}
            for _ in range(MOST_TRIES):
                placed = place_groups(sizes, room)
                homes = {name: Homes(parameters=tier) for name, tier in placed.items()}
                plan = Plan(homes, stage, self.world.num_shards, limits=limits)
                counted = self._predict(self.settings.obeying(plan, sizes_of(self.blueprints)))
                if activations:
                    counted.setdefault(Tier.DEVICE, {})[Kind.ACTIVATIONS] = activations
                over = {tier: sum(counted.get(tier, {}).values()) - limits.get(tier, 0) for tier in Tier}
                if all(size <= 0 for size in over.values()):
                    predicted = replace(predict_pass(placed, sizes, profile, machine), bytes=counted)
                    return replace(plan, predicted=predicted, notes=describe_pass(placed, sizes))
                if placed == tiers:
                    break
                tiers = placed
                held = {tier: sum(size for name, size in sizes.items() if placed[name] is tier) for tier in Tier}
                room = {tier: max(0, held[tier] - over[tier]) if over[tier] > 0 else room[tier] for tier in room}
            refusal = explain_pass(placed, sizes, limits, over)
        raise PrepareError(refusal)

    def revise(self, limits: Mapping[Tier, int], machine: MachineProfile, seen: ObservedStep) -> tuple[Plan, Plan]:
        """Return the present plan with its cost as steps were observed, and the best one with parameters where they
        are. The first may not fit into the limits; raises PrepareError if nothing does."""
        plan = self.settings.plan
        assert plan is not None
        homes = homes_of(plan, self.blueprints)
        request = replace(
            self._request(limits, None, machine, self.settings.decided[0]),
            accumulate=self.settings.accumulate or seen.num_passes,
            rests={name: home.parameters for name, home in homes.items()},
            speculates=plan.speculate,
        )
        planned = plan.predicted.bytes.get(Tier.DEVICE, {}).get(Kind.ACTIVATIONS)
        if seen.activation_bytes is None and planned is not None:  # nobody can see them, but they were counted on
            seen = replace(seen, activation_bytes=planned)
        request = refit(request, homes, seen)
        now = evaluate(replace(request, fixed=_fixed_bytes(request)), homes)
        counted = self._count(request, homes, model_state(now))
        best = replace(self._best(request), activations=plan.activations)
        return plan_from(now, homes, counted), best

    def _request(
        self, limits: Mapping[Tier, int], profile: ModelProfile | None, machine: MachineProfile, stage: Stage
    ) -> PlanRequest:
        settings = self.settings
        profile = profile or untried_profile(self.blueprints, settings.precision, settings.states)
        placed = {Kind.PARAMETERS}
        if self.settings.has_optimizer:
            placed |= {Kind.GRADIENTS, Kind.OPTIMIZER_STATES}
        return PlanRequest(
            model=profile,
            machine=machine,
            limits=limits,
            stage=stage,
            world_size=self.world.num_shards,
            accumulate=settings.accumulate or 1,
            waits_for_norm=settings.max_grad_norm is not None
            or settings.accumulate is None
            or settings.precision.scales_loss,
            num_threads=threads_of(machine, self.world.local_size),
            can_place=frozenset(placed),
            activations=frozenset() if profile.recomputed else frozenset(WAYS),  # a model that recomputes is left alone
        )

    def _speculative(self, request: PlanRequest, without: Plan) -> list[Plan]:
        """Return the plan that speculates, if it may and that is worth its memory."""
        settings = self.settings
        knows_norm = settings.accumulate is not None and settings.max_grad_norm is not None
        may_speculate = knows_norm and not settings.precision.scales_loss and request.model.knows_time
        if not may_speculate or not without.predicted.total(Tier.HOST):
            return []
        try:
            plan = self._best(replace(request, speculates=True))
        except PrepareError:
            return []
        step_s = plan.predicted.step_s or 0.0
        without_s = without.predicted.step_s or 0.0
        return [plan] if step_s < (1.0 - WORTH_SPECULATING) * without_s else []

    def _best(self, request: PlanRequest) -> Plan:
        """Return the best plan that fits by exact account, without a disk that would hold next to nothing."""
        plan = self._search(request)
        on_disk = plan.predicted.total(Tier.DISK)
        if not 0 < on_disk < WORTH_A_DISK * sum(plan.predicted.total(tier) for tier in Tier):
            return plan
        limits: dict[Tier, int] = {tier: size for tier, size in request.limits.items() if tier is not Tier.DISK}
        with contextlib.suppress(PrepareError):
            without = replace(self._search(replace(request, limits=limits)), limits=request.limits)
            if (without.predicted.step_s or 0.0) <= (1 + WORTH_A_DISK) * (plan.predicted.step_s or 0.0):
                return without
        return plan

    def _search(self, request: PlanRequest) -> Plan:
        """Plan, count exactly, and plan again with that much less room until it fits. Bytes that the program does not
        know, such as buffers, depend on its answer; so first only the states of that answer are placed again. If they
        then cost time, another answer may be better: a few more are tried."""
        least = _fixed_bytes(request)
        fixed = dict(least)
        over: dict[Tier, int] = {}
        fitting: list[tuple[Solution, Bytes]] = []
        for attempt in range(MOST_TRIES):
            try:
                answer = solve(replace(request, fixed=fixed))
            except PrepareError:
                if fitting:
                    break
                if attempt == 0 or attempt > MOST_TRIES // 2:
                    raise
                fixed = {tier: (size + least.get(tier, 0)) // 2 for tier, size in fixed.items()}  # may need less
                continue
            solution: Solution | None = answer
            for _ in range(2):
                assert solution is not None
                assumed = model_state(solution)
                counted = self._count(request, solution.homes, assumed)
                unknown = _unknown_bytes(counted, assumed, solution.request.fixed)
                over = {tier: sum(counted.get(tier, {}).values()) - request.limits.get(tier, 0) for tier in Tier}
                if all(size <= 0 for size in over.values()):
                    fitting.append((solution, counted))
                    break
                earlier = solution.request.fixed
                needed = {tier: max(earlier.get(tier, 0), unknown[tier]) for tier in Tier}
                solution = place_states(solution, needed)
                if solution is None:
                    break
            has_enough = len(fitting) >= MOST_FITTING
            if fitting and (has_enough or fitting[-1][0].cost_s <= answer.cost_s * (1 + SLACK)):
                break
            for tier in Tier:
                fixed[tier] = max(fixed.get(tier, 0), unknown[tier])
                is_near = over[tier] < NEARLY * request.limits.get(tier, 0)  # answers differ by that much
                if over[tier] > 0 and (is_near or attempt > 1):
                    fixed[tier] += attempt * over[tier]
        if fitting:
            best, counted = min(fitting, key=lambda pair: pair[0].cost_s)
            return plan_from(best, best.homes, counted, _notes(request))
        beyond = {tier.value: size for tier, size in over.items()}
        raise PrepareError(
            f"no placement was found whose bytes stay inside the limits: the last one is {beyond} bytes over. Give the "
            "tier that is over more, with Budget(...)"
        )

    def _count(self, request: PlanRequest, homes: Mapping[str, Homes], assumed: Bytes) -> Bytes:
        """Return the exact bytes of given homes, with the activations that were assumed."""
        given = {group.name: homes.get(group.name, Homes()) for group in self.blueprints}
        plan = Plan(given, request.stage, request.world_size, speculate=request.speculates)
        counted = self._predict(self.settings.obeying(plan, sizes_of(self.blueprints)))
        for tier in Tier:
            if activations := assumed.get(tier, {}).get(Kind.ACTIVATIONS, 0):
                counted.setdefault(tier, {})[Kind.ACTIVATIONS] = activations
        return counted

    def _predict(self, settings: Settings) -> dict[Tier, dict[Kind, int]]:
        rules = rules_for(settings, self.world, self.blueprints)
        return predict(plan_flats(self.blueprints, rules), rules)


def _seconds(plan: Plan) -> float:
    """Return those of a step; without a time, the most that a resource has to do."""
    return plan.predicted.step_s or max(plan.predicted.busy.values(), default=0.0)


def _fixed_bytes(request: PlanRequest) -> dict[Tier, int]:
    """Return the bytes that are there wherever things are placed: activations, if there is no choice about them."""
    return {Tier.DEVICE: 0 if request.chooses else request.model.activations()}


def _unknown_bytes(counted: Bytes, assumed: Bytes, fixed: Mapping[Tier, int]) -> dict[Tier, int]:
    """Return the bytes of each tier that the program did not know of, with those it was told of, rounded up."""
    unknown = {}
    for tier in Tier:
        beside = sum(counted.get(tier, {}).values()) - sum(assumed.get(tier, {}).values())
        unknown[tier] = int(ROUNDING * (beside + fixed.get(tier, 0))) + 1
    return unknown


def _notes(request: PlanRequest) -> list[str]:
    notes = []
    if request.model.samples is None and request.model.forward_s is None:
        notes.append("The batch is not known, so time to compute is not in the plan and activations are not either.")
    if Tier.DISK not in request.limits:
        notes.append("The disk is not used: name a directory with Budget(disk_path=...) to let it be.")
    if request.waits_for_norm and request.accumulate == 1 and not request.speculates:
        notes.append(
            "Updates wait for the end of backward: gradients are clipped or scaled, or prepare was not told with "
            "accumulate= how many passes make a step."
        )
    return notes


def sizes_of(blueprints: Sequence[Blueprint]) -> dict[str, float]:
    """Return the number of trained parameters by name of group; of all parameters, if none train."""
    trains = any(member.options is not None for group in blueprints for member in group.members)
    return {
        group.name: float(sum(m.parameter.numel() for m in group.members if m.options is not None or not trains))
        for group in blueprints
        if group.members
    }


def _bytes_of(group: Blueprint) -> int:
    """Return the bytes of a group's parameters as they compute."""
    return sum(member.parameter.numel() * member.dtype.itemsize for member in group.members)


def _held(blueprints: Sequence[Blueprint], world: World) -> int:
    """Return the bytes of parameters that are on the device already."""
    parameters = [member.parameter for group in blueprints for member in group.members]
    return sum(p.numel() * p.element_size() for p in parameters if p.device == world.device)
