"""load: a checkpoint to a prepared model, of any number of ranks, stage and placement.

manifest -> everything is checked, on all ranks -> flat by flat to where it rests -> parameters are renewed
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from zerostd.checkpointing import Checkpoint, Manifest
from zerostd.checkpointing.manifest import TensorEntry
from zerostd.checkpointing.progress import Progress
from zerostd.checkpointing.values import decode
from zerostd.errors import CheckpointError
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.records import put_flat, wanted_states
from zerostd.parameters import Flat
from zerostd.runtime import Runtime
from zerostd.saving import buffers_of, check_call, describe_optimizer, flats_of

__all__ = ["load_checkpoint"]

Wanted = tuple[TensorEntry, int, int]


@torch.no_grad()
def load_checkpoint(runtime: Runtime, optimizer: ZeroOptimizer | None, path: Path) -> Any:
    """All ranks call it. Returns what `extra` was. Nothing is changed unless everything is in order on all ranks."""
    check_call(runtime, optimizer, "load")
    control = runtime.gatherer.control
    checkpoint: Checkpoint | None = None
    try:
        try:
            checkpoint = Checkpoint(path)
            _check_fits(runtime, optimizer, checkpoint.manifest)
            wanted = [*_wanted(runtime, optimizer, checkpoint.manifest)]
            sizes = [(high - low) * getattr(torch, entry.dtype).itemsize for entry, low, high in wanted]
            with Progress("checking", sum(sizes), is_shown=runtime.world.rank == 0) as progress:
                checkpoint.verify(wanted, progress.add)
            extra = _extra(checkpoint)
            failed = None
        except CheckpointError as error:
            failed = str(error)
        everyone = control.meet("zerostd.load()", failed)
        wrong = [(rank, text) for rank, text in enumerate(everyone) if text is not None]
        if wrong:
            where = f"rank {wrong[0][0]}: " if runtime.world.size > 1 else ""
            raise CheckpointError(f"{where}{wrong[0][1]}. Nothing was changed")
        assert checkpoint is not None
        _apply(runtime, optimizer, checkpoint)
        return extra
    finally:
        if checkpoint is not None:
            checkpoint.close()


def _check_fits(runtime: Runtime, optimizer: ZeroOptimizer | None, manifest: Manifest) -> None:
    """Every parameter and buffer is there with the same shape, and nothing else; so are groups of the optimizer."""
    mine = {i.name: i.shape for flat in flats_of(runtime) for i in flat.layout.intervals}
    buffers = {name: tuple(buffer.shape) for name, buffer in buffers_of(runtime.model)}
    problems = []
    for kind, wanted in (("parameter", mine), ("buffer", buffers)):
        there = {one.of: one.shape for one in manifest.of_kind(kind)}
        empty = {name for name, shape in wanted.items() if 0 in shape}  # nothing of them is stored
        problems += [
            f"{kind} {name!r} is not in the checkpoint" for name in wanted if name not in there | dict.fromkeys(empty)
        ]
        problems += [f"{kind} {name!r} is not in the model" for name in there if name not in wanted]
        problems += [
            f"{kind} {name!r} has shape {there[name]} in the checkpoint and {shape} in the model"
            for name, shape in wanted.items()
            if name in there and there[name] != shape
        ]
    if optimizer is not None:
        problems += _optimizer_problems(runtime, optimizer, manifest)
    if problems:
        more = f", and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(problems[:20]) + more)


def _optimizer_problems(runtime: Runtime, optimizer: ZeroOptimizer, manifest: Manifest) -> list[str]:
    if manifest.optimizer is None:
        return ["it has no optimizer: load it with optimizer=None"]
    there, mine = manifest.optimizer, describe_optimizer(runtime, optimizer)
    if there.get("class") != mine["class"]:
        return [f"its optimizer is {there.get('class')!r} and this one {mine['class']!r}"]
    found = [sorted(group["parameters"]) for group in there["groups"]]
    if found != [sorted(group["parameters"]) for group in mine["groups"]]:
        return [f"its param_groups have {[len(one) for one in found]} parameters, or others than these"]
    return []


def _wanted(runtime: Runtime, optimizer: ZeroOptimizer | None, manifest: Manifest) -> Iterator[Wanted]:
    """Every interval that this rank reads."""
    for flat in flats_of(runtime):
        for name, low, high, _ in _value_places(flat, runtime.world.rank):
            entry = manifest.find("parameter", name)
            assert entry is not None
            yield entry, low, high
        if optimizer is not None and flat.gradient is not None:
            for _, name, low, high in wanted_states(flat):
                for entry in manifest.states_of(name):
                    yield entry, low, high
    for kind in ("buffer", "extra"):
        for entry in manifest.of_kind(kind):
            yield entry, 0, entry.numel
    for entry in _generators_of(runtime, manifest):
        yield entry, 0, entry.numel


def _value_places(flat: Flat, rank: int) -> Iterator[tuple[str, int, int, int]]:
    """What of each parameter rests on this rank: name, start, stop, and where in the flat's region or rest."""
    part = flat.region if flat.shelves or not flat.is_sharded else flat.layout.shard(rank)
    for piece in flat.layout.pieces(part):
        yield flat.layout.intervals[piece.index].name, piece.start, piece.stop, piece.offset


def _generators_of(runtime: Runtime, manifest: Manifest) -> list[TensorEntry]:
    """torch's random states of this rank, if as many ranks saved."""
    if manifest.world_size != runtime.world.size:
        return []
    found = [manifest.find("random", f"{runtime.world.rank}/{what}") for what in ("torch", "device")]
    return [entry for entry in found if entry is not None]


def _extra(checkpoint: Checkpoint) -> Any:
    def get(number: int) -> torch.Tensor:
        entry = checkpoint.manifest.find("extra", str(number))
        if entry is None:
            raise CheckpointError(f"the checkpoint has no tensor {number} of extra")
        return checkpoint.read(entry, 0, entry.numel).view(entry.shape)

    return decode(checkpoint.manifest.extra, get)


def _apply(runtime: Runtime, optimizer: ZeroOptimizer | None, checkpoint: Checkpoint) -> None:
    """Everything was checked: take it over, flat by flat."""
    manifest = checkpoint.manifest
    runtime.gatherer.finish_all()
    singles = manifest.optimizer["singles"] if optimizer is not None and manifest.optimizer is not None else {}
    total = sum(entry.numel * getattr(torch, entry.dtype).itemsize for entry in manifest.of_kind("parameter"))
    with Progress("loading", total, is_shown=runtime.world.rank == 0) as progress:
        for group in runtime.groups:
            for flat in group.flats:
                _load_values(flat, runtime.world.rank, checkpoint)
                if optimizer is not None and flat.gradient is not None:
                    put_flat(optimizer._updater, flat, _read_states(flat, checkpoint, singles))
                flat.publish()
                progress.add(flat.rest.numel * flat.rest.dtype.itemsize)
    for group in runtime.update_order():
        runtime.renew(group)
    for name, buffer in buffers_of(runtime.model):
        entry = manifest.find("buffer", name)
        if entry is not None:
            buffer.copy_(checkpoint.read(entry, 0, entry.numel).view(entry.shape))
    if optimizer is not None and manifest.optimizer is not None:
        for options, saved in zip(optimizer.param_groups, manifest.optimizer["groups"], strict=True):
            options.update(decode(saved["options"], _nothing_there))
        optimizer._updater.moved(runtime.groups, optimizer._updater.routes)
    if runtime.loss_scale is not None and manifest.loss_scale is not None:
        for one in fields(runtime.loss_scale):
            setattr(runtime.loss_scale, one.name, manifest.loss_scale[one.name])
    runtime.backward.passes.num_steps = manifest.step
    _restore_generators(runtime, checkpoint)


def _load_values(flat: Flat, rank: int, checkpoint: Checkpoint) -> None:
    for name, low, high, offset in _value_places(flat, rank):
        entry = checkpoint.manifest.find("parameter", name)
        assert entry is not None
        values = checkpoint.read(entry, low, high)
        if not flat.shelves:
            flat.rest.write(slice(offset, offset + high - low), values.to(flat.rest.dtype))
            continue
        for shelf in flat.shelves:
            found = shelf.overlap(offset, offset + high - low)
            if found is not None:
                shelf.master.write(found[0], values[found[1]].to(shelf.master.dtype))


def _read_states(flat: Flat, checkpoint: Checkpoint, singles: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for _, name, low, high in wanted_states(flat):
        states = dict(decode(singles.get(name, {}), _nothing_there))
        for entry in checkpoint.manifest.states_of(name):
            states[entry.state] = checkpoint.read(entry, low, high)
        found[name] = states
    return found


def _nothing_there(number: int) -> torch.Tensor:
    raise CheckpointError(f"tensor {number} is among options or states of one value, where no tensor can be")


def _restore_generators(runtime: Runtime, checkpoint: Checkpoint) -> None:
    """Random states, if as many ranks saved them."""
    manifest, rank, device = checkpoint.manifest, runtime.world.rank, runtime.world.device
    if manifest.world_size != runtime.world.size:
        return
    for entry in _generators_of(runtime, manifest):
        state = checkpoint.read(entry, 0, entry.numel)
        if entry.of.endswith("/torch"):
            torch.set_rng_state(state)
        elif device.type != "cpu":
            torch.get_device_module(device).set_rng_state(state, device)
    others = decode(manifest.random.get(str(rank), {}), _nothing_there)
    if "python" in others:
        random.setstate(others["python"])
    if "numpy" in others and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(others["numpy"])
