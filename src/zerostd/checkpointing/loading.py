"""Load a checkpoint into a prepared model, of any number of ranks, stage and placement.

manifest -> everything is checked, on all ranks -> flat by flat to where it is kept -> parameters are renewed

Nothing is changed unless every rank has found everything in order. If a disk fails after that, all ranks raise.
`importing` loads ordinary models in the same two phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from msgspec.structs import replace

from zerostd.checkpointing.generators import generator_entries, restore_functions
from zerostd.checkpointing.saving import check_call, describe_optimizer, modules_with_own
from zerostd.checkpointing.storage import Checkpoint, Manifest
from zerostd.checkpointing.storage.directory import clear_leftovers
from zerostd.checkpointing.storage.manifest import OptimizerGroup, TensorEntry, decode_value, refuse_tensor
from zerostd.checkpointing.storage.remote import AnyPath
from zerostd.engine.averaging import COUNTS, averages_of
from zerostd.engine.intervals import SavedInterval, gradient_intervals, kept_values, state_intervals, updated_intervals
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError, MisuseError
from zerostd.monitoring.progress import ByteProgress
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.states import replace_states
from zerostd.optimizers.updater import Updater
from zerostd.parameters import Flat
from zerostd.parameters.blueprints import buffers_of
from zerostd.parameters.state_shard import OF_MASTER
from zerostd.sharding.boxes import Stretch

if TYPE_CHECKING:  # it imports torch.distributed.checkpoint, which `api.save_dcp` does when it is needed
    from zerostd.checkpointing.storage.dcp_files import DcpCheckpoint

    AnyCheckpoint = Checkpoint | DcpCheckpoint

MOST_PROBLEMS = 20  # named in an error
IN_PART = (
    ". The model is only partly loaded, on all ranks, and cannot be trained or saved: call zerostd.load again, with "
    "this path or another"
)

T = TypeVar("T")
Wanted = tuple[TensorEntry, Stretch]  # elements of a tensor that this rank reads


def load_in_two_phases(
    runtime: Runtime, optimizer: ZeroOptimizer | None, check: Callable[[ExitStack], T], apply: Callable[[T], None]
) -> T:
    """Return what `check` returned, after `apply` has used it and parameters are renewed. All ranks call it.

    1. Wait until nothing is under way, and refuse a call that would lose gradients.
    2. `check(files)` opens files, which are closed at the end, and raises if anything is wrong. It changes nothing.
    3. `apply(checked)` puts values where this rank keeps them. It needs no other rank.
    """
    check_call(runtime, optimizer, "load")
    num_done = runtime.backward.passes.num_done
    if num_done:
        raise MisuseError(
            f"zerostd.load after {num_done} backward pass(es) of an incomplete step: call it between "
            "optimizer.step() and the next backward"
        )
    if any(group.num_pins for group in runtime.groups):
        raise MisuseError("zerostd.load inside zerostd.gathered(): leave the context first")
    runtime.finish_updates()
    control = runtime.gatherer.control
    with ExitStack() as files:
        checked = control.on_all_ranks(lambda: check(files), "zerostd.load()", CheckpointError, ". Nothing was changed")
        runtime.gatherer.wait_all()
        control.on_all_ranks(lambda: apply(checked), "the end of zerostd.load()", CheckpointError, IN_PART)
    for group in runtime.update_order():
        for shard in (shard for flat in group.flats for shard in flat.state_shards):
            shard.seals.clear()  # files are read past torch
        runtime.renew(group)
    updates = None if runtime.optimizer is None else runtime.optimizer.backward_updates
    if runtime.gradients.refusal is not None and updates is not None and runtime.optimizer is not None:
        updates.forget()
        runtime.optimizer.zero_grad()
    return checked


def load_checkpoint(runtime: Runtime, optimizer: ZeroOptimizer | None, path: AnyPath) -> Any:
    """Load a checkpoint of ours, and return what `extra` was. All ranks call it."""

    def open_checkpoint() -> Checkpoint:
        if runtime.world.rank == 0:
            clear_leftovers(path.parent)
        return Checkpoint(path, runtime.ledger.retries)

    return load_from(runtime, optimizer, open_checkpoint)


@torch.no_grad()
def load_from(runtime: Runtime, optimizer: ZeroOptimizer | None, open_checkpoint: Callable[[], AnyCheckpoint]) -> Any:
    """Load what `open_checkpoint` opens, and return what `extra` was. Nothing is changed unless all is in order on all
    ranks."""
    restore_generators: list[Callable[[], object]] = []

    def check(files: ExitStack) -> AnyCheckpoint:
        checkpoint = files.enter_context(closing(open_checkpoint()))
        manifest = checkpoint.manifest
        problems = [*_problems(runtime, optimizer, manifest)]
        if problems:
            more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
            raise CheckpointError(f"checkpoint does not match the model: {'; '.join(problems[:MOST_PROBLEMS])}{more}")
        wanted = [*_wanted(runtime, optimizer, manifest)]
        total = sum((stretch.stop - stretch.start) * entry.torch_dtype.itemsize for entry, stretch in wanted)
        with ByteProgress("checking", total, is_shown=runtime.world.rank == 0) as progress:
            checkpoint.verify(wanted, progress.add)
        try:
            restore_generators.extend(restore_functions(runtime.world, checkpoint))
        except Exception as error:  # setstate does not say what it raises
            raise CheckpointError(f"the checkpoint contains an invalid RNG state: {error!s:.200}") from error
        checkpoint.manifest = _decoded(checkpoint, optimizer)
        return checkpoint

    checkpoint = load_in_two_phases(runtime, optimizer, check, lambda checked: _apply(runtime, optimizer, checked))
    manifest = checkpoint.manifest
    runtime.gatherer.control.note(f"zerostd.load() of the checkpoint saved at {manifest.saved}")
    if optimizer is not None and manifest.passes:
        runtime.backward.resume(manifest.passes, {entry.of for entry in manifest.of_kind("gradient")})
    for restore in restore_generators:
        restore()
    return manifest.extra


# Checking: everything that can go wrong goes wrong here, where nothing is changed yet


def _problems(runtime: Runtime, optimizer: ZeroOptimizer | None, manifest: Manifest) -> Iterator[str]:
    """Yield what does not fit: parameters, buffers, extra states, the optimizer's groups and the loss scale."""
    parameters = {i.name: i.full_shape for flat in _flats_in(runtime, manifest) for i in flat.layout.intervals}
    buffers = {name: tuple(buffer.shape) for name, buffer in buffers_of(runtime.model).items()}
    for kind, shapes in (("parameter", parameters), ("buffer", buffers)):
        saved = {entry.of: entry.shape for entry in manifest.of_kind(kind)}
        yield from (f"{kind} {name!r} is not in the checkpoint" for name in shapes if name not in saved)
        yield from (f"{kind} {name!r} is not in the model" for name in saved if name not in shapes)
        for name, shape in shapes.items():
            if saved.get(name, shape) != shape:
                yield f"{kind} {name!r} has shape {saved[name]} in the checkpoint, but {shape} in the model"
    with_state = modules_with_own(runtime.model, "get_extra_state")
    settable = modules_with_own(runtime.model, "set_extra_state")
    yield from (f"it has no extra state for module {name!r}" for name in with_state if name not in manifest.modules)
    yield from (f"module {name!r} has no set_extra_state" for name in manifest.modules if name not in settable)
    if optimizer is not None:
        yield from _optimizer_problems(runtime, optimizer, manifest)
    if runtime.loss_scale is not None and manifest.loss_scale is not None:
        for field in fields(runtime.loss_scale):
            if field.name not in manifest.loss_scale:
                yield f"its loss_scale has no {field.name!r}"
    yield from _average_problems(runtime, manifest, is_resumed=optimizer is not None)


def _average_problems(runtime: Runtime, manifest: Manifest, *, is_resumed: bool) -> Iterator[str]:
    """Yield the problems with averages. A model whose training does not resume needs none."""
    averages = {average.name: average for average in averages_of(runtime)}
    if is_resumed and len(averages) < len(manifest.averages):
        yield f"it has {len(manifest.averages)} average(s): make them with zerostd.averaged(model, ...) before loading"
    for name, average in averages.items():
        if name not in manifest.averages:
            yield f"average {name} is not in the checkpoint: make it after loading"
        elif missing := [count for count in COUNTS if count not in manifest.averages[name]]:
            yield f"its average {name} has no {missing[0]!r}"
        elif manifest.averages[name]["num_averaged"]:
            trained = [i for flat in runtime.trained_flats for i in flat.layout.intervals]
            shapes = {interval.name: interval.full_shape for interval in trained if interval.numel}
            shapes |= {buffer: tuple(values.shape) for buffer, values in average.buffers.items()}
            for of, shape in shapes.items():
                if shape not in [entry.shape for entry in manifest.named("average", of) if entry.state == name]:
                    yield f"average {name} of {of!r} is not in the checkpoint, or has another shape"


def _optimizer_problems(runtime: Runtime, optimizer: ZeroOptimizer, manifest: Manifest) -> Iterator[str]:
    saved = manifest.optimizer
    if saved is None:
        yield "it has no optimizer: load it with optimizer=None"
        return
    ours = describe_optimizer(runtime, optimizer)
    if saved.class_name != ours.class_name:
        yield f"its optimizer is {saved.class_name!r}, but this one is {ours.class_name!r}"
        return
    accumulate = runtime.backward.passes.accumulate
    if accumulate is not None and manifest.passes > accumulate:
        yield f"it was saved after {manifest.passes} backward passes of a step, but accumulate={accumulate} is less"
        return
    if [sorted(group.parameters) for group in saved.groups] != [sorted(group.parameters) for group in ours.groups]:
        counts = [len(group.parameters) for group in saved.groups]
        yield f"its param_groups have {counts} parameters, but this optimizer's have other numbers or names"
        return
    trained = runtime.trained_flats
    trained_names = {interval.name for flat in trained for interval in flat.layout.intervals}
    for entry in manifest.of_kind("gradient"):
        if entry.of not in trained_names:
            yield f"{entry.label} cannot be loaded: the parameter is frozen in this model"
    for flat in trained:
        for name, _ in updated_intervals(flat):
            for entry in manifest.named("state", name):
                if any(not shard.is_resident and entry.state not in shard.tensors for shard in flat.state_shards):
                    yield f"{entry.label} cannot be loaded: the optimizer had other options when it was saved"


def _flats_in(runtime: Runtime, manifest: Manifest) -> list[Flat]:
    """Return the flats that the checkpoint is about: parameters that do not train may have been left out."""
    flats = runtime.flats
    if manifest.frozen:
        return flats
    saved = {entry.of for entry in manifest.of_kind("parameter")}
    return [flat for flat in flats if flat.gradient is not None or any(i.name in saved for i in flat.layout.intervals)]


def _wanted(runtime: Runtime, optimizer: ZeroOptimizer | None, manifest: Manifest) -> Iterator[Wanted]:
    for flat in _flats_in(runtime, manifest):
        for record in kept_values(flat, runtime.world.shard_rank):
            (entry,) = manifest.named("parameter", record.of)
            yield entry, record.stretch
        for record in _average_records(runtime, flat):
            for entry in manifest.named("average", record.of):
                if entry.state == record.state:
                    yield entry, record.stretch
        if optimizer is not None and flat.gradient is not None:
            for name, stretch in updated_intervals(flat):
                for entry in (*manifest.named("state", name), *manifest.named("gradient", name)):
                    yield entry, stretch
    generators = generator_entries(runtime.world, manifest)
    for entry in (*manifest.of_kind("buffer"), *manifest.of_kind("extra"), *generators):
        yield entry, entry.whole


def _decoded(checkpoint: AnyCheckpoint, optimizer: ZeroOptimizer | None) -> Manifest:
    """Return the manifest with users' values in place of their JSON: options, scalar states, extra states."""
    manifest = checkpoint.manifest
    tensors = {entry.of: entry for entry in manifest.of_kind("extra")}

    def load(number: int) -> torch.Tensor:
        entry = tensors.pop(str(number), None)
        if entry is None:
            raise CheckpointError(f"the checkpoint has no tensor {number} in extra, or uses it twice")
        return checkpoint.read(entry)

    saved = manifest.optimizer
    if optimizer is not None and saved is not None:
        groups = tuple(OptimizerGroup(_decode_options(group.options), group.parameters) for group in saved.groups)
        singles = {name: _decode_options(states) for name, states in saved.singles.items()}
        saved = replace(saved, groups=groups, singles=singles)
    extra = decode_value(manifest.extra, load)
    modules = {name: decode_value(state, load) for name, state in manifest.modules.items()}
    return replace(manifest, optimizer=saved, extra=extra, modules=modules)


def _decode_options(data: Any) -> dict[str, Any]:
    options = decode_value(data, refuse_tensor)
    if not isinstance(options, dict) or not all(isinstance(name, str) and name != "params" for name in options):
        raise CheckpointError(f"the checkpoint contains invalid options or scalar states: {str(options)[:80]}")
    return options


# Applying: this rank's part, as far as it needs no other rank


def _apply(runtime: Runtime, optimizer: ZeroOptimizer | None, checkpoint: AnyCheckpoint) -> None:
    manifest = checkpoint.manifest
    entries = {entry.identity: entry for entry in manifest.tensors}
    targets = []
    for record in _records(runtime, optimizer, manifest):
        entry = entries.get((record.kind, record.of, record.state))
        if entry is not None:
            targets.append((entry, record))
    total = sum((record.stop - record.start) * entry.torch_dtype.itemsize for entry, record in targets)
    with ByteProgress("loading", total, is_shown=runtime.world.rank == 0) as progress:
        checkpoint.fill_tiers(targets, progress.add)
    for flat in runtime.flats:
        flat.round_masters()
    for name, buffer in buffers_of(runtime.model).items():
        for entry in manifest.named("buffer", name):
            buffer.copy_(checkpoint.read(entry))
    for average in averages_of(runtime):
        average.set_counts(manifest.averages[average.name])
        for name, averaged in average.buffers.items():
            for entry in manifest.named("average", name):
                if entry.state == average.name:
                    averaged.copy_(checkpoint.read(entry))
    for name, extra_state in manifest.modules.items():
        runtime.model.get_submodule(name).set_extra_state(extra_state)
    if optimizer is not None and manifest.optimizer is not None:
        for group, saved in zip(optimizer.param_groups, manifest.optimizer.groups, strict=True):
            group.update(saved.options)
        optimizer.updater.moved(optimizer.updater.offload)
    if runtime.loss_scale is not None and manifest.loss_scale is not None:
        for field in fields(runtime.loss_scale):
            setattr(runtime.loss_scale, field.name, manifest.loss_scale[field.name])
    runtime.backward.passes.num_steps = manifest.step


def _clear_states(flat: Flat, manifest: Manifest) -> None:
    """Set states that the checkpoint does not have to zero, where there is memory for them already."""
    for shard in flat.state_shards:
        for part, here in shard.parts(flat.layout.pieces(flat.region)):
            saved = {entry.state for entry in manifest.named("state", flat.layout.intervals[part.index].name)}
            for name, tensor in shard.tensors.items():
                if name not in OF_MASTER and name not in saved:
                    tensor.write(here, torch.zeros(part.numel, dtype=tensor.dtype))


def _records(runtime: Runtime, optimizer: ZeroOptimizer | None, manifest: Manifest) -> Iterator[SavedInterval]:
    """Yield where this rank keeps what it loads, after making room for states and gradients of an incomplete step."""
    for flat in _flats_in(runtime, manifest):
        yield from kept_values(flat, runtime.world.shard_rank)
        yield from _average_records(runtime, flat)
        if optimizer is None or flat.gradient is None:
            continue
        _clear_states(flat, manifest)
        _make_states(optimizer.updater, flat, manifest)
        yield from state_intervals(optimizer.updater.spans[flat], flat.region, group="")
        gradients = [entry for name, _ in updated_intervals(flat) for entry in manifest.named("gradient", name)]
        if gradients:
            yield from gradient_intervals(flat, flat.region, "", {entry.torch_dtype for entry in gradients})


def _average_records(runtime: Runtime, flat: Flat) -> Iterator[SavedInterval]:
    """Yield where this rank keeps averages of a flat."""
    for average in averages_of(runtime):
        yield from average.records(flat, flat.region, group="", is_loaded=True)


def _make_states(updater: Updater, flat: Flat, manifest: Manifest) -> None:
    """Take over scalar states and make room for the long ones. Parameters that share a span have the same."""
    scalars = {} if manifest.optimizer is None else manifest.optimizer.singles
    names = [interval.name for interval in flat.layout.intervals]
    by_parameter = zip(flat.parameters, names, strict=True)
    replace_states(updater, flat, {parameter: dict(scalars.get(name, {})) for parameter, name in by_parameter})
    spans = updater.spans[flat]
    spans.cut([tuple((entry.state, entry.dtype) for entry in manifest.named("state", name)) for name in names])
    for span in spans:
        for entry in manifest.named("state", names[span.pieces[0].index]):
            spans.make_long_state(span, entry.state, entry.torch_dtype)
