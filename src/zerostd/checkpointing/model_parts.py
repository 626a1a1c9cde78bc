"""Name the saved parts of a prepared model: parameters in flats, persistent buffers, extra states, random generators.

`full_values` gives whole parameters, one flat at a time, and `full_state` the whole state_dict. torch's generators are
tensors of kind "random"; Python's and numpy's are JSON in the manifest. Each rank has its own generators, so they are
restored only where as many ranks load as saved.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostd.checkpointing.storage import Checkpoint, Manifest
from zerostd.checkpointing.storage.manifest import StoreTensor, TensorEntry, decode_value, encode_value, refuse_tensor
from zerostd.communication import World
from zerostd.communication.dtensors import Spec
from zerostd.compat import persistent_buffers
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError, MisuseError
from zerostd.parameters import Flat, Group
from zerostd.parameters.intervals import SavedInterval, tensor_interval, value_intervals
from zerostd.sharding import Interval

if TYPE_CHECKING:  # it imports torch.distributed.checkpoint, which `api.save_dcp` does when it is needed
    from zerostd.checkpointing.storage.dcp_files import DcpCheckpoint


def flats_of(runtime: Runtime) -> list[Flat]:
    return [flat for group in runtime.groups for flat in group.flats]


def parameters_of(runtime: Runtime) -> Iterator[tuple[Flat, nn.Parameter, Interval]]:
    """Yield every parameter with its flat and its interval there, which has its name."""
    for flat in flats_of(runtime):
        for parameter, interval in zip(flat.parameters, flat.layout.intervals, strict=True):
            yield flat, parameter, interval


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by name, each under the first name of its module."""
    return {
        f"{prefix}.{short}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        for short, buffer in persistent_buffers(module).items()
    }


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, object]]:
    """Yield every name in a state_dict, its tensor and owner: the parameter, or a buffer's module and short name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, parameter
    for prefix, module in model.named_modules(remove_duplicate=False):
        for short, buffer in persistent_buffers(module).items():
            yield f"{prefix}.{short}".lstrip("."), buffer, (module, short)


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


def full_values(runtime: Runtime, group: Group) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield every parameter of a group in its original dtype, when updates are finished: local values of DTensors. All
    ranks call it."""
    runtime.gatherer.wait_updates(group)
    runtime.gatherer.wait_gather(group)
    for flat in group.flats:
        mine = flat.exact_values()
        if mine.numel() == flat.layout.numel:
            full = mine
        elif not flat.is_sharded and mine.dtype == flat.full.dtype:
            full = flat.full
        else:
            full = torch.empty(flat.layout.numel, dtype=mine.dtype, device=mine.device)
            with runtime.world.at(f"the gather of group {group.name!r}"):
                runtime.wires.gather(full, mine).wait()
        for parameter, interval in zip(flat.parameters, flat.layout.intervals, strict=True):
            values = full[interval.offset : interval.end].view(interval.shape)
            yield parameter, values.to(runtime.original_dtypes[parameter])


def full_state(runtime: Runtime, rank: int | None) -> dict[str, Any]:
    """Return an ordinary state_dict on host memory; with `rank` the other ranks return an empty one. All call it."""
    if runtime.optimizer is not None:
        runtime.optimizer.check_consistent("full_state_dict()")
    check_rank(rank, runtime.world)
    runtime.gatherer.control.confirm("zerostd.full_state_dict()")
    keep = rank is None or rank == runtime.world.rank
    runtime.finish_updates()
    values: dict[torch.Tensor, torch.Tensor] = {}
    for group in runtime.groups:
        for parameter, value in full_values(runtime, group):
            spec = Spec.of(parameter)
            value = value if spec is None else spec.whole(value)
            if keep:
                values[parameter] = value.to("cpu", copy=True)
    if not keep:
        return {}
    runtime.guards.is_open = True
    try:
        state = runtime.model.state_dict(keep_vars=True)
    finally:
        runtime.guards.is_open = False
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            state[key] = values[value] if value in values else value.detach().to("cpu", copy=True)
    return state


def check_rank(rank: int | None, world: World) -> None:
    """Refuse a rank for `full_state_dict` that is none of the world's."""
    if rank is not None and (not isinstance(rank, int) or rank not in range(world.size)):
        raise MisuseError(f"full_state_dict(rank={rank!r}): use 0 to {world.size - 1}, or None for all")


def kept_values(flat: Flat, rank: int) -> Iterator[SavedInterval]:
    """Yield where this rank keeps values of a flat's parameters. Masters are these values where there are any."""
    mine = flat.region
    if not flat.state_shards:  # frozen: every rank has all of it, or its shard
        mine = flat.layout.shard(rank) if flat.is_sharded else slice(0, flat.layout.numel)
    return value_intervals(flat, mine, group="")


def generator_records(world: World) -> Iterator[SavedInterval]:
    """Yield the states of torch's generators on this rank."""
    yield tensor_interval("random", f"{world.rank}/torch", torch.get_rng_state())
    if world.device.type != "cpu":
        state = torch.get_device_module(world.device).get_rng_state(world.device)
        yield tensor_interval("random", f"{world.rank}/device", state)


def other_states() -> dict[str, Any]:
    """Return the states of Python's generator and, if numpy is imported, of numpy's."""
    states: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), int(position), int(has_gauss), float(gauss))
    return states


def generator_entries(world: World, manifest: Manifest) -> list[TensorEntry]:
    """Return torch's generators of this rank; none if another number of ranks saved."""
    if manifest.world_size != world.size:
        return []
    return [entry for which in ("torch", "device") for entry in manifest.named("random", f"{world.rank}/{which}")]


def restore_functions(world: World, checkpoint: Checkpoint | DcpCheckpoint) -> Iterator[Callable[[], object]]:
    """Yield functions that restore the generators. Each state is tried here, on a generator made for that."""
    manifest = checkpoint.manifest
    if manifest.world_size != world.size:
        return
    for entry in generator_entries(world, manifest):
        state = checkpoint.read(entry)
        if entry.of.endswith("/torch"):
            torch.Generator().set_state(state)
            yield partial(torch.set_rng_state, state)
        elif world.device.type != "cpu":
            torch.Generator(world.device).set_state(state)
            yield partial(torch.get_device_module(world.device).set_rng_state, state, world.device)
    others = decode_value(manifest.random.get(str(world.rank), {}), refuse_tensor)
    if not isinstance(others, dict):
        raise CheckpointError(f"the random states of rank {world.rank} are not a dict: {str(others)[:80]}")
    yield from restore_others(others)


def restore_others(others: dict[str, Any]) -> Iterator[Callable[[], object]]:
    """Yield functions that restore what `other_states` returned, after trying it."""
    if "python" in others:
        random.Random().setstate(others["python"])
        yield partial(random.setstate, others["python"])
    if "numpy" in others and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.RandomState().set_state(others["numpy"])
        yield partial(numpy.random.set_state, others["numpy"])
