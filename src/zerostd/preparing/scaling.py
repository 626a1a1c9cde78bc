"""Models that are only numbers, on machines that need not be here: planned as modules are, by blueprints without
modules, and for many world sizes side by side. `zerostd plan --params`, `--config` and `--scaling` call it. A cluster
is the machine profile of one rank, with its wires.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from zerostd.communication import World
from zerostd.engine.settings import Settings
from zerostd.errors import PrepareError
from zerostd.measuring.model import ASSUMED_STATES, blueprints_of, untried_profile
from zerostd.parameters.blueprints import Blueprint
from zerostd.planning import MachineProfile, ModelProfile, Plan
from zerostd.planning.profiles import WAYS
from zerostd.planning.request import replicas_of, shared, stages_of
from zerostd.planning.searching import divide, divisions, table
from zerostd.policy import MOST_RANKS, Kind, Placement, Precision, Stage, Tier, shards
from zerostd.preparing.budgets import FOR_ACTIVATIONS, find_limits
from zerostd.preparing.proposing import PlanSearch, predict_bytes

MOST_SAMPLES = 1 << 12  # of a pass on one rank
BACKWARD = 2  # FLOPs of backward, for each of forward; what is recomputed does not count
WORKING = (Kind.ACTIVATIONS, Kind.BUFFERS)  # kinds that are not model state


def plan_numbers(
    model: ModelProfile,
    machine: MachineProfile,
    settings: Settings,
    world_size: int = 1,
    *,
    batch: int | None = None,
    ways: frozenset[str] = frozenset(WAYS),
) -> Plan:
    """Return the plan with the shortest step; PrepareError says what is missing if nothing fits.

    `batch` is the number of samples in a step on one rank: how they are divided into passes is searched. Stages are
    too, and replicas of the model state whose ranks share a faster wire.
    """
    for name, value in (("world", world_size), ("accumulate", settings.accumulate), ("batch", batch)):
        if value is not None and not 1 <= value <= MOST_RANKS:
            raise PrepareError(f"{name}={reprlib.repr(value)} must be a whole number from 1 to {MOST_RANKS:,}")
    divided = divide(batch, model.samples, settings.accumulate)
    settings = _on(machine, settings)
    settings = replace(settings, accumulate=1 if batch and settings.accumulate is None else settings.accumulate)
    device = torch.device("cpu" if machine.link is None else "cuda")
    world = World.pretend(device, world_size, machine.ranks_per_node)
    blueprints = blueprints_of(model, settings.precision)
    model = _in_precision(model, blueprints, settings.precision)
    left = 0.0 if model.knows_time or batch else FOR_ACTIVATIONS
    limits = find_limits(settings.budget, world, 0, machine.free, left=left)
    search = PlanSearch(settings, blueprints, world, ways)
    result = search.search(
        [
            replace(
                search.request(limits, replace(model, samples=samples), shared(machine, world.local_size), stage),
                accumulate=passes,
            ).on_replicas(num_replicas)
            for samples, passes in divided
            for stage in stages_of(settings.stage, world_size)
            for num_replicas in replicas_of(machine, world_size)
        ]
    )
    refused = [str(error) for request, error in result.refused if request.num_replicas == 1]
    return search.plan_from(result, refused if batch is None else [table(result)])


def _on(machine: MachineProfile, settings: Settings) -> Settings:
    """Return the settings with the states of AdamW, and with the machine's disk."""
    budget = settings.budget
    if machine.disk is not None:
        budget = replace(budget, disk_path=machine.disk.path)
    elif budget.disk is not None:
        raise PrepareError(
            f"the budget has {budget.disk} of disk, but no disk is known: name a directory with --disk-path, "
            "or describe `disk` in the machine profile"
        )
    return replace(settings, budget=budget, states=ASSUMED_STATES)


def _in_precision(model: ModelProfile, blueprints: Sequence[Blueprint], precision: Precision) -> ModelProfile:
    return model.in_dtypes_of(untried_profile(blueprints, precision, ASSUMED_STATES))


# -- bytes --


def state_bytes(model: ModelProfile, stage: Stage, world_size: int) -> int:
    """Return the bytes of model state that one rank holds, all of it on the device."""
    settings = Settings(stage=stage, placement=Placement(), states=ASSUMED_STATES)
    world = World.pretend(torch.device("cuda"), world_size, 1)
    held = predict_bytes(settings, world, blueprints_of(model, settings.precision))
    return sum(size for kind, size in held[Tier.DEVICE].items() if kind not in WORKING)


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


def scaling(
    model: ModelProfile,
    machine: MachineProfile,
    worlds: Sequence[int],
    settings: Settings,
    *,
    ways: frozenset[str] = frozenset(WAYS),
    samples_per_step: int | None = None,
) -> list[ScalingRow]:
    """Return a row for each number of ranks in `worlds`, smallest first.

    With `samples_per_step`, of all ranks together, larger worlds make fewer passes. Without, each rank makes the passes
    that `settings` says, and a step has more samples in a larger world. Where the model does not say the samples of a
    pass, each world gets those with the most samples a second: what a larger one has free of its devices is used.
    """
    if model.samples is None and not any(group.forward_flops for group in model.groups):
        raise PrepareError(
            "scaling needs the samples of one pass and their cost: let the function return (model, optimizer, batch)"
        )

    model = _in_precision(model, blueprints_of(model, settings.precision), settings.precision)

    def row_of(world_size: int, samples: int) -> ScalingRow:
        passes = settings.accumulate
        if samples_per_step is not None:
            passes = -(-samples_per_step // (world_size * samples))
        try:
            sized = replace(model, samples=samples)
            plan = plan_numbers(sized, machine, replace(settings, accumulate=passes), world_size, ways=ways)
        except PrepareError as error:
            return ScalingRow(world_size, refused=str(error))
        of_step = samples_per_step or world_size * samples * (passes or 1)
        return _row(sized, plan, world_size, passes or 1, of_step)

    rows = []
    for size in sorted(set(worlds)):
        if samples_per_step is not None and samples_per_step < size:
            refused = f"a step of {samples_per_step} samples is too small for {size} ranks"
            rows.append(ScalingRow(size, refused=refused))
        elif model.samples is not None:
            rows.append(row_of(size, model.samples))
        else:
            rows.append(_with_the_best_pass(partial(row_of, size), samples_per_step and samples_per_step // size))
    perfect = next((row.samples_per_s / row.world_size for row in rows if not row.refused), 1.0)
    return [replace(row, efficiency=row.samples_per_s / row.world_size / perfect) for row in rows]


def _with_the_best_pass(row_of: Callable[[int], ScalingRow], batch: int | None) -> ScalingRow:
    """Return the row with the samples of a pass of the highest throughput; a step has a `batch` of them, if given."""
    row_of = cache(row_of)
    if batch is not None:
        return max((row_of(samples) for samples, _ in divisions(batch)), key=lambda row: row.samples_per_s)

    def rate(samples: int) -> float:
        return row_of(samples).samples_per_s

    low = 1
    while rate(low) and low < MOST_SAMPLES and rate(2 * low) > rate(low):
        low *= 2
    high = 2 * low
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if rate(middle) > rate(low) else (low, middle)
    return row_of(low)


def _row(model: ModelProfile, plan: Plan, world_size: int, passes: int, samples: int) -> ScalingRow:
    """Return the row of a plan for a step of this many samples."""
    held = {
        tier: sum(size for kind, size in kinds.items() if kind not in WORKING)
        for tier, kinds in plan.predicted.bytes.items()
    }
    step_s = plan.predicted.step_s or 0.0
    flops = (1 + BACKWARD) * sum(group.forward_flops for group in model.groups)
    return ScalingRow(
        world_size,
        plan.stage,
        {tier: size for tier, size in held.items() if size},
        sent_bytes(model, plan.stage, plan.world_size, passes, plan.num_replicas),
        step_s,
        plan.predicted.compute_s or 0.0,
        samples / step_s if step_s else 0.0,
        samples=model.samples or 0,
        passes=passes,
        tflops=flops * samples / world_size / step_s / 1e12 if step_s else 0.0,
    )
