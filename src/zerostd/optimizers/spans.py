"""Spans: the stretches of a region that are updated together, as few and as long as possible.

Neighbouring parameters with equal options whose states are in one shard form one span, so an optimizer sees long flat
tensors instead of many small ones. When some parameters of a span get no gradient in a step, the span is cut there, and
its states with it: untouched parameters stay untouched and keep their own step count.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from zerostd.parameters import Flat
from zerostd.parameters.flat import MASTER, StateShard
from zerostd.sharding import Piece

ScalarStates = dict[str, Any]  # states of one value for all elements, such as the count of steps


@dataclass(eq=False)
class UpdateSpan:
    """Neighbouring pieces of parameters with equal options in one shard."""

    pieces: tuple[Piece, ...]  # without gaps
    param_group: int  # index of the user's param_group
    shard: StateShard
    tensor: torch.Tensor | None  # resident only: its part of the master, the key of its states
    scalars: ScalarStates | None = None  # not resident: None before the first update
    speculative_scalars: ScalarStates | None = None  # as a speculative update left them
    is_committed: bool = False  # the speculative update counts, as soon as it is done

    @property
    def region(self) -> slice:
        """Where it lies in the flat's region."""
        return slice(self.pieces[0].offset, self.pieces[-1].place.stop)

    @property
    def in_shard(self) -> slice:
        """Where it lies in its shard."""
        return self.part_in_shard(slice(0, self.numel))

    @property
    def numel(self) -> int:
        """Elements."""
        return sum(piece.numel for piece in self.pieces)

    def part_of(self, piece: Piece) -> slice:
        """Return where one of its pieces lies, counted from the span's start."""
        start = piece.offset - self.pieces[0].offset
        return slice(start, start + piece.numel)

    def part_in_shard(self, part: slice) -> slice:
        """Return where a part, counted from the span's start, lies in the shard."""
        start = self.pieces[0].offset - self.shard.start
        return slice(start + part.start, start + part.stop)

    def keep(self, scalars: ScalarStates | None, *, is_speculative: bool) -> None:
        """Keep the scalar states that an update left."""
        if is_speculative:
            self.speculative_scalars = scalars
        else:
            self.scalars = scalars
            self.speculative_scalars = None

    def finish_commit(self) -> None:
        """Take the scalar states of a committed speculative update over; it must be done."""
        if self.is_committed:
            self.scalars = self.speculative_scalars
            self.speculative_scalars = None
            self.is_committed = False


class UpdateSpans:
    """The spans of one flat. `state` is the inner optimizer's, keyed by the tensors of resident spans."""

    def __init__(self, flat: Flat, param_groups: Sequence[int | None], state: MutableMapping[Any, Any]) -> None:
        """`param_groups` has an index for each parameter; None: the user's optimizer does not have it."""
        self.flat = flat
        self.state = state
        self._spans: list[UpdateSpan] = []
        region = flat.layout.pieces(flat.region)
        for shard in flat.state_shards:
            for index, pieces in groupby(_pieces_in(shard, region), lambda piece: param_groups[piece.index]):
                if index is not None:
                    self._spans.append(_make_span(tuple(pieces), index, shard))

    def __iter__(self) -> Iterator[UpdateSpan]:
        return iter(self._spans)

    def active(self, has_gradient: Sequence[bool]) -> list[UpdateSpan]:
        """Return the spans of the parameters with `has_gradient`; spans are cut where needed."""
        if not all(has_gradient):
            self.cut(has_gradient)
        return [span for span in self if has_gradient[span.pieces[0].index]]

    def cut(self, labels: Sequence[Hashable]) -> None:
        """Cut spans so that all parameters of a span have one label; their states are cut with them."""
        self._spans = [part for span in self for part in self._cut(span, labels)]

    def _cut(self, span: UpdateSpan, labels: Sequence[Hashable]) -> list[UpdateSpan]:
        cuts = [tuple(pieces) for _, pieces in groupby(span.pieces, lambda piece: labels[piece.index])]
        if len(cuts) == 1:
            return [span]
        span.finish_commit()
        parts = [_make_span(pieces, span.param_group, span.shard) for pieces in cuts]
        states = self.state.pop(span.tensor, None) if span.tensor is not None else None
        for part in parts:
            part.scalars = copy.deepcopy(span.scalars)
            if states and span.tensor is not None:
                start = part.region.start - span.region.start
                self.state[part.tensor] = _slice_states(states, span.tensor, slice(start, start + part.numel))
        return parts

    def by_parameter(self) -> dict[nn.Parameter, list[tuple[UpdateSpan, Piece]]]:
        """Return where the states of each parameter are, in the order of its elements: one place for each shard."""
        places: dict[nn.Parameter, list[tuple[UpdateSpan, Piece]]] = {}
        for span in self:
            for piece in span.pieces:
                places.setdefault(self.flat.parameters[piece.index], []).append((span, piece))
        return places

    def read(self, span: UpdateSpan, piece: Piece) -> dict[str, Any]:
        """Return the states of one piece of a span, in memory."""
        part = span.part_of(piece)
        if span.tensor is not None:
            return _slice_states(self.state.get(span.tensor, {}), span.tensor, part)
        span.finish_commit()
        if span.scalars is None:
            return {}
        place = span.part_in_shard(part)
        tensors = {name: tensor.read(place) for name, tensor in span.shard.tensors.items() if name != MASTER}
        return {**copy.deepcopy(span.scalars), **tensors}


def _make_span(pieces: tuple[Piece, ...], param_group: int, shard: StateShard) -> UpdateSpan:
    span = UpdateSpan(pieces, param_group, shard, None)
    if shard.is_resident:
        assert shard.master.tensor is not None
        span.tensor = shard.master.tensor[span.in_shard].detach()
    return span


def _pieces_in(shard: StateShard, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the pieces of a region, cut to a shard."""
    for piece in pieces:
        low = max(piece.offset, shard.start)
        high = min(piece.place.stop, shard.stop)
        if low < high:
            start = piece.start + low - piece.offset
            yield replace(piece, start=start, stop=start + high - low, offset=low)


def _slice_states(states: dict[str, Any], whole: torch.Tensor, part: slice) -> dict[str, Any]:
    """Return the states of a part: tensors as long as the whole are sliced, anything else is copied."""
    return {
        key: value[part] if isinstance(value, torch.Tensor) and value.shape == whole.shape else copy.deepcopy(value)
        for key, value in states.items()
    }
