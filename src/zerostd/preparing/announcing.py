"""What prepare tells the user: one line about the plan, one if a lower stage takes less memory, and warnings if an
accelerator is idle, or parameters get other strides."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from zerostd.communication import World
from zerostd.engine.settings import Settings
from zerostd.errors import PrepareError
from zerostd.monitoring.texts import percent_text, plain_seconds, size_text
from zerostd.parameters.blueprints import Blueprint
from zerostd.policy import Kind, Placement, Stage, Tier
from zerostd.preparing.accounting import predict
from zerostd.preparing.homes import FlatPlan, Rules, plan_flats
from zerostd.preparing.options import check_world, rules_for

SHOWN = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATES)

log = logging.getLogger("zerostd")


def announce(settings: Settings, world: World, blueprints: Sequence[Blueprint]) -> None:
    """Log the decisions in one line, and in another one what a mesh of several hosts would change."""
    if world.rank == 0:
        _say(summary(settings, world))
        if advice := about_hosts(settings, world, blueprints):
            _say(advice)


def about_hosts(settings: Settings, world: World, blueprints: Sequence[Blueprint]) -> str:
    """Return a hint that names the mesh with which gathers stay inside hosts, and its bytes; empty if it is no help."""
    size, rest = divmod(world.num_shards, world.num_hosts)
    is_open = settings.mesh is None and settings.has_optimizer and world.link is None and world.num_hosts > 1
    if not is_open or world.num_replicas * world.num_splits > 1 or size == 1 or rest or not settings.stage:
        return ""
    taken = []
    with contextlib.suppress(PrepareError):  # of shares that no other number of ranks can keep
        for each in (world, replace(world, num_replicas=world.num_hosts)):
            rules = rules_for(settings, each, blueprints)
            taken.append(sum(predict(plan_flats(blueprints, rules), rules)[Tier.DEVICE].values()))
    if len(taken) < 2:
        return ""
    mesh = f"init_device_mesh({world.device.type!r}, ({world.num_hosts}, {size}))"
    return (
        f"the ranks are on {world.num_hosts} hosts: with mesh={mesh} only slices of gradients would go from host to "
        f"host. Without activations, a rank would take {size_text(taken[1])} of the device instead of "
        f"{size_text(taken[0])}"
    )


def _say(line: str) -> None:
    """Log a line. Where logging was not configured, Python would drop it, so it goes to stderr;
    `logging.getLogger("zerostd").setLevel("WARNING")` silences it."""
    if log.hasHandlers() or log.level != logging.NOTSET:
        log.info("%s", line)
    else:
        print(f"zerostd: {line}", file=sys.stderr)


def summary(settings: Settings, world: World) -> str:
    """Return stage, ranks, precision, homes and, of a plan, bytes and the predicted step in one line."""
    stage, placement = settings.decided
    kinds = SHOWN if settings.has_optimizer else SHOWN[:1]
    homes: dict[str, list[str]] = {}
    for kind in kinds:
        homes.setdefault(_home(placement, kind), []).append(kind.value.replace("_", " "))
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    ranks += f" in {world.num_replicas} replicas" if world.num_replicas > 1 else ""
    dtypes = "dtypes as given" if settings.precision.compute is None else settings.precision.name
    parts = [f"stage {stage.value} on {ranks} ({world.device}), {dtypes}"]
    parts += [f"{', '.join(names)} on {home}" for home, names in homes.items()]
    plan = settings.plan
    if plan is not None:
        sizes = [f"{size_text(plan.predicted.total(tier))} {tier.value}" for tier in Tier if plan.predicted.total(tier)]
        parts += ["planned " + ", ".join(sizes)] if sizes else []
        parts += [f"a step in {plain_seconds(plan.predicted.step_s)}"] if plan.predicted.step_s else []
    return "; ".join(parts)


def advise_on_stage(
    settings: Settings, world: World, blueprints: Sequence[Blueprint], plans: Sequence[Sequence[FlatPlan]], rules: Rules
) -> None:
    """Say, on rank 0, that a lower stage takes less of the device. It does where a few layers are most of the model:
    they are gathered and reduced whole, and that takes more than sharding saves."""
    if world.rank != 0 or world.num_shards == 1 or world.link is not None:
        return
    stage, _ = settings.decided
    counted = predict(plans, rules)[Tier.DEVICE]
    buffers = counted.get(Kind.BUFFERS, 0)
    taken = {stage: sum(counted.values())}
    if 2 * buffers <= taken[stage]:
        return
    for lower in (each for each in Stage if each < stage):
        candidate = replace(settings, stage=lower, plan=None)
        with contextlib.suppress(PrepareError):  # of placements that need sharding
            check_world(candidate, world)
            rules = rules_for(candidate, world, blueprints)
            taken[lower] = sum(predict(plan_flats(blueprints, rules), rules)[Tier.DEVICE].values())
    best = min(taken, key=lambda each: taken[each])
    if best is not stage:
        _say(
            f"stage {stage.value} takes {size_text(taken[stage])} of the device on each rank, of which "
            f"{size_text(buffers)} are buffers, because a few layers hold most of the model; "
            f"stage={best.value} would take {size_text(taken[best])}"
        )


def _home(placement: Placement, kind: Kind) -> str:
    shares = placement.shares(kind)
    if len(shares) == 1:
        return f"the {next(iter(shares)).value}"
    return ", ".join(f"{tier.value} {percent_text(share)}" for tier, share in shares.items())


def warn_of_strides(named: Mapping[str, nn.Parameter], world: World) -> None:
    """Warn if parameters are not contiguous: prepared ones are, and products with other strides round differently."""
    strided = [name for name, parameter in named.items() if not parameter.is_contiguous()]
    if strided and world.rank == 0:
        log.warning(
            "%s of %s parameters, such as %r, are not contiguous, as after t() or to(memory_format=channels_last); "
            "prepared ones are, so results may round differently. Convolutions of channels_last inputs do not change",
            len(strided),
            len(named),
            strided[0],
        )


def warn_of_idle_accelerator(settings: Settings, world: World) -> None:
    """Warn if the model trains on the CPU although there is an accelerator and the CPU was not asked for."""
    is_asked_for = settings.device is not None or settings.servers is not None
    if world.device.type == "cpu" and not is_asked_for and torch.accelerator.is_available():
        name = torch.accelerator.current_accelerator()
        warnings.warn(
            f"the model is on the CPU and will train there, but this machine has an accelerator ({name}): pass "
            f"device='{name}' to prepare to use it, or device='cpu' to silence this warning",
            UserWarning,
            stacklevel=4,
        )
