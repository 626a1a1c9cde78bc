"""Models on machines that need not be here: a plan from two profiles, many world sizes side by side, and the bytes that
a rank holds and sends by closed form. A cluster is a machine profile, of one rank in one of its nodes, with its wires.

Working memory is counted in large parts only: gathered groups and what gradients pass through. `zerostd.plan` counts a
module's to the byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zerostd.errors import PrepareError
from zerostd.planning.advice import if_most_are_clipped
from zerostd.planning.costs import group_costs
from zerostd.planning.demands import work
from zerostd.planning.machine import MachineProfile, Processor
from zerostd.planning.model import ModelProfile
from zerostd.planning.plan import Plan
from zerostd.planning.planner import Solution, homes_by_group, model_state, plan_from, solve
from zerostd.planning.request import FOR_ACTIVATIONS, WORTH_SPECULATING, PlanRequest, limits_for, stages_of, threads_of
from zerostd.planning.search import SolvedLayout, StepLayout, divisions, shortest, table, try_all
from zerostd.policy import Budget, Kind, Stage, Tier, shards

__all__ = ["ScalingRow", "TrainingOptions", "limits_of", "plan_on", "scaling", "sent_bytes", "state_bytes"]

NUM_GATHERED = 3  # groups that are whole at once: the one at work, the next, and in backward the one before
NUM_STAGING = 2  # groups whose gradients are on their way
NO_WIRES = "The machine profile has no wires, so time of collectives is not in the plan."
NOWHERE = MachineProfile("nowhere", "none", {"any": 1.0}, 0.0, {}, Processor(1, {1: 1.0}, 1.0), None)  # counts bytes


@dataclass(frozen=True)
class TrainingOptions:
    """How a model is to be trained on a machine."""

    world_size: int = 1
    stage: Stage | None = None  # None: the one with the shortest step
    accumulate: int | None = None  # passes in a step; None: one, and prepare is not told
    clips: bool = False
    scales_loss: bool = False
    budget: Budget = field(default_factory=Budget)  # of the host and the disk that of a node, as in prepare
    activations: frozenset[str] = frozenset()  # keep, recompute, host: those to choose among; empty: as the model does
    batch: int | None = None  # samples in a step on one rank; how they are divided into passes is searched

    def __post_init__(self) -> None:
        for what, value in (("world", self.world_size), ("accumulate", self.accumulate), ("batch", self.batch)):
            if value is not None and value < 1:
                raise PrepareError(f"{what}={value!r} must be a whole number, 1 or more")


@dataclass(frozen=True)
class ScalingRow:
    """One world size."""

    world_size: int
    stage: Stage | None = None
    state: Mapping[Tier, int] = field(default_factory=dict)  # bytes of model state on one rank
    sent: int = 0  # bytes that each rank sends in a step
    step_s: float = 0.0
    compute_s: float = 0.0  # of a step, if wires and offload took no time
    samples_per_s: float = 0.0  # of all ranks together
    efficiency: float = 0.0  # samples a second and rank, against those of the smallest world that fits
    refused: str = ""  # why there is no plan; all numbers are 0 then


def plan_on(model: ModelProfile, machine: MachineProfile, use: TrainingOptions) -> Plan:
    """The plan with the shortest step; PrepareError says what is missing if nothing fits."""
    options = [
        StepLayout(samples, passes, stage)
        for samples, passes in _divided(model, use)
        for stage in stages_of(use.stage, use.world_size)
    ]
    fits, refused = try_all(options, lambda option: _fitted(_request(model, machine, use, option)), _seconds)
    best = shortest(fits)
    solution = min([best.found, *_speculating(fits, use)], key=_seconds)
    plan = plan_from(solution, homes_by_group(solution), model_state(solution))
    if use.batch is None:
        told = [*_notes(solution.request, use), *(str(one.error) for one in refused)]
    else:
        known = replace(use, accumulate=best.option.accumulate)
        told = [table(fits, refused, best.option), *_notes(solution.request, known)]
    return replace(plan, notes=(*plan.notes, *told, *if_most_are_clipped(plan, best.seconds)))


def _divided(model: ModelProfile, use: TrainingOptions) -> list[tuple[int | None, int | None]]:
    """Samples in a pass and passes in a step: as they are given, or all that are worth trying."""
    batch, samples, passes = use.batch, model.samples, use.accumulate
    if batch is None:
        return [(samples, passes)]
    if samples is None and passes is None:
        return [*divisions(batch)]
    if batch % (samples or passes or 1) or (samples and passes and samples * passes != batch):
        raise PrepareError(
            f"a batch of {batch} cannot be {samples or 'some'} samples in each of {passes or 'some'} passes: give "
            "numbers that divide it, or only the batch"
        )
    return [(samples or batch // (passes or 1), passes or batch // (samples or 1))]


def _request(model: ModelProfile, machine: MachineProfile, use: TrainingOptions, option: StepLayout) -> PlanRequest:
    model, local = replace(model, samples=option.samples), min(use.world_size, machine.ranks_per_node)
    return PlanRequest(
        model=model,
        machine=_share(machine, local),
        limits=limits_of(machine, use.world_size, use.budget, knows_activations=_knows_time(model)),
        stage=option.stage,
        world_size=use.world_size,
        accumulate=option.accumulate or 1,
        waits_for_norm=use.clips or use.scales_loss or option.accumulate is None,
        num_threads=threads_of(machine, local),
        activations=use.activations,
    )


def _knows_time(model: ModelProfile) -> bool:
    return model.samples is not None or model.forward_s is not None


def _seconds(solution: Solution) -> float:
    """Of a step; without a time, the most that a resource has to do."""
    if _knows_time(solution.request.model):
        return solution.timeline.step_s
    return max(work(solution.request, solution.costs, solution.shares).values(), default=0.0)


def _speculating(fits: Sequence[SolvedLayout[Solution]], use: TrainingOptions) -> Iterator[Solution]:
    """The best of each stage once more with speculation, where that is worth its memory."""
    if not use.clips or use.scales_loss:
        return
    for stage in {one.option.stage for one in fits}:
        best = shortest([one for one in fits if one.option.stage is stage])
        request = best.found.request
        knows = best.option.accumulate is not None and _knows_time(request.model)
        if knows and model_state(best.found)[Tier.HOST]:
            with contextlib.suppress(PrepareError):
                other = _fitted(replace(request, speculates=True))
                if other.timeline.step_s < (1.0 - WORTH_SPECULATING) * best.seconds:
                    yield other


def _fitted(request: PlanRequest) -> Solution:
    """With room for activations and for working memory, which is more if parameters come from elsewhere."""
    is_sharded = request.world_size > 1 and shards(request.stage, Kind.PARAMETERS)
    activations = 0 if request.chooses else request.model.activations()
    for gathers in (is_sharded, True):
        fixed = {Tier.DEVICE: activations + _working(request, gathers=gathers)}
        solution = solve(replace(request, fixed=fixed))
        if gathers or not any(share.parameters_host + share.parameters_disk for share in solution.shares):
            break
    return solution


def _working(request: PlanRequest, *, gathers: bool) -> int:
    """Bytes of the device beside model state and activations."""
    found, total = group_costs(request), 0.0
    if gathers:  # what is outside of the blocks, first and last, is there as long as forward lasts
        sizes = [cost.gathered for cost in found]
        ends, between = [*sizes[:1], *sizes[1:][-1:]], sizes[1:-1]
        windows = [sum(between[start : start + NUM_GATHERED]) for start in range(len(between))]
        total += sum(ends) + max(windows, default=0.0)
    if request.world_size > 1:
        largest = max((group.trained for group in request.model.groups), default=0) * request.model.gradient_bytes
        staged = NUM_STAGING * largest if shards(request.stage, Kind.GRADIENTS) else 0
        total += staged + largest / request.world_size
    if request.model.gradient_bytes < 4:
        total += 4 * max((cost.updated for cost in found), default=0.0)  # as the update reads it
    return int(total)


def _notes(request: PlanRequest, use: TrainingOptions) -> Iterator[str]:
    model, machine = request.model, request.machine
    if model.samples is None and model.forward_s is None:
        yield "The batch is not known, so time to compute is not in the plan and activations are not either."
        if use.budget.device is None:
            yield f"{FOR_ACTIVATIONS:.0%} of the device is left to activations."
    if Tier.DISK not in request.limits:
        yield "The disk is not used: it was not named, or the machine profile has none."
    if request.world_size > 1 and not machine.wires:
        yield NO_WIRES
    if use.accumulate is None and not (use.clips or use.scales_loss):
        yield "Updates wait for the end of backward: prepare is not told with accumulate= how many passes make a step."


# -- machines --


def limits_of(
    machine: MachineProfile, world_size: int, budget: Budget, *, knows_activations: bool = True
) -> dict[Tier, int]:
    """Bytes that one rank may use of each tier: its part of the budget, or of what is free less a margin."""
    if machine.disk is None and budget.disk is not None:
        raise PrepareError(
            f"a budget of {budget.disk} of the disk, but nothing is known of one: name a directory with --disk-path, "
            "or describe `disk` in the machine profile"
        )
    return limits_for(
        budget,
        machine.free,
        min(world_size, machine.ranks_per_node),
        is_host=machine.link is None,
        has_disk=machine.disk is not None,
        knows_activations=knows_activations,
    )


def _share(machine: MachineProfile, local: int) -> MachineProfile:
    """What one of several ranks of a node has where the device is the processor; a device is a rank's own, and memory
    and disk are shared out by the request."""
    if machine.link is not None:
        return machine
    matrix = {dtype: rate / local for dtype, rate in machine.matrix.items()}
    return replace(machine, matrix=matrix, resident_ns=machine.resident_ns * local)


# -- closed forms --


def state_bytes(model: ModelProfile, stage: Stage, world_size: int) -> float:
    """Model state that one rank holds: 2 bytes for a parameter, 2 for its gradient and 12 for its states in bf16."""
    found = group_costs(PlanRequest(replace(model, samples=None, forward_s=None), NOWHERE, {}, stage, world_size))
    whole = sum(cost.parameters + cost.gradients + cost.pinned_gradients for cost in found)
    return whole + model.state_bytes * sum(cost.updated for cost in found)


def sent_bytes(model: ModelProfile, stage: Stage, world_size: int, passes: int = 1) -> int:
    """What each rank sends in a step: at stage 3 every pass gathers parameters in forward and in backward, at 1 and 2
    new ones are gathered once a step, at 0 gradients are reduced to everywhere, which is a reduce and a gather."""
    gradients = model.trained * model.gradient_bytes * passes
    if stage is Stage.DATA_PARALLEL:
        gathered = gradients
    elif shards(stage, Kind.PARAMETERS):
        gathered = 2 * passes * model.numel * model.parameter_bytes
    else:
        gathered = model.trained * model.parameter_bytes
    return (gathered + gradients) * (world_size - 1) // world_size


# -- many worlds --


def scaling(
    model: ModelProfile,
    machine: MachineProfile,
    worlds: Sequence[int],
    *,
    use: TrainingOptions | None = None,
    samples_per_step: int | None = None,
) -> list[ScalingRow]:
    """A row for each world size, smallest first.

    Args:
        model: With `samples`, those of one pass on one rank, or with times.
        machine: That of every rank.
        worlds: Numbers of ranks.
        use: As in `plan_on`, but for its world size.
        samples_per_step: Of all ranks together: larger worlds make fewer passes. None: each rank makes the passes that
            `use` says, and a step has more samples in a larger world.
    """
    if model.samples is None:
        raise PrepareError("scaling needs to know the samples of one pass on one rank: give them with --samples")
    rows = []
    for size in sorted(set(worlds)):
        one = replace(use or TrainingOptions(), world_size=size)
        samples = size * model.samples * (one.accumulate or 1)
        if samples_per_step is not None:
            if samples_per_step < size:
                refused = f"a step of {samples_per_step} samples has none for some of {size} ranks"
                rows.append(ScalingRow(size, refused=refused))
                continue
            samples = samples_per_step
            one = replace(one, accumulate=-(-samples // (size * model.samples)))
        rows.append(_row(model, machine, one, samples))
    fits = [row for row in rows if not row.refused]
    if not fits:
        return rows
    perfect = fits[0].samples_per_s / fits[0].world_size
    return [replace(row, efficiency=row.samples_per_s / row.world_size / perfect) for row in rows]


def _row(model: ModelProfile, machine: MachineProfile, use: TrainingOptions, samples: int) -> ScalingRow:
    try:
        plan = plan_on(model, machine, use)
    except PrepareError as error:
        return ScalingRow(use.world_size, refused=str(error))
    passes, local = use.accumulate or 1, min(use.world_size, machine.ranks_per_node)
    alone = PlanRequest(
        model, replace(_share(machine, local), wires=()), plan.limits, plan.stage, use.world_size, passes
    )
    found = group_costs(replace(alone, activations=use.activations))
    again_s = sum(
        cost.activations.longer_s
        for cost in found
        if cost.activations is not None and plan.activations_of(cost.name) == "recompute"
    )
    held = {
        tier: sum(size for kind, size in kinds.items() if kind not in (Kind.ACTIVATIONS, Kind.BUFFERS))
        for tier, kinds in plan.predicted.bytes.items()
    }
    step_s = plan.predicted.step_s or 0.0
    return ScalingRow(
        use.world_size,
        plan.stage,
        {tier: size for tier, size in held.items() if size},
        sent_bytes(model, plan.stage, use.world_size, passes),
        step_s,
        passes * (sum(cost.forward_s + cost.backward_s for cost in found) + again_s),
        samples / step_s if step_s else 0.0,
    )
