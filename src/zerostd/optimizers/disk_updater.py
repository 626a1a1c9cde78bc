"""States on disk: tiles are read ahead into slots of host memory, updated there, and written back behind.

The CPU updates them in place, or they pass through the device as on the streamed route. Tiles are read as blocks of
whole pages, so neighbouring spans may share one: what is on its way out is written before it is read again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from zerostd.optimizers.cpu_updater import CpuUpdater
from zerostd.optimizers.spans import ScalarStates, UpdateSpan
from zerostd.optimizers.staging import NUM_SLOTS, StagingSlot, tile_numel, widest_dtypes
from zerostd.optimizers.streamed_updater import StreamedUpdater
from zerostd.optimizers.tasks import Tensors, UpdateTask
from zerostd.parameters import Flat
from zerostd.parameters.state_shard import StateShard
from zerostd.policy import Kind, Route
from zerostd.sharding.portions import UNIT
from zerostd.tiers import Done, Streams, TierAllocator, Transfer
from zerostd.tiers.debug import poison

TILE_NUMEL = 4 << 20


class DiskUpdater(CpuUpdater):
    """Updates spans whose states are on disk, in a thread of its own."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        placed: Sequence[tuple[Flat, StateShard]],
        allocator: TierAllocator,
        streams: Streams,
        *,
        num_threads: int,
        streamed: StreamedUpdater | None,
    ) -> None:
        """`placed` are its shards, with their flats; `streamed` updates those that pass through the device."""
        super().__init__(
            inner, placed, allocator, streams, num_threads=num_threads, name="the update of states on disk"
        )
        self.streamed = streamed
        shards = [shard for _, shard in placed]
        self._tile_numel = tile_numel(TILE_NUMEL, max(shard.numel for shard in shards))
        sizes = {name: self._tile_numel * dtype.itemsize for name, dtype in widest_dtypes(shards).items()}
        self._slots = [
            StagingSlot({name: allocator.host.allocate(size, Kind.BUFFERS) for name, size in sizes.items()})
            for _ in range(NUM_SLOTS)
        ]

    @staticmethod
    def buffer_bytes(dtypes: Mapping[str, torch.dtype], longest: int) -> int:
        """Return the bytes that the slots take on the host, if the longest shard has so many elements."""
        return NUM_SLOTS * tile_numel(TILE_NUMEL, longest) * sum(dtype.itemsize for dtype in dtypes.values())

    def close(self) -> None:
        """End the threads and give their memory back."""
        super().close()
        self.wait_writes()
        for slot in self._slots:
            for memory in slot.memory.values():
                self.allocator.host.free(memory)
        self._slots = []
        if self.streamed is not None:
            self.streamed.close()

    def wait_writes(self) -> None:
        """Return when everything is written."""
        for slot in self._slots:
            _wait_writes(slot)

    def launch(self, task: UpdateTask) -> Transfer:
        """Start an update; done when the new parameters are where they belong."""
        is_streamed = task.span.shard.route is Route.STREAMED
        return self.submit(task) if is_streamed else super().launch(task)

    def submit(self, task: UpdateTask) -> Transfer:
        """Put a task into the thread with all its tiles at once: reading ahead and writing behind overlap inside it."""
        return task.submit(self.worker, [partial(self._do_all, task)])

    # In the thread

    def _do_all(self, task: UpdateTask) -> None:
        span = task.span
        is_streamed = span.shard.route is Route.STREAMED
        if not is_streamed:
            task.ready.synchronize()
        factor = 1.0 if is_streamed else task.options.read_factor()
        begun = time.perf_counter()
        events = self.allocator.ledger.events
        num_bytes = 2 * span.numel * sum(tensor.dtype.itemsize for tensor in task.source.values())
        event = events.begin("update", "disk", task.group.name, num_bytes, step=task.step)
        blocks = self._blocks(span)
        ahead = NUM_SLOTS - 1
        for index, block in enumerate(blocks[:ahead]):
            self._read(task, block, self._slots[index])
        scalars: ScalarStates | None = None
        for index, block in enumerate(blocks):
            slot = self._slots[index % NUM_SLOTS]
            if index + ahead < len(blocks):
                self._read(task, blocks[index + ahead], self._slots[(index + ahead) % NUM_SLOTS])
            for read in slot.reads:
                read.wait()
            staged = slot.views(task.source, block.stop - block.start)
            tile, states = _inside(span, block, staged)
            if is_streamed:
                assert self.streamed is not None
                scalars, landed = self.streamed.update_tile(task, tile, states, states, after=Done())
                landed.synchronize()
            else:
                scalars = self.update_tile(task, tile, states, states, factor)
            slot.writes += [tensor.start_write(block.start, staged[name]) for name, tensor in task.source.items()]
            self.send_weights(task, tile)
        self.finish(task, scalars)
        events.end(event)
        self.busy_s += time.perf_counter() - begun

    def _blocks(self, span: UpdateSpan) -> list[slice]:
        """Return the tiles of a span as parts of its shard, each of whole pages."""
        place = span.in_shard
        end = min(span.shard.numel, -(-place.stop // UNIT) * UNIT)
        starts = range(place.start // UNIT * UNIT, place.stop, self._tile_numel)
        return [slice(start, min(end, start + self._tile_numel)) for start in starts]

    def _read(self, task: UpdateTask, block: slice, slot: StagingSlot) -> None:
        """Start reading a block into a slot, when what overlaps it has been written."""
        _wait_writes(slot)
        for writing in self._slots:
            if _overlaps(writing, task, block):
                _wait_writes(writing)
        slot.task = task
        slot.block = block
        staged = slot.views(task.source, block.stop - block.start)
        slot.reads = [tensor.start_read(block.start, staged[name]) for name, tensor in task.source.items()]


def _wait_writes(slot: StagingSlot) -> None:
    if slot.writes:
        slot.wait_writes()
        for memory in slot.memory.values():
            poison(memory)


def _overlaps(slot: StagingSlot, task: UpdateTask, block: slice) -> bool:
    """Whether a slot holds elements of this block of the task's shard."""
    if slot.task is None or slot.block is None or slot.task.span.shard is not task.span.shard:
        return False
    return bool(slot.block.start < block.stop and block.start < slot.block.stop)


def _inside(span: UpdateSpan, block: slice, staged: Tensors) -> tuple[slice, Tensors]:
    """Return the part of a block that is the span's: as a tile of the span, and its tensors."""
    place = span.in_shard
    low = max(block.start, place.start)
    high = min(block.stop, place.stop)
    part = slice(low - block.start, high - block.start)
    return slice(low - place.start, high - place.start), {name: tensor[part] for name, tensor in staged.items()}
