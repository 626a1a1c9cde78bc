"""The front door: checks what it is given, puts the parts together, and hands the user's own objects back.

prepare   plan -> world -> groups and shards -> hooks -> optimizer
the rest  asks the Runtime that prepare left on the model
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerostd.communication import Control, Wires, World
from zerostd.errors import MisuseError, NotSupportedError, PrepareError
from zerostd.monitoring import Ledger, Memory
from zerostd.optimizers.adopting import Adoption
from zerostd.optimizers.elementwise import check_elementwise
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.states import put_states
from zerostd.optimizers.update import Updater
from zerostd.parameters import Flat, Group, GroupState
from zerostd.parameters.building import Ground, Member, blueprints, describe_groups, make_group
from zerostd.parameters.checking import (
    MARK,
    check_model,
    check_optimizer,
    describe_model,
    describe_optimizer,
    optimizer_options,
)
from zerostd.parameters.deferred import draw_seeds, is_deferred, make_real
from zerostd.policy import Budget, Kind, Placement, Precision, Stage, Tier
from zerostd.runtime import Runtime

__all__ = ["apply_to_device", "full_state_dict", "gathered", "memory", "no_sync", "prepare", "release"]

PREFETCH_DEPTH = 1


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: int | Stage | None = None,
    placement: Placement | None = None,
    precision: str | Precision | None = None,
    accumulate: int | None = None,
    max_grad_norm: float | None = None,
    budget: Budget | None = None,
    plan: object | None = None,
    groups: Sequence[str] | None = None,
) -> tuple[nn.Module, Any]:
    """Shard a model and its optimizer over the ranks, in place.

    Args:
        model: Any module, on the device it will train on, or built under `zerostd.empty_init()`.
        optimizer: Any element-wise torch optimizer on the model's parameters. None: one made afterwards is taken over
            at its first step.
        stage: 0 data parallel, 1 shards optimizer states, 2 also gradients, 3 also parameters. None: 3.
        placement: Where states rest; only the device so far.
        precision: 'fp32', 'bf16' or 'fp16'; 16-bit runs keep fp32 masters. None keeps each parameter's dtype.
        accumulate: How many backward passes make a step, if known: with 1 gradients rest in the reduce dtype, with
            more they are summed in fp32 from the first pass on. None: found out as it happens.
        max_grad_norm: Clip gradients to this global norm in every step.
        budget, plan: Not supported yet.
        groups: Globs of module names whose parameters travel together, such as ['blocks.*']. None: found from the
            model's structure.

    Returns:
        The same module, and a torch.optim.Optimizer to use instead of the one passed (None if none was).

    Raises:
        PrepareError: Nothing was changed; the message says what to do.
    """
    checked_stage = Stage.PARAMETERS if stage is None else Stage.parse(stage)
    checked_precision = Precision.parse(precision)
    _refuse_unsupported(placement, budget, plan)
    _check_numbers(accumulate, max_grad_norm)
    check_model(model)
    if optimizer is not None:
        check_optimizer(model, optimizer)
        check_elementwise(optimizer)
    elif max_grad_norm is not None:
        raise PrepareError(f"max_grad_norm={max_grad_norm} needs the optimizer: pass it to prepare")
    settings = [f"stage {checked_stage.value}", f"precision {checked_precision.name}", f"accumulate {accumulate}"]
    settings += [f"max_grad_norm {max_grad_norm}", *describe_optimizer(optimizer)]
    runtime = _build(model, optimizer, checked_stage, checked_precision, groups, settings)
    if accumulate is not None and accumulate > 1:
        for group in runtime.groups:
            for flat in group.trainable:
                assert flat.gradient is not None
                flat.gradient.use_sum()
    object.__setattr__(model, MARK, runtime)
    if optimizer is None:
        runtime.adoption = Adoption(lambda found: _make_optimizer(runtime, found, None), runtime.gradients)
        return model, None
    return model, _make_optimizer(runtime, optimizer, max_grad_norm)


def apply_to_device(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Move a model to a device and shard it; any element-wise optimizer made from it afterwards works as it is."""
    check_model(model)
    if any(p.device.type == "meta" for p in model.parameters()):
        if _device_of(model).type != torch.device(device).type:
            raise PrepareError(f"a model built under empty_init goes to {_device_of(model)}, not to {device}")
    else:
        model = model.to(device)
    prepared, _ = prepare(model)
    return prepared


def _refuse_unsupported(placement: Placement | None, budget: Budget | None, plan: object | None) -> None:
    for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATES, Kind.ACTIVATIONS):
        if placement is not None and set(placement.shares(kind)) != {Tier.DEVICE}:
            raise NotSupportedError(
                f"Placement({kind.value}={getattr(placement, kind.value)!r}): only 'device' is supported yet; leave it "
                "out, and use stage=3 to make the model state smaller"
            )
    for name, value in (("budget", budget), ("plan", plan)):
        if value is not None:
            raise NotSupportedError(f"{name}={value!r} is not supported yet; choose stage= and precision= instead")


def _check_numbers(accumulate: int | None, max_grad_norm: float | None) -> None:
    if accumulate is not None and (isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1):
        raise PrepareError(f"accumulate={accumulate!r} must be a whole number of backward passes, 1 or more")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise PrepareError(f"max_grad_norm={max_grad_norm!r} must be positive; leave it out for no clipping")


def _build(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    stage: Stage,
    precision: Precision,
    globs: Sequence[str] | None,
    settings: list[str],
) -> Runtime:
    options = optimizer_options(model, optimizer)
    plans = blueprints(model, options, precision, globs)
    device = _device_of(model)
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" and not is_deferred(parameter):
            make_real(name, parameter, seed=0, device=device)  # raises: nobody knows its values
    world = World.discover(device)
    control = Control(world)
    try:
        control.check_equal("models or options", [*settings, *describe_model(model, options), *describe_groups(plans)])
    except BaseException:
        world.close()
        raise
    ledger = Ledger()
    wires = Wires(world, ledger)
    dtypes = {p: p.dtype for p in model.parameters()}
    ground = Ground(world.rank, world.size, stage, device, precision.reduce, ledger)
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
    for index, plan in enumerate(plans):
        group = make_group(plan, index, ground, value_of)
        groups.append(group)
        if group.is_sharded:
            for flat in group.flats:
                flat.hide()
            group.state = GroupState.RELEASED
    runtime = Runtime(
        model, groups, wires, control, precision=precision, original_dtypes=dtypes, prefetch_depth=PREFETCH_DEPTH
    )
    _place_buffers(model, device, seed)
    runtime.install(_casts(dtypes, precision))
    return runtime


def _device_of(model: nn.Module) -> torch.device:
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


def _make_optimizer(runtime: Runtime, inner: torch.optim.Optimizer, max_grad_norm: float | None) -> ZeroOptimizer:
    earlier: dict[Any, dict[str, Any]] = {parameter: dict(states) for parameter, states in inner.state.items()}
    inner.state.clear()
    updater = Updater(inner, runtime.groups, runtime.world.device, runtime.ledger)
    if earlier:
        put_states(updater, earlier)
    runtime.optimizer = ZeroOptimizer(
        updater,
        runtime.gradients,
        runtime,
        runtime.world,
        max_grad_norm=max_grad_norm,
        loss_scale=runtime.loss_scale,
    )
    return runtime.optimizer


def _runtime_of(model: nn.Module, call: str) -> Runtime:
    runtime = model.__dict__.get(MARK)
    if not isinstance(runtime, Runtime):
        raise MisuseError(f"zerostd.{call} needs the module that zerostd.prepare was called on")
    return runtime


def _owner_of(module: nn.Module) -> Runtime:
    """The runtime of a prepared model or of a part of one."""
    runtime = module.__dict__.get(MARK)
    if isinstance(runtime, Runtime):
        return runtime
    guard = module.__dict__.get("_apply")
    owner = getattr(getattr(guard, "func", None), "__self__", None)
    root = getattr(owner, "root", None)
    if not isinstance(root, nn.Module):
        raise MisuseError("zerostd.gathered needs a prepared model or a module inside one")
    return _runtime_of(root, "gathered")


@contextlib.contextmanager
def gathered(module: nn.Module, write: bool = False) -> Iterator[nn.Module]:
    """Full parameters of `module` inside the context. With `write`, rank 0's changes are kept, on all ranks.

    Collective: every rank must enter it.
    """
    runtime = _owner_of(module)
    inside = set(module.parameters())
    groups = [g for g in runtime.groups if any(p in inside for flat in g.flats for p in flat.parameters)]
    released = [group for group in groups if group.state is GroupState.RELEASED]
    for group in groups:
        runtime.gatherer.start(group)
        runtime.gatherer.finish(group)
        group.num_pins += 1
    try:
        yield module
    finally:
        for group in groups:
            group.num_pins -= 1
        if write:
            for group in groups:
                for flat in group.flats:
                    runtime.wires.broadcast([flat.full])
                    flat.take_edits()
        for group in released:
            runtime.gatherer.release(group)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside sum gradients locally; the first one outside reduces them all."""
    backward = _runtime_of(model, "no_sync").backward
    earlier, backward.is_syncing = backward.is_syncing, False
    try:
        yield
    finally:
        backward.is_syncing = earlier


def memory(model: nn.Module) -> Memory:
    """Bytes of this rank by tier and kind, now and at peak."""
    return _runtime_of(model, "memory").ledger.memory()


@torch.no_grad()
def full_state_dict(model: nn.Module, *, rank: int | None = None) -> dict[str, Any]:
    """An ordinary state_dict on host memory, in the dtypes the model had before prepare, from the fp32 masters.

    Collective: every rank must call it. With `rank`, only that rank keeps it and the others get an empty dict.
    """
    runtime = _runtime_of(model, "full_state_dict")
    keep = rank is None or rank == runtime.world.rank
    values: dict[torch.Tensor, torch.Tensor] = {}
    for group in runtime.groups:
        for parameter, value in _full_values(runtime, group):
            if keep:
                values[parameter] = value.to("cpu", copy=True)
    if not keep:
        return {}
    runtime.guards.is_open = True
    try:
        state = model.state_dict(keep_vars=True)
    finally:
        runtime.guards.is_open = False
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            state[key] = values[value] if value in values else value.detach().to("cpu", copy=True)
    return state


def _full_values(runtime: Runtime, group: Group) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Every parameter of a group in its original dtype; one flat at a time is whole."""
    runtime.gatherer.finish(group)
    for flat in group.flats:
        full = _exact(flat, runtime.wires)
        for parameter, interval in zip(flat.parameters, flat.layout.intervals, strict=True):
            part = full[interval.offset : interval.end].view(interval.shape)
            yield parameter, part.to(runtime.original_dtypes[parameter])


def _exact(flat: Flat, wires: Wires) -> torch.Tensor:
    """All of a flat at the precision it is kept in."""
    if not flat.is_sharded and (flat.master is None or flat.master.dtype == flat.full.dtype):
        return flat.full
    mine = flat.shard if flat.master is None else flat.master
    if mine.numel() == flat.layout.numel:
        return mine
    full = torch.empty(flat.layout.numel, dtype=mine.dtype, device=mine.device)
    wires.gather(full, mine).wait()
    return full


@torch.no_grad()
def release(model: nn.Module) -> nn.Module:
    """Undo prepare: an ordinary module again, with full parameters in the dtypes they had. Collective."""
    runtime = _runtime_of(model, "release")
    runtime.settle()
    runtime.hooks.remove()
    runtime.guards.remove()
    for group in runtime.groups:
        for parameter, value in _full_values(runtime, group):
            parameter.data = value.clone()
            parameter.grad = None
    if runtime.adoption is not None:
        runtime.adoption.end()
    if runtime.optimizer is not None:
        runtime.optimizer.retire()
    runtime.world.close()
    object.__delattr__(model, MARK)
    return model
