"""What an optimizer keeps, as checkpoints store it: long states and gradients as records of intervals, scalar states by
name of parameter. Each rank gives what it owns."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from zerostd.optimizers.spans import UpdateSpan
from zerostd.optimizers.updater import Updater
from zerostd.parameters import Flat
from zerostd.parameters.flat import MASTER, SavedInterval, owned_pieces
from zerostd.policy import Tier
from zerostd.tiers import TierTensor


def state_records(updater: Updater, flat: Flat, rank: int, group: str) -> Iterator[SavedInterval]:
    """Yield the long states of a trained flat's parameters, as far as this rank owns them."""
    for span in updater.spans[flat]:
        states = _long_states(updater, span)
        for piece, low, high in owned_pieces(flat, rank, span.pieces):
            interval = flat.layout.intervals[piece.index]
            start = piece.start + low
            stop = piece.start + high
            for name, (tensor, base) in states.items():
                offset = base + span.part_of(piece).start + low
                yield SavedInterval("state", interval.name, interval.shape, start, stop, tensor, offset, name, group)


def _long_states(updater: Updater, span: UpdateSpan) -> dict[str, tuple[TierTensor, int]]:
    """Return the long states of a span, and where in them it begins."""
    span.finish_commit()
    if span.tensor is None:
        tensors = span.shard.tensors.items() if span.scalars is not None else ()
        return {name: (tensor, span.in_shard.start) for name, tensor in tensors if name != MASTER}
    return {
        name: (TierTensor(value.numel(), value.dtype, Tier.DEVICE, value), 0)
        for name, value in updater.inner.state.get(span.tensor, {}).items()
        if isinstance(value, torch.Tensor) and value.shape == span.tensor.shape
    }


def gradient_records(flat: Flat, rank: int, group: str) -> Iterator[SavedInterval]:
    """Yield what the passes of an incomplete step have brought for a flat's parameters, as far as this rank owns it;
    parameters without elements are rank 0's."""
    tensor = gradient_tensor(flat)
    intervals = flat.layout.intervals
    has_gradient = [parameter.grad is not None for parameter in flat.parameters]
    for index, interval in enumerate(intervals if rank == 0 else ()):
        if has_gradient[index] and not interval.numel:
            yield SavedInterval("gradient", interval.name, interval.shape, 0, 0, tensor, 0, group=group)
    for piece, low, high in owned_pieces(flat, rank):
        if has_gradient[piece.index]:
            interval = intervals[piece.index]
            start = piece.start + low
            stop = piece.start + high
            offset = piece.offset + low
            yield SavedInterval("gradient", interval.name, interval.shape, start, stop, tensor, offset, group=group)


def gradient_tensor(flat: Flat, dtypes: Collection[torch.dtype] = ()) -> TierTensor:
    """Return the gradient of a flat's region where it is kept, in a form that loses nothing of these dtypes."""
    gradient = flat.gradient
    assert gradient is not None
    if any(torch.promote_types(dtype, gradient.rest_dtype) != gradient.rest_dtype for dtype in dtypes):
        gradient.use_sum()
    rest = gradient.wait_landed()
    return TierTensor(rest.numel(), rest.dtype, gradient.tier, rest)


def scalar_states(updater: Updater, rank: int) -> dict[str, dict[str, Any]]:
    """Return scalar states, such as counts of steps, by name of parameter, as far as this rank owns any of it."""
    by_name: dict[str, dict[str, Any]] = {}
    for flat, spans in updater.spans.items():
        owned = {piece.index for piece, _, _ in owned_pieces(flat, rank)}
        for span in spans:
            span.finish_commit()
            states = updater.inner.state.get(span.tensor, {}) if span.tensor is not None else span.scalars or {}
            scalars = {
                key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for key, value in states.items()
                if not (isinstance(value, torch.Tensor) and value.dim() and value.numel() == span.numel)
            }
            if scalars:
                names = [flat.layout.intervals[piece.index].name for piece in span.pieces if piece.index in owned]
                by_name |= dict.fromkeys(names, scalars)
    return by_name


def updated_intervals(flat: Flat) -> list[tuple[str, int, int]]:
    """Return the elements of each parameter that this rank updates: name, start, stop."""
    pieces = flat.layout.pieces(flat.region)
    return [(flat.layout.intervals[piece.index].name, piece.start, piece.stop) for piece in pieces]
