"""The streamed route: states that rest on the host pass through the device, tile by tile, and are updated there.

    up: states of a tile -> a slot        update: the user's optimizer on the slot, parameters published
    down: the slot -> home                free: when it is down, the slot takes the next tile

Four slots are on their way at once, so both directions of the link and the device work at the same time. A thread puts
tiles into the streams as slots become free, and not before: until then, what forward needs first may still overtake.
The arithmetic is the user's optimizer on the device, as for resident states: the same bits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from zerostd.monitoring import Ledger
from zerostd.optimizers.arithmetic import Twin, copies, take_new
from zerostd.optimizers.orders import Order
from zerostd.optimizers.runs import Singles
from zerostd.parameters.state_shard import MASTER
from zerostd.policy import Kind, Tier
from zerostd.tiers import Done, QueuedTransfer, Streams, Transfer, Worker
from zerostd.tiers.debug import DEBUG

__all__ = ["Streamed", "Tile"]

NUM_SLOTS = 4
UP, DOWN = (Tier.HOST.value, Tier.DEVICE.value), (Tier.DEVICE.value, Tier.HOST.value)

Tensors = dict[str, torch.Tensor]


@dataclass(eq=False)
class _Slot:
    """Room on the device for one tile, in bytes."""

    columns: Tensors
    gradient: torch.Tensor  # as the update reads it
    landing: torch.Tensor  # for gradients that come from the host, and parameters that go there
    free: Transfer = field(default_factory=Done)
    held: Order | None = None  # what the device reads beside the slot must stay until it is free


@dataclass(frozen=True, eq=False)
class Tile:
    """What one tile needs: all of one length, states on the host, gradient and parameters anywhere."""

    source: Tensors
    target: Tensors  # may be the source
    gradient: torch.Tensor
    weight: torch.Tensor | None  # None where the master is the parameter
    ready: Transfer  # when it can begin


@dataclass(eq=False)
class _Job:
    """A run on its way, tile by tile."""

    order: Order
    gradient: torch.Tensor  # of the flat's region
    ready: Transfer  # when it can begin
    relay: QueuedTransfer = field(default_factory=QueuedTransfer)
    after: Transfer = field(default_factory=Done)  # the last update's states are home
    before: Singles | None = None  # states of one value, before the update


class Streamed:
    """Updates tiles on the device, in a thread of its own."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        columns: dict[str, torch.dtype],
        tile_numel: int,
        device: torch.device,
        streams: Streams,
        ledger: Ledger,
    ) -> None:
        self.worker = Worker("the update on the device of states that rest on the host", device)
        self.twin = Twin(inner)
        self.tile_numel = tile_numel
        self.streams = streams
        self.device = device
        self.ledger = ledger
        self.busy_s = 0.0  # that the thread has worked or waited for slots, in all
        self._turn = 0
        self._slots: list[_Slot] = []
        for _ in range(NUM_SLOTS):
            sizes = [tile_numel * dtype.itemsize for dtype in (*columns.values(), columns[MASTER], columns[MASTER])]
            *room, gradient, landing = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
            self._slots.append(_Slot(dict(zip(columns, room, strict=True)), gradient, landing))
            ledger.enter(Kind.BUFFERS, sum(sizes))

    def close(self) -> None:
        """End the thread and give the slots back."""
        self.worker.stop()
        for slot in self._slots:
            sizes = [memory.nbytes for memory in (*slot.columns.values(), slot.gradient, slot.landing)]
            self.ledger.leave(Kind.BUFFERS, sum(sizes))
        self._slots = []

    def launch(self, order: Order) -> Transfer:
        """Start the update of a run on the host; done when the new parameters are where they rest."""
        gradient = order.flat.gradient
        assert gradient is not None
        ready = order.can_begin(gradient.arrived)
        job, numel = _Job(order, gradient.current, ready), order.run.numel
        tiles = [slice(low, min(numel, low + self.tile_numel)) for low in range(0, numel, self.tile_numel)]
        job.relay.work = self.worker.submit_parts([partial(self._do, job, tile) for tile in tiles], order.place, ready)
        return job.relay

    # In the thread

    def _do(self, job: _Job, part: slice) -> None:
        begun = time.perf_counter()
        order, run, shard = job.order, job.order.run, job.order.run.shard
        if part.start == 0:
            job.after, job.before = shard.landed, run.singles
        weights = None if shard.holds_parameters else order.flat.parameters_of(shard)
        here = slice(run.part.start + part.start, run.part.start + part.stop)
        tile = Tile(
            _cut(order.source, here),
            _cut(order.target, here),
            job.gradient[run.region.start + part.start : run.region.start + part.stop],
            None if weights is None else weights[here],
            job.ready,
        )
        singles, job.relay.event, shard.landed = self.update(tile, order, job.before, job.after)
        if part.stop == run.numel:
            order.keep(singles)
        self.busy_s += time.perf_counter() - begun

    def update(
        self, tile: Tile, order: Order, singles: Singles | None, after: Transfer
    ) -> tuple[Singles, Transfer, Transfer]:
        """One tile; returns the states that are one value, when parameters are published, when states are home."""
        slot, numel = self._next(), tile.gradient.numel()
        slot.free.synchronize()
        slot.held = order
        room = {name: _room(slot.columns[name], numel, column.dtype) for name, column in tile.source.items()}
        gradient = _room(slot.gradient, numel, room[MASTER].dtype)
        incoming = tile.gradient
        if incoming.device != self.device:
            tile.ready.synchronize()  # here, lest the lane wait with everything behind it
        events, sizes = self.ledger.events, sum(column.nbytes for column in tile.source.values())
        told: dict[str, Any] = {"group": order.group, "num_bytes": sizes, "device": self.device, "step": order.step}
        with self.streams.up.after(after), events.within("transfer", "up", way=UP, **told):
            for name, column in tile.source.items():
                if singles is not None or name == MASTER:
                    room[name].copy_(column, non_blocking=True)
            if incoming.device != self.device:
                incoming = _room(slot.landing, numel, incoming.dtype).copy_(incoming, non_blocking=True)
            up = self.streams.up.record_event()
        with self.streams.update.after(up, tile.ready), events.within("update", "update", **told):
            gradient.copy_(incoming)
            if order.terms.factor is not None:
                gradient.mul_(order.terms.factor)
            states = None if singles is None else {**copies(singles), **_without_master(room)}
            made = self.twin.step(order.terms, order.run.options, room[MASTER], states, gradient)
            take_new(made, _without_master(room))
            weight = tile.weight
            if weight is not None and weight.device == self.device:
                weight.copy_(room[MASTER])
            elif weight is not None:
                rounded = _room(slot.landing, numel, weight.dtype).copy_(room[MASTER])
            done = self.streams.update.record_event()
        with self.streams.down.after(done), events.within("transfer", "down", way=DOWN, **told):
            if weight is not None and weight.device != self.device:
                weight.copy_(rounded, non_blocking=True)
            for name, column in tile.target.items():
                column.copy_(room[name], non_blocking=True)
            for tensor in (*room.values(), gradient, slot.landing):
                DEBUG.poison(tensor)
            slot.free = self.streams.down.record_event()
        published = done if weight is not None and weight.device == self.device else slot.free
        return {name: value for name, value in made.items() if name not in room}, published, slot.free

    def _next(self) -> _Slot:
        self._turn = (self._turn + 1) % NUM_SLOTS
        return self._slots[self._turn]


def _cut(columns: Any, part: slice) -> Tensors:
    return {name: column.tensor[part] for name, column in columns.items()}


def _room(memory: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return memory[: numel * dtype.itemsize].view(dtype)


def _without_master(room: Tensors) -> Tensors:
    return {name: column for name, column in room.items() if name != MASTER}
