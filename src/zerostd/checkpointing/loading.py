"""load: a checkpoint to a prepared model, of any number of ranks, stage and placement.

manifest -> everything is checked, on all ranks -> flat by flat to where it rests -> parameters are renewed
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostd.checkpointing.saving import buffers_of, check_call, describe_optimizer, flats_of, with_extra_state
from zerostd.checkpointing.storage import Checkpoint, Manifest
from zerostd.checkpointing.storage.directory import clear_leftovers
from zerostd.checkpointing.storage.filling import Target, fill_columns
from zerostd.checkpointing.storage.manifest import TensorEntry
from zerostd.checkpointing.storage.progress import Progress
from zerostd.checkpointing.storage.values import decode
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError, MisuseError
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.records import gradient_column, put_flat, wanted_states
from zerostd.optimizers.update import Updater
from zerostd.parameters import Flat
from zerostd.parameters.state_shard import MASTER
from zerostd.policy import Tier
from zerostd.tiers import TierTensor

__all__ = ["IN_PART", "agree", "begin_load", "load_checkpoint", "value_places"]

IN_PART = (
    "The model is loaded in part, on all ranks, and cannot be trained or saved like this: call zerostd.load again, "
    "with this path or another"
)

Wanted = tuple[TensorEntry, int, int]


@dataclass(frozen=True)
class _Found:
    """What is no long tensor, ready to be taken over."""

    extra: Any
    options: list[dict[str, Any]]  # of the optimizer's groups
    singles: dict[str, dict[str, Any]]  # states of one value, by parameter
    modules: dict[str, Any]  # what get_extra_state gave, by name of module
    generators: list[Callable[[], object]]  # put a random state back


@torch.no_grad()
def load_checkpoint(runtime: Runtime, optimizer: ZeroOptimizer | None, path: Path) -> Any:
    """All ranks call it. Returns what `extra` was. Nothing is changed unless everything is in order on all ranks."""
    begin_load(runtime, optimizer)
    checkpoint: Checkpoint | None = None
    found: _Found | None = None
    cause: Exception | None = None
    try:
        try:
            if runtime.world.rank == 0:
                clear_leftovers(path.parent)
            checkpoint = Checkpoint(path)
            found = _checked(runtime, optimizer, checkpoint)
        except Exception as error:
            cause = error
        agree(runtime, "zerostd.load()", cause, "Nothing was changed")
        assert checkpoint is not None and found is not None
        runtime.gatherer.finish_all()
        try:
            _take_over(runtime, optimizer, checkpoint, found)
        except Exception as error:
            cause = error
        agree(runtime, "the end of zerostd.load()", cause, IN_PART)
    finally:
        if checkpoint is not None:
            checkpoint.close()
    for group in runtime.update_order():
        runtime.renew(group)
    if optimizer is not None and checkpoint.manifest.passes:
        names = {one.of for one in checkpoint.manifest.of_kind("gradient")}
        runtime.backward.resume(checkpoint.manifest.passes, names)
    for restore in found.generators:
        restore()
    return found.extra


def begin_load(runtime: Runtime, optimizer: ZeroOptimizer | None) -> None:
    """Return when nothing is under way; raise if something may be that would be lost."""
    check_call(runtime, optimizer, "load")
    if runtime.backward.passes.num_done:
        raise MisuseError(
            f"zerostd.load after {runtime.backward.passes.num_done} backward pass(es) of a step that is not complete: "
            "call it between optimizer.step() and the next backward"
        )
    if any(group.num_pins for group in runtime.groups):
        raise MisuseError("zerostd.load inside zerostd.gathered(): leave the context first")
    runtime.finish_updates()


def agree(runtime: Runtime, where: str, cause: Exception | None, remark: str) -> None:
    """All ranks go on, or all raise what is wrong on the first of them that has something."""
    text = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
    everyone = runtime.gatherer.control.meet(where, None if cause is None else text)
    wrong = [(rank, said) for rank, said in enumerate(everyone) if said is not None]
    if wrong:
        who = f"rank {wrong[0][0]}: " if runtime.world.size > 1 else ""
        raise CheckpointError(f"{who}{wrong[0][1]}. {remark}") from cause


def _checked(runtime: Runtime, optimizer: ZeroOptimizer | None, checkpoint: Checkpoint) -> _Found:
    """Everything that can go wrong goes wrong here, where nothing is changed yet."""
    manifest = checkpoint.manifest
    _check_fits(runtime, optimizer, manifest)
    wanted = [*_wanted(runtime, optimizer, manifest)]
    sizes = [(high - low) * getattr(torch, entry.dtype).itemsize for entry, low, high in wanted]
    with Progress("checking", sum(sizes), is_shown=runtime.world.rank == 0) as progress:
        checkpoint.verify(wanted, progress.add)
    options, singles = [], {}
    if optimizer is not None and manifest.optimizer is not None:
        options = [_named(group["options"]) for group in manifest.optimizer["groups"]]
        singles = {name: _named(one) for name, one in manifest.optimizer["singles"].items()}
    try:
        generators = [*_generators(runtime, checkpoint)]
    except Exception as error:  # what setstate raises is nowhere said
        raise CheckpointError(f"the checkpoint has a random state that is none: {error!s:.200}") from error
    extra, modules = _extras(checkpoint)
    return _Found(extra, options, singles, modules, generators)


def _named(data: Any) -> dict[str, Any]:
    """Options or states by name."""
    found = decode(data, _nothing_there)
    if not isinstance(found, dict) or not all(isinstance(name, str) and name != "params" for name in found):
        raise CheckpointError(f"options or states of one value are {str(found)[:80]}")
    return found


def _check_fits(runtime: Runtime, optimizer: ZeroOptimizer | None, manifest: Manifest) -> None:
    """Every parameter and buffer is there with the same shape, and nothing else; so are groups of the optimizer."""
    mine = {i.name: i.shape for flat in _flats_in(runtime, manifest) for i in flat.layout.intervals}
    buffers = {name: tuple(buffer.shape) for name, buffer in buffers_of(runtime.model)}
    problems = []
    for kind, wanted in (("parameter", mine), ("buffer", buffers)):
        there = {one.of: one.shape for one in manifest.of_kind(kind)}
        problems += [f"{kind} {name!r} is not in the checkpoint" for name in wanted if name not in there]
        problems += [f"{kind} {name!r} is not in the model" for name in there if name not in wanted]
        problems += [
            f"{kind} {name!r} has shape {there[name]} in the checkpoint and {shape} in the model"
            for name, shape in wanted.items()
            if name in there and there[name] != shape
        ]
    takers = {
        name for name, one in runtime.model.named_modules() if type(one).set_extra_state != nn.Module.set_extra_state
    }
    givers = with_extra_state(runtime.model)
    problems += [f"it has no extra state of module {name!r}" for name in givers if name not in manifest.modules]
    problems += [f"module {name!r} has no set_extra_state" for name in manifest.modules if name not in takers]
    if optimizer is not None:
        problems += _optimizer_problems(runtime, optimizer, manifest)
    if runtime.loss_scale is not None and manifest.loss_scale is not None:
        absent = [one.name for one in fields(runtime.loss_scale) if one.name not in manifest.loss_scale]
        problems += [f"its loss_scale has no {name!r}" for name in absent]
    if problems:
        more = f", and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(problems[:20]) + more)


def _optimizer_problems(runtime: Runtime, optimizer: ZeroOptimizer, manifest: Manifest) -> list[str]:
    if manifest.optimizer is None:
        return ["it has no optimizer: load it with optimizer=None"]
    there, mine = manifest.optimizer, describe_optimizer(runtime, optimizer)
    if there.get("class") != mine["class"]:
        return [f"its optimizer is {there.get('class')!r} and this one {mine['class']!r}"]
    told = runtime.backward.passes.accumulate
    if told is not None and manifest.passes > told:
        return [f"it was saved after {manifest.passes} backward passes of a step, and accumulate={told} is less"]
    found = [sorted(group["parameters"]) for group in there["groups"]]
    if found != [sorted(group["parameters"]) for group in mine["groups"]]:
        return [f"its param_groups have {[len(one) for one in found]} parameters, or others than these"]
    trained = {one.name for flat in flats_of(runtime) if flat.gradient is not None for one in flat.layout.intervals}
    frozen = [one.label for one in manifest.of_kind("gradient") if one.of not in trained]
    return [f"{label} has no place: the parameter does not train here" for label in frozen] + [
        f"{entry.label} has no place: the optimizer had other options when it was saved"
        for flat in flats_of(runtime)
        if flat.gradient is not None
        for _, name, _, _ in wanted_states(flat)
        for entry in manifest.states_of(name)
        if any(not shard.is_resident and entry.state not in shard.columns for shard in flat.state_shards)
    ]


def _wanted(runtime: Runtime, optimizer: ZeroOptimizer | None, manifest: Manifest) -> Iterator[Wanted]:
    """Every interval that this rank reads."""
    for flat in _flats_in(runtime, manifest):
        for name, low, high, _ in value_places(flat, runtime.world.rank):
            entry = manifest.find("parameter", name)
            assert entry is not None
            yield entry, low, high
        if optimizer is not None and flat.gradient is not None:
            for _, name, low, high in wanted_states(flat):
                gradient = manifest.find("gradient", name)
                for entry in (*manifest.states_of(name), *([] if gradient is None else [gradient])):
                    yield entry, low, high
    for kind in ("buffer", "extra"):
        for entry in manifest.of_kind(kind):
            yield entry, 0, entry.numel
    for entry in _generators_of(runtime, manifest):
        yield entry, 0, entry.numel


def _flats_in(runtime: Runtime, manifest: Manifest) -> list[Flat]:
    """Those that the checkpoint is about: parameters that do not train may have been left out."""
    flats = flats_of(runtime)
    if manifest.frozen:
        return flats
    return [
        flat
        for flat in flats
        if flat.gradient is not None or any(manifest.find("parameter", one.name) for one in flat.layout.intervals)
    ]


def value_places(flat: Flat, rank: int) -> Iterator[tuple[str, int, int, int]]:
    """What of each parameter rests on this rank: name, start, stop, and where in the flat's region or rest."""
    part = flat.region
    if not flat.state_shards:  # frozen: every rank has all of it, or its shard
        part = flat.layout.shard(rank) if flat.is_sharded else slice(0, flat.layout.numel)
    for piece in flat.layout.pieces(part):
        yield flat.layout.intervals[piece.index].name, piece.start, piece.stop, piece.offset


def _generators_of(runtime: Runtime, manifest: Manifest) -> list[TensorEntry]:
    """torch's random states of this rank, if as many ranks saved."""
    if manifest.world_size != runtime.world.size:
        return []
    found = [manifest.find("random", f"{runtime.world.rank}/{what}") for what in ("torch", "device")]
    return [entry for entry in found if entry is not None]


def _extras(checkpoint: Checkpoint) -> tuple[Any, dict[str, Any]]:
    """The user's, and that of modules."""
    left = {one.of: one for one in checkpoint.manifest.of_kind("extra")}

    def get(number: int) -> torch.Tensor:
        entry = left.pop(str(number), None)
        if entry is None:
            raise CheckpointError(f"the checkpoint has no tensor {number} of extra, or names it twice")
        return checkpoint.read(entry, 0, entry.numel).view(entry.shape)

    manifest = checkpoint.manifest
    return decode(manifest.extra, get), {name: decode(one, get) for name, one in manifest.modules.items()}


def _take_over(runtime: Runtime, optimizer: ZeroOptimizer | None, checkpoint: Checkpoint, found: _Found) -> None:
    """Everything was checked: this rank's part, flat by flat, as far as it needs no other rank."""
    manifest = checkpoint.manifest
    targets: list[Target] = []
    for flat in _flats_in(runtime, manifest):
        targets += _value_targets(flat, runtime.world.rank, manifest)
        if optimizer is not None and flat.gradient is not None:
            _clear_states(flat, manifest)
            targets += _state_targets(optimizer._updater, flat, manifest, found.singles)
            targets += _gradient_targets(flat, manifest)
    sizes = [(part.stop - part.start) * getattr(torch, entry.dtype).itemsize for entry, _, _, part in targets]
    with Progress("loading", sum(sizes), is_shown=runtime.world.rank == 0) as progress:
        fill_columns(checkpoint, targets, progress.add)
    for flat in flats_of(runtime):
        flat.round_masters()
    for name, buffer in buffers_of(runtime.model):
        entry = manifest.find("buffer", name)
        if entry is not None:
            buffer.copy_(checkpoint.read(entry, 0, entry.numel).view(entry.shape))
    for name, state in found.modules.items():
        runtime.model.get_submodule(name).set_extra_state(state)
    if optimizer is not None and manifest.optimizer is not None:
        for options, saved in zip(optimizer.param_groups, found.options, strict=True):
            options.update(saved)
        optimizer._updater.moved(runtime.groups, optimizer._updater.routes)
    if runtime.loss_scale is not None and manifest.loss_scale is not None:
        for one in fields(runtime.loss_scale):
            setattr(runtime.loss_scale, one.name, manifest.loss_scale[one.name])
    runtime.backward.passes.num_steps = manifest.step


def _value_targets(flat: Flat, rank: int, manifest: Manifest) -> Iterator[Target]:
    for name, low, high, offset in value_places(flat, rank):
        entry = manifest.find("parameter", name)
        assert entry is not None
        if not flat.state_shards:
            yield entry, low, flat.rest, slice(offset, offset + high - low)
            continue
        for shard in flat.state_shards:
            found = shard.overlap(offset, offset + high - low)
            if found is not None:
                yield entry, low + found[1].start, shard.master, found[0]


def _clear_states(flat: Flat, manifest: Manifest) -> None:
    """A state that the checkpoint does not have begins with zeros, where there is a place for it already."""
    for piece in flat.layout.pieces(flat.region):
        saved = {entry.state for entry in manifest.states_of(flat.layout.intervals[piece.index].name)}
        for shard in flat.state_shards:
            part = shard.overlap(piece.offset, piece.offset + piece.numel)
            for name, column in shard.columns.items():
                if name != MASTER and name not in saved and part is not None:
                    column.write(part[0], torch.zeros(part[0].stop - part[0].start, dtype=column.dtype))


def _state_targets(
    updater: Updater, flat: Flat, manifest: Manifest, singles: Mapping[str, Mapping[str, Any]]
) -> Iterator[Target]:
    """Take over states of one value and make room for the long ones. Parameters that share a run have the same."""
    names = [interval.name for interval in flat.layout.intervals]
    put_flat(updater, flat, {name: singles.get(name, {}) for name in names})
    updater.runs[flat].cut([tuple((entry.state, entry.dtype) for entry in manifest.states_of(name)) for name in names])
    for run in updater.runs[flat].runs:
        for entry in manifest.states_of(names[run.pieces[0].index]):
            if run.tensor is None:
                run.singles = {} if run.singles is None else run.singles
                column, begin = run.shard.columns[entry.state], run.part.start
            else:
                value = torch.empty_like(run.tensor, dtype=getattr(torch, entry.dtype))
                updater.inner.state[run.tensor][entry.state] = value
                column, begin = TierTensor(run.numel, value.dtype, Tier.DEVICE, value), 0
            for piece in run.pieces:
                found = manifest.find("state", names[piece.index], entry.state)
                assert found is not None
                place = begin + piece.offset - run.region.start
                yield found, piece.start, column, slice(place, place + piece.numel)


def _gradient_targets(flat: Flat, manifest: Manifest) -> Iterator[Target]:
    """Of passes of a step that was not complete. Parameters that had none have none then: what is there is not read."""
    found = [
        (entry, piece)
        for piece in flat.layout.pieces(flat.region)
        if (entry := manifest.find("gradient", flat.layout.intervals[piece.index].name)) is not None
    ]
    if found:
        column = gradient_column(flat, {getattr(torch, entry.dtype) for entry, _ in found})
        for entry, piece in found:
            yield entry, piece.start, column, slice(piece.offset, piece.offset + piece.numel)


def _nothing_there(number: int) -> torch.Tensor:
    raise CheckpointError(f"tensor {number} is among options or states of one value, where no tensor can be")


def _generators(runtime: Runtime, checkpoint: Checkpoint) -> Iterator[Callable[[], object]]:
    """How to put random states back, if as many ranks saved them. Each is tried on a generator of its own."""
    manifest, rank, device = checkpoint.manifest, runtime.world.rank, runtime.world.device
    if manifest.world_size != runtime.world.size:
        return
    for entry in _generators_of(runtime, manifest):
        state = checkpoint.read(entry, 0, entry.numel)
        if entry.of.endswith("/torch"):
            torch.Generator().set_state(state)
            yield partial(torch.set_rng_state, state)
        elif device.type != "cpu":
            torch.Generator(device).set_state(state)
            yield partial(torch.get_device_module(device).set_rng_state, state, device)
    others = decode(manifest.random.get(str(rank), {}), _nothing_there)
    if not isinstance(others, dict):
        raise CheckpointError(f"random states of rank {rank} are {str(others)[:80]}")
    if "python" in others:
        random.Random().setstate(others["python"])
        yield partial(random.setstate, others["python"])
    if "numpy" in others and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.RandomState().set_state(others["numpy"])
        yield partial(numpy.random.set_state, others["numpy"])
