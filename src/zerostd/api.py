"""The public functions: check what they are given, put the parts together, and hand the user's own objects back.

prepare   plan -> world -> groups and shards -> hooks -> optimizer; the rest asks the Runtime that it left on the model
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from zerostd.checkpointing.importing import import_model, is_model
from zerostd.checkpointing.saving import save_checkpoint
from zerostd.checkpointing.storage import PendingSave, Saving
from zerostd.checkpointing.storage import latest as newest
from zerostd.checkpointing.storage.remote import RemotePath, place_of
from zerostd.communication import World
from zerostd.communication.meshes import Mesh
from zerostd.engine.averaging import Average, AverageOptions, make_average
from zerostd.engine.runtime import owner_of, runtime_of
from zerostd.engine.settings import Settings
from zerostd.errors import MisuseError, check_flag
from zerostd.measuring.identity import device_for
from zerostd.measuring.model import frozen, profile_model
from zerostd.monitoring import Memory
from zerostd.optimizers.optimizer import LateOptimizer, ZeroOptimizer
from zerostd.parameters.blueprints import MARK, find_blueprints
from zerostd.planning import MachineProfile, ModelProfile, Plan
from zerostd.policy import Budget, Placement, Precision, Stage, Tier
from zerostd.preparing.announcing import announce, warn_of_idle_accelerator
from zerostd.preparing.building import add_masters, attach_optimizer, build
from zerostd.preparing.options import check_budget, check_settings, codable, target_device
from zerostd.preparing.proposing import PlanSearch
from zerostd.replanning.adapting import adapt
from zerostd.replanning.late import attach_late
from zerostd.serving.calls import begin_role, full_state_of, load_model, release_any, save_by_servers
from zerostd.tiers import Done

Model = TypeVar("Model", bound=nn.Module)


def prepare(
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: int | Stage | None = None,
    placement: Placement | Mapping[str, Any] | None = None,
    precision: str | Precision | None = None,
    accumulate: int | None = None,
    max_grad_norm: float | None = None,
    budget: Budget | Mapping[str, Any] | int | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    groups: Sequence[str] | None = None,
    mesh: Mesh = None,
    reduce: str = "mean",
    servers: int | None = None,
    exact: bool = True,
    device: torch.device | str | None = None,
) -> tuple[Model, ZeroOptimizer]:
    """Shard a model and its optimizer over the ranks, in place.

    Args:
        model: Any module, or one built under `zerostd.empty_init()`.
        optimizer: Any element-wise torch optimizer on its parameters. None: make it later; zerostd then uses it.
        stage: 0 is data parallel; 1 shards optimizer states, 2 also gradients, 3 also parameters. None: planned, or 3
            if a placement is given.
        placement: Where each kind of state is kept: a tier or shares of tiers. None: planned for the shortest step.
        precision: 'fp32', 'bf16', 'fp16' or a `Precision`; 16-bit runs keep fp32 masters. None: each parameter's dtype.
        accumulate: Backward passes per step; offloaded updates then begin inside the last pass. None: any number.
        max_grad_norm: Clip gradients to this global norm in every step.
        budget: Limit of each tier from the first step on, and the path of the disk. A single size limits the device.
        plan: A plan from `zerostd.plan`, or the path of a saved plan. It replaces stage and placement.
        groups: Globs of module names whose parameters travel together, such as ['blocks.*'].
        mesh: The process group or DeviceMesh of the ranks that train. In a mesh (replicate, shard), a row is a replica.
        reduce: 'mean' or 'sum' of gradients over ranks. Gradients of several passes add up, as in torch.
        servers: Number of parameter servers: the last ranks hold masters and states. On them prepare does not return.
        exact: False allows lossy codes. A placement names them; a plan may choose 8-bit moments and 8-bit messages.
        device: The device to train on, such as 'cuda'. None: the model's device.

    Returns:
        The same module, and the torch.optim.Optimizer to use from now on (None without an optimizer).

    Raises:
        PrepareError: Something cannot be prepared; nothing was changed, and the message says what to do.
    """
    settings = Settings(
        stage=None if stage is None else Stage.parse(stage),
        placement=Placement.parse(placement),
        precision=Precision.parse(precision),
        accumulate=accumulate,
        max_grad_norm=max_grad_norm,
        budget=Budget.parse(budget),
        globs=groups,
        mesh=mesh,
        reduce=reduce,
        servers=servers,
        codable=codable(exact),
        device=None if device is None else target_device(model, device),
        plan=plan if plan is None or isinstance(plan, Plan) else Plan.load(plan),
    )
    return _start(model, optimizer, settings)


def _start(model: Model, optimizer: torch.optim.Optimizer | None, settings: Settings) -> tuple[Model, Any]:
    check_budget(settings.budget)
    runtime = build(model, optimizer, check_settings(settings, model, optimizer))
    object.__setattr__(model, MARK, runtime)
    announce(runtime.settings, runtime.world, runtime.blueprints)
    warn_of_idle_accelerator(settings, runtime.world)
    if optimizer is None:
        runtime.late_optimizer = LateOptimizer(functools.partial(attach_late, runtime), runtime.gradients)
        return model, None
    prepared = attach_optimizer(runtime, optimizer)
    adapt(runtime)
    begin_role(runtime, prepared)
    return model, prepared


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: Budget | Mapping[str, Any] | int | str | None = None,
    batch: Any = None,
    world_size: int | None = None,
    machine: MachineProfile | None = None,
    stage: int | Stage | None = None,
    precision: str | Precision | None = None,
    accumulate: int | None = None,
    max_grad_norm: float | None = None,
    groups: Sequence[str] | None = None,
    exact: bool = True,
) -> Plan:
    """Return the plan that prepare would follow with these options. The model is not changed, and nothing is allocated.

    Args:
        model: Any module: with values, built under `zerostd.empty_init()`, or on the meta device.
        optimizer: As for prepare. None: only parameters are placed, and a step is one forward.
        budget: Limit of each tier. None: the free memory, less a margin.
        batch: Arguments of one forward: a tensor, a tuple of arguments or a dict of keywords. The plan then knows time
            and activations. A model with values runs a few passes and is unchanged afterwards; on the meta device, or
            for another machine, operations are counted. None: the plan covers model state only.
        world_size: Number of ranks to plan for. None: the ranks of this job.
        machine: The machine to plan for. None: this one, measured once. All ranks must call it, and get the same plan.
        stage: This and all other arguments are as for prepare.

    Returns:
        A plan: `print(plan.explain())`, `plan.save(path)`, `prepare(..., plan=plan)`.

    Raises:
        PrepareError: No plan fits; the message says how many bytes are missing, and where.
    """
    settings = Settings(
        stage=None if stage is None else Stage.parse(stage),
        precision=Precision.parse(precision),
        accumulate=accumulate,
        max_grad_norm=max_grad_norm,
        budget=Budget.parse(budget),
        globs=groups,
        codable=codable(exact),
    )
    settings = check_settings(settings, model, optimizer)
    if machine is None:
        check_budget(settings.budget)
    world = World.pretend(device_for(model, machine), world_size, None if machine is None else machine.ranks_per_node)
    blueprints = find_blueprints(model, optimizer, settings.precision, groups, world.num_shards)
    profile = batch if isinstance(batch, ModelProfile) else None  # of an earlier measurement
    if batch is not profile:
        probe = functools.partial(profile_model, model, optimizer, precision=settings.precision, groups=groups)
        with contextlib.nullcontext() if optimizer is not None else frozen(model):
            profile = probe(batch=batch, probe=machine is None, num_ranks=world.num_shards)
    return PlanSearch(settings, blueprints, world).plan(profile, machine)


def apply_to_device(model: Model, device: torch.device | str) -> Model:
    """Move a model to a device and shard it. Then make any element-wise torch optimizer on its parameters."""
    return _start(model, None, Settings(device=target_device(model, device)))[0]


def averaged(
    model: nn.Module,
    decay: float | Callable[[int], float] | None = 0.999,
    *,
    start: int = 0,
    every: int = 1,
    tier: str | None = None,
    use_buffers: bool = False,
) -> Average:
    """Keep a running average of the trained parameters, and update it after each `optimizer.step()`.

    Collective: every rank must call it. The average is fp32 or wider, and sharded like the masters. If updates run
    beside the next forward, so does the average. `zerostd.save` and `zerostd.load` include it.

    Args:
        model: The module that prepare was called on.
        decay: The decay of an exponential moving average, or a function of the step number (from 1), such as
            `lambda step: min(0.999, (1 + step) / (10 + step))`. None: all averaged steps have equal weight, as in SWA.
        start: Number of steps before averaging begins. The average starts with the first averaged step's parameters.
        every: Average one step in this many.
        tier: Where the average is kept: 'device', 'host' or 'disk'; an error if it is full. None: with the masters.
        use_buffers: Average floating-point buffers too. Other buffers are those of the model.

    Returns:
        The average. Evaluate with it inside `with average.applied():`; get it with `zerostd.full_state_dict(average)`.
    """
    runtime = runtime_of(model, "averaged")
    options = AverageOptions(decay, start, every, None if tier is None else Tier.parse(tier), use_buffers)
    add_masters(runtime)
    return make_average(runtime, options)


@contextlib.contextmanager
def gathered(module: nn.Module, write: bool = False) -> Iterator[nn.Module]:
    """Gather the full parameters of `module` inside the context. With `write`, all ranks keep the changes of rank 0.

    Collective: every rank must enter it.
    """
    runtime = owner_of(module)
    check_flag("write", write, MisuseError)
    inside = set(module.parameters())
    groups = [g for g in runtime.groups if any(p in inside for flat in g.flats for p in flat.parameters)]
    if write:
        runtime.world.check_here("zerostd.gathered(write=True)")
        runtime.finish_updates()  # masters must be home before they are changed
    with runtime.access.held(groups, write=write):
        yield module


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Sum gradients locally in the backward passes inside the context; the first pass after it reduces them."""
    backward = runtime_of(model, "no_sync").backward
    was_syncing = backward.is_syncing
    backward.is_syncing = False
    try:
        yield
    finally:
        backward.is_syncing = was_syncing


def memory(model: nn.Module) -> Memory:
    """Return the bytes that this rank holds, by tier and kind, now and at peak."""
    return runtime_of(model, "memory").memory()


@torch.no_grad()
def full_state_dict(model: nn.Module | Average, *, rank: int | None = None) -> dict[str, Any]:
    """Return an ordinary state_dict in host memory, in the model's original dtypes, taken from the fp32 masters.

    Collective: every rank must call it. With `rank`, only that rank gets the state_dict, and the others get an empty
    dict. For an average, it has the averaged values.
    """
    if isinstance(model, Average):
        with model.applied() as averaged_model:
            return full_state_dict(averaged_model, rank=rank)
    return full_state_of(runtime_of(model, "full_state_dict"), rank)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    keep: int | None = None,
    wait: bool = True,
    frozen: bool = True,
) -> Saving | Done:
    """Write a checkpoint to the directory `path`. It is complete or absent, even if a process is killed.

    Collective: every rank must call it. Each rank writes the shards it holds; nothing is gathered. Between the backward
    passes of a step, the checkpoint includes the gradients so far, and `save` always waits until it is written.

    Args:
        path: A directory that does not exist yet, such as 'checkpoints/step-1000', or a URL that fsspec supports, such
            as 's3://mine/step-1000'. Each rank uploads to it from the directory for temporary files (TMPDIR).
        model: The module that prepare was called on.
        optimizer: The optimizer that prepare returned. None: save parameters and buffers only.
        extra: Other values to save: numbers, text, lists, dicts and tensors, such as {'scheduler':
            scheduler.state_dict()}. Rank 0's values are saved, and its buffers and `get_extra_state` of modules.
        keep: Keep only this many of the newest checkpoints in the parent directory. None: keep all.
        wait: True returns when the checkpoint is complete. False returns at once, and a thread writes while training
            continues. The checkpoint has the values of this moment: the update of a group waits until the group is
            written, and fp32 parameters on the device are copied to the host first. It is complete when `wait()` of
            the returned object returns. A process completes it before it exits, or exits with code 1.
        frozen: False leaves out frozen parameters, such as the base of LoRA; the model that loads it must have them.

    Returns:
        The pending checkpoint. Either all ranks call its `wait()`, or none.

    Raises:
        CheckpointError: A rank could not write it; nothing is left of it.
    """
    runtime = runtime_of(model, "save")
    parts = (runtime, _prepared(optimizer, "save"), place_of(path, "path"), extra, keep)
    write = save_by_servers if runtime.world.is_worker else save_checkpoint
    return write(*parts, frozen=frozen, wait=wait)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load a checkpoint and return its `extra`, or load the values of an ordinary model.

    Collective: every rank must call it. On the same number of ranks, training resumes bit for bit, random states
    included. Any other number of ranks, stage or placement can load it too. Each rank reads only its shards.

    Args:
        path: A checkpoint: a directory or a URL. Or an ordinary model: a Hugging Face directory, a safetensors file or
            the file of a state_dict. These have no states: leave the optimizer out. Values are cast to the dtypes of
            the prepared model, and the log names the casts.
        model: The module that prepare was called on.
        optimizer: The optimizer that prepare returned. None: load parameters and buffers only.

    Raises:
        CheckpointError: It is damaged or from another model; nothing was changed on any rank. If a disk fails later,
            the model is partly loaded, and the error says so: load again.
    """
    runtime = runtime_of(model, "load")
    prepared = _prepared(optimizer, "load")
    source = place_of(path, "path")
    if not isinstance(source, RemotePath) and is_model(source):
        return import_model(runtime, prepared, source)
    return load_model(runtime, prepared, source)


def save_dcp(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    wait: bool = True,
) -> PendingSave:
    """Write a checkpoint in the format of torch.distributed.checkpoint, for FSDP2 programs and other readers.

    Collective. Tensors have the names of torch's `get_state_dict`: model.NAME, optim.state.NAME.STATE,
    optim.param_groups.N.OPTION. Parameters are the fp32 masters. Random states and the loss scale are not saved.

    Args:
        path: A directory or a URL that fsspec supports, such as 's3://mine/step-1000', without a checkpoint in it.
        model: The module that prepare was called on.
        optimizer: The optimizer that prepare returned. None: save parameters and buffers only.
        extra: Other values to save, under the name zerostd.extra.
        wait: True returns when it is written. False copies this rank's part to host memory, and a thread writes it
            while training continues. A process completes it before it exits, or exits with code 1.

    Returns:
        The pending checkpoint, with `wait()`.

    Raises:
        CheckpointError: It could not be written.
    """
    from zerostd.checkpointing import dcp  # 40 % of what importing zerostd would take, and few processes need it

    place_of(path, "path")
    runtime = runtime_of(model, "save_dcp")
    return dcp.save_dcp(runtime, _prepared(optimizer, "save_dcp"), os.fspath(path), extra, wait=wait)


def load_dcp(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load a checkpoint of torch.distributed.checkpoint, such as FSDP2 programs write, and return its `extra`.

    Collective. It loads with any number of ranks, stage or placement; each rank reads only its shards. The format uses
    pickle, so load only files that you trust.

    Args:
        path: A directory, or a URL that fsspec supports.
        model: The module that prepare was called on.
        optimizer: The optimizer that prepare returned. None: load parameters and buffers only.

    Raises:
        CheckpointError: It is not a checkpoint, or from another model; nothing was changed on any rank.
    """
    from zerostd.checkpointing import dcp  # see `save_dcp`

    place_of(path, "path")
    return dcp.load_dcp(runtime_of(model, "load_dcp"), _prepared(optimizer, "load_dcp"), os.fspath(path))


def latest(parent: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint in the directory or URL `parent`. The log names those that are skipped."""
    path = newest(place_of(parent, "parent"))
    return None if path is None else str(path)


def _prepared(optimizer: torch.optim.Optimizer | None, call: str) -> ZeroOptimizer | None:
    if optimizer is not None and not isinstance(optimizer, ZeroOptimizer):
        raise MisuseError(f"zerostd.{call} needs the optimizer that zerostd.prepare returned, not the original one")
    return optimizer


def release(model: Model) -> Model:
    """Undo prepare and return the ordinary module, with full parameters in their original dtypes. Collective."""
    release_any(runtime_of(model, "release"))
    object.__delattr__(model, MARK)
    return model
