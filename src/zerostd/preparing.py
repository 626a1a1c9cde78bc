"""From a module and checked options to a Runtime: decide everything, refuse what does not fit, then build.

world -> blueprints -> plans for every flat, with homes -> bytes by tier, against what is free -> arenas -> groups one
at a time -> hooks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zerostd.communication import Control, Wires, World
from zerostd.communication.world import thread_budget
from zerostd.errors import NotSupportedError, PrepareError
from zerostd.monitoring import Ledger
from zerostd.optimizers.from_disk import NUM_SLOTS as SLOTS_FROM_DISK
from zerostd.optimizers.from_disk import TILE_NUMEL as TILE_FROM_DISK
from zerostd.parameters import GroupState
from zerostd.parameters.blueprints import Blueprint, Member, blueprints, describe_groups
from zerostd.parameters.building import Ground, make_group
from zerostd.parameters.checking import describe_model, optimizer_options
from zerostd.parameters.deferred import draw_seeds, is_deferred, make_real
from zerostd.parameters.homes import FlatPlan, Rules, demand, plan_flats
from zerostd.parameters.hosting import Staging
from zerostd.policy import Budget, Kind, Placement, Precision, Stage, Tier, parse_bytes
from zerostd.runtime import Roads, Runtime
from zerostd.sharding import default_cpu_share
from zerostd.tiers import Inbound, Lanes, Stores
from zerostd.tiers.disk import Disk
from zerostd.tiers.host import Host
from zerostd.tiers.inbound import NUM_BUFFERS as INBOUND_BUFFERS
from zerostd.tiers.limits import check_disk, check_host

__all__ = ["Settings", "build", "check_placement", "device_of"]

NUM_BUSY_THREADS = 2  # cores left to the loop and the autograd engine while the processor updates beside them


@dataclass(frozen=True)
class Settings:
    """What prepare was told, checked."""

    stage: Stage
    precision: Precision
    placement: Placement
    budget: Budget
    accumulate: int | None
    max_grad_norm: float | None
    globs: Sequence[str] | None
    states: Mapping[str, torch.dtype] = field(default_factory=dict)  # long states of the optimizer, by name

    def describe(self) -> list[str]:
        """What must be the same on all ranks."""
        return [
            f"stage {self.stage.value}",
            f"precision {self.precision.name}",
            f"placement {self.placement}",
            f"accumulate {self.accumulate}",
            f"max_grad_norm {self.max_grad_norm}",
        ]


def check_placement(settings: Settings, *, has_optimizer: bool) -> None:
    """Refuse what cannot be honoured, before anything is looked at."""
    placement = settings.placement
    if set(placement.shares(Kind.ACTIVATIONS)) != {Tier.DEVICE}:
        raise NotSupportedError(
            f"Placement(activations={placement.activations!r}): only 'device' is supported yet; recompute them with "
            "torch.utils.checkpoint instead"
        )
    if Tier.DISK in placement.shares(Kind.GRADIENTS):
        raise NotSupportedError(
            f"Placement(gradients={placement.gradients!r}): gradients are written and read once a step, and rest on "
            "the device or the host; use 'host'"
        )
    if not has_optimizer and set(placement.shares(Kind.OPTIMIZER_STATES)) != {Tier.DEVICE}:
        raise PrepareError(
            f"Placement(optimizer_states={placement.optimizer_states!r}) needs the optimizer, to know what it keeps: "
            "pass it to prepare"
        )
    if placement.speculate and (settings.accumulate is None or settings.max_grad_norm is None):
        raise PrepareError(
            "Placement(speculate=True) updates before the norm is known, inside the last backward of a step: it needs "
            f"max_grad_norm= (now {settings.max_grad_norm}) and accumulate= (now {settings.accumulate}) in prepare"
        )
    if placement.speculate and settings.precision.scales_loss:
        raise PrepareError("Placement(speculate=True) does not go with precision='fp16', whose steps may be skipped")
    if placement.speculate and set(placement.shares(Kind.PARAMETERS)) != {Tier.DEVICE}:
        raise NotSupportedError("Placement(speculate=True) needs parameters='device'")
    _check_budget(settings.budget)


def _check_budget(budget: Budget) -> None:
    for tier, size in (("device", budget.device), ("host", budget.host), ("disk", budget.disk)):
        if size is None:
            continue
        wanted = parse_bytes(size)
        if tier == "host":
            check_host(wanted, f"Budget(host={size!r})")
        elif tier == "disk" and budget.disk_path is not None:
            check_disk(wanted, budget.disk_path)


def _check_world(settings: Settings, world: World) -> None:
    """Refuse homes that need sharding where there is none."""
    for kind, least in ((Kind.PARAMETERS, Stage.PARAMETERS), (Kind.GRADIENTS, Stage.GRADIENTS)):
        if world.size > 1 and settings.stage < least and set(settings.placement.shares(kind)) != {Tier.DEVICE}:
            share = getattr(settings.placement, kind.value)
            raise PrepareError(
                f"Placement({kind.value}={share!r}) with stage={settings.stage.value} on {world.size} ranks: what "
                f"rests off the device is this rank's shard, so use stage={least.value} or more"
            )


def _rules(settings: Settings, world: World) -> Rules:
    has_own_memory = world.device.type != "cpu"
    share = settings.placement.cpu_share
    if Tier.DISK in settings.placement.shares(Kind.PARAMETERS):
        share = 1.0  # new parameters go to the disk from the host
    if share is None:
        kinds = (Kind.PARAMETERS, Kind.GRADIENTS)
        off = {kind: 1.0 - settings.placement.shares(kind).get(Tier.DEVICE, 0.0) for kind in kinds}
        share = default_cpu_share(
            _num_threads(world),
            has_link=has_own_memory,
            parameters_off=off[Kind.PARAMETERS],
            gradients_off=off[Kind.GRADIENTS],
        )
    return Rules(
        rank=world.rank,
        size=world.size,
        stage=settings.stage,
        placement=settings.placement,
        cpu_share=share,
        reduce_dtype=settings.precision.reduce,
        states=settings.states,
        has_own_memory=has_own_memory,
        sums_gradients=settings.accumulate is not None and settings.accumulate > 1,
    )


def _num_threads(world: World) -> int:
    """For updates on the processor."""
    budget = thread_budget(world.local_size)
    return budget if world.device.type == "cpu" else max(1, budget - NUM_BUSY_THREADS)


def build(model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings, lines: list[str]) -> Runtime:
    """Everything but the optimizer. `lines` is what must be equal on all ranks beside the settings."""
    options = optimizer_options(model, optimizer)
    found = blueprints(model, options, settings.precision, settings.globs)
    device = device_of(model)
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" and not is_deferred(parameter):
            make_real(name, parameter, seed=0, device=device)  # raises: nobody knows its values
    world = World.discover(device)
    control = Control(world)
    try:
        lines = [*settings.describe(), *lines, *describe_model(model, options), *describe_groups(found)]
        control.check_equal("models or options", lines)
        _check_world(settings, world)
        rules = _rules(settings, world)
        plans = plan_flats(found, rules)
        need = demand(plans, rules)
        need[Tier.HOST, Kind.BUFFERS] += _buffers(plans, rules)
        ledger = Ledger()
        stores = _make_stores(need, settings.budget, world, ledger)
    except BaseException:
        world.close()
        raise
    ground = Ground(rules, device, ledger, stores, Lanes.make(device), Staging())
    return _build(model, settings, found, plans, ground, control)


def _buffers(plans: list[list[FlatPlan]], rules: Rules) -> int:
    """Bytes of host memory that what rests on disk passes through."""
    flats = [plan for group in plans for plan in group]
    longest = max((p.numel for plan in flats for p in plan.portions if p.tier is Tier.DISK), default=0)
    widths = [4, *(dtype.itemsize for dtype in rules.states.values())]
    slots = SLOTS_FROM_DISK * min(TILE_FROM_DISK, longest) * sum(widths)
    return slots + INBOUND_BUFFERS * _largest_on_disk(plans, rules)


def _largest_on_disk(plans: list[list[FlatPlan]], rules: Rules) -> int:
    on_disk = [plan for group in plans for plan in group if plan.parameters is Tier.DISK]
    return max((plan.rest_numel(rules) * plan.dtype.itemsize for plan in on_disk), default=0)


def _make_stores(need: Counter[tuple[Tier, Kind]], budget: Budget, world: World, ledger: Ledger) -> Stores:
    """Check the bytes against what is free and what the budget allows, then take them."""
    totals = Counter[Tier]()
    for (tier, _), num_bytes in need.items():
        totals[tier] += num_bytes
    if budget.device is not None and totals[Tier.DEVICE] > parse_bytes(budget.device):
        raise PrepareError(
            f"the model state needs {totals[Tier.DEVICE] / 2**30:.3f} GiB on the device ({_parts(need, Tier.DEVICE)}; "
            f"gathered groups and activations come on top), and Budget(device={budget.device!r}) allows less: place "
            "more of it with Placement(optimizer_states='host')"
        )
    on_host, on_disk = totals[Tier.HOST] * world.local_size, totals[Tier.DISK] * world.local_size
    limit = None if budget.host is None else parse_bytes(budget.host)
    if on_host:
        what = f"the host share of {world.local_size} rank(s) on this machine ({_parts(need, Tier.HOST)} each)"
        check_host(on_host, what, limit)
    host = Host(world.device, ledger, _num_threads(world))
    disk = None
    if on_disk:
        limit = None if budget.disk is None else parse_bytes(budget.disk)
        disk = Disk(budget.disk_path, ledger, limit=limit)
    stores = Stores(world.device, host, disk, ledger)
    try:
        if disk is not None:
            check_disk(on_disk, disk.path, limit)
        for (tier, kind), num_bytes in need.items():
            if tier is not Tier.DEVICE and kind in (Kind.OPTIMIZER_STATES, Kind.PARAMETERS):
                stores.reserve(tier, kind, num_bytes)
    except BaseException:
        stores.close()
        raise
    return stores


def _parts(need: Counter[tuple[Tier, Kind]], tier: Tier) -> str:
    return ", ".join(f"{kind.value} {size / 2**30:.3f} GiB" for (where, kind), size in need.items() if where is tier)


def _build(
    model: nn.Module,
    settings: Settings,
    found: list[Blueprint],
    plans: list[list[FlatPlan]],
    ground: Ground,
    control: Control,
) -> Runtime:
    world, device, ledger = control.world, ground.device, ground.ledger
    wires = Wires(world, ledger)
    dtypes = {p: p.dtype for p in model.parameters()}
    seed = control.collect(torch.initial_seed())[0]
    seeds = draw_seeds(model.named_parameters(), seed=seed)

    def value_of(member: Member) -> torch.Tensor:
        """First values: rank 0's, or made here from a seed that is the same everywhere."""
        if member.parameter.device.type == "meta":
            return make_real(member.name, member.parameter, seed=seeds[member.name], device=device)
        value = member.parameter.data.to(device)
        wires.broadcast([value])
        return value

    groups = []
    for index, (blueprint, flats) in enumerate(zip(found, plans, strict=True)):
        group = make_group(blueprint, index, flats, ground, value_of)
        groups.append(group)
        if group.gives_back:
            for flat in group.flats:
                flat.hide()
            group.state = GroupState.RELEASED
    inbound = Inbound(ground.stores, ground.lanes, largest_on_disk=_largest_on_disk(plans, ground.rules))
    roads = Roads(ground.stores, ground.lanes, inbound, _num_threads(world))
    runtime = Runtime(model, groups, wires, control, roads, precision=settings.precision, original_dtypes=dtypes)
    runtime.backward.passes.wanted = settings.accumulate
    _place_buffers(model, device, seed)
    runtime.install(_casts(dtypes, settings.precision))
    return runtime


def device_of(model: nn.Module) -> torch.device:
    """Where the model lies; one built under empty_init goes to the accelerator, if there is one."""
    real = {p.device for p in model.parameters() if p.device.type != "meta"}
    is_deferred_model = any(p.device.type == "meta" for p in model.parameters())
    if is_deferred_model and all(device.type == "cpu" for device in real):
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    else:
        device = real.pop()
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device


def _place_buffers(model: nn.Module, device: torch.device, seed: int) -> None:
    """Buffers that empty_init left on the host, or without memory, come to the device."""
    for name, module in model.named_modules():
        for short, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[short] = make_real(f"{name}.{short}", buffer, seed=seed, device=device)
            elif buffer is not None and buffer.device != device:
                module._buffers[short] = buffer.to(device)


def _casts(dtypes: dict[nn.Parameter, torch.dtype], precision: Precision) -> tuple[torch.dtype, torch.dtype] | None:
    """The root takes and returns the dtype its parameters had; inside it computes in another."""
    outside = {dtype for dtype in dtypes.values() if dtype.is_floating_point}
    if precision.compute is None or outside == {precision.compute} or len(outside) != 1:
        return None
    return outside.pop(), precision.compute
