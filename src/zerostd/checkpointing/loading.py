"""Load a checkpoint into a prepared model, of any number of ranks, stage and placement.

manifest -> everything is checked, on all ranks -> flat by flat to where it is kept -> parameters are renewed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from zerostd.checkpointing.model_parts import buffers_of, flats_of, modules_with_own
from zerostd.checkpointing.random_states import generator_entries, restore_functions
from zerostd.checkpointing.saving import describe_optimizer
from zerostd.checkpointing.storage import Checkpoint, Manifest
from zerostd.checkpointing.storage.directory import clear_leftovers
from zerostd.checkpointing.storage.json_values import decode_value, refuse_tensor
from zerostd.checkpointing.storage.manifest import TensorEntry
from zerostd.checkpointing.storage.reading import Target
from zerostd.checkpointing.two_phase import load_in_two_phases, value_targets
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError
from zerostd.monitoring.progress import ByteProgress
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.records import gradient_tensor, updated_intervals
from zerostd.optimizers.states import replace_states
from zerostd.optimizers.updater import Updater
from zerostd.parameters import Flat
from zerostd.parameters.flat import MASTER
from zerostd.policy import Tier
from zerostd.tiers import TierTensor

MOST_PROBLEMS = 20  # named in an error


@dataclass(frozen=True)
class _CheckedState:
    """A checkpoint that fits, with everything but long tensors decoded."""

    checkpoint: Checkpoint
    extra: Any
    options: list[dict[str, Any]]  # of the optimizer's groups
    singles: dict[str, dict[str, Any]]  # states of one value, by parameter
    modules: dict[str, Any]  # what get_extra_state returned, by name of module
    restore_generators: list[Callable[[], object]]


@torch.no_grad()
def load_checkpoint(runtime: Runtime, optimizer: ZeroOptimizer | None, path: Path) -> Any:
    """Load, and return what `extra` was. All ranks call it. Nothing is changed unless all is in order on all ranks."""

    def check(files: ExitStack) -> _CheckedState:
        if runtime.world.rank == 0:
            clear_leftovers(path.parent)
        return _check(runtime, optimizer, files.enter_context(Checkpoint(path)))

    state = load_in_two_phases(runtime, optimizer, check, lambda state: _apply(runtime, optimizer, state))
    manifest = state.checkpoint.manifest
    if optimizer is not None and manifest.passes:
        runtime.backward.resume(manifest.passes, {entry.of for entry in manifest.of_kind("gradient")})
    for restore in state.restore_generators:
        restore()
    return state.extra


# Checking: everything that can go wrong goes wrong here, where nothing is changed yet


def _check(runtime: Runtime, optimizer: ZeroOptimizer | None, checkpoint: Checkpoint) -> _CheckedState:
    manifest = checkpoint.manifest
    problems = [*_problems(runtime, optimizer, manifest)]
    if problems:
        more = f", and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(problems[:MOST_PROBLEMS]) + more)
    wanted = [*_wanted(runtime, optimizer, manifest)]
    total = sum((high - low) * entry.torch_dtype.itemsize for entry, low, high in wanted)
    with ByteProgress("checking", total, is_shown=runtime.world.rank == 0) as progress:
        checkpoint.verify(wanted, progress.add)
    options: list[dict[str, Any]] = []
    singles: dict[str, dict[str, Any]] = {}
    if optimizer is not None and manifest.optimizer is not None:
        options = [_decode_options(group.options) for group in manifest.optimizer.groups]
        singles = {name: _decode_options(states) for name, states in manifest.optimizer.singles.items()}
    restore_generators = restore_functions(runtime.world, checkpoint)
    extra, modules = _decode_extra(checkpoint)
    return _CheckedState(checkpoint, extra, options, singles, modules, restore_generators)


def _problems(runtime: Runtime, optimizer: ZeroOptimizer | None, manifest: Manifest) -> Iterator[str]:
    """Yield what does not fit: parameters, buffers, extra states, the optimizer's groups and the loss scale."""
    parameters = {i.name: i.shape for flat in _flats_in(runtime, manifest) for i in flat.layout.intervals}
    buffers = {name: tuple(buffer.shape) for name, buffer in buffers_of(runtime.model).items()}
    for kind, shapes in (("parameter", parameters), ("buffer", buffers)):
        saved = {entry.of: entry.shape for entry in manifest.of_kind(kind)}
        yield from (f"{kind} {name!r} is not in the checkpoint" for name in shapes if name not in saved)
        yield from (f"{kind} {name!r} is not in the model" for name in saved if name not in shapes)
        for name, shape in shapes.items():
            if saved.get(name, shape) != shape:
                yield f"{kind} {name!r} has shape {saved[name]} in the checkpoint and {shape} in the model"
    for name in modules_with_own(runtime.model, "get_extra_state"):
        if name not in manifest.modules:
            yield f"it has no extra state of module {name!r}"
    settable = modules_with_own(runtime.model, "set_extra_state")
    yield from (f"module {name!r} has no set_extra_state" for name in manifest.modules if name not in settable)
    if optimizer is not None:
        yield from _optimizer_problems(runtime, optimizer, manifest)
    if runtime.loss_scale is not None and manifest.loss_scale is not None:
        for field in fields(runtime.loss_scale):
            if field.name not in manifest.loss_scale:
                yield f"its loss_scale has no {field.name!r}"


def _optimizer_problems(runtime: Runtime, optimizer: ZeroOptimizer, manifest: Manifest) -> Iterator[str]:
    saved = manifest.optimizer
    if saved is None:
        yield "it has no optimizer: load it with optimizer=None"
        return
    ours = describe_optimizer(runtime, optimizer)
    if saved.class_name != ours.class_name:
        yield f"its optimizer is {saved.class_name!r} and this one {ours.class_name!r}"
        return
    accumulate = runtime.backward.passes.accumulate
    if accumulate is not None and manifest.passes > accumulate:
        yield f"it was saved after {manifest.passes} backward passes of a step, and accumulate={accumulate} is less"
        return
    if [sorted(group.parameters) for group in saved.groups] != [sorted(group.parameters) for group in ours.groups]:
        counts = [len(group.parameters) for group in saved.groups]
        yield f"its param_groups have {counts} parameters, or others than these"
        return
    trained = [flat for flat in flats_of(runtime) if flat.gradient is not None]
    trained_names = {interval.name for flat in trained for interval in flat.layout.intervals}
    for entry in manifest.of_kind("gradient"):
        if entry.of not in trained_names:
            yield f"{entry.label} has no place: the parameter does not train here"
    for flat in trained:
        for name, _, _ in updated_intervals(flat):
            for entry in manifest.states_of(name):
                if any(not shard.is_resident and entry.state not in shard.tensors for shard in flat.state_shards):
                    yield f"{entry.label} has no place: the optimizer had other options when it was saved"


def _flats_in(runtime: Runtime, manifest: Manifest) -> list[Flat]:
    """Return the flats that the checkpoint is about: parameters that do not train may have been left out."""
    flats = flats_of(runtime)
    if manifest.frozen:
        return flats
    return [
        flat
        for flat in flats
        if flat.gradient is not None
        or any(manifest.find("parameter", interval.name) for interval in flat.layout.intervals)
    ]


def _wanted(
    runtime: Runtime, optimizer: ZeroOptimizer | None, manifest: Manifest
) -> Iterator[tuple[TensorEntry, int, int]]:
    """Yield every interval that this rank reads."""
    for flat in _flats_in(runtime, manifest):
        for entry, low, _, part in _value_targets(flat, runtime.world.rank, manifest):
            yield entry, low, low + part.stop - part.start
        if optimizer is not None and flat.gradient is not None:
            for name, low, high in updated_intervals(flat):
                gradient = manifest.find("gradient", name)
                for entry in (*manifest.states_of(name), *([] if gradient is None else [gradient])):
                    yield entry, low, high
    for entry in (
        *manifest.of_kind("buffer"),
        *manifest.of_kind("extra"),
        *generator_entries(runtime.world, manifest),
    ):
        yield entry, 0, entry.numel


def _decode_options(data: Any) -> dict[str, Any]:
    """Return options or states by name."""
    options = decode_value(data, refuse_tensor)
    if not isinstance(options, dict) or not all(isinstance(name, str) and name != "params" for name in options):
        raise CheckpointError(f"options or states of one value are {str(options)[:80]}")
    return options


def _decode_extra(checkpoint: Checkpoint) -> tuple[Any, dict[str, Any]]:
    """Return the user's extra state and that of modules."""
    left = {entry.of: entry for entry in checkpoint.manifest.of_kind("extra")}

    def load(number: int) -> torch.Tensor:
        entry = left.pop(str(number), None)
        if entry is None:
            raise CheckpointError(f"the checkpoint has no tensor {number} of extra, or names it twice")
        return checkpoint.read(entry)

    extra = decode_value(checkpoint.manifest.extra, load)
    return extra, {name: decode_value(state, load) for name, state in checkpoint.manifest.modules.items()}


# Applying: this rank's part, as far as it needs no other rank


def _apply(runtime: Runtime, optimizer: ZeroOptimizer | None, state: _CheckedState) -> None:
    checkpoint = state.checkpoint
    manifest = checkpoint.manifest
    targets: list[Target] = []
    for flat in _flats_in(runtime, manifest):
        targets += _value_targets(flat, runtime.world.rank, manifest)
        if optimizer is not None and flat.gradient is not None:
            _clear_states(flat, manifest)
            targets += _state_targets(optimizer.updater, flat, manifest, state.singles)
            targets += _gradient_targets(flat, manifest)
    total = sum((part.stop - part.start) * entry.torch_dtype.itemsize for entry, _, _, part in targets)
    with ByteProgress("loading", total, is_shown=runtime.world.rank == 0) as progress:
        checkpoint.fill_tiers(targets, progress.add)
    for flat in flats_of(runtime):
        flat.round_masters()
    for name, buffer in buffers_of(runtime.model).items():
        entry = manifest.find("buffer", name)
        if entry is not None:
            buffer.copy_(checkpoint.read(entry))
    for name, extra_state in state.modules.items():
        runtime.model.get_submodule(name).set_extra_state(extra_state)
    if optimizer is not None and manifest.optimizer is not None:
        for group, options in zip(optimizer.param_groups, state.options, strict=True):
            group.update(options)
        optimizer.updater.moved(runtime.groups, optimizer.updater.offload)
    if runtime.loss_scale is not None and manifest.loss_scale is not None:
        for field in fields(runtime.loss_scale):
            setattr(runtime.loss_scale, field.name, manifest.loss_scale[field.name])
    runtime.backward.passes.num_steps = manifest.step


def _value_targets(flat: Flat, rank: int, manifest: Manifest) -> Iterator[Target]:
    for name, low, tensor, part in value_targets(flat, rank):
        entry = manifest.find("parameter", name)
        assert entry is not None
        yield entry, low, tensor, part


def _clear_states(flat: Flat, manifest: Manifest) -> None:
    """Set states that the checkpoint does not have to zero, where there is memory for them already."""
    for piece in flat.layout.pieces(flat.region):
        saved = {entry.state for entry in manifest.states_of(flat.layout.intervals[piece.index].name)}
        for shard in flat.state_shards:
            overlap = shard.overlap(piece.offset, piece.offset + piece.numel)
            for name, tensor in shard.tensors.items():
                if name != MASTER and name not in saved and overlap is not None:
                    here = overlap[0]
                    tensor.write(here, torch.zeros(here.stop - here.start, dtype=tensor.dtype))


def _state_targets(
    updater: Updater, flat: Flat, manifest: Manifest, scalars: Mapping[str, Mapping[str, Any]]
) -> Iterator[Target]:
    """Take over scalar states and make room for the long ones. Parameters that share a span have the same."""
    names = [interval.name for interval in flat.layout.intervals]
    by_parameter = zip(flat.parameters, names, strict=True)
    replace_states(updater, flat, {parameter: dict(scalars.get(name, {})) for parameter, name in by_parameter})
    spans = updater.spans[flat]
    spans.cut([tuple((entry.state, entry.dtype) for entry in manifest.states_of(name)) for name in names])
    for span in spans:
        for entry in manifest.states_of(names[span.pieces[0].index]):
            if span.tensor is None:
                span.scalars = {} if span.scalars is None else span.scalars
                tensor = span.shard.tensors[entry.state]
                begin = span.in_shard.start
            else:
                value = torch.empty_like(span.tensor, dtype=entry.torch_dtype)
                updater.inner.state[span.tensor][entry.state] = value
                tensor = TierTensor(span.numel, value.dtype, Tier.DEVICE, value)
                begin = 0
            for piece in span.pieces:
                state = manifest.find("state", names[piece.index], entry.state)
                assert state is not None
                start = begin + span.part_of(piece).start
                yield state, piece.start, tensor, slice(start, start + piece.numel)


def _gradient_targets(flat: Flat, manifest: Manifest) -> Iterator[Target]:
    """Yield targets for the gradients of an incomplete step. Parameters without one there have none after it, either:
    what their memory holds is not read."""
    gradients = [
        (entry, piece)
        for piece in flat.layout.pieces(flat.region)
        if (entry := manifest.find("gradient", flat.layout.intervals[piece.index].name)) is not None
    ]
    if gradients:
        tensor = gradient_tensor(flat, {entry.torch_dtype for entry, _ in gradients})
        for entry, piece in gradients:
            yield entry, piece.start, tensor, slice(piece.offset, piece.offset + piece.numel)
