"""States on disk: tiles are read ahead into slots of host memory, updated there, and written back behind.

The processor updates them in place, or they pass through the device as on the streamed route. Tiles are whole pages,
so neighbouring runs may share one: what is on its way out is written before it is read again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from zerostd.optimizers.on_cpu import Job, OnCpu, cut
from zerostd.optimizers.orders import Order
from zerostd.optimizers.streamed import Streamed, Tile
from zerostd.optimizers.tiles import tile_numel
from zerostd.parameters.state_shard import StateShard
from zerostd.policy import Kind, Route
from zerostd.sharding.portions import UNIT
from zerostd.tiers import Done, QueuedTransfer, Transfer
from zerostd.tiers.debug import DEBUG

__all__ = ["FromDisk"]

NUM_SLOTS = 4
TILE_NUMEL = 4 << 20


@dataclass(eq=False)
class _Slot:
    """Host memory for one tile, and what is on its way in and out."""

    columns: dict[str, torch.Tensor]  # bytes
    reads: list[Transfer] = field(default_factory=list)
    writes: list[Transfer] = field(default_factory=list)
    home: tuple[StateShard | None, slice] = (None, slice(0, 0))  # of what is on its way out

    def settle(self) -> None:
        """Return when nothing is on its way out."""
        for write in self.writes:
            write.wait()
        if self.writes:
            for column in self.columns.values():
                DEBUG.poison(column)
        self.writes.clear()


class FromDisk(OnCpu):
    """Updates runs whose states are on disk, in a thread of its own."""

    streamed: Streamed | None = None  # behind it, for portions that the device updates

    def reserve_slots(self, columns: dict[str, torch.dtype], longest: int) -> None:
        """Take memory for the slots; no portion has more elements than `longest`."""
        self._slots: list[_Slot] = []
        self._tile_numel = numel = tile_numel(TILE_NUMEL, longest)
        for _ in range(NUM_SLOTS):
            room = {
                name: self.stores.host.allocate(numel * dtype.itemsize, Kind.BUFFERS) for name, dtype in columns.items()
            }
            self._slots.append(_Slot(room))

    def close(self) -> None:
        """End the thread and give its memory back."""
        super().close()
        self.settle()
        for slot in self._slots:
            for memory in slot.columns.values():
                self.stores.host.free(memory)
        self._slots = []
        if self.streamed is not None:
            self.streamed.close()

    def launch(self, order: Order) -> Transfer:
        """Start the update of a run; done when the new parameters are where they rest."""
        run, held = order.run, order.flat.gradient
        if run.shard.portion.route is not Route.STREAMED:
            return super().launch(order)
        assert held is not None
        gradient, place, relay = held.current[run.region], order.flat.parameters_of(run.shard), QueuedTransfer()
        ready = order.can_begin(held.arrived)
        job = Job(order, gradient, ready, None if place is None else place[run.part], None, None, relay)
        relay.work = self.worker.submit_parts(self.parts(job), order.place, ready)
        return relay

    def parts(self, job: Job) -> list[Callable[[], None]]:
        """All tiles at once: reading ahead and writing behind overlap inside a run."""
        return [partial(self._do_all, job)]

    # In the thread

    def _do_all(self, job: Job) -> None:
        is_streamed = job.run.shard.portion.route is Route.STREAMED
        if not is_streamed:
            job.ready.synchronize()
        factor = 1.0 if is_streamed else job.order.terms.host_factor()
        begun = time.perf_counter()
        run, shard, events = job.run, job.run.shard, self.stores.ledger.events
        size = 2 * run.numel * sum(column.dtype.itemsize for column in shard.columns.values())
        span = events.begin("update", "disk", job.order.group, size, step=job.order.step)
        starts = list(range(run.part.start // UNIT * UNIT, run.part.stop, self._tile_numel))
        end = min(shard.portion.numel, -(-run.part.stop // UNIT) * UNIT)
        tiles = [slice(start, min(end, start + self._tile_numel)) for start in starts]
        for index in range(min(NUM_SLOTS - 1, len(tiles))):
            self._read(shard, tiles[index], self._slots[index])
        singles = None
        for index, tile in enumerate(tiles):
            slot = self._slots[index % NUM_SLOTS]
            if index + NUM_SLOTS - 1 < len(tiles):
                self._read(shard, tiles[index + NUM_SLOTS - 1], self._slots[(index - 1) % NUM_SLOTS])
            for read in slot.reads:
                read.wait()
            inside = slice(max(tile.start, run.part.start), min(tile.stop, run.part.stop))
            states = cut(_rooms(slot, shard, tile), slice(inside.start - tile.start, inside.stop - tile.start))
            here = slice(inside.start - run.part.start, inside.stop - run.part.start)
            singles = (self._stream if is_streamed else self._update)(job, states, here, factor)
            slot.home = (shard, tile)
            rooms = _rooms(slot, shard, tile)
            slot.writes += [column.start_write(tile.start, rooms[name]) for name, column in shard.columns.items()]
            self.send(job, here)
        self.end(job, singles)
        events.end(span)
        self.busy_s += time.perf_counter() - begun

    def _read(self, shard: StateShard, tile: slice, slot: _Slot) -> None:
        slot.settle()
        for other in self._slots:
            home, written = other.home
            if home is shard and written.start < tile.stop and tile.start < written.stop:
                other.settle()
        rooms = _rooms(slot, shard, tile)
        slot.reads = [column.start_read(tile.start, rooms[name]) for name, column in shard.columns.items()]

    def _update(self, job: Job, states: dict[str, torch.Tensor], here: slice, factor: float) -> dict[str, Any] | None:
        return self.update(job, states, states, here, factor)

    def _stream(self, job: Job, states: dict[str, torch.Tensor], here: slice, factor: float) -> dict[str, Any] | None:
        assert self.streamed is not None
        weight = None if job.weights is None else job.weights[here]
        tile = Tile(states, states, job.gradient[here], weight, job.ready)
        singles, published, landed = self.streamed.update(tile, job.order, job.run.singles, Done())
        job.relay.event = published
        landed.synchronize()
        return singles

    def settle(self) -> None:
        """Return when everything is written."""
        for slot in self._slots:
            slot.settle()


def _rooms(slot: _Slot, shard: StateShard, tile: slice) -> dict[str, torch.Tensor]:
    """A slot's memory as the columns of a tile."""
    numel = tile.stop - tile.start
    return {name: slot.columns[name][: numel * c.dtype.itemsize].view(c.dtype) for name, c in shard.columns.items()}
