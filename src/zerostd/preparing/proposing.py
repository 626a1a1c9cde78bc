"""Make a plan for a model from the options that the user left open.

`decide` is called by prepare, `PlanSearch.plan` by `zerostd.plan`, `PlanSearch.revise` while training goes on. If
everything fits on the device, nothing is measured. Otherwise the planner proposes placements, their bytes are counted
by the code that will allocate them, and the shortest step that fits is taken. All ranks get the same plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from zerostd.communication import Control, World
from zerostd.engine.settings import Settings
from zerostd.errors import PrepareError
from zerostd.measuring import load_or_measure
from zerostd.measuring.machine import from_first
from zerostd.measuring.model import untried_profile
from zerostd.monitoring.texts import percent_text
from zerostd.parameters.blueprints import Blueprint, sizes_of
from zerostd.planning import MachineProfile, ModelProfile, Plan, PlanRequest, Prediction
from zerostd.planning.planner import VARIATIONS, Counted, fitting, neighbours, total
from zerostd.planning.pricing import bare_plan, if_most_are_clipped, plan_from, plan_of
from zerostd.planning.profiles import WAYS
from zerostd.planning.request import replicas_of, shared, stages_of, threads_of
from zerostd.planning.searching import SearchResult, search, search_coded
from zerostd.planning.solution import CountBytes, ObservedStep, Solution, evaluate, model_state, refit, with_hidden
from zerostd.planning.streaming import describe_pass, explain_pass, place_groups, predict_pass
from zerostd.policy import Homes, Kind, Placement, Stage, Tier, Way, shards
from zerostd.preparing.accounting import predict
from zerostd.preparing.budgets import FOR_ACTIVATIONS, FOR_PASSES, find_limits, least_limits
from zerostd.preparing.homes import plan_flats
from zerostd.preparing.options import check_placement, homes_of, rules_for
from zerostd.preparing.remembering import recall

WAITS_FOR_LAUNCHES = 0.8  # part of forward in which the host launches kernels: the device waits for it
MOST_TRIES = 12  # to place groups that are streamed
FIRST_PASS = "The first pass recomputes activations and measures them; then the plan is made again."

log = logging.getLogger("zerostd")


def decide(settings: Settings, blueprints: Sequence[Blueprint], control: Control) -> Settings:
    """Return the settings with stage, placement and plan filled in. All ranks call it together."""
    if settings.plan is None and settings.placement is not None:
        return replace(settings, stage=Stage.PARAMETERS if settings.stage is None else settings.stage)
    world = control.world
    plan = settings.plan
    if plan is None:
        plan = _plan_together(settings, blueprints, control)
    elif plan.world_size != world.num_shards or plan.num_replicas not in (1, world.num_replicas):
        raise PrepareError(
            f"the plan is for {_ranks_of(plan.world_size, plan.num_replicas)}, but "
            f"{_ranks_of(world.num_shards, world.num_replicas)} share this model: plan again for these"
        )
    obeying = settings.obeying(plan, sizes_of(blueprints))
    check_placement(obeying, obeying.decided[1])
    return obeying


def _plan_together(settings: Settings, blueprints: Sequence[Blueprint], control: Control) -> Plan:
    """Return the plan of the first rank, made for the rank with the least memory. The batch is not known. So if memory
    is scarce, the first pass takes as little as possible, and then the plan is made again from what it took."""
    world = control.world
    search = PlanSearch(settings, blueprints, world)
    least = partial(least_limits, control, held=_held(blueprints, world), left=search.left)
    limits = least(replace(settings.budget, disk_path=None))
    plan = search.all_on_device(limits)
    is_scarce = plan is None or settings.budget.device is not None
    if plan is None and not search.updates:  # no rate decides what is kept where
        plan = search.stream(least(settings.budget), None, None)
    elif plan is None:
        limits = least(settings.budget)
        machine = load_or_measure(world.device, disk_path=settings.budget.disk_path, mesh=settings.mesh)
        plan = search.propose_untried(limits, machine)
    remembered = recall(settings, blueprints, world) if search.updates else None
    if remembered is not None and search.fits(remembered, limits):
        predicted = Prediction(bytes=search.account(remembered))
        plan = replace(remembered, limits=plan.limits, activations={}, predicted=predicted)
    if is_scarce and search.trains:
        way = least_way(world).in_plan
        plan = replace(plan, activations={"*": way}, notes=(*plan.notes, FIRST_PASS))
    plan = Plan.from_json(control.collect(plan.to_json())[0])
    if world.rank == 0:
        log.info("%s", plan.explain())
    return plan


class PlanSearch:
    """Finds plans for one model in one world."""

    def __init__(
        self,
        settings: Settings,
        blueprints: Sequence[Blueprint],
        world: World,
        ways: frozenset[str] = frozenset(WAYS),
    ) -> None:
        self.settings = settings
        self.blueprints = blueprints
        self.world = world
        self.ways = ways  # to handle activations, that may be chosen

    def on_paper(self) -> PlanSearch:
        """Return the same search without modules, memory and channels, for another process."""
        settings = replace(self.settings, mesh=None)
        blueprints = [blueprint.on_paper() for blueprint in self.blueprints]
        return PlanSearch(settings, blueprints, replace(self.world, channels=None, link=None), self.ways)

    @property
    def updates(self) -> bool:
        """Whether an optimizer updates anything of the model."""
        return self.settings.has_optimizer and self.trains

    @property
    def trains(self) -> bool:
        """Whether anything of the model may be trained."""
        return any(member.options is not None for group in self.blueprints for member in group.members)

    def plan(self, profile: ModelProfile | None, machine: MachineProfile | None) -> Plan:
        """Return a plan for a world that need not exist here. Without a profile the batch is not known. Without a
        machine, all ranks of this job call it together, and get the plan of the first."""
        budget = self.settings.budget
        left = self.left if profile is None else 0.0
        if machine is not None:
            limits = find_limits(budget, self.world, 0, machine.free, left=left)
            return self.propose_replicas(limits, profile, shared(machine, self.world.local_size))
        with contextlib.closing(World.discover(self.world.device)) as here:
            control = Control(here)
            limits = least_limits(control, budget, _held(self.blueprints, self.world), left=left, world=self.world)
            if profile is None and (plan := self.all_on_device(limits)):
                return plan
            machine = load_or_measure(self.world.device, disk_path=budget.disk_path)
            return from_first(control, partial(self.propose_replicas, limits, profile, machine))

    @property
    def left(self) -> float:
        """The part of the device that is left to activations while the batch is not known."""
        return FOR_ACTIVATIONS if self.updates else FOR_PASSES

    def all_on_device(self, limits: Mapping[Tier, int]) -> Plan | None:
        """Return the plan with everything on the device, at the first stage at which it fits; None if at none."""
        homes = {group.name: Homes() for group in self.blueprints}
        note = "Everything fits on the device, so nothing has to move."
        for stage in stages_of(self.settings.stage, self.world.num_shards):
            settings = replace(self.settings, stage=stage, placement=Placement())
            counted = predict_bytes(settings, self.world, self.blueprints)
            if total(counted, Tier.DEVICE) <= limits[Tier.DEVICE]:
                plan = self._plan_of(homes, stage, limits)
                return replace(plan, predicted=Prediction(bytes=counted), notes=(note,))
        return None

    def propose(self, limits: Mapping[Tier, int], profile: ModelProfile | None, machine: MachineProfile) -> Plan:
        """Return the plan with the shortest step inside the limits, over all stages that are open. Without a profile
        nothing is known of the model's time and activations."""
        return self._propose(limits, profile, machine, [1])

    def propose_replicas(
        self, limits: Mapping[Tier, int], profile: ModelProfile | None, machine: MachineProfile
    ) -> Plan:
        """Return the same for a world whose ranks may share several replicas of the model state, where the wire between
        some of them is faster."""
        return self._propose(limits, profile, machine, replicas_of(machine, self.world.num_shards))

    def _propose(
        self, limits: Mapping[Tier, int], profile: ModelProfile | None, machine: MachineProfile, replicas: Sequence[int]
    ) -> Plan:
        if not self.updates:
            return self.stream(limits, profile, machine)
        stages = stages_of(self.settings.stage, self.world.num_shards)
        flat = [self.request(limits, profile, machine, stage) for stage in stages]
        result = self.search([request.on_replicas(count) for request in flat for count in replicas])
        refused = [str(error) for request, error in result.refused if request.num_replicas == flat[0].num_replicas]
        return self.plan_from(result, refused)

    def search(self, requests: Sequence[PlanRequest]) -> SearchResult:
        """Return what fits of all requests. Raises PrepareError if nothing does."""
        find = search if self.settings.exact else partial(search_coded, codable=self.settings.codable)
        return find(requests, self.count, may_speculate=self.may_speculate, may_free=self.settings.servers is None)

    def plan_from(self, result: SearchResult, notes: Sequence[str]) -> Plan:
        """Return the shortest step of a search as a plan."""
        plan = plan_from(result.best, [*self._notes(result.best.solution.request), *notes])
        return replace(plan, notes=(*plan.notes, *if_most_are_clipped(plan, result.shortest.seconds)))

    def stream(self, limits: Mapping[Tier, int], profile: ModelProfile | None, machine: MachineProfile | None) -> Plan:
        """Return the plan of a model that is not updated: what fits stays on the device, the rest is streamed."""
        activations = 0 if profile is None else profile.activations()
        refusal = ""
        for stage in stages_of(self.settings.stage, self.world.num_shards):
            is_whole = not shards(stage, Kind.PARAMETERS)
            num_ranks = 1 if is_whole else self.world.num_shards
            sizes = {group.name: group.num_bytes // num_ranks for group in self.blueprints}
            room = dict(limits)
            if is_whole and self.world.num_shards > 1:  # what is whole on every rank stays on the device
                room = {Tier.DEVICE: limits[Tier.DEVICE]}
            tiers: dict[str, Tier] = {}
            for _ in range(MOST_TRIES):
                placed = place_groups(sizes, room)
                homes = {name: Homes(parameters=tier) for name, tier in placed.items()}
                plan = self._plan_of(homes, stage, limits)
                counted = self.account(plan)
                if activations:
                    counted.setdefault(Tier.DEVICE, {})[Kind.ACTIVATIONS] = activations
                over = {tier: total(counted, tier) - limits.get(tier, 0) for tier in Tier}
                held = {tier: sum(size for name, size in sizes.items() if placed[name] is tier) for tier in Tier}
                if all(size <= 0 for size in over.values()):
                    predicted = replace(predict_pass(held, profile, machine), bytes=counted)
                    return replace(plan, predicted=predicted, notes=describe_pass(held))
                if placed == tiers:
                    break
                tiers = placed
                room = {tier: max(0, held[tier] - over[tier]) if over[tier] > 0 else room[tier] for tier in room}
            refusal = explain_pass(held, limits, over)
        raise PrepareError(refusal)

    def _plan_of(self, homes: Mapping[str, Homes], stage: Stage, limits: Mapping[Tier, int]) -> Plan:
        """Return a plan for this world, without what it costs."""
        return Plan(homes, stage, self.world.num_shards, self.world.num_replicas, limits=limits)

    def propose_untried(self, limits: Mapping[Tier, int], machine: MachineProfile) -> Plan:
        """Return a plan for an unknown batch that leaves a part of the device to its activations, unless only a plan
        without that part fits."""
        part = 1.0 if self.settings.budget.device is None else 1.0 - FOR_ACTIVATIONS  # else it is left already
        less: dict[Tier, int] = {**limits, Tier.DEVICE: int(limits[Tier.DEVICE] * part)}
        with contextlib.suppress(PrepareError):
            return replace(self.propose(less, None, machine), limits=limits)
        return self.propose(limits, None, machine)

    def place_states(self, limits: Mapping[Tier, int], machine: MachineProfile) -> Plan:
        """Return the present plan with its states placed again inside the limits, and nothing else. Raises
        PrepareError with what is missing."""
        plan = self.settings.plan
        assert plan is not None
        request = replace(
            self.request(limits, None, machine, self.settings.decided[0]),
            can_place=frozenset({Kind.OPTIMIZER_STATES}),
        )
        best = fitting(request, self.count)[0]
        return replace(plan, homes=best.solution.homes, predicted=Prediction(bytes=best.held))

    def fits(self, plan: Plan, limits: Mapping[Tier, int]) -> bool:
        """Return whether the model state of a plan fits into the limits, in this world."""
        if plan.world_size != self.world.num_shards:
            return False
        try:
            held = self.account(plan)
        except PrepareError:  # it is of another model
            return False
        return all(total(held, tier) <= limits.get(tier, 0) for tier in Tier)

    def account(self, plan: Plan) -> dict[Tier, dict[Kind, int]]:
        """Return the bytes of a plan without activations, by the code that allocates them."""
        return predict_bytes(self.settings.obeying(plan, sizes_of(self.blueprints)), self.world, self.blueprints)

    def revise(
        self, limits: Mapping[Tier, int], machine: MachineProfile, seen: ObservedStep, *, speculates: bool
    ) -> tuple[Plan, list[Plan]]:
        """Return the present plan with its cost as steps were observed, and others, the best first, with parameters
        where they are. The first may not fit into the limits; raises PrepareError if nothing does."""
        plan = self.settings.plan
        assert plan is not None
        homes = homes_of(plan, self.blueprints)
        request = replace(
            self.request(limits, seen.profile, machine, self.settings.decided[0]),
            accumulate=self.settings.accumulate or seen.num_passes,
            speculates=plan.speculate,
        )
        open_ways = request.activations
        if Way.RECOMPUTE_HOST in plan.activations.values():
            request = replace(request, activations=open_ways - {Way.RECOMPUTE.in_plan})
        planned = plan.predicted.bytes.get(Tier.DEVICE, {}).get(Kind.ACTIVATIONS)
        if seen.activation_bytes is None and planned is not None:  # nobody can see them, but they were counted on
            seen = replace(seen, activation_bytes=planned)
        request = refit(request, homes, seen, plan.activations_of)
        now = evaluate(request, homes, plan.activations_of)
        held = self.count(now)
        request = replace(request, speculates=False, activations=open_ways)
        count = partial(with_hidden, self.count, held, seen.late_bytes)
        result = search([request], count, may_speculate=speculates)
        others = [bare_plan(each) for each in (*result.speculating, *result.candidates, *self._near(result, count))]
        if not request.chooses:
            others = [replace(other, activations=plan.activations) for other in others]
        others = [replace(other, codec=plan.codec) for other in others]
        present = replace(bare_plan(Counted(now, held)), homes=homes, codec=plan.codec)
        return present, sorted(others, key=lambda other: other.predicted.step_s or 0.0)

    @property
    def _codec(self) -> Mapping[str, str]:
        """The codes of a model that trains already: it keeps them."""
        return {} if self.settings.plan is None else self.settings.plan.codec

    def _near(self, result: SearchResult, count: CountBytes) -> list[Counted]:
        """Return the best candidate with more and with fewer updates by the CPU, and with none."""
        best = result.best
        limits = best.solution.request.limits
        near = [Counted(solution, count(solution)) for solution in neighbours(best.solution, VARIATIONS)]
        return [each for each in near if all(total(each.held, tier) <= limits.get(tier, 0) for tier in Tier)]

    @property
    def may_speculate(self) -> bool:
        """Whether updates may begin before the norm is known."""
        settings = self.settings
        knows_norm = settings.accumulate is not None and settings.max_grad_norm is not None
        return knows_norm and not settings.precision.scales_loss

    def request(
        self, limits: Mapping[Tier, int], profile: ModelProfile | None, machine: MachineProfile, stage: Stage
    ) -> PlanRequest:
        settings = self.settings
        plan = settings.plan
        rests = None  # of a model that trains already, parameters stay where they are
        if plan is not None:
            rests = {name: home.parameters for name, home in homes_of(plan, self.blueprints).items()}
        profile = profile or untried_profile(self.blueprints, settings.precision, settings.states)
        if plan is not None:
            profile = replace(profile, launches=max(profile.launches, plan.predicted.launches))
        if Kind.OPTIMIZER_STATES.value in self._codec:
            profile = profile.with_codes()
        if "reduce" in self._codec:
            profile = profile.with_coded_wires()
        return PlanRequest(
            model=profile,
            machine=machine,
            limits=limits,
            stage=stage,
            world_size=self.world.num_shards,
            num_replicas=self.world.num_replicas,
            accumulate=settings.accumulate or 1,
            waits_for_norm=settings.max_grad_norm is not None
            or settings.accumulate is None
            or settings.precision.scales_loss,
            num_threads=threads_of(machine, self.world.local_size),
            activations=frozenset() if profile.recomputed else self.ways,  # a model that recomputes is left alone
            keeps_gradients=plan is None or plan.keep_gradients,
            rests=rests,
        )

    def _notes(self, request: PlanRequest) -> Iterator[str]:
        if not request.model.knows_time:
            yield "The batch is not known, so the plan leaves out the time to compute and activations."
            if self.settings.budget.device is None:
                yield f"{percent_text(FOR_ACTIVATIONS)} of the device is left for activations."
        if request.model.launches > WAITS_FOR_LAUNCHES:
            part = percent_text(request.model.launches)
            yield f"The host is busy with launches for {part} of forward: torch.compile or more samples may help."
        if request.num_replicas > self.world.num_replicas:
            shape = (request.num_replicas, request.world_size)
            yield (
                f"Every {request.world_size} neighbours share one replica of the model state, as the wire between them "
                f"is faster: prepare(plan=...), or, without the plan, prepare(mesh=init_device_mesh("
                f"{request.machine.device!r}, {shape}))."
            )
        if Tier.DISK not in request.limits and request.machine.measured:
            yield "The disk is not used: name a directory with Budget(disk_path=...) to use it."
        elif Tier.DISK not in request.limits:
            yield "The disk is not used: no directory was given, or the machine profile has no disk."
        if request.world_size > 1 and request.model.knows_time and not request.machine.wires:
            yield "The machine profile has no wires, so the plan leaves out the time of collectives."
        if request.waits_for_norm and request.accumulate == 1 and not request.speculates:
            yield (
                "Updates wait for the end of backward, because gradients are clipped or scaled, or accumulate= was not "
                "passed to prepare."
            )

    def count(self, solution: Solution) -> dict[Tier, dict[Kind, int]]:
        """Return the bytes of a solution by the code that allocates them, with the activations that it assumes."""
        request = solution.request
        plan = replace(plan_of(solution), codec=self._codec or request.codec)
        settings = replace(self.settings, accumulate=self.settings.accumulate and request.accumulate)
        world = replace(self.world, num_replicas=request.num_replicas)
        counted = predict_bytes(settings.obeying(plan, sizes_of(self.blueprints)), world, self.blueprints)
        for tier, kinds in model_state(solution).items():
            if activations := kinds.get(Kind.ACTIVATIONS, 0):
                counted.setdefault(tier, {})[Kind.ACTIVATIONS] = activations
        return counted


def predict_bytes(settings: Settings, world: World, blueprints: Sequence[Blueprint]) -> dict[Tier, dict[Kind, int]]:
    """Return all bytes but activations, once stage and placement are decided."""
    rules = rules_for(settings, world, blueprints)
    return predict(plan_flats(blueprints, rules), rules)


def _ranks_of(num_shards: int, num_replicas: int) -> str:
    return f"{num_shards} rank(s)" if num_replicas == 1 else f"{num_replicas} replicas on {num_shards} rank(s) each"


def least_way(world: World) -> Way:
    """Return the way to handle activations that takes the least device memory."""
    return Way.RECOMPUTE if world.device.type == "cpu" else Way.RECOMPUTE_HOST


def _held(blueprints: Sequence[Blueprint], world: World) -> int:
    """Return the bytes of parameters that are on the device already."""
    members = [member for group in blueprints for member in group.members if member.parameter.device == world.device]
    return sum(member.numel * member.parameter.element_size() for member in members)
