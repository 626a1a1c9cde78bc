"""The streamed route: states in host memory pass through the device, tile by tile, and are updated there.

    up: states of a tile -> a slot        update: a clone of the user's optimizer on the slot, parameters published
    down: the slot -> home                free: when it is down, the slot takes the next tile

Four slots are on their way at once, so both directions of the link and the device work at the same time. A thread puts
tiles into the streams as slots become free, and not before: until then, what forward needs first may still overtake.
The arithmetic is the user's optimizer on the device, as for resident states: the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import torch

from zerostd.monitoring import Ledger
from zerostd.optimizers.arithmetic import OptimizerClone
from zerostd.optimizers.spans import ScalarStates
from zerostd.optimizers.staging import NUM_SLOTS, StagingSlot
from zerostd.optimizers.tasks import Tensors, UpdateTask
from zerostd.parameters.state_shard import MASTER
from zerostd.policy import Kind, Tier
from zerostd.tiers import Streams, Transfer, Worker
from zerostd.tiers.debug import poison

UP = (Tier.HOST.value, Tier.DEVICE.value)
DOWN = (Tier.DEVICE.value, Tier.HOST.value)
TILE_NUMEL = 8 << 20
GRADIENT = "(gradient)"  # in a slot, beside master and states: as the update reads it
LANDING = "(landing)"  # likewise: gradients that come from the host, and parameters that go there


class StreamedUpdater:
    """Updates tiles on the device, in a thread of its own."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        dtypes: Mapping[str, torch.dtype],
        tile_numel: int,
        device: torch.device,
        streams: Streams,
        ledger: Ledger,
    ) -> None:
        """`dtypes` are those of master and states, the widest of each."""
        self.worker = Worker("the update on the device of states in host memory", device)
        self.clone = OptimizerClone(inner)
        self.tile_numel = tile_numel
        self.streams = streams
        self.device = device
        self.ledger = ledger
        self.busy_s = 0.0  # that the thread has worked or waited for slots, in all
        self._turn = 0
        sizes = {name: tile_numel * dtype.itemsize for name, dtype in _slot_dtypes(dtypes).items()}
        self._slots = [
            StagingSlot({name: torch.empty(size, dtype=torch.uint8, device=device) for name, size in sizes.items()})
            for _ in range(NUM_SLOTS)
        ]
        ledger.enter(Kind.BUFFERS, self.buffer_bytes(dtypes, tile_numel))

    @staticmethod
    def buffer_bytes(dtypes: Mapping[str, torch.dtype], tile_numel: int) -> int:
        """Return the bytes that the slots take on the device."""
        return NUM_SLOTS * tile_numel * sum(dtype.itemsize for dtype in _slot_dtypes(dtypes).values())

    def close(self) -> None:
        """End the thread and give the slots back."""
        self.worker.stop()
        self.ledger.leave(Kind.BUFFERS, sum(memory.nbytes for slot in self._slots for memory in slot.memory.values()))
        self._slots = []

    def launch(self, task: UpdateTask) -> Transfer:
        """Start an update of states on the host; done when the new parameters are where they belong."""
        numel = task.span.numel
        tiles = [slice(start, min(numel, start + self.tile_numel)) for start in range(0, numel, self.tile_numel)]
        return task.submit(self.worker, [partial(self._do, task, tile) for tile in tiles])

    # In the thread

    def _do(self, task: UpdateTask, tile: slice) -> None:
        begun = time.perf_counter()
        span = task.span
        source = task.source_tile(tile)
        target = task.target_tile(tile)
        scalars, landed = self.update_tile(task, tile, source, target, after=span.shard.landed)
        if tile.stop == span.numel:
            span.shard.landed = landed
            span.keep(scalars, is_speculative=task.is_speculative)
        self.busy_s += time.perf_counter() - begun

    def update_tile(
        self, task: UpdateTask, tile: slice, source: Tensors, target: Tensors, *, after: Transfer
    ) -> tuple[ScalarStates, Transfer]:
        """Update one tile of states on the host, which come up when `after` is over. Returns the scalar states, and
        when the new states are home."""
        span = task.span
        slot = self._next_slot()
        slot.wait_writes()
        slot.task = task
        numel = tile.stop - tile.start
        staged = slot.views(source, numel)
        master = staged[MASTER]
        gradient = slot.view(GRADIENT, master.dtype, numel)
        incoming = task.gradient[tile]
        weights = None if task.weights is None else task.weights[tile]
        is_on_device = weights is not None and weights.device == self.device
        if incoming.device != self.device:
            task.ready.synchronize()  # here, lest the stream wait with everything behind it
        within = partial(
            self.ledger.events.within,
            group=task.group.name,
            num_bytes=sum(tensor.nbytes for tensor in source.values()),
            device=self.device,
            step=task.step,
        )
        with self.streams.up.after(after), within("transfer", "up", way=UP):
            for name, tensor in source.items():
                if span.scalars is not None or name == MASTER:
                    staged[name].copy_(tensor, non_blocking=True)
            if incoming.device != self.device:
                incoming = slot.view(LANDING, incoming.dtype, numel).copy_(incoming, non_blocking=True)
            up = self.streams.up.record_event()
        with self.streams.update.after(up, task.ready), within("update", "update"):
            gradient.copy_(incoming)
            if task.options.factor is not None:
                gradient.mul_(task.options.factor)
            long_states = {name: tensor for name, tensor in staged.items() if name != MASTER}
            scalars = self.clone.update(task.options, span.param_group, master, long_states, span.scalars, gradient)
            if weights is not None:
                rounded = weights if is_on_device else slot.view(LANDING, weights.dtype, numel)
                rounded.copy_(master)
            updated = self.streams.update.record_event()
        with self.streams.down.after(updated), within("transfer", "down", way=DOWN):
            if weights is not None and not is_on_device:
                weights.copy_(rounded, non_blocking=True)
            for name, tensor in target.items():
                tensor.copy_(staged[name], non_blocking=True)
            for tensor in (*staged.values(), gradient, slot.memory[LANDING]):
                poison(tensor)
            landed = self.streams.down.record_event()
        slot.writes.append(landed)
        task.transfer.event = updated if is_on_device else landed
        return scalars, landed

    def _next_slot(self) -> StagingSlot:
        self._turn = (self._turn + 1) % NUM_SLOTS
        return self._slots[self._turn]


def _slot_dtypes(dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Return what a slot has room for: master, states, and the gradient twice."""
    return {**dtypes, GRADIENT: dtypes[MASTER], LANDING: dtypes[MASTER]}
