"""The states of random generators, saved and restored: torch's on the CPU and the device, Python's and numpy's.

torch's are tensors of kind "random"; the others are JSON in the manifest. Each rank has its own, so they are restored
only where as many ranks load as saved.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from zerostd.checkpointing.storage import Checkpoint, Manifest
from zerostd.checkpointing.storage.json_values import decode_value, encode_value, refuse_tensor
from zerostd.checkpointing.storage.manifest import TensorEntry
from zerostd.communication import World
from zerostd.errors import CheckpointError
from zerostd.parameters.flat import SavedInterval, tensor_interval


def generator_records(world: World) -> Iterator[SavedInterval]:
    """Yield the states of torch's generators on this rank."""
    yield tensor_interval("random", f"{world.rank}/torch", torch.get_rng_state())
    if world.device.type != "cpu":
        state = torch.get_device_module(world.device).get_rng_state(world.device)
        yield tensor_interval("random", f"{world.rank}/device", state)


def encode_other_states() -> Any:
    """Return the states of Python's generator and, if numpy is imported, of numpy's, as JSON."""
    states: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), int(position), int(has_gauss), float(gauss))
    return encode_value(states, refuse_tensor, "the state of a generator")


def generator_entries(world: World, manifest: Manifest) -> list[TensorEntry]:
    """Return torch's generators of this rank; none if another number of ranks saved."""
    if manifest.world_size != world.size:
        return []
    entries = [manifest.find("random", f"{world.rank}/{which}") for which in ("torch", "device")]
    return [entry for entry in entries if entry is not None]


def restore_functions(world: World, checkpoint: Checkpoint) -> list[Callable[[], object]]:
    """Return functions that restore the generators. Each state is tried here, on a generator made for that."""
    try:
        return [*_restore_functions(world, checkpoint)]
    except Exception as error:  # setstate does not say what it raises
        raise CheckpointError(f"the checkpoint contains an invalid random state: {error!s:.200}") from error


def _restore_functions(world: World, checkpoint: Checkpoint) -> Iterator[Callable[[], object]]:
    manifest = checkpoint.manifest
    if manifest.world_size != world.size:
        return
    device = world.device
    for entry in generator_entries(world, manifest):
        state = checkpoint.read(entry)
        if entry.of.endswith("/torch"):
            torch.Generator().set_state(state)
            yield partial(torch.set_rng_state, state)
        elif device.type != "cpu":
            torch.Generator(device).set_state(state)
            yield partial(torch.get_device_module(device).set_rng_state, state, device)
    others = decode_value(manifest.random.get(str(world.rank), {}), refuse_tensor)
    if not isinstance(others, dict):
        raise CheckpointError(f"random states of rank {world.rank} are {str(others)[:80]}")
    if "python" in others:
        random.Random().setstate(others["python"])
        yield partial(random.setstate, others["python"])
    if "numpy" in others and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.RandomState().set_state(others["numpy"])
        yield partial(numpy.random.set_state, others["numpy"])
