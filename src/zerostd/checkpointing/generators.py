"""Save and restore random generators: torch's as tensors, Python's and numpy's as JSON in the manifest.

Each rank has its own generators, so they are restored only where as many ranks load as saved.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zerostd.checkpointing.storage import Checkpoint, Manifest
from zerostd.checkpointing.storage.manifest import TensorEntry, decode_value, refuse_tensor
from zerostd.communication import World
from zerostd.engine.intervals import SavedInterval, tensor_interval
from zerostd.errors import CheckpointError

if TYPE_CHECKING:  # it imports torch.distributed.checkpoint, which `api.save_dcp` does when it is needed
    from zerostd.checkpointing.storage.dcp_files import DcpCheckpoint


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
