"""Load an ordinary model, from files that know nothing of zerostd, into a prepared model.

names, shapes, dtypes -> everything is checked, on all ranks -> each rank reads what it keeps, block by block
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from zerostd.checkpointing.model_parts import buffers_of, flats_of, parameters_of, walk_buffers
from zerostd.checkpointing.storage.model_files import TensorReader, open_model
from zerostd.checkpointing.two_phase import load_in_two_phases, value_targets
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError
from zerostd.monitoring.progress import ByteProgress
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.parameters import Flat

BLOCK = 4 << 20  # bytes read at a time
MOST_NAMED = 40  # in an error, of each kind; the log has all

log = logging.getLogger("zerostd")


@dataclass
class _NameMatch:
    """Which tensor of the files belongs to which of the model, and what is wrong with the rest."""

    readers: dict[str, TensorReader]  # of the files, by name of tensor
    parameters: dict[str, str] = field(default_factory=dict)  # name in the files, by name in the model
    buffers: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    conversions: Counter[tuple[torch.dtype, torch.dtype]] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)

    def find(self, names: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """Return the name under which the files have a tensor; None if they do not, or if it has no elements."""
        present = [name for name in names if name in self.readers]
        if not present and 0 not in shape:
            others = f" (or {', '.join(map(repr, names[1:]))})" if len(names) > 1 else ""
            self.missing.append(f"{names[0]!r}{others}")
        for name in present:
            stored = self.readers[name].tensors[name]
            if tuple(stored.shape) != shape:
                self.unlike.append(f"{name!r} has shape {tuple(stored.shape)} and {shape} in the model")
            elif _kind(stored.dtype) != _kind(dtype):
                self.unlike.append(f"{name!r} is {_dtype_text(stored.dtype)} and {_dtype_text(dtype)} in the model")
        if not present or 0 in shape:
            return None
        stored_dtype = self.readers[present[0]].tensors[present[0]].dtype
        if stored_dtype != dtype:
            self.conversions[stored_dtype, dtype] += 1
        return present[0]


@torch.no_grad()
def import_model(runtime: Runtime, optimizer: ZeroOptimizer | None, path: Path) -> None:
    """Load a model from ordinary files. All ranks call it. Nothing is changed unless everything fits on all ranks;
    states of an optimizer stay."""

    def check(files: ExitStack) -> _NameMatch:
        if optimizer is not None:
            raise CheckpointError(
                f"{path} is an ordinary model, without states of an optimizer: leave the optimizer out of "
                "zerostd.load. Its masters take the new values, and its states begin with training"
            )
        return _match_names(runtime, open_model(path, files))

    match = load_in_two_phases(runtime, optimizer, check, lambda match: _apply(runtime, match))
    if runtime.world.rank == 0:
        log.info("%s", _summary(path, match))


def _match_names(runtime: Runtime, readers: dict[str, TensorReader]) -> _NameMatch:
    """Return where everything goes. The error lists what is missing, not expected, or of another shape or kind."""
    names = _all_names(runtime.model)
    match = _NameMatch(readers)
    for flat, parameter, interval in parameters_of(runtime):
        name = match.find(names[parameter], interval.shape, _stored_dtype(flat))
        if name is not None:
            match.parameters[interval.name] = name
    for buffer in buffers_of(runtime.model).values():
        name = match.find(names[buffer], tuple(buffer.shape), buffer.dtype)
        if name is not None:
            match.buffers.append((buffer, name))
    known = {name for aliases in names.values() for name in aliases}
    unknown = [repr(name) for name in readers if name not in known]
    _refuse({"missing": match.missing, "not in the model": unknown, "unlike": match.unlike})
    return match


def _all_names(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return the names of every parameter and persistent buffer."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for _, name, buffer in walk_buffers(model, all_names=True):
        names.setdefault(buffer, []).append(name)
    return names


def _refuse(problems: Mapping[str, Sequence[str]]) -> None:
    """Raise if there are problems."""
    sentences = []
    for what, items in problems.items():
        more = ""
        if len(items) > MOST_NAMED:
            log.error("%s: %s", what, ", ".join(items))
            more = f", and {len(items) - MOST_NAMED} more, which the log names"
        if items:
            sentences.append(f"{what}: {', '.join(items[:MOST_NAMED])}{more}")
    if sentences:
        raise CheckpointError("the files do not fit the model. " + "; ".join(sentences))


def _stored_dtype(flat: Flat) -> torch.dtype:
    return flat.state_shards[0].master.dtype if flat.state_shards else flat.rest.dtype


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point or dtype.is_complex:
        return "floating" if dtype.is_floating_point else "complex"
    return "bool" if dtype == torch.bool else "integer"


def _apply(runtime: Runtime, match: _NameMatch) -> None:
    """Read what this rank keeps, into the masters where there are any."""
    rank = runtime.world.rank
    targets = [target for flat in flats_of(runtime) for target in value_targets(flat, rank)]
    total = sum((part.stop - part.start) * tensor.dtype.itemsize for _, _, tensor, part in targets)
    memory = torch.empty(BLOCK, dtype=torch.uint8)
    with ByteProgress("loading", total, is_shown=rank == 0) as progress:
        for name, first, tensor, part in targets:
            source = match.parameters[name]
            reader = match.readers[source]
            block = memory.view(reader.tensors[source].dtype)
            for low in range(part.start, part.stop, block.numel()):
                values = block[: part.stop - low]
                reader.read(source, first + low - part.start, values)
                tensor.write(slice(low, low + values.numel()), values.to(tensor.dtype))
                progress.add(values.numel() * tensor.dtype.itemsize)
    for flat in flats_of(runtime):
        flat.round_masters()
    for buffer, name in match.buffers:
        values = torch.empty(buffer.shape, dtype=match.readers[name].tensors[name].dtype)
        match.readers[name].read(name, 0, values.view(-1))
        buffer.copy_(values)


def _summary(path: Path, match: _NameMatch) -> str:
    conversions = [
        f"{count} tensor{'s' if count > 1 else ''} from {_dtype_text(old)} to {_dtype_text(new)}"
        for (old, new), count in match.conversions.items()
    ]
    how = "; ".join(conversions) or "nothing was converted"
    return f"{len(match.parameters) + len(match.buffers)} tensors loaded from {path}: {how}"


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
