"""save and load of a prepared model: what it is made of, to a checkpoint and back.

save   updates are done -> records of values and states from their homes -> files -> manifest
load   manifest -> everything checked, on all ranks -> group by group to where it rests -> parameters renewed
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostd.checkpointing.storage.values import dtype_name, encode
from zerostd.checkpointing.storage.writing import Facts, Saving
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError, MisuseError
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.records import gradient_records, single_states, state_records
from zerostd.parameters import Flat
from zerostd.parameters.saved_intervals import SavedInterval, tensor_interval, value_intervals

__all__ = ["buffers_of", "check_call", "describe_optimizer", "flats_of", "save_checkpoint", "with_extra_state"]


@torch.no_grad()
def save_checkpoint(
    runtime: Runtime, optimizer: ZeroOptimizer | None, path: Path, extra: Any, keep: int | None, *, frozen: bool = True
) -> Saving:
    """Begin to save. All ranks call it. In the middle of a step it returns when all is written: the next pass would
    add to the gradients."""
    check_call(runtime, optimizer, "save")
    _check_gradients(runtime)
    if not frozen and all(flat.gradient is None for flat in flats_of(runtime)):
        raise MisuseError("zerostd.save(frozen=False) of a model in which nothing trains: there is nothing to save")
    control = runtime.gatherer.control
    for earlier in [observer for observer in runtime.observers if isinstance(observer, Saving)]:
        earlier.settle()  # one at a time
        runtime.observers.remove(earlier)
    try:
        facts, records = _facts_and_records(runtime, optimizer, extra, frozen=frozen)
    except CheckpointError as error:
        control.meet("zerostd.save()", error)  # so that the others do not wait
        raise
    saving = Saving(path, records, facts, control, keep=keep)
    for group in runtime.groups:
        group.pending_save = saving.kept(group.name)
    runtime.observers.append(saving)
    if facts.passes:
        saving.settle()
    return saving


def _facts_and_records(
    runtime: Runtime, optimizer: ZeroOptimizer | None, extra: Any, *, frozen: bool
) -> tuple[Facts, list[SavedInterval]]:
    tensors: list[torch.Tensor] = []

    def keep_tensor(tensor: torch.Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    encoded, modules = None, {}
    if runtime.world.rank == 0:
        encoded = encode(extra, keep_tensor, "extra")
        modules = {name: _extra_state(name, one, keep_tensor) for name, one in with_extra_state(runtime.model).items()}
    groups, singles = None, {}
    if optimizer is not None:
        groups = describe_optimizer(runtime, optimizer)
        found = single_states(optimizer._updater, runtime.world.rank)
        singles = {name: encode(states, _no_tensor, f"the states of {name!r}") for name, states in found.items()}
    facts = Facts(
        version=_version(),
        step=runtime.backward.passes.num_steps,
        stage=runtime.settings.decided[0].value,
        random=_other_generators(),
        originals=_originals(runtime),
        names=_other_names(runtime.model),
        optimizer=groups,
        singles=singles,
        loss_scale=None if runtime.loss_scale is None else asdict(runtime.loss_scale),
        modules=modules,
        passes=0 if optimizer is None else runtime.backward.passes.num_done,
        extra=encoded,
        frozen=frozen,
    )
    records = [*_records(runtime, optimizer, frozen=frozen)]
    if runtime.world.rank == 0:
        records += [tensor_interval("buffer", name, buffer) for name, buffer in buffers_of(runtime.model)]
        records += [tensor_interval("extra", str(number), tensor) for number, tensor in enumerate(tensors)]
    return facts, records


def check_call(runtime: Runtime, optimizer: ZeroOptimizer | None, call: str) -> None:
    """Nothing may be under way."""
    if optimizer is not None and optimizer is not runtime.optimizer:
        raise MisuseError(f"zerostd.{call}: the optimizer is not the one that prepare returned for this model")
    runtime.settle()
    if runtime.optimizer is not None:
        runtime.optimizer.check_whole(f"zerostd.{call}()")
        runtime.optimizer.synchronize()


def _check_gradients(runtime: Runtime) -> None:
    """In the middle of a step they must be as backward has left them."""
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


def _records(runtime: Runtime, optimizer: ZeroOptimizer | None, *, frozen: bool) -> Iterator[SavedInterval]:
    rank, device = runtime.world.rank, runtime.world.device
    for group in runtime.update_order():
        runtime.gatherer.complete(group)
        for flat in [flat for flat in group.flats if frozen or flat.gradient is not None]:
            yield from value_intervals(flat, rank, group.name)
            if optimizer is not None and flat in optimizer._updater.runs:
                yield from state_records(optimizer._updater, flat, rank, group.name)
            if optimizer is not None and flat.gradient is not None and runtime.backward.passes.num_done:
                yield from gradient_records(flat, rank, group.name)
    yield tensor_interval("random", f"{rank}/torch", torch.get_rng_state())
    if device.type != "cpu":
        yield tensor_interval("random", f"{rank}/device", torch.get_device_module(device).get_rng_state(device))


def describe_optimizer(runtime: Runtime, optimizer: ZeroOptimizer) -> dict[str, Any]:
    """Its class, and its groups with options and names of parameters."""
    names = {
        p: i.name for flat in flats_of(runtime) for p, i in zip(flat.parameters, flat.layout.intervals, strict=True)
    }
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        encoded = encode(options, _no_tensor, f"param_groups[{number}]")
        groups.append({"options": encoded, "parameters": [names[p] for p in group["params"]]})
    return {"class": type(optimizer.inner).__name__, "groups": groups}


def flats_of(runtime: Runtime) -> list[Flat]:
    """All of them, in order."""
    return [flat for group in runtime.groups for flat in group.flats]


def _no_tensor(tensor: torch.Tensor) -> int:
    raise CheckpointError(
        f"a tensor of shape {tuple(tensor.shape)} among options or states of one value has no place in a checkpoint"
    )


def _originals(runtime: Runtime) -> dict[str, str]:
    return {
        interval.name: dtype_name(runtime.original_dtypes[parameter])
        for flat in flats_of(runtime)
        for parameter, interval in zip(flat.parameters, flat.layout.intervals, strict=True)
    }


def _other_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of parameters that have several, and of buffers of modules that have several."""
    names: dict[object, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for short in _persistent(module):
            names.setdefault((module, short), []).append(f"{prefix}.{short}".lstrip("."))
    return {found[0]: found for found in names.values() if len(found) > 1}


def buffers_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Those that a state_dict has; of a module with several names once, under the first."""
    return [
        (f"{prefix}.{short}".lstrip("."), buffer)
        for prefix, module in model.named_modules()
        for short, buffer in _persistent(module).items()
    ]


def _persistent(module: nn.Module) -> dict[str, torch.Tensor]:
    skipped = module._non_persistent_buffers_set
    return {name: one for name, one in module._buffers.items() if one is not None and name not in skipped}


def with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that have a get_extra_state of their own, by name."""
    found = model.named_modules()
    return {name: one for name, one in found if type(one).get_extra_state is not nn.Module.get_extra_state}


def _extra_state(name: str, module: nn.Module, keep_tensor: Callable[[torch.Tensor], int]) -> Any:
    where = f"get_extra_state() of module {name!r} ({type(module).__name__})"
    try:
        state = module.get_extra_state()
    except Exception as error:  # whatever the user's code raises
        raise CheckpointError(f"{where} failed: {type(error).__name__}: {error}") from error
    return encode(state, keep_tensor, where)


def _other_generators() -> dict[str, Any]:
    """Python's and, if anybody uses it, numpy's."""
    found: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, place, has_gauss, gauss = numpy.random.get_state()
        found["numpy"] = (kind, keys.tolist(), int(place), int(has_gauss), float(gauss))
    encoded: dict[str, Any] = encode(found, _no_tensor, "the state of a generator")
    return encoded


def _version() -> str:
    try:
        return metadata.version("zerostd")
    except metadata.PackageNotFoundError:
        return "unknown"
