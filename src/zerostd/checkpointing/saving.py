"""Save a prepared model: describe what this rank keeps, and hand it to the thread that writes.

updates are done -> records of values, states and gradients where they are kept -> manifest of this rank -> Saving
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from zerostd.checkpointing.model_parts import buffers_of, flats_of, modules_with_own, parameters_of, walk_buffers
from zerostd.checkpointing.random_states import encode_other_states, generator_records
from zerostd.checkpointing.storage import Manifest, Saving
from zerostd.checkpointing.storage.dtypes import dtype_name
from zerostd.checkpointing.storage.json_values import encode_value, refuse_tensor
from zerostd.checkpointing.storage.manifest import OptimizerEntry, OptimizerGroup, TensorEntry
from zerostd.checkpointing.two_phase import check_call
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError, MisuseError
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.records import gradient_records, scalar_states, state_records
from zerostd.parameters.flat import SavedInterval, tensor_interval, value_intervals


@torch.no_grad()
def save_checkpoint(
    runtime: Runtime, optimizer: ZeroOptimizer | None, path: Path, extra: Any, keep: int | None, *, frozen: bool = True
) -> Saving:
    """Start to save. All ranks call it. In the middle of a step it returns when all is written, because the next pass
    would add to the gradients."""
    check_call(runtime, optimizer, "save")
    _check_gradients(runtime)
    if not frozen and all(flat.gradient is None for flat in flats_of(runtime)):
        raise MisuseError("zerostd.save(frozen=False) of a model in which nothing trains: there is nothing to save")
    control = runtime.gatherer.control
    for earlier in [observer for observer in runtime.observers if isinstance(observer, Saving)]:
        earlier.finish()  # one at a time
        runtime.observers.remove(earlier)
    try:
        manifest, records = _describe(runtime, optimizer, extra, frozen=frozen)
    except CheckpointError as error:
        control.meet("zerostd.save()", error)  # so that the others do not wait
        raise
    saving = Saving(path, records, manifest, control, keep=keep)
    for group in runtime.groups:
        group.pending_save = saving.group_write(group.name)
    runtime.observers.append(saving)
    if manifest.passes:
        saving.finish()
    return saving


def _check_gradients(runtime: Runtime) -> None:
    """Refuse gradients in the middle of a step that are not as backward has left them."""
    if not runtime.backward.passes.num_done:
        return
    if runtime.backward.has_unsynced:
        raise MisuseError(
            "zerostd.save after backward passes under zerostd.no_sync, whose gradients each rank has for itself: call "
            "it after a pass outside no_sync, or after optimizer.step()"
        )
    if not isinstance(runtime.gradients.factor, float) or runtime.gradients.factor != 1.0:
        raise MisuseError(
            "zerostd.save between clip_grad_norm_() and optimizer.step(): call it before the one or after the other"
        )


def _describe(
    runtime: Runtime, optimizer: ZeroOptimizer | None, extra: Any, *, frozen: bool
) -> tuple[Manifest, list[SavedInterval]]:
    """Return this rank's manifest, without files and parts, and the record of each tensor in it."""
    rank = runtime.world.rank
    tensors: list[torch.Tensor] = []

    def store(tensor: torch.Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    encoded = None
    modules: dict[str, Any] = {}
    if rank == 0:
        encoded = encode_value(extra, store, "extra")
        for name, module in modules_with_own(runtime.model, "get_extra_state").items():
            modules[name] = _encode_extra_state(name, module, store)
    optimizer_entry = None
    if optimizer is not None:
        optimizer_entry = replace(describe_optimizer(runtime, optimizer), singles=_encode_singles(optimizer, rank))
    random = {str(rank): encode_other_states()}
    records = [*_records(runtime, optimizer, frozen=frozen)]
    if rank == 0:
        records += [tensor_interval("buffer", name, buffer) for name, buffer in buffers_of(runtime.model).items()]
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
        random=random,
        extra=encoded,
        modules=modules,
        passes=0 if optimizer is None else runtime.backward.passes.num_done,
        frozen=frozen,
    )
    return manifest, records


def _records(runtime: Runtime, optimizer: ZeroOptimizer | None, *, frozen: bool) -> Iterator[SavedInterval]:
    rank = runtime.world.rank
    for group in runtime.update_order():
        runtime.gatherer.wait_updates(group)
        for flat in group.flats if frozen else group.trainable:
            yield from value_intervals(flat, rank, group.name)
            if optimizer is not None and flat in optimizer.updater.spans:
                yield from state_records(optimizer.updater, flat, rank, group.name)
            if optimizer is not None and flat.gradient is not None and runtime.backward.passes.num_done:
                yield from gradient_records(flat, rank, group.name)
    yield from generator_records(runtime.world)


def _entries(runtime: Runtime, records: Sequence[SavedInterval]) -> tuple[TensorEntry, ...]:
    """Return the manifest's entry of each record, still without parts."""
    original = {i.name: dtype_name(runtime.original_dtypes[parameter]) for _, parameter, i in parameters_of(runtime)}
    names = _all_names(runtime.model)
    return tuple(
        TensorEntry(
            kind=record.kind,
            of=record.of,
            dtype=dtype_name(record.dtype),
            shape=record.shape,
            parts=(),
            state=record.state,
            original=original.get(record.of, "") if record.kind == "parameter" else "",
            names=names.get(record.of, ()) if record.kind in ("parameter", "buffer") else (),
        )
        for record in records
    )


def _all_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of parameters, and of buffers of modules, that have several; by the first of them."""
    names: dict[object, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for owner, name, _ in walk_buffers(model, all_names=True):
        names.setdefault(owner, []).append(name)
    return {aliases[0]: tuple(aliases) for aliases in names.values() if len(aliases) > 1}


def describe_optimizer(runtime: Runtime, optimizer: ZeroOptimizer) -> OptimizerEntry:
    """Return the optimizer's class, and its groups with options and names of parameters; no states."""
    names = {parameter: interval.name for _, parameter, interval in parameters_of(runtime)}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        encoded = encode_value(options, refuse_tensor, f"param_groups[{number}]")
        groups.append(OptimizerGroup(encoded, tuple(names[parameter] for parameter in group["params"])))
    return OptimizerEntry(type(optimizer.inner).__name__, tuple(groups), {})


def _encode_singles(optimizer: ZeroOptimizer, rank: int) -> dict[str, Any]:
    return {
        name: encode_value(states, refuse_tensor, f"the states of {name!r}")
        for name, states in scalar_states(optimizer.updater, rank).items()
    }


def _encode_extra_state(name: str, module: nn.Module, store: Callable[[torch.Tensor], int]) -> Any:
    where = f"get_extra_state() of module {name!r} ({type(module).__name__})"
    try:
        state = module.get_extra_state()
    except Exception as error:  # whatever the user's code raises
        raise CheckpointError(f"{where} failed: {type(error).__name__}: {error}") from error
    return encode_value(state, store, where)


def _version() -> str:
    try:
        return metadata.version("zerostd")
    except metadata.PackageNotFoundError:
        return "unknown"
