"""What an optimizer keeps, as records of intervals and as states of one value, by name of parameter; and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zerostd.optimizers.runs import Run
from zerostd.optimizers.states import fill_flat
from zerostd.optimizers.update import Updater
from zerostd.parameters import Flat
from zerostd.parameters.saved_intervals import SavedInterval, owned_pieces
from zerostd.parameters.state_shard import MASTER
from zerostd.policy import Tier
from zerostd.tiers import TierTensor

__all__ = ["gradient_column", "gradient_records", "put_flat", "single_states", "state_records", "wanted_states"]


def state_records(updater: Updater, flat: Flat, rank: int, group: str) -> Iterator[SavedInterval]:
    """Long states of a trained flat's parameters, as far as this rank keeps them."""
    for run in updater.runs[flat].runs:
        columns = _columns(updater, run)
        for piece, low, high in owned_pieces(flat, rank):
            interval = flat.layout.intervals[piece.index]
            start, stop = max(piece.offset + low, run.region.start), min(piece.offset + high, run.region.stop)
            if start >= stop:
                continue
            first = piece.start + start - piece.offset
            last = first + stop - start
            for name, (column, base) in columns.items():
                place = base + start - run.region.start
                yield SavedInterval("state", interval.name, interval.shape, first, last, column, place, name, group)


def _columns(updater: Updater, run: Run) -> dict[str, tuple[TierTensor, int]]:
    """The long states of a run, and where in them it begins."""
    run.settle()
    if run.tensor is None:
        named = run.shard.columns.items() if run.singles is not None else ()
        return {name: (column, run.part.start) for name, column in named if name != MASTER}
    found = {}
    for name, value in updater.inner.state.get(run.tensor, {}).items():
        if isinstance(value, torch.Tensor) and value.shape == run.tensor.shape:
            found[name] = (TierTensor(value.numel(), value.dtype, Tier.DEVICE, value), 0)
    return found


def gradient_records(flat: Flat, rank: int, group: str) -> Iterator[SavedInterval]:
    """What passes of a step that is not complete have brought for a flat's parameters, as far as this rank keeps it;
    those without elements are rank 0's."""
    column, intervals = gradient_column(flat), flat.layout.intervals
    has_one = [parameter.grad is not None for parameter in flat.parameters]
    for index, interval in enumerate(intervals if rank == 0 else ()):
        if has_one[index] and not interval.numel:
            yield SavedInterval("gradient", interval.name, interval.shape, 0, 0, column, 0, group=group)
    for piece, low, high in owned_pieces(flat, rank):
        if has_one[piece.index]:
            start, stop, place = piece.start + low, piece.start + high, piece.offset + low
            interval = intervals[piece.index]
            yield SavedInterval("gradient", interval.name, interval.shape, start, stop, column, place, group=group)


def gradient_column(flat: Flat, dtypes: Collection[torch.dtype] = ()) -> TierTensor:
    """The gradient of a flat's region where it rests, in a form that loses nothing of numbers of these dtypes."""
    gradient = flat.gradient
    assert gradient is not None
    if any(torch.promote_types(dtype, gradient.rest_dtype) != gradient.rest_dtype for dtype in dtypes):
        gradient.use_sum()
    rest = gradient.wait_landed()
    return TierTensor(rest.numel(), rest.dtype, Tier.HOST if gradient.host is not None else Tier.DEVICE, rest)


def single_states(updater: Updater, rank: int) -> dict[str, dict[str, Any]]:
    """States of one value, such as counts of steps, by parameter, as far as this rank keeps any of it."""
    found: dict[str, dict[str, Any]] = {}
    for flat, runs in updater.runs.items():
        kept = {piece.index for piece, _, _ in owned_pieces(flat, rank)}
        for run in runs.runs:
            run.settle()
            states = updater.inner.state.get(run.tensor, {}) if run.tensor is not None else run.singles or {}
            numel = run.numel
            single = {
                key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for key, value in states.items()
                if not (isinstance(value, torch.Tensor) and value.dim() and value.numel() == numel)
            }
            if single:
                found |= {flat.layout.intervals[p.index].name: single for p in run.pieces if p.index in kept}
    return found


def wanted_states(flat: Flat) -> list[tuple[nn.Parameter, str, int, int]]:
    """The elements of each parameter that this rank updates: parameter, name, start, stop."""
    return [
        (flat.parameters[piece.index], flat.layout.intervals[piece.index].name, piece.start, piece.stop)
        for piece in flat.layout.pieces(flat.region)
    ]


@torch.no_grad()
def put_flat(updater: Updater, flat: Flat, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Take states by name of parameter over into one flat; long ones are this rank's interval of it. What there was
    before is forgotten."""
    by_parameter = {parameter: dict(saved.get(name, {})) for parameter, name, _, _ in wanted_states(flat)}
    for run in updater.runs[flat].runs:
        if run.tensor is not None:
            updater.inner.state.pop(run.tensor, None)
    updater.runs[flat] = updater.make_runs(flat)
    fill_flat(updater, updater.runs[flat], by_parameter)
