"""Build a Runtime from a module and checked options: decide everything, refuse what does not fit, then allocate.

world -> blueprints -> plans for every flat, with homes -> bytes by tier, against what is free -> arenas -> groups one
at a time -> hooks
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerostd.communication import Control, NodeWires, Wires, World
from zerostd.communication.coded_wires import make_wires
from zerostd.communication.dtensors import local_values, mesh_of
from zerostd.communication.meshes import Replicas
from zerostd.communication.servers import WorkerWires
from zerostd.communication.wires import wires_to_peers
from zerostd.engine.runtime import Resources, Runtime
from zerostd.engine.settings import Settings
from zerostd.errors import PrepareError
from zerostd.measuring.identity import device_of
from zerostd.monitoring import Ledger
from zerostd.monitoring.texts import size_text
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.parameter_states import ParameterStates
from zerostd.optimizers.states import put_states
from zerostd.optimizers.updater import OffloadUpdater, Updater
from zerostd.parameters import Group
from zerostd.parameters.blueprints import ROOT, Member, describe, find_blueprints, sizes_of
from zerostd.parameters.deferred import draw_seeds, make_real
from zerostd.parameters.disk_gradient import Windows
from zerostd.parameters.host_gradient import Staging
from zerostd.parameters.prepared import separate_counters
from zerostd.parameters.replaying import is_deferred
from zerostd.planning import Plan
from zerostd.policy import Budget, Kind, Tier, limit_of, parse_bytes
from zerostd.preparing.accounting import largest_on_disk, reserved
from zerostd.preparing.announcing import advise_on_stage, warn_of_strides
from zerostd.preparing.groups import ValueOf, make_flat, make_masters
from zerostd.preparing.homes import Demand, FlatPlan, demand, plan_flats
from zerostd.preparing.options import (
    check_gradients,
    check_packing,
    check_world,
    for_role,
    num_threads,
    rules_for,
    ways_for,
)
from zerostd.preparing.proposing import decide
from zerostd.scheduling.activations import Activations
from zerostd.scheduling.gathering import Gatherer
from zerostd.scheduling.offloading import ActivationOffloader
from zerostd.scheduling.saved_storage import ActivationCopies
from zerostd.tiers import Aside, Streams, TierAllocator, Uploader
from zerostd.tiers.host import Host, check_host
from zerostd.tiers.scratch_files import check_disk


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Stop the garbage collector meanwhile: it would scan objects in use again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collecting()
def build(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings, *, has_values: bool = True
) -> Runtime:
    """Build everything but the optimizer, which `attach_optimizer` adds. Without values they are loaded afterwards."""
    device = settings.device or device_of(model)
    named = dict(model.named_parameters())
    for name, parameter in named.items() if has_values else ():
        if parameter.device.type == "meta" and not is_deferred(parameter):
            make_real(name, parameter, seed=0, device=device)  # raises: nobody knows its values
    world = _join(settings, device, named)
    control = Control(world)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(world.close)
        num_ranks = world.size // world.num_splits if world.link is None else 1  # servers have the groups of workers
        blueprints = find_blueprints(model, optimizer, settings.precision, settings.globs, num_ranks)
        everyone = control if world.link is None else Control(world.inside(world.link.group))  # servers too
        everyone.check_equal("models or options", [*settings.describe(), *describe(model, optimizer, blueprints)])
        is_asked_for = settings.stage is not None and settings.plan is None
        settings = check_gradients(decide(for_role(settings, world), blueprints, control), optimizer)
        check_world(settings, world)
        rules = rules_for(settings, world, blueprints)
        plans = plan_flats(blueprints, rules)
        check_packing(settings, plans)
        if is_asked_for:
            advise_on_stage(settings, world, blueprints, plans, rules)
        ways = ways_for(settings, [blueprint.name for blueprint in blueprints if blueprint.name != ROOT])
        need = reserved(plans)
        ledger = Ledger()
        peers = wires_to_peers(settings.decided[1].same_activations, world, ledger)
        needs_disk = any(way.tier is Tier.DISK for way in ways.values())
        allocator = _make_allocator(need, settings.budget, world, ledger, needs_disk=needs_disk)
        on_failure.callback(allocator.close)
        _reserve(allocator, plans, need, settings.budget, world)
        on_failure.pop_all()
    sums = settings.reduce == "sum"
    wires = WorkerWires(world, ledger) if world.is_worker else make_wires(settings.decided[1], world, ledger, sums=sums)
    resources = _make_resources(allocator, wires, largest_on_disk(plans))
    original_dtypes = {parameter: parameter.dtype for parameter in named.values()}
    warn_of_strides(named, world)
    seed = everyone.collect(torch.initial_seed())[0]
    separate_counters(list(named.values()))
    value_of = _first_values(named, wires, seed) if has_values else _no_values
    groups = []
    for index, (blueprint, flat_plans) in enumerate(zip(blueprints, plans, strict=True)):
        flats = [make_flat(plan, resources, value_of) for plan in flat_plans]
        groups.append(Group(blueprint, index, flats, wires, resources.uploader))
    _place_buffers(model, device, seed)
    if isinstance(wires, WorkerWires):
        flats = [flat for group in groups for flat in group.trainable]
        wires.register([(flat.full, flat.gradient.whole) for flat in flats if flat.gradient is not None])
    gatherer = Gatherer(tuple(groups), wires, control)
    left = {Tier.HOST: _left_on_host(need, settings.budget, world), Tier.DISK: None}  # a disk knows its own limit
    copies = ActivationCopies(allocator, resources.streams, left)
    is_planned = settings.plan is not None and bool(settings.plan.limits)
    activations = Activations(model, gatherer, ways, ActivationOffloader(copies, peers, may_stay=is_planned))
    activations.counter.is_on = settings.plan is not None and settings.plan.is_untried
    runtime = Runtime(model, gatherer, activations, resources, settings=settings, original_dtypes=original_dtypes)
    runtime.install()
    return runtime


def _join(settings: Settings, device: torch.device, named: Mapping[str, nn.Parameter]) -> World:
    """Return the world of the ranks that train these parameters: those of the mesh, or of a plan with replicas."""
    mesh = settings.mesh
    if mesh is None and settings.plan is not None and settings.plan.num_replicas > 1:
        mesh = Replicas(settings.plan.num_replicas)
    has_nodes = settings.placement is not None and settings.placement.secondary_shards
    return World.discover(device, mesh, mesh_of(named.values()), settings.servers or 0, has_nodes=has_nodes)


def _make_resources(allocator: TierAllocator, wires: Wires, largest: int) -> Resources:
    """Return what groups share. `largest` is the bytes of parameters on disk that come up at once."""
    world = wires.world
    node_wires = NodeWires(wires) if world.node_size > 1 else None
    streams = Streams(world.device)
    uploader = Uploader(allocator, streams, largest_on_disk=largest)
    aside = Aside(allocator, streams)
    return Resources(allocator, streams, uploader, Staging(), Windows(allocator), aside, num_threads(world), node_wires)


def _make_allocator(need: Demand, budget: Budget, world: World, ledger: Ledger, *, needs_disk: bool) -> TierAllocator:
    """Check the bytes against what is free and what the budget allows; a disk is checked when arenas are taken."""
    _check_device(need, budget)
    on_host = _total(need, Tier.HOST) * world.local_size
    if on_host:
        what = f"the host share of {world.local_size} rank(s) on this machine ({_parts(need, Tier.HOST)} each)"
        check_host(on_host, what, limit_of(budget.host))
    host = Host(world.device, ledger, num_threads(world))
    allocator = TierAllocator(world.device, host, None, ledger, budget.background)
    if needs_disk or _total(need, Tier.DISK):
        allocator.open_disk(budget, world.local_size)
    return allocator


def _check_device(need: Demand, budget: Budget) -> None:
    on_device = _total(need, Tier.DEVICE)
    if budget.device is not None and on_device > parse_bytes(budget.device):
        raise PrepareError(
            f"the model state needs {size_text(on_device)} on the device ({_parts(need, Tier.DEVICE)}; "
            f"gathered groups and activations come on top), but Budget(device={budget.device!r}) allows less: keep "
            "less on the device, as with Placement(optimizer_states='host')"
        )


def _reserve(allocator: TierAllocator, plans: list[list[FlatPlan]], need: Demand, budget: Budget, world: World) -> None:
    """Take the arenas of all flats, before the first one is built."""
    if allocator.disk is not None:
        check_disk(_total(need, Tier.DISK) * world.local_size, allocator.disk.path, limit_of(budget.disk))
    for plan in (plan for group in plans for plan in group):
        for (tier, kind), num_bytes in plan.demand().items():
            if kind in (Kind.OPTIMIZER_STATES, Kind.PARAMETERS):
                item_bytes = plan.packed_bytes if kind is Kind.PARAMETERS else 0
                allocator.reserve(plan.owner, tier, kind, num_bytes, item_bytes=item_bytes)


def _left_on_host(need: Demand, budget: Budget, world: World) -> int | None:
    """Return the bytes that a budget leaves to the activations of this rank; None: as many as there are."""
    limit = limit_of(budget.host)
    return None if limit is None else max(0, limit // world.local_size - _total(need, Tier.HOST))


def _total(need: Demand, tier: Tier) -> int:
    return sum(num_bytes for (where, _), num_bytes in need.items() if where is tier)


def _parts(need: Demand, tier: Tier) -> str:
    return ", ".join(f"{kind.value} {size_text(size)}" for (where, kind), size in need.items() if where is tier)


def _first_values(named: Mapping[str, nn.Parameter], wires: Wires, seed: int) -> ValueOf:
    """Return the source of first values: rank 0, or a seed that all ranks share."""
    device = wires.world.device
    seeds = draw_seeds(((name, p) for name, p in named.items() if p.device.type == "meta"), seed=seed)

    def value_of(member: Member) -> torch.Tensor:
        if member.parameter.device.type == "meta":
            return make_real(member.name, member.parameter, seed=seeds[member.name], device=device)
        value: torch.Tensor = local_values(member.parameter.data).to(device)
        with wires.world.at(f"the broadcast of {member.name!r}"):
            if wires.world.link is not None:
                return wires.world.link.broadcast(value)
            wires.broadcast([value])
        return value

    return value_of


def _no_values(member: Member) -> None:
    """Leave a parameter without values: they are loaded to where it is kept."""


def _place_buffers(model: nn.Module, device: torch.device, seed: int) -> None:
    """Bring buffers to the device that empty_init left on the host or without memory."""
    for name, module in model.named_modules():
        for short, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and not is_deferred(buffer):
                module._buffers[short] = torch.empty_like(buffer, device=device)  # it will be loaded
            elif buffer is not None and buffer.is_meta:
                module._buffers[short] = make_real(f"{name}.{short}", buffer, seed=seed, device=device)
            elif buffer is not None and buffer.device != device:
                module._buffers[short] = buffer.to(device)


def attach_optimizer(runtime: Runtime, inner: torch.optim.Optimizer) -> ZeroOptimizer:
    """Return the optimizer that updates the runtime's groups as `inner` would; states that it has are taken over."""
    add_masters(runtime)
    settings = runtime.settings
    earlier: dict[Any, dict[str, Any]] = {
        parameter: {name: local_values(value) for name, value in states.items()}
        for parameter, states in inner.state.items()
    }
    offload = make_offload_updater(runtime, inner)
    updater = Updater(inner, runtime.groups, runtime.world.device, runtime.ledger, offload, settings.states)
    if earlier:
        put_states(updater, earlier)
    states = ParameterStates(updater, runtime.gradients, runtime.gatherer.control)
    optimizer = ZeroOptimizer(updater, states, runtime.gradients, runtime, max_grad_norm=settings.max_grad_norm)
    runtime.optimizer = optimizer
    runtime.agreement.include(optimizer)
    begin_backward_updates(runtime, optimizer)
    return optimizer


def add_masters(runtime: Runtime, plan: Plan | None = None) -> None:
    """Give masters to trained parameters that had none while there was no optimizer, at the places that `plan` or the
    settings say. Existing masters are kept."""
    if runtime.settings.has_optimizer:
        return
    runtime.settings = replace(runtime.settings, has_optimizer=True)
    sizes = sizes_of(runtime.blueprints)
    settings = runtime.settings if plan is None else runtime.settings.obeying(plan, sizes)
    plans = plan_flats(runtime.blueprints, rules_for(settings, runtime.world, runtime.blueprints))
    if _total(demand(plans), Tier.DISK):
        runtime.resources.allocator.open_disk(settings.budget, runtime.world.local_size)
    for group, flat_plans in zip(runtime.groups, plans, strict=True):
        group.commit_edits()
        for flat, wanted in zip(group.flats, flat_plans, strict=True):
            if wanted.has_masters and not flat.state_shards:
                make_masters(flat, wanted, runtime.resources)


def make_offload_updater(runtime: Runtime, inner: torch.optim.Optimizer) -> OffloadUpdater | None:
    """Return the updater of states off the device; None if there are no such states."""
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
        knows_last_pass=knows_last_pass,
        may_speculate=placement.speculate,
        keeps_gradients=placement.keep_gradients,
    )
