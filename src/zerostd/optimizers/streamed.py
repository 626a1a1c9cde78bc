"""The streamed route: states that rest on the host pass through the device, tile by tile, and are updated there.

    up: states of a tile -> a slot        update: the user's optimizer on the slot, parameters published
    down: the slot -> home                free: when it is down, the slot takes the next tile

Four slots are on their way at once, so both directions of the link and the device work at the same time. The arithmetic
is the user's optimizer on the device, as for resident states: the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from zerostd.monitoring import Ledger
from zerostd.optimizers.arithmetic import Terms, Twin, copies, take_new
from zerostd.optimizers.runs import Run
from zerostd.parameters import Flat
from zerostd.parameters.shelf import MASTER
from zerostd.policy import Kind
from zerostd.tiers import Done, Lanes, Transfer, mark_here

__all__ = ["Streamed", "Tile"]

NUM_SLOTS = 4

Tensors = dict[str, torch.Tensor]


@dataclass(eq=False)
class _Slot:
    """Room on the device for one tile."""

    columns: Tensors
    gradient: torch.Tensor  # fp32: as the update reads it
    landing: torch.Tensor  # bytes: for gradients that come from the host, and parameters that go there
    free: Transfer = field(default_factory=Done)


@dataclass(frozen=True, eq=False)
class Tile:
    """What one tile needs: all of one length, states on the host, gradient and parameters anywhere."""

    source: Tensors
    target: Tensors  # may be the source
    gradient: torch.Tensor
    weight: torch.Tensor | None  # None where the master is the parameter
    ready: Transfer  # the gradient, and the states' last way home


class Streamed:
    """Updates tiles on the device. Not for two threads at once."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        columns: dict[str, torch.dtype],
        tile_numel: int,
        device: torch.device,
        lanes: Lanes,
        ledger: Ledger,
    ) -> None:
        self.twin = Twin(inner)
        self.tile_numel = tile_numel
        self.lanes = lanes
        self.device = device
        self._turn = 0
        self._slots: list[_Slot] = []
        for _ in range(NUM_SLOTS):
            room = {name: torch.empty(tile_numel, dtype=dtype, device=device) for name, dtype in columns.items()}
            gradient = torch.empty(tile_numel, dtype=columns[MASTER], device=device)
            landing = torch.empty(tile_numel * 4, dtype=torch.uint8, device=device)
            self._slots.append(_Slot(room, gradient, landing))
            ledger.enter(Kind.BUFFERS, sum(t.nbytes for t in room.values()) + gradient.nbytes + landing.nbytes)

    def launch(self, flat: Flat, run: Run, terms: Terms, *, on_trial: bool) -> Transfer:
        """Start the update of a run on the host; done when the new parameters are where they rest."""
        shelf, gradient = run.shelf, flat.gradient
        assert gradient is not None
        weights = None if shelf.holds_parameters else flat.updated(shelf)
        ready = gradient.keeper.kept if gradient.keeper is not None else mark_here(self.device)
        after, singles = shelf.landed, run.singles
        published: Transfer = Done()
        for low in range(0, run.numel, self.tile_numel):
            high = min(run.numel, low + self.tile_numel)
            here = slice(run.part.start + low, run.part.start + high)
            tile = Tile(
                _cut(shelf.columns, here),
                _cut(shelf.spare if on_trial else shelf.columns, here),
                gradient.current[run.region.start + low : run.region.start + high],
                None if weights is None else weights[here],
                ready,
            )
            options = terms.options[run.options]
            singles, published, shelf.landed = self.update(tile, options, run.singles, terms.factor, after)
        if on_trial:
            run.tried = singles
        else:
            run.singles = singles
        return published

    def update(
        self,
        tile: Tile,
        options: dict[str, Any],
        singles: dict[str, Any] | None,
        factor: torch.Tensor | None,
        after: Transfer,
    ) -> tuple[dict[str, Any], Transfer, Transfer]:
        """One tile; returns the states that are one value, when parameters are published, when states are home."""
        slot, numel = self._next(), tile.gradient.numel()
        room = {name: column[:numel] for name, column in slot.columns.items()}
        gradient = slot.gradient[:numel]
        incoming = tile.gradient
        with self.lanes.up.after(slot.free, after, tile.ready if incoming.device != self.device else None):
            for name, column in tile.source.items():
                if singles is not None or name == MASTER:
                    room[name].copy_(column, non_blocking=True)
            if incoming.device != self.device:
                landed = slot.landing[: incoming.nbytes].view(incoming.dtype)
                incoming = landed.copy_(incoming, non_blocking=True)
            up = self.lanes.up.mark()
        with self.lanes.update.after(up, slot.free, tile.ready):
            gradient.copy_(incoming)
            if factor is not None:
                gradient.mul_(factor)
            states = None if singles is None else {**copies(singles), **_without_master(room)}
            made = self.twin.step(options, room[MASTER], states, gradient)
            take_new(made, _without_master(room))
            weight = tile.weight
            if weight is not None and weight.device == self.device:
                weight.copy_(room[MASTER])
            elif weight is not None:
                rounded = slot.landing[: weight.nbytes].view(weight.dtype)
                rounded.copy_(room[MASTER])
            done = self.lanes.update.mark()
        with self.lanes.down.after(done):
            if weight is not None and weight.device != self.device:
                weight.copy_(rounded, non_blocking=True)
            for name, column in tile.target.items():
                column.copy_(room[name], non_blocking=True)
            slot.free = self.lanes.down.mark()
        published = done if weight is not None and weight.device == self.device else slot.free
        return {name: value for name, value in made.items() if name not in room}, published, slot.free

    def _next(self) -> _Slot:
        self._turn = (self._turn + 1) % NUM_SLOTS
        return self._slots[self._turn]


def _cut(columns: Any, part: slice) -> Tensors:
    return {name: column.tensor[part] for name, column in columns.items()}


def _without_master(room: Tensors) -> Tensors:
    return {name: column for name, column in room.items() if name != MASTER}
