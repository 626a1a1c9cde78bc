"""load of an ordinary model: files that know nothing of zerostd, to a prepared model of any ranks, stage and placement.

names, shapes, dtypes -> everything is checked, on all ranks -> each rank reads what rests on it, block by block
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from zerostd.checkpointing.loading import IN_PART, agree, begin_load, value_places
from zerostd.checkpointing.saving import buffers_of, flats_of
from zerostd.checkpointing.storage.ordinary import OrdinaryModel
from zerostd.checkpointing.storage.progress import Progress
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.parameters import Flat

__all__ = ["load_ordinary"]

BLOCK = 4 << 20  # bytes that are read at a time
MOST_NAMED = 40  # in an error, of each kind; the log has all

log = logging.getLogger("zerostd")


@dataclass(frozen=True)
class _Fit:
    """What of the files goes where: names in them, by names in the model."""

    parameters: dict[str, str] = field(default_factory=dict)
    buffers: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    conversions: Counter[tuple[torch.dtype, torch.dtype]] = field(default_factory=Counter)


@torch.no_grad()
def load_ordinary(runtime: Runtime, optimizer: ZeroOptimizer | None, path: Path) -> None:
    """All ranks call it. Nothing is changed unless everything fits on all ranks. States of an optimizer stay."""
    begin_load(runtime, optimizer)
    given: OrdinaryModel | None = None
    cause: Exception | None = None
    try:
        try:
            if optimizer is not None:
                raise CheckpointError(
                    f"{path} is an ordinary model, without states of an optimizer: leave the optimizer out of "
                    "zerostd.load. Its masters take the new values, and its states begin with training"
                )
            given = OrdinaryModel(path)
            fit = _fitted(runtime, given)
        except Exception as error:
            cause = error
        agree(runtime, "zerostd.load()", cause, "Nothing was changed")
        assert given is not None
        try:
            _apply(runtime, given, fit)
        except Exception as error:
            cause = error
        agree(runtime, "the end of zerostd.load()", cause, IN_PART)
    finally:
        if given is not None:
            given.close()
    for group in runtime.update_order():
        runtime.renew(group)
    if runtime.world.rank == 0:
        log.info("%s", _story(path, fit))


def _fitted(runtime: Runtime, given: OrdinaryModel) -> _Fit:
    """Where everything goes, or an error that lists what is missing, not expected, or of another shape or kind."""
    fit = _Fit()
    names = _all_names(runtime.model)
    missing: list[str] = []
    odd: list[str] = []

    def find(known: Iterable[str], shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        first, *others = known
        there = [name for name in (first, *others) if name in given]
        if not there and 0 not in shape:
            missing.append(repr(first) + (f" (or {', '.join(map(repr, others))})" if others else ""))
        for name in there:
            place = given.place(name)
            if place.shape != shape:
                odd.append(f"{name!r} has shape {place.shape} and {shape} in the model")
            elif _kind(place.dtype) != _kind(dtype):
                odd.append(f"{name!r} is {_word(place.dtype)} and {_word(dtype)} in the model")
        if not there or 0 in shape:
            return None
        if given.place(there[0]).dtype != dtype:
            fit.conversions[given.place(there[0]).dtype, dtype] += 1
        return there[0]

    for flat in flats_of(runtime):
        for parameter, interval in zip(flat.parameters, flat.layout.intervals, strict=True):
            found = find(names[parameter], interval.shape, _kept_dtype(flat))
            if found is not None:
                fit.parameters[interval.name] = found
    for _, buffer in buffers_of(runtime.model):
        found = find(names[buffer], tuple(buffer.shape), buffer.dtype)
        if found is not None:
            fit.buffers.append((buffer, found))
    known = {name for found in names.values() for name in found}
    _refuse({"missing": missing, "not in the model": [repr(n) for n in given.names if n not in known], "unlike": odd})
    return fit


def _all_names(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Of parameters, and of buffers that a state_dict has."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.setdefault(buffer, []).append(f"{prefix}.{name}".lstrip("."))
    return names


def _refuse(problems: dict[str, list[str]]) -> None:
    parts = []
    for what, found in problems.items():
        if len(found) > MOST_NAMED:
            log.error("%s: %s", what, ", ".join(found))
        more = f", and {len(found) - MOST_NAMED} more, which the log names" if len(found) > MOST_NAMED else ""
        if found:
            parts.append(f"{what}: {', '.join(found[:MOST_NAMED])}{more}")
    if parts:
        raise CheckpointError("the files do not fit the model. " + "; ".join(parts))


def _kept_dtype(flat: Flat) -> torch.dtype:
    return flat.state_shards[0].master.dtype if flat.state_shards else flat.rest.dtype


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point or dtype.is_complex:
        return "floating" if dtype.is_floating_point else "complex"
    return "bool" if dtype == torch.bool else "integer"


def _apply(runtime: Runtime, given: OrdinaryModel, fit: _Fit) -> None:
    """Everything fits: each rank takes what rests on it, from the masters to the parameters."""
    runtime.gatherer.wait_all()
    rank = runtime.world.rank
    total = sum(flat.rest.numel * flat.rest.dtype.itemsize for flat in flats_of(runtime))
    memory = torch.empty(BLOCK, dtype=torch.uint8)
    with Progress("loading", total, is_shown=rank == 0) as progress:
        for flat in flats_of(runtime):
            for name, low, high, offset in value_places(flat, rank):
                source = fit.parameters[name]
                step = BLOCK // given.place(source).dtype.itemsize
                for start in range(low, high, step):
                    values = given.read(source, start, min(high, start + step), memory)
                    _put(flat, offset + start - low, values)
                    progress.add(values.numel() * flat.rest.dtype.itemsize)
    for buffer, name in fit.buffers:
        buffer.copy_(given.read(name, 0, buffer.numel()).view(buffer.shape))


def _put(flat: Flat, offset: int, values: torch.Tensor) -> None:
    """New values of a stretch of the region, or of what rests here of a frozen flat."""
    values = values.to(_kept_dtype(flat))
    stop = offset + values.numel()
    for shard in flat.state_shards:
        found = shard.overlap(offset, stop)
        if found is not None:
            shard.master.write(found[0], values[found[1]])
    if not all(shard.holds_parameters for shard in flat.state_shards) or not flat.state_shards:
        base = flat.region.start if flat.state_shards and not flat.gives_back else 0
        flat.rest.write(slice(base + offset, base + stop), values.to(flat.rest.dtype))


def _story(path: Path, fit: _Fit) -> str:
    parts = [
        f"{count} tensor{'s' if count > 1 else ''} from {_word(old)} to {_word(new)}"
        for (old, new), count in fit.conversions.items()
    ]
    how = "; ".join(parts) if parts else "nothing was converted"
    return f"{len(fit.parameters) + len(fit.buffers)} tensors loaded from {path}: {how}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
