"""Models on machines that need not be here: a plan from two profiles, many world sizes side by side, and the bytes that
a rank holds and sends, by closed form. A cluster is the machine profile of one rank, with its wires.

Working memory is counted in large parts only: gathered groups and what gradients pass through. `zerostd.plan` counts a
module's to the byte.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zerostd.errors import PrepareError
from zerostd.monitoring.texts import percent_text, plain_seconds
from zerostd.planning.plan import Plan
from zerostd.planning.planner import Bytes, Counted
from zerostd.planning.pricing import if_most_are_clipped, plan_from
from zerostd.planning.profiles import RECOMPUTED, MachineProfile, ModelProfile, Processor
from zerostd.planning.request import (
    FOR_ACTIVATIONS,
    PlanRequest,
    group_costs,
    limits_for,
    stages_of,
    threads_of,
    wire_of,
)
from zerostd.planning.searching import Refusal, search, search_coded
from zerostd.planning.solution import Solution, model_state
from zerostd.policy import MOST_RANKS, Budget, Kind, Stage, Tier, shards

NUM_GATHERED = 3  # groups that are whole at once: the one at work, the next, and in backward the one before
NUM_STAGING = 2  # groups whose gradients are on their way
NUM_HELD = 4  # groups, beside the root, that have gradients at once where these are not kept
NO_WIRES = "The machine profile has no wires, so the plan leaves out the time of collectives."
NOWHERE = MachineProfile("nowhere", "none", {"any": 1.0}, 0.0, {}, Processor(1, {1: 1.0}, 1.0), None)  # counts bytes
MOST_TRIED = 8  # divisions of a batch into passes
ALMOST = 0.01  # of a step
MOST_SAMPLES = 1 << 12  # of a pass on one rank
BACKWARD = 2  # FLOPs of backward, for each of forward; what is recomputed does not count
MISSING = re.compile(r"[^:.]*(?:[.]\d[^:.]*)* is missing")  # what of a refusal goes into the table


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
    exact: bool = True  # False: optimizer states may be kept as codes

    def __post_init__(self) -> None:
        for name, value in (("world", self.world_size), ("accumulate", self.accumulate), ("batch", self.batch)):
            if value is not None and not 1 <= value <= MOST_RANKS:
                raise PrepareError(f"{name}={reprlib.repr(value)} must be a whole number from 1 to {MOST_RANKS:,}")


@dataclass(frozen=True)
class ScalingRow:
    """The bytes and seconds of one world size."""

    world_size: int
    stage: Stage | None = None
    state: Mapping[Tier, int] = field(default_factory=dict)  # bytes of model state on one rank
    sent: int = 0  # bytes that each rank sends in a step
    step_s: float = 0.0
    compute_s: float = 0.0  # of a step, if wires and offload took no time
    samples_per_s: float = 0.0  # of all ranks together
    efficiency: float = 0.0  # samples a second and rank, against those of the smallest world that fits
    samples: int = 0  # of a pass on one rank
    passes: int = 0  # of a step
    tflops: float = 0.0  # TFLOP/s of one rank, of forward and backward
    refused: str = ""  # why there is no plan; all numbers are 0 then


# -- one plan --


def plan_on(model: ModelProfile, machine: MachineProfile, use: TrainingOptions) -> Plan:
    """Return the plan with the shortest step; PrepareError says what is missing if nothing fits."""
    requests = [
        _request(replace(model, samples=samples), machine, use, passes, stage, num_replicas)
        for samples, passes in _divided(model, use)
        for stage in stages_of(use.stage, use.world_size)
        for num_replicas in _replicas_of(machine, use.world_size)
    ]
    may_speculate = use.clips and not use.scales_loss and (use.batch is not None or use.accumulate is not None)
    find = search if use.exact else search_coded
    result = find(requests, count, may_speculate=may_speculate, may_free=True)
    best = shortest(result.candidates)
    chosen = min([best, *result.speculating], key=lambda counted: counted.seconds)
    plan = plan_from(chosen)
    if use.batch is None:
        refused = [str(error) for request, error in result.refused if request.num_replicas == 1]
        notes = [*_notes(chosen.solution.request, use), *refused]
    else:
        use = replace(use, accumulate=best.solution.request.accumulate)
        notes = [table(result.candidates, result.refused, best), *_notes(chosen.solution.request, use)]
    return replace(plan, notes=(*plan.notes, *notes, *if_most_are_clipped(plan, best.seconds)))


def _replicas_of(machine: MachineProfile, world_size: int) -> list[int]:
    """Return the numbers of replicas worth trying: those whose ranks share a faster wire, and then one replica, whose
    refusal is reported."""
    wire = wire_of(machine.wires, world_size)
    faster = [
        inner.ranks
        for inner in machine.wires
        if wire is not None and 1 < inner.ranks < world_size and inner.bandwidth > wire.bandwidth
    ]
    return [*(world_size // ranks for ranks in sorted(faster) if world_size % ranks == 0), 1]


def _divided(model: ModelProfile, use: TrainingOptions) -> list[tuple[int | None, int | None]]:
    batch = use.batch
    samples = model.samples
    passes = use.accumulate
    if batch is None:
        return [(samples, passes)]
    if samples is None and passes is None:
        return [*divisions(batch)]
    if batch % (samples or passes or 1) or (samples and passes and samples * passes != batch):
        raise PrepareError(
            f"a batch of {batch} cannot be divided into {f'{passes} ' if passes else ''}passes"
            f"{f' of {samples} samples' if samples else ''}: give numbers that divide it, or only the batch"
        )
    return [(samples or batch // (passes or 1), passes or batch // (samples or 1))]


def divisions(batch: int, most: int = MOST_TRIED) -> list[tuple[int, int]]:
    """Return divisions of a batch into samples in a pass and passes: all, or a selection at equal ratios."""
    small = [size for size in range(1, math.isqrt(batch) + 1) if batch % size == 0]
    sizes = sorted({*small, *(batch // size for size in small)})
    if len(sizes) > most:
        wanted = [math.log(batch) * place / (most - 1) for place in range(most)]
        sizes = sorted({min(sizes, key=lambda size: abs(math.log(size) - power)) for power in wanted})
    return [(size, batch // size) for size in reversed(sizes)]


def shortest(counted: Sequence[Counted]) -> Counted:
    """Return the shortest; of nearly equal ones at a stage, that with more samples a pass or fewer replicas."""
    best = min(counted, key=lambda each: each.seconds)
    most_s = best.seconds * (1 + ALMOST)
    stage = best.solution.request.stage
    near = [each for each in counted if each.solution.request.stage is stage and each.seconds <= most_s]

    def rank(each: Counted) -> tuple[int, int, float]:
        request = each.solution.request
        return (request.model.samples or 0, -request.num_replicas, -each.seconds)

    return max(near, key=rank)


def table(counted: Sequence[Counted], refused: Sequence[Refusal], chosen: Counted) -> str:
    """Return the divisions of a batch that were tried, a line each, with the best stage."""
    outcomes = {}
    for request, error in refused:
        match = MISSING.search(str(error))
        outcomes[request.model.samples or 1, request.accumulate] = match.group().strip() if match else str(error)
    for each in sorted(counted, key=lambda each: each.seconds, reverse=True):
        request = each.solution.request
        outcomes[request.model.samples or 1, request.accumulate] = f"{plain_seconds(each.seconds)} a step"
    passes = chosen.solution.request.accumulate
    samples = chosen.solution.request.model.samples or 1
    lines = [f"A step of {samples * passes} samples is divided into passes of {samples}: accumulate={passes}. Tried:"]
    lines += [f"  {size} x {count}: {outcomes[size, count]}" for size, count in sorted(outcomes, reverse=True)]
    return "\n".join(lines)


def _request(
    model: ModelProfile,
    machine: MachineProfile,
    use: TrainingOptions,
    passes: int | None,
    stage: Stage,
    num_replicas: int = 1,
) -> PlanRequest:
    local = min(use.world_size, machine.ranks_per_node)
    if machine.link is None:  # the CPU is the device, and ranks of a node share it
        matrix = {dtype: rate / local for dtype, rate in machine.matrix.items()}
        machine = replace(machine, matrix=matrix, resident_ns=machine.resident_ns * local)
    return PlanRequest(
        model=model,
        machine=machine,
        limits=limits_of(machine, use.world_size, use.budget, knows_activations=model.knows_time),
        stage=stage,
        world_size=use.world_size // num_replicas,
        num_replicas=num_replicas,
        accumulate=passes or 1,
        waits_for_norm=use.clips or use.scales_loss or passes is None,
        num_threads=threads_of(machine, local),
        activations=use.activations,
    )


def count(solution: Solution) -> Bytes:
    """Return the bytes of a solution by closed form, with working memory in its large parts."""
    request = solution.request
    is_sharded = request.world_size > 1 and shards(request.stage, Kind.PARAMETERS)
    gathers = is_sharded or any(share.parameters_off for share in solution.shares)
    fixed = {Tier.DEVICE: _working(request, gathers=gathers)}
    return model_state(replace(solution, request=replace(request, fixed=fixed)))


def _working(request: PlanRequest, *, gathers: bool) -> int:
    model = request.model
    costs = group_costs(request)
    in_backward = 0.0
    received = 0.0
    if gathers:  # what is outside of the blocks, first and last, is there as long as forward lasts
        sizes = [cost.gathered for cost in costs]
        ends = [*sizes[:1], *sizes[1:][-1:]]
        between = sizes[1:-1]
        windows = [sum(between[start : start + NUM_GATHERED]) for start in range(len(between))]
        in_backward += sum(ends) + max(windows, default=0.0)
    if request.world_size > 1:
        largest = max((group.trained for group in model.groups), default=0) * model.gradient_bytes
        in_backward += NUM_STAGING * largest if shards(request.stage, Kind.GRADIENTS) else 0
        received = largest / request.world_size
    # As the update reads gradients, and joined masters. Coded states have a kernel that needs neither.
    per_element = (4 if model.gradient_bytes < 4 else 0) + (4 if model.shared_bytes else 0)
    per_element *= not model.is_coded
    in_step = per_element * max((cost.updated for cost in costs), default=0.0)
    if request.keeps_gradients:
        return int(received + max(in_backward, in_step))
    root, *others = [cost.updated * model.gradient_bytes for cost in costs]
    held = root + sum(sorted(others, reverse=True)[:NUM_HELD])
    return int(received + in_backward + in_step + held)


def _notes(request: PlanRequest, use: TrainingOptions) -> Iterator[str]:
    if not request.model.knows_time:
        yield "The batch is not known, so the plan leaves out the time to compute and activations."
        if use.budget.device is None:
            yield f"{percent_text(FOR_ACTIVATIONS)} of the device is left for activations."
    if request.num_replicas > 1:
        shape = (request.num_replicas, request.world_size)
        yield (
            f"Every {request.world_size} neighbours share one replica of the model state, as the wire between them is "
            f"faster: prepare(mesh=init_device_mesh({request.machine.device!r}, {shape}))."
        )
    if Tier.DISK not in request.limits:
        yield "The disk is not used: no directory was given, or the machine profile has no disk."
    if request.world_size > 1 and not request.machine.wires:
        yield NO_WIRES
    if use.accumulate is None and not (use.clips or use.scales_loss):
        yield "Updates start after backward, because accumulate= does not say how many passes make a step."


# -- machines --


def limits_of(
    machine: MachineProfile, world_size: int, budget: Budget, *, knows_activations: bool = True
) -> dict[Tier, int]:
    """Return the bytes that one rank may use of each tier."""
    if machine.disk is None and budget.disk is not None:
        raise PrepareError(
            f"the budget has {budget.disk} of disk, but no disk is known: name a directory with --disk-path, "
            "or describe `disk` in the machine profile"
        )
    return limits_for(
        budget,
        machine.free,
        min(world_size, machine.ranks_per_node),
        is_host=machine.link is None,
        has_disk=machine.disk is not None,
        for_activations=0.0 if knows_activations else FOR_ACTIVATIONS,
    )


# -- closed forms --


def state_bytes(model: ModelProfile, stage: Stage, world_size: int) -> float:
    """Return the bytes of model state that one rank holds."""
    costs = group_costs(PlanRequest(replace(model, samples=None, forward_s=None), NOWHERE, {}, stage, world_size))
    whole = sum(cost.parameters + cost.gradients + cost.pinned_gradients for cost in costs)
    return whole + (model.state_bytes - model.shared_bytes) * sum(cost.updated for cost in costs)


def sent_bytes(model: ModelProfile, stage: Stage, world_size: int, passes: int = 1, num_replicas: int = 1) -> int:
    """Return the bytes that each rank sends in a step. Stage 3 gathers parameters twice in each pass; stages 1 and 2
    gather new ones once in a step; stage 0 reduces gradients to all ranks, a reduce and a gather. `world_size` ranks
    share a replica of the model state; slices of gradients are averaged over replicas."""
    gradients = model.trained * model.gradient_bytes * passes
    if stage is Stage.DATA_PARALLEL:
        gathered = gradients
    elif shards(stage, Kind.PARAMETERS):
        gathered = 2 * passes * model.numel * model.parameter_bytes
    else:
        gathered = model.trained * model.parameter_bytes
    across = 2 * gradients // world_size * (num_replicas - 1) // num_replicas
    return (gathered + gradients) * (world_size - 1) // world_size + across


# -- many worlds --


def scaling(
    model: ModelProfile,
    machine: MachineProfile,
    worlds: Sequence[int],
    *,
    use: TrainingOptions | None = None,
    samples_per_step: int | None = None,
) -> list[ScalingRow]:
    """Return a row for each number of ranks in `worlds`, smallest first, for `use` but its world size.

    With `samples_per_step`, of all ranks together, larger worlds make fewer passes. Without, each rank makes the passes
    that `use` says, and a step has more samples in a larger world. Where the model does not say the samples of a pass,
    each world gets those with the most samples a second: what a larger one has free of its devices is used.
    """
    if model.samples is None and not any(group.forward_flops for group in model.groups):
        raise PrepareError(
            "scaling needs the samples of one pass and their cost: let the function return (model, optimizer, batch)"
        )
    rows = []
    for size in sorted(set(worlds)):
        of_world = replace(use or TrainingOptions(), world_size=size)
        if samples_per_step is not None and samples_per_step < size:
            refused = f"a step of {samples_per_step} samples is too small for {size} ranks"
            rows.append(ScalingRow(size, refused=refused))
        else:
            rows.append(_best_row(model, machine, of_world, samples_per_step))
    perfect = next((row.samples_per_s / row.world_size for row in rows if not row.refused), 1.0)
    return [replace(row, efficiency=row.samples_per_s / row.world_size / perfect) for row in rows]


def _best_row(
    model: ModelProfile, machine: MachineProfile, use: TrainingOptions, samples_per_step: int | None
) -> ScalingRow:
    """Return the row of one world, with the pass size of the highest throughput."""
    tried: dict[int, ScalingRow] = {}

    def rate(samples: int) -> float:
        if samples not in tried:
            of_step = use.world_size * samples * (use.accumulate or 1)
            of_world = use
            if samples_per_step is not None:
                of_step = samples_per_step
                of_world = replace(use, accumulate=-(-of_step // (use.world_size * samples)))
            tried[samples] = _row(replace(model, samples=samples), machine, of_world, of_step)
        return tried[samples].samples_per_s

    if model.samples is not None:
        rate(model.samples)
    elif samples_per_step is not None:
        for samples, _ in divisions(samples_per_step // use.world_size):
            rate(samples)
    else:
        low = 1
        while rate(low) and low < MOST_SAMPLES and rate(2 * low) > rate(low):
            low *= 2
        high = 2 * low
        while high - low > max(1, low // 8):
            middle = (low + high) // 2
            low, high = (middle, high) if rate(middle) > rate(low) else (low, middle)
    best = max(tried, key=rate)
    return tried[best]


def _row(model: ModelProfile, machine: MachineProfile, use: TrainingOptions, samples: int) -> ScalingRow:
    try:
        plan = plan_on(model, machine, use)
    except PrepareError as error:
        return ScalingRow(use.world_size, refused=str(error))
    passes = use.accumulate or 1
    costs = group_costs(_request(model, replace(machine, wires=()), use, passes, plan.stage))
    recomputed = [cost.activations for cost in costs if plan.activations_of(cost.name) in RECOMPUTED]
    longer_s = sum(activations.longer_s for activations in recomputed)
    held = {
        tier: sum(size for kind, size in kinds.items() if kind not in (Kind.ACTIVATIONS, Kind.BUFFERS))
        for tier, kinds in plan.predicted.bytes.items()
    }
    step_s = plan.predicted.step_s or 0.0
    flops = (1 + BACKWARD) * sum(group.forward_flops for group in model.groups)
    return ScalingRow(
        use.world_size,
        plan.stage,
        {tier: size for tier, size in held.items() if size},
        sent_bytes(model, plan.stage, plan.world_size, passes, use.world_size // plan.world_size),
        step_s,
        passes * (sum(cost.forward_s + cost.backward_s for cost in costs) + longer_s),
        samples / step_s if step_s else 0.0,
        samples=model.samples or 0,
        passes=passes,
        tflops=flops * samples / use.world_size / step_s / 1e12 if step_s else 0.0,
    )
