"""Runs: the pieces of a region that are updated together, as few and as long as can be.

Parameters that lie side by side and have the same options form one run, so an optimizer sees long flat tensors
instead of many small ones. When some parameters of a run get no gradient in a step, the run is cut there, its states
with it: untouched parameters stay untouched, and keep their own step count.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerostd.parameters import Flat
from zerostd.sharding import Piece

__all__ = ["Run", "Runs"]


@dataclass(frozen=True, eq=False)
class Run:
    """Neighbouring pieces with the same options; `tensor` is their part of the master."""

    pieces: tuple[Piece, ...]
    options: int  # index of the user's param_group
    tensor: torch.Tensor

    @property
    def region(self) -> slice:
        """Where it lies in the flat's region."""
        return slice(self.pieces[0].offset, self.pieces[-1].offset + self.pieces[-1].numel)


class Runs:
    """The runs of one flat. `state` is the inner optimizer's, keyed by the runs' tensors."""

    def __init__(self, flat: Flat, options: Sequence[int | None], state: MutableMapping[Any, Any]) -> None:
        assert flat.master is not None
        self.flat = flat
        self.state = state
        self.runs: list[Run] = []
        pieces: list[Piece] = []
        for piece in flat.layout.pieces(flat.region):
            if pieces and options[piece.index] != options[pieces[-1].index]:
                self._add(pieces, options[pieces[-1].index])
                pieces = []
            pieces.append(piece)
        if pieces:
            self._add(pieces, options[pieces[-1].index])

    def _add(self, pieces: list[Piece], options: int | None) -> None:
        if options is not None:  # None: the user's optimizer does not have these parameters
            self.runs.append(self._make(tuple(pieces), options))

    def _make(self, pieces: tuple[Piece, ...], options: int) -> Run:
        assert self.flat.master is not None
        return Run(pieces, options, self.flat.master[pieces[0].offset : pieces[-1].offset + pieces[-1].numel].detach())

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
        made = [self._make(tuple(part), run.options) for part in parts]
        states = self.state.pop(run.tensor, None)
        if states:
            for part in made:
                low = part.region.start - run.region.start
                self.state[part.tensor] = slice_states(states, run.tensor, slice(low, low + part.tensor.numel()))
        return made


def slice_states(states: dict[str, Any], whole: torch.Tensor, part: slice) -> dict[str, Any]:
    """The states of a part: tensors as long as the whole are sliced, anything else is copied."""
    return {
        key: value[part] if isinstance(value, torch.Tensor) and value.shape == whole.shape else copy.deepcopy(value)
        for key, value in states.items()
    }
