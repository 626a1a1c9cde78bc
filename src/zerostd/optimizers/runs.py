"""Runs: the pieces of a region that are updated together, as few and as long as can be.

Parameters that lie side by side, have the same options and whose states rest on one shard form one run, so an optimizer
sees long flat tensors instead of many small ones. When some parameters of a run get no gradient in a step, the run is
cut there, its states with it: untouched parameters stay untouched, and keep their own step count.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerostd.parameters import Flat
from zerostd.parameters.state_shard import MASTER, StateShard
from zerostd.sharding import Piece

__all__ = ["Run", "Runs"]

Singles = dict[str, Any]


@dataclass(eq=False)
class Run:
    """Neighbouring pieces with the same options on one shard."""

    pieces: tuple[Piece, ...]
    options: int  # index of the user's param_group
    shard: StateShard
    tensor: torch.Tensor | None  # resident only: their part of the master, the key of their states
    singles: Singles | None = None  # elsewhere: states of one value for all elements; None before the first update
    tried: Singles | None = None  # likewise, of an update on trial
    is_adopted: bool = False  # the update on trial counts, as soon as it is done

    @property
    def region(self) -> slice:
        """Where it lies in the flat's region."""
        return slice(self.pieces[0].offset, self.pieces[-1].offset + self.pieces[-1].numel)

    @property
    def part(self) -> slice:
        """Where it lies on its shard."""
        start = self.shard.portion.start
        return slice(self.region.start - start, self.region.stop - start)

    @property
    def numel(self) -> int:
        """Elements, no gaps between pieces."""
        return sum(piece.numel for piece in self.pieces)

    def settle(self) -> None:
        """The last update is done: if it was on trial and counts, so does what it left."""
        if self.is_adopted:
            self.singles, self.tried, self.is_adopted = self.tried, None, False


class Runs:
    """The runs of one flat. `state` is the inner optimizer's, keyed by the tensors of resident runs."""

    def __init__(self, flat: Flat, options: Sequence[int | None], state: MutableMapping[Any, Any]) -> None:
        self.flat = flat
        self.state = state
        self.runs: list[Run] = []
        for shard in flat.state_shards:
            pieces: list[Piece] = []
            for piece in _pieces_on(shard, flat.layout.pieces(flat.region)):
                if pieces and options[piece.index] != options[pieces[-1].index]:
                    self._add(pieces, options[pieces[-1].index], shard)
                    pieces = []
                pieces.append(piece)
            if pieces:
                self._add(pieces, options[pieces[-1].index], shard)

    def _add(self, pieces: list[Piece], options: int | None, shard: StateShard) -> None:
        if options is not None:  # None: the user's optimizer does not have these parameters
            self.runs.append(_make(tuple(pieces), options, shard))

    def active(self, has_gradient: Sequence[bool]) -> list[Run]:
        """The runs to update when only parameters with `has_gradient` are; runs are cut where needed."""
        if not all(has_gradient):
            self.cut(has_gradient)
        return [run for run in self.runs if has_gradient[run.pieces[0].index]]

    def cut(self, labels: Sequence[Hashable]) -> None:
        """Cut runs so that all parameters of a run have one label; their states are cut with them."""
        self.runs = [part for run in self.runs for part in self._cut(run, labels)]

    def _cut(self, run: Run, labels: Sequence[Hashable]) -> list[Run]:
        parts: list[list[Piece]] = []
        for piece in run.pieces:
            if not parts or labels[parts[-1][-1].index] != labels[piece.index]:
                parts.append([])
            parts[-1].append(piece)
        if len(parts) == 1:
            return [run]
        made = [_make(tuple(part), run.options, run.shard) for part in parts]
        run.settle()
        for part in made:
            part.singles = copy.deepcopy(run.singles)
        states = self.state.pop(run.tensor, None) if run.tensor is not None else None
        if states and run.tensor is not None:
            for part in made:
                low = part.region.start - run.region.start
                self.state[part.tensor] = _slice_states(states, run.tensor, slice(low, low + part.numel))
        return made

    def read(self, run: Run, part: slice) -> dict[str, Any]:
        """The states of a part of a run, in memory; `part` counts from the run's start."""
        if run.tensor is not None:
            return _slice_states(self.state.get(run.tensor, {}), run.tensor, part)
        run.settle()
        if run.singles is None:
            return {}
        place = slice(run.part.start + part.start, run.part.start + part.stop)
        tensors = {name: column.read(place) for name, column in run.shard.columns.items() if name != MASTER}
        return {**copy.deepcopy(run.singles), **tensors}

    def master(self, run: Run, part: slice) -> torch.Tensor:
        """The masters of a part of a run, in memory."""
        return run.shard.master.read(slice(run.part.start + part.start, run.part.start + part.stop))


def _make(pieces: tuple[Piece, ...], options: int, shard: StateShard) -> Run:
    run = Run(pieces, options, shard, None)
    if shard.is_resident:
        assert shard.master.tensor is not None
        run.tensor = shard.master.tensor[run.part].detach()
    return run


def _pieces_on(shard: StateShard, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Pieces of the region, cut to a shard's portion."""
    for piece in pieces:
        low, high = max(piece.offset, shard.portion.start), min(piece.offset + piece.numel, shard.portion.stop)
        if low < high:
            shift = low - piece.offset
            yield replace(piece, start=piece.start + shift, stop=piece.start + shift + high - low, offset=low)


def _slice_states(states: dict[str, Any], whole: torch.Tensor, part: slice) -> dict[str, Any]:
    """The states of a part: tensors as long as the whole are sliced, anything else is copied."""
    return {
        key: value[part] if isinstance(value, torch.Tensor) and value.shape == whole.shape else copy.deepcopy(value)
        for key, value in states.items()
    }
