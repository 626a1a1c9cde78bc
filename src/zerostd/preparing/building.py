"""From a module and checked options to a Runtime: decide everything, refuse what does not fit, then build.

world -> blueprints -> plans for every flat, with homes -> bytes by tier, against what is free -> arenas -> groups one
at a time -> hooks
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from zerostd.communication import Control, Wires, World
from zerostd.communication.wires import wires_to_peers
from zerostd.engine.resources import Resources
from zerostd.engine.runtime import Runtime
from zerostd.engine.settings import Settings
from zerostd.errors import PrepareError
from zerostd.measuring.identity import device_of
from zerostd.monitoring import Ledger
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.states import put_states
from zerostd.optimizers.updater import OffloadUpdater, Updater
from zerostd.parameters import Group
from zerostd.parameters.blueprints import ROOT, Blueprint, Member, describe, find_blueprints
from zerostd.parameters.deferred import draw_seeds, make_real
from zerostd.parameters.host_gradient import Staging
from zerostd.parameters.replaying import is_deferred
from zerostd.policy import Budget, Kind, Tier, parse_bytes
from zerostd.preparing.accounting import host_buffers, largest_on_disk
from zerostd.preparing.groups import make_group
from zerostd.preparing.homes import FlatPlan, demand, plan_flats
from zerostd.preparing.options import check_world, num_threads, rules_for, ways_for
from zerostd.preparing.proposing import decide, homes_of
from zerostd.scheduling.activations import Activations
from zerostd.scheduling.gathering import Gatherer
from zerostd.scheduling.offloading import ActivationOffloader
from zerostd.scheduling.saved_storage import ActivationCopies
from zerostd.tiers import Streams, TierAllocator, Uploader
from zerostd.tiers.disk import Disk
from zerostd.tiers.host import Host
from zerostd.tiers.limits import check_disk, check_host


def build(model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings) -> Runtime:
    """Build everything but the optimizer, which `attach_optimizer` adds."""
    blueprints = find_blueprints(model, optimizer, settings.precision, settings.globs)
    device = device_of(model)
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" and not is_deferred(parameter):
            make_real(name, parameter, seed=0, device=device)  # raises: nobody knows its values
    world = World.discover(device)
    control = Control(world)
    try:
        lines = [*settings.describe(), *describe(model, optimizer, blueprints)]
        control.check_equal("models or options", lines)
        settings = decide(settings, blueprints, control, has_optimizer=optimizer is not None)
        check_world(settings, world)
        rules = rules_for(settings, world, homes_of(settings.plan, blueprints))
        plans = plan_flats(blueprints, rules)
        ways = ways_for(settings, [blueprint.name for blueprint in blueprints if blueprint.name != ROOT])
        need = demand(plans)
        need[Tier.HOST, Kind.BUFFERS] += host_buffers(plans, rules)
        ledger = Ledger()
        peers = wires_to_peers(settings.decided[1].same_activations, world, ledger)
        has_more = any(way.tier is Tier.DISK for way in ways.values())
        allocator = _make_allocator(need, settings.budget, world, ledger, needs_disk=has_more)
        _reserve(allocator, plans)
    except BaseException:
        world.close()
        raise
    streams = Streams(device)
    uploader = Uploader(allocator, streams, largest_on_disk=largest_on_disk(plans))
    resources = Resources(allocator, streams, uploader, Staging(), num_threads(world))
    wires = Wires(world, ledger)
    original_dtypes = {parameter: parameter.dtype for parameter in model.parameters()}
    groups = _make_groups(model, blueprints, plans, resources, control, wires)
    gatherer = Gatherer(groups, wires, control)
    copies = ActivationCopies(allocator, streams, _left_of(need, settings.budget, world))
    activations = Activations(model, gatherer, ways, ActivationOffloader(copies, peers))
    runtime = Runtime(model, gatherer, activations, resources, settings=settings, original_dtypes=original_dtypes)
    runtime.install()
    return runtime


def _make_allocator(
    need: Counter[tuple[Tier, Kind]], budget: Budget, world: World, ledger: Ledger, *, needs_disk: bool
) -> TierAllocator:
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
    on_host = totals[Tier.HOST] * world.local_size
    on_disk = totals[Tier.DISK] * world.local_size
    limit = None if budget.host is None else parse_bytes(budget.host)
    if on_host:
        what = f"the host share of {world.local_size} rank(s) on this machine ({_parts(need, Tier.HOST)} each)"
        check_host(on_host, what, limit)
    host = Host(world.device, ledger, num_threads(world))
    disk = None
    if on_disk or needs_disk:
        limit = None if budget.disk is None else parse_bytes(budget.disk)
        disk = open_disk(budget, ledger)
    allocator = TierAllocator(world.device, host, disk, ledger)
    if disk is not None:
        try:
            check_disk(on_disk, disk.path, limit)
        except BaseException:
            allocator.close()
            raise
    return allocator


def _left_of(need: Counter[tuple[Tier, Kind]], budget: Budget, world: World) -> dict[Tier, int | None]:
    """Bytes that a budget leaves to the activations of this rank; None: as many as there are. A disk knows its own."""
    if budget.host is None:
        return {Tier.HOST: None, Tier.DISK: None}
    taken = sum(num_bytes for (tier, _), num_bytes in need.items() if tier is Tier.HOST)
    return {Tier.HOST: max(0, parse_bytes(budget.host) // world.local_size - taken), Tier.DISK: None}


def _reserve(allocator: TierAllocator, plans: list[list[FlatPlan]]) -> None:
    """Take the arenas of all flats, before the first one is built."""
    try:
        for plan in (plan for group in plans for plan in group):
            for (tier, kind), num_bytes in plan.demand().items():
                if kind in (Kind.OPTIMIZER_STATES, Kind.PARAMETERS):
                    allocator.reserve(plan.owner, tier, kind, num_bytes)
    except BaseException:
        allocator.close()
        raise


def _parts(need: Counter[tuple[Tier, Kind]], tier: Tier) -> str:
    return ", ".join(f"{kind.value} {size / 2**30:.3f} GiB" for (where, kind), size in need.items() if where is tier)


def _make_groups(
    model: nn.Module,
    blueprints: list[Blueprint],
    plans: list[list[FlatPlan]],
    resources: Resources,
    control: Control,
    wires: Wires,
) -> tuple[Group, ...]:
    """One group at a time, with rank 0's values or values made here from a seed that is the same everywhere."""
    device = control.world.device
    seed = control.collect(torch.initial_seed())[0]
    seeds = draw_seeds(model.named_parameters(), seed=seed)

    def value_of(member: Member) -> torch.Tensor:
        if member.parameter.device.type == "meta":
            return make_real(member.name, member.parameter, seed=seeds[member.name], device=device)
        value = member.parameter.data.to(device)
        wires.broadcast([value])
        return value

    groups = []
    for index, (blueprint, flats) in enumerate(zip(blueprints, plans, strict=True)):
        group = make_group(blueprint, index, flats, resources, wires, value_of)
        groups.append(group)
    _place_buffers(model, device, seed)
    return tuple(groups)


def _place_buffers(model: nn.Module, device: torch.device, seed: int) -> None:
    """Buffers that empty_init left on the host, or without memory, come to the device."""
    for name, module in model.named_modules():
        for short, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[short] = make_real(f"{name}.{short}", buffer, seed=seed, device=device)
            elif buffer is not None and buffer.device != device:
                module._buffers[short] = buffer.to(device)


def attach_optimizer(runtime: Runtime, inner: torch.optim.Optimizer) -> ZeroOptimizer:
    """Return the optimizer that updates the runtime's groups as `inner` would; states that it has are taken over."""
    settings = runtime.settings
    earlier: dict[Any, dict[str, Any]] = {parameter: dict(states) for parameter, states in inner.state.items()}
    inner.state.clear()
    offload = make_offload_updater(runtime, inner)
    updater = Updater(inner, runtime.groups, runtime.world.device, runtime.ledger, offload, settings.states)
    if earlier:
        put_states(updater, earlier)
    optimizer = ZeroOptimizer(updater, runtime.gradients, runtime, max_grad_norm=settings.max_grad_norm)
    runtime.optimizer = optimizer
    begin_backward_updates(runtime, optimizer)
    return optimizer


def make_offload_updater(runtime: Runtime, inner: torch.optim.Optimizer) -> OffloadUpdater | None:
    """Return what updates states off the device; None if there are none there."""
    if not any(group.is_updated_later for group in runtime.groups):
        return None
    resources = runtime.resources
    return OffloadUpdater(
        inner, runtime.groups, resources.allocator, resources.streams, num_threads=resources.num_threads
    )


def begin_backward_updates(runtime: Runtime, optimizer: ZeroOptimizer) -> None:
    """Let updates begin inside backward, where the settings allow it."""
    _, placement = runtime.settings.decided
    knows_last_pass = runtime.settings.accumulate is not None
    runtime.backward.group_updates = optimizer.begin_backward_updates(
        knows_last_pass=knows_last_pass, may_speculate=placement.speculate
    )


def open_disk(budget: Budget, ledger: Ledger) -> Disk:
    """The disk that a budget names."""
    return Disk(budget.disk_path, ledger, limit=None if budget.disk is None else parse_bytes(budget.disk))
