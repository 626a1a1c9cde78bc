"""The options of prepare, checked, and the rules that follow from them for one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from zerostd.communication import World, coded_wires
from zerostd.communication.meshes import shape_of
from zerostd.communication.world import thread_budget
from zerostd.engine.settings import Settings
from zerostd.errors import NotSupportedError, PrepareError, check_flag, is_number, is_whole
from zerostd.kernels import MOMENT_CODECS
from zerostd.measuring.identity import choose_device, device_of, parse_device
from zerostd.optimizers.elementwise import check_elementwise, find_states, written_options
from zerostd.parameters.blueprints import Blueprint, check_model, check_optimizer
from zerostd.planning import Plan
from zerostd.planning.profiles import CODABLE, STATES, WIRES
from zerostd.planning.request import NUM_BUSY_THREADS
from zerostd.policy import LOSSLESS, Budget, Homes, Kind, Placement, Stage, Tier, Way, parse_bytes
from zerostd.preparing.homes import PACKED, FlatPlan, Rules, moments_of
from zerostd.sharding.layout import BYTES_STREAMED, UNIT, default_cpu_share
from zerostd.tiers.host import check_host
from zerostd.tiers.packing import coder
from zerostd.tiers.scratch_files import check_disk

FLOATS = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes to compute and to reduce in
CODECS = coded_wires.CODECS | {"optimizer_states": tuple(MOMENT_CODECS), "parameters": (LOSSLESS,)}  # by what is coded
LOW_BYTES = 2  # of an element's master that its parameter does not hold


def check_settings(settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Settings:
    """Refuse options that cannot be honoured, and return them with the states that the optimizer keeps."""
    if settings.plan is not None and (settings.stage is not None or settings.placement is not None):
        raise PrepareError("plan= replaces stage= and placement=: leave them out, or the plan")
    accumulate = settings.accumulate
    if accumulate is not None and not is_whole(accumulate, 1):
        raise PrepareError(f"accumulate={accumulate!r} must be a whole number of backward passes, 1 or more")
    if settings.reduce not in ("mean", "sum"):
        raise PrepareError(f"reduce={settings.reduce!r} must be 'mean' or 'sum', of gradients over ranks")
    norm = settings.max_grad_norm
    if norm is not None and not (is_number(norm) and norm > 0):
        raise PrepareError(f"max_grad_norm={norm!r} must be a positive number; leave it out to train without clipping")
    check_flag("Precision: scales_loss", settings.precision.scales_loss)
    for dtype in (settings.precision.compute, settings.precision.reduce):
        if dtype not in FLOATS:
            raise PrepareError(f"Precision: {dtype!r} must be None or a floating-point dtype of 16 bits or more")
    check_model(model)
    settings = replace(settings, has_optimizer=optimizer is not None)
    if optimizer is not None:
        check_optimizer(model, optimizer)
        check_elementwise(optimizer)
        settings = replace(settings, states=find_states(optimizer))
    elif settings.max_grad_norm is not None:
        raise PrepareError(f"max_grad_norm={settings.max_grad_norm} needs the optimizer: pass it to prepare")
    if settings.placement is not None:
        check_placement(settings, settings.placement)
    given = settings.placement or settings.plan
    if given is not None and "optimizer_states" in given.codec:
        _check_coded_states(settings, model, optimizer, given.codec["optimizer_states"])
    elif given is None and not settings.exact:
        settings = replace(settings, codable=frozenset(_may_be_coded(settings, model, optimizer)))
    if settings.servers is not None:
        _check_servers(settings, has_optimizer=optimizer is not None)
    return settings


def codable(exact: bool) -> frozenset[str]:
    """Return what may be coded, as a user says whether results must be exact."""
    check_flag("exact", exact)
    return frozenset() if exact else CODABLE


def target_device(model: nn.Module, device: torch.device | str) -> torch.device:
    """Return the device that a user named for a model; refuse one that `empty_init` did not build it for."""
    check_model(model)
    device = parse_device(device)
    if any(p.device.type == "meta" for p in model.parameters()) and device_of(model).type != device.type:
        raise PrepareError(f"device={device}: a model of empty_init goes to {device_of(model)}; leave device out")
    return choose_device(device)


def _check_servers(settings: Settings, *, has_optimizer: bool) -> None:
    """Refuse options that do not go with parameter servers."""
    servers = settings.servers
    if not is_whole(servers, 1):
        raise PrepareError(f"servers={servers!r} must be a whole number of ranks; leave it out for no servers")
    given = {"stage": settings.stage, "plan": settings.plan, "mesh": settings.mesh}
    for name, value in given.items():
        if value is not None:
            raise PrepareError(f"servers={servers} does not work with {name}=: servers hold the state; leave it out")
    if not has_optimizer:
        raise PrepareError(f"servers={servers} needs the optimizer, which the servers run: pass it to prepare")
    if settings.precision.scales_loss:
        raise NotSupportedError(f"servers={servers} does not work with precision='fp16': use 'bf16'")
    placement = settings.placement or Placement()
    for kind in (Kind.PARAMETERS, Kind.GRADIENTS):
        if set(placement.shares(kind)) != {Tier.DEVICE}:
            raise NotSupportedError(
                f"Placement({kind.value}={getattr(placement, kind.value)!r}) with servers={servers}: workers keep it "
                "on the device; place only optimizer_states and activations"
            )
    if placement.speculate:
        raise NotSupportedError(f"Placement(speculate=True) does not work with servers={servers}")


def for_role(settings: Settings, world: World) -> Settings:
    """Return the settings of a worker or of a server. Servers are ranks that shard everything and run no forward;
    workers have parameters and gradients, and one push makes a step."""
    if world.link is None:
        return settings
    given = settings.placement or Placement(optimizer_states="host")
    if world.is_worker:
        placement = Placement(activations=given.activations, same_activations=given.same_activations)
        accumulate = settings.accumulate or 1
        return replace(
            settings, stage=Stage.OPTIMIZER_STATES, placement=placement, accumulate=accumulate, max_grad_norm=None
        )
    if world.device.type != "cpu":
        raise PrepareError(
            f"rank {world.link.rank} is one of {settings.servers} servers, but its model is on {world.device}: leave "
            "the models of servers (the last ranks) on the CPU"
        )
    placement = replace(given, activations="device", same_activations=None)
    return replace(settings, stage=Stage.PARAMETERS, placement=placement, accumulate=None)


def check_placement(settings: Settings, placement: Placement) -> None:
    """Refuse placements that cannot be honoured, before looking at the model."""
    if not settings.has_optimizer and set(placement.shares(Kind.OPTIMIZER_STATES)) != {Tier.DEVICE}:
        raise PrepareError(
            f"Placement(optimizer_states={placement.optimizer_states!r}) needs the optimizer, to know its states: "
            "pass it to prepare"
        )
    if placement.speculate and (settings.accumulate is None or settings.max_grad_norm is None):
        raise PrepareError(
            "Placement(speculate=True) updates before the norm is known, inside the last backward of a step: it needs "
            f"max_grad_norm= (now {settings.max_grad_norm}) and accumulate= (now {settings.accumulate}) in prepare"
        )
    _check_codec(settings, placement)
    _check_secondary(settings, placement)
    if placement.speculate and settings.precision.scales_loss:
        raise PrepareError("Placement(speculate=True) does not work with precision='fp16', whose steps may be skipped")
    if placement.speculate and set(placement.shares(Kind.PARAMETERS)) != {Tier.DEVICE}:
        raise NotSupportedError("Placement(speculate=True) needs parameters='device'")


def _why_gradients_stay(settings: Settings, optimizer: torch.optim.Optimizer | None) -> str:
    """Return why gradients have to be kept until the step; empty if they need not be."""
    if optimizer is None:
        return "there is no optimizer yet, which would update groups inside backward: pass it to prepare"
    if settings.accumulate != 1:
        return f"accumulate={settings.accumulate}: pass accumulate=1 to prepare, and make one pass in each step"
    if settings.max_grad_norm is not None:
        return f"max_grad_norm={settings.max_grad_norm} needs all gradients before the first update: leave it out"
    if settings.precision.scales_loss:
        return "precision='fp16' may skip a step once all gradients are there: use 'bf16'"
    if settings.servers is not None:
        return f"servers={settings.servers} take gradients once a step: leave it out"
    if written := written_options(optimizer):
        return (
            f"{type(optimizer).__name__} changes {sorted(written)} in param_groups once a step: use another optimizer"
        )
    return ""


def check_gradients(settings: Settings, optimizer: torch.optim.Optimizer | None) -> Settings:
    """Return the settings; refuse to free gradients inside backward where something has to know all of them."""
    _, placement = settings.decided
    if placement.keep_gradients:
        return settings
    why = _why_gradients_stay(settings, optimizer)
    if set(placement.shares(Kind.GRADIENTS)) != {Tier.DEVICE}:
        why = f"gradients={placement.gradients!r} keeps them: leave it out"
    if placement.speculate:
        why = "speculate=True needs them once more if the step is clipped: leave it out"
    if why:
        raise PrepareError(f"keep_gradients=False is not possible, because {why}. Or leave keep_gradients out")
    return settings


def _check_secondary(settings: Settings, placement: Placement) -> None:
    """Refuse secondary shards where no gather could stay inside a node because of them."""
    given = "Placement(secondary_shards=True)"
    if not placement.secondary_shards:
        return
    if settings.servers is not None:
        raise NotSupportedError(f"{given} does not work with servers={settings.servers}: servers hold the parameters")
    if not settings.has_optimizer:
        raise PrepareError(
            f"{given} needs the optimizer: it is for the backward passes before an update. Pass the optimizer to "
            "prepare; without one, a mesh of two dimensions alone keeps all gathers inside a node"
        )
    shape = shape_of(settings.mesh)
    if len(shape) != 2 or min(shape) < 2:
        of_shape = f"a mesh of shape {shape}" if shape else "no DeviceMesh"
        raise PrepareError(
            f"{given} with {of_shape}: it needs two nodes or more of two ranks or more. Pass mesh=init_device_mesh("
            "device, (num_nodes, ranks_per_node)), or leave secondary_shards out"
        )


def _check_codec(settings: Settings, placement: Placement) -> None:
    """Refuse codecs that do not exist, that were not allowed, or that conflict with other options."""
    if not isinstance(placement.codec, Mapping):
        raise PrepareError(f"Placement(codec={placement.codec!r}) must be a dict, such as {{'reduce': 'int8'}}")
    for name, codec in placement.codec.items():
        if codec not in CODECS.get(name, ()):
            raise PrepareError(f"Placement(codec={placement.codec!r}): no codec {codec!r} for {name!r}; use {CODECS}")
    if LOSSLESS in placement.codec.values():
        coder()
    if settings.exact and set(placement.codec.values()) - {LOSSLESS}:
        raise PrepareError(
            f"Placement(codec={dict(placement.codec)!r}) changes results: pass exact=False to prepare to allow it, or "
            "leave the codec out"
        )
    is_summed = settings.reduce != "mean" and bool(coded_wires.CODECS.keys() & placement.codec.keys())
    if is_summed or (placement.codec and settings.servers is not None):
        given = "reduce='sum'" if settings.servers is None else f"servers={settings.servers}"
        raise NotSupportedError(
            f"Placement(codec={dict(placement.codec)!r}) does not work with {given}: coded gradients are averaged "
            "over ranks, and servers keep states as they are"
        )
    if placement.codec.get("reduce") == "int4" and settings.precision.scales_loss:
        raise PrepareError(
            "Placement(codec={'reduce': 'int4'}) does not work with precision='fp16': the rounding error is added to "
            "the next gradient, whose loss scale may differ; use 'int8' or precision='bf16'"
        )


def _may_be_coded(settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    """Yield what a plan may code."""
    if settings.servers is not None:
        return
    with contextlib.suppress(PrepareError):
        _check_coded_states(settings, model, optimizer, "int8")
        yield STATES
    if settings.reduce == "mean" and optimizer is not None:
        yield WIRES


def _check_coded_states(
    settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer | None, codec: str
) -> None:
    """Refuse optimizers and parameters whose states cannot be kept as codes."""
    given = f"codec={{{Kind.OPTIMIZER_STATES.value!r}: {codec!r}}}"
    if optimizer is None:
        raise PrepareError(f"{given} needs the optimizer, whose states it codes: pass it to prepare")
    name = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise PrepareError(
            f"{given} is for the moments of torch.optim.Adam and AdamW, but the optimizer is {name}: use one of these, "
            "or leave 'optimizer_states' out of the codec"
        )
    for index, group in enumerate(optimizer.param_groups):
        for option in ("amsgrad", "differentiable"):
            if group.get(option):
                raise PrepareError(
                    f"{given} does not work with {name}({option}=True) in param_groups[{index}]: set it to False, or "
                    "leave 'optimizer_states' out of the codec"
                )
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        dtype = settings.precision.compute or parameter.dtype
        if parameter in trained and dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise PrepareError(
                f"{given}: parameter {name!r} is {dtype}, but codes are at most as precise as fp32. Use precision="
                "'fp32' or 'bf16', or leave 'optimizer_states' out of the codec"
            )


def check_packing(settings: Settings, plans: Sequence[Sequence[FlatPlan]]) -> None:
    """Refuse a placement that packs parameters and has none to pack; in a plan all may fit elsewhere."""
    codec = settings.decided[1].codec
    is_packed = any(plan.packed_bytes for group in plans for plan in group)
    if LOSSLESS in codec.values() and settings.plan is None and not is_packed:
        raise PrepareError(
            f"Placement(codec={dict(codec)!r}) packs frozen parameters on disk, of {PACKED} bytes a number, and there "
            "are none: place parameters with parameters='disk', or leave 'parameters' out of the codec"
        )


def check_budget(budget: Budget) -> None:
    """Refuse a budget that exceeds the free memory or disk space."""
    if budget.host is not None:
        check_host(parse_bytes(budget.host), f"Budget(host={budget.host!r})")
    if budget.disk is not None and budget.disk_path is not None:
        check_disk(parse_bytes(budget.disk), budget.disk_path)


def check_world(settings: Settings, world: World) -> None:
    """Refuse homes and codecs that need sharding where there is none."""
    stage, placement = settings.decided
    if not placement.keep_gradients and world.num_shards > 1 and stage in (Stage.OPTIMIZER_STATES, Stage.GRADIENTS):
        raise PrepareError(
            f"keep_gradients=False with stage={stage.value} on {world.num_shards} ranks: all ranks gather new "
            "parameters in step(), after the last gradient; use stage=3 or stage=0, or leave keep_gradients out"
        )
    if "gather" in placement.codec and stage < Stage.PARAMETERS:
        raise PrepareError(
            f"Placement(codec={dict(placement.codec)!r}) with stage={stage.value}: only stage=3 gathers parameters to "
            "compute with them; use stage=3, or leave 'gather' out"
        )
    if placement.secondary_shards and stage < Stage.PARAMETERS:
        raise PrepareError(
            f"Placement(secondary_shards=True) with stage={stage.value}: only stage=3 gathers parameters for backward; "
            "use stage=3, or leave secondary_shards out"
        )
    if placement.secondary_shards and world.num_splits > 1:
        raise NotSupportedError(
            "Placement(secondary_shards=True) does not work with parameters that are DTensors: leave secondary_shards "
            "out, or train without tensor parallelism"
        )
    for kind, least in ((Kind.PARAMETERS, Stage.PARAMETERS), (Kind.GRADIENTS, Stage.GRADIENTS)):
        if world.num_shards > 1 and stage < least and set(placement.shares(kind)) != {Tier.DEVICE}:
            share = getattr(placement, kind.value)
            raise PrepareError(
                f"Placement({kind.value}={share!r}) with stage={stage.value} on {world.num_shards} ranks: only "
                f"shards can be kept off the device, so use stage={least.value} or more"
            )


def homes_of(plan: Plan, blueprints: Sequence[Blueprint]) -> dict[str, Homes]:
    """Return the homes by name of group; those without parameters need none."""
    return {group.name: plan.homes_of(group.name) if group.members else Homes() for group in blueprints}


def rules_for(settings: Settings, world: World, blueprints: Sequence[Blueprint]) -> Rules:
    """Return the rules that say how much of a model this rank holds, and where."""
    stage, placement = settings.decided
    has_own_memory = world.device.type != "cpu"
    share = placement.cpu_share
    if Tier.DISK in placement.shares(Kind.PARAMETERS):
        share = 1.0  # new parameters go to the disk from the host
    if share is None:
        coded_bytes = sum(moment.num_bytes(UNIT) / UNIT for moment in moments_of(placement).values())
        share = default_cpu_share(
            num_threads(world),
            has_link=has_own_memory,
            parameters_off=1.0 - placement.shares(Kind.PARAMETERS).get(Tier.DEVICE, 0.0),
            gradients_off=1.0 - placement.shares(Kind.GRADIENTS).get(Tier.DEVICE, 0.0),
            state_bytes=LOW_BYTES + coded_bytes if coded_bytes else BYTES_STREAMED,
        )
    return Rules(
        rank=world.shard_rank,
        size=world.num_shards,
        stage=stage,
        placement=placement,
        cpu_share=share,
        reduce_dtype=settings.precision.reduce,
        states=settings.states,
        has_own_memory=has_own_memory,
        sums_gradients=settings.accumulate is not None and settings.accumulate > 1,
        homes=None if settings.plan is None else homes_of(settings.plan, blueprints),
        reduces_all=settings.precision.compute is None,
        num_replicas=world.num_replicas,
        has_optimizer=settings.has_optimizer,
        num_servers=world.link.num_servers if world.link is not None and world.is_worker else 0,
        node_size=world.node_size,
    )


def ways_for(settings: Settings, groups: Sequence[str]) -> dict[str, Way]:
    """Return what groups do with their activations: as the plan says, or else the placement."""
    _, placement = settings.decided
    if settings.plan is None:
        return placement.ways(groups)
    return {name: Way(settings.plan.activations_of(name) or Way.DEVICE) for name in groups}


def num_threads(world: World) -> int:
    """Return the threads for updates on the CPU."""
    budget = thread_budget(world.local_size)
    return budget if world.device.type == "cpu" else max(1, budget - NUM_BUSY_THREADS)
