"""Save a prepared model: describe what this rank keeps, and hand it to the thread that writes.

updates are done -> records of values, states and gradients where they are kept -> manifest of this rank -> Saving
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from zerostd.checkpointing.generators import generator_records, other_states
from zerostd.checkpointing.storage import Manifest, PendingSave, Saving
from zerostd.checkpointing.storage.manifest import (
    OptimizerEntry,
    OptimizerGroup,
    StoreTensor,
    TensorEntry,
    dtype_name,
    encode_value,
    refuse_tensor,
)
from zerostd.checkpointing.storage.remote import AnyPath
from zerostd.engine.averaging import averages_of
from zerostd.engine.intervals import (
    SavedInterval,
    gradient_intervals,
    scalar_states,
    state_intervals,
    tensor_interval,
    value_intervals,
)
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError, MisuseError, check_flag, is_whole
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.parameters import Flat, Group
from zerostd.parameters.blueprints import buffers_of, named_tensors
from zerostd.parameters.state_shard import SplitTensor


@torch.no_grad()
def save_checkpoint(
    runtime: Runtime,
    optimizer: ZeroOptimizer | None,
    path: AnyPath,
    extra: Any,
    keep: int | None,
    *,
    frozen: bool,
    wait: bool,
) -> Saving:
    """Save; without `wait`, start to save. All ranks call it. In the middle of a step it always waits: the next pass
    would add to the gradients."""
    check_flag("wait", wait, CheckpointError)
    check_flag("frozen", frozen, CheckpointError)
    if keep is not None and not is_whole(keep, 1):
        raise CheckpointError(f"keep={keep!r} must be a whole number of checkpoints, 1 or more")
    check_call(runtime, optimizer, "save")
    if runtime.backward.passes.num_done and runtime.backward.has_unsynced:
        raise MisuseError(
            "zerostd.save after backward passes under zerostd.no_sync, whose gradients are not reduced yet: call it "
            "after a pass outside no_sync, or after optimizer.step()"
        )
    runtime.gradients.flush()
    factor = runtime.gradients.factor  # not 1 when gradients are no longer as backward has left them
    if runtime.backward.passes.num_done and not (isinstance(factor, float) and factor == 1.0):
        raise MisuseError(
            "zerostd.save between clip_grad_norm_() and optimizer.step(), when gradients are scaled: call it before "
            "clip_grad_norm_() or after optimizer.step()"
        )
    if not frozen and all(flat.gradient is None for flat in runtime.flats):
        raise MisuseError("zerostd.save(frozen=False) has nothing to save: all parameters of the model are frozen")
    control = runtime.gatherer.control
    for earlier in finish_saves(runtime):  # one at a time
        earlier.forget_exit()
    try:
        manifest, records = _describe(runtime, optimizer, extra, frozen=frozen)
    except CheckpointError as error:
        control.collect(error, "zerostd.save()")  # so that the others do not wait
        raise
    if not wait:
        records = _out_of_reach(runtime, records)
    pace = None if wait else runtime.resources.allocator.pace
    saving = Saving(path, records, manifest, control, keep, runtime.ledger.retries, pace)
    for group in runtime.groups:
        group.add_reader(saving.group_write(group.name))
    add_save(runtime, saving)
    if wait:
        saving.wait()
    elif manifest.passes:
        saving.finish()
    return saving


def add_save(runtime: Runtime, saving: PendingSave) -> None:
    """Note a checkpoint that is being written: steps continue, and memory that it reads is not freed."""
    runtime.observers.append(saving)
    runtime.resources.allocator.before_close(saving.join)


def finish_saves(runtime: Runtime) -> list[PendingSave]:
    """Wait until pending checkpoints are complete or have failed, and return them. All ranks call it."""
    savings = [observer for observer in runtime.observers if isinstance(observer, PendingSave)]
    for saving in savings:
        saving.finish()
        runtime.observers.remove(saving)
        runtime.resources.allocator.forget_stop(saving.join)
    return savings


def _out_of_reach(runtime: Runtime, records: Sequence[SavedInterval]) -> list[SavedInterval]:
    """Return the records, with copies of values that users can write to directly: device parameters that are masters,
    or their upper halves. Writes to all other values wait until the checkpoint has read them."""
    within_reach = {flat.full.untyped_storage().data_ptr() for flat in runtime.flats if not flat.gives_back}

    def is_within_reach(record: SavedInterval) -> bool:
        column = record.column
        tensor = column.high.tensor if isinstance(column, SplitTensor) else column.tensor
        return tensor is not None and tensor.untyped_storage().data_ptr() in within_reach

    return [record.copied() if is_within_reach(record) else record for record in records]


def check_call(runtime: Runtime, optimizer: ZeroOptimizer | None, call: str) -> None:
    """Wait until nothing is under way; refuse another model's optimizer, and states of which an update has failed."""
    if optimizer is not None and optimizer is not runtime.optimizer:
        raise MisuseError(f"zerostd.{call}: the optimizer is not the one that prepare returned for this model")
    if any(average.is_applied for average in averages_of(runtime)):
        raise MisuseError(
            f"zerostd.{call}() inside average.applied(): leave the context first. A checkpoint includes the average; "
            "zerostd.full_state_dict(average) returns the averaged model"
        )
    runtime.wait_gradients()
    if runtime.optimizer is not None:
        if not (call == "load" and optimizer is not None and runtime.gradients.refusal is not None):  # it helps
            runtime.optimizer.check_consistent(f"zerostd.{call}()")
        runtime.optimizer.synchronize()


def _describe(
    runtime: Runtime, optimizer: ZeroOptimizer | None, extra: Any, *, frozen: bool
) -> tuple[Manifest, list[SavedInterval]]:
    """Return this rank's manifest, without files and parts, and the record of each tensor in it."""
    rank = runtime.world.rank
    tensors: list[torch.Tensor] = []  # in what users and modules hand over

    def store(tensor: torch.Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    encoded = None
    modules: dict[str, Any] = {}
    if rank == 0:
        encoded = encode_value(extra, store, "extra")
        modules = extra_states(runtime.model, store)
    optimizer_entry = None
    if optimizer is not None:
        singles = {
            name: encode_value(states, refuse_tensor, f"the states of {name!r}")
            for name, states in scalar_states(optimizer.updater, runtime.world.shard_rank).items()
        }
        optimizer_entry = replace(describe_optimizer(runtime, optimizer), singles=singles)
    records = [*records_of(runtime, optimizer, frozen=frozen)]
    if rank == 0:
        buffers = buffers_of(runtime.model)
        records += [tensor_interval("buffer", name, buffer) for name, buffer in buffers.items()]
        for average in averages_of(runtime):
            for name, averaged in average.buffers.items() if average.num_averaged else ():
                records.append(tensor_interval("average", name, averaged, average.name))
        records += [tensor_interval("extra", str(number), tensor) for number, tensor in enumerate(tensors)]
    manifest = Manifest(
        zerostd=_version(),
        saved=time.time(),
        step=runtime.backward.passes.num_steps,
        world_size=runtime.world.size,
        stage=runtime.settings.decided[0].value,
        files={},
        tensors=_entries(runtime, records),
        optimizer=optimizer_entry,
        loss_scale=None if runtime.loss_scale is None else asdict(runtime.loss_scale),
        random={str(rank): encode_value(other_states(), refuse_tensor, "the state of a generator")},
        extra=encoded,
        modules=modules,
        passes=0 if optimizer is None else runtime.backward.passes.num_done,
        frozen=frozen,
        averages={average.name: average.counts() for average in averages_of(runtime)},
    )
    return manifest, records


def records_of(runtime: Runtime, optimizer: ZeroOptimizer | None, *, frozen: bool) -> Iterator[SavedInterval]:
    """Yield where this rank keeps what it saves, group by group, each when its update is done. Of several replicas
    the first one saves."""
    for group in runtime.update_order() if runtime.world.replica == 0 else ():
        runtime.gatherer.wait_updates(group)
        for flat in group.flats if frozen else group.trainable:
            copies = {  # that another split saves
                interval.name
                for index, interval in enumerate(flat.layout.intervals)
                if not flat.saves(index, runtime.world.split)
            }
            kept = _kept_of(runtime, optimizer, group, flat)
            yield from (record for record in kept if record.of not in copies)
    yield from generator_records(runtime.world)


def _kept_of(runtime: Runtime, optimizer: ZeroOptimizer | None, group: Group, flat: Flat) -> Iterator[SavedInterval]:
    """Yield where this rank keeps what it saves of one flat: values, averages, states, and gradients in a step."""
    mine = flat.layout.shard(runtime.world.shard_rank)
    yield from value_intervals(flat, mine, group.name)
    for average in averages_of(runtime):
        yield from average.records(flat, mine, group.name)
    if optimizer is not None and flat in optimizer.updater.spans:
        yield from state_intervals(optimizer.updater.spans[flat], mine, group.name)
    if optimizer is not None and flat.gradient is not None and runtime.backward.passes.num_done:
        pairs = zip(flat.layout.intervals, flat.parameters, strict=True)
        has_gradient = {interval.name for interval, parameter in pairs if parameter.grad is not None}
        gradients = gradient_intervals(flat, mine, group.name)
        yield from (record for record in gradients if record.of in has_gradient)


def _entries(runtime: Runtime, records: Sequence[SavedInterval]) -> tuple[TensorEntry, ...]:
    parameters = runtime.parameters()
    original = {interval.name: dtype_name(runtime.original_dtypes[parameter]) for _, parameter, interval in parameters}
    by_owner: dict[object, list[str]] = {}
    for name, _, owner in named_tensors(runtime.model):
        by_owner.setdefault(owner, []).append(name)
    aliases = {names[0]: tuple(names) for names in by_owner.values() if len(names) > 1}
    return tuple(
        TensorEntry(
            kind=record.kind,
            of=record.of,
            dtype=dtype_name(record.dtype),
            shape=record.full_shape,
            parts=(),
            state=record.state,
            original=original.get(record.of, "") if record.kind == "parameter" else "",
            names=aliases.get(record.of, ()) if record.kind in ("parameter", "buffer") else (),
        )
        for record in records
    )


def extra_states(model: nn.Module, store: StoreTensor) -> dict[str, Any]:
    """Return what modules give in `get_extra_state`, by name, as JSON; `store` takes the tensors in it."""
    states: dict[str, Any] = {}
    for name, module in modules_with_own(model, "get_extra_state").items():
        where = f"get_extra_state() of module {name!r} ({type(module).__name__})"
        try:
            state = module.get_extra_state()
        except Exception as error:  # whatever the user's code raises
            raise CheckpointError(f"{where} failed: {type(error).__name__}: {error}") from error
        states[name] = encode_value(state, store, where)
    return states


def modules_with_own(model: nn.Module, method: str) -> dict[str, nn.Module]:
    """Return the modules that override a method of nn.Module, by name."""
    inherited = getattr(nn.Module, method)
    return {name: module for name, module in model.named_modules() if getattr(type(module), method) is not inherited}


def describe_optimizer(runtime: Runtime, optimizer: ZeroOptimizer) -> OptimizerEntry:
    """Return the optimizer's class, and its groups with options and names of parameters; no states."""
    names = {parameter: interval.name for _, parameter, interval in runtime.parameters()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        encoded = encode_value(options, refuse_tensor, f"param_groups[{number}]")
        groups.append(OptimizerGroup(encoded, tuple(names[parameter] for parameter in group["params"])))
    return OptimizerEntry(type(optimizer.inner).__name__, tuple(groups), {})


def _version() -> str:
    try:
        return metadata.version("zerostd")
    except metadata.PackageNotFoundError:
        return "unknown"
