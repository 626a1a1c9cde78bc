"""The streamed route: states in host memory pass through the device, tile by tile, and are updated there.

    up: states of a tile -> a slot        update: a clone of the user's optimizer on the slot, parameters published
    down: the slot -> home                free: when it is down, the slot takes the next tile

Four slots are on their way at once, so both directions of the link and the device work at the same time. A thread puts
tiles into the streams as slots become free, and not before: until then, what forward needs first may still overtake.
The arithmetic is the user's optimizer on the device, as for resident states: the same bits.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.optim import Optimizer

from zerostd.optimizers.elementwise import clone_optimizer, update_by_clone
from zerostd.optimizers.spans import ScalarStates, Tensors, UpdateTask
from zerostd.parameters.flat import MASTER, StateShard
from zerostd.parameters.gradient import DOWN
from zerostd.parameters.host_gradient import UP
from zerostd.policy import Kind
from zerostd.sharding import Portion
from zerostd.sharding.portions import UNIT
from zerostd.tiers import Streams, TierAllocator, TierTensor, Transfer, Worker
from zerostd.tiers.debug import poison

TILE_NUMEL = 8 << 20
NUM_SLOTS = 4
FEW = 4  # tiles that a shard is cut into if one tile could hold it
LEAST = 1 << 16
GRADIENT = "(gradient)"  # in a slot, beside master and states: as the update reads it
LANDING = "(landing)"  # likewise: gradients that come from the host, and parameters that go there


@dataclass(eq=False)
class StagingSlot:
    """Memory that states pass through, for one tile, and what is on its way in and out."""

    memory: Tensors  # bytes, by name
    reads: list[Transfer] = field(default_factory=list)
    writes: list[Transfer] = field(default_factory=list)
    task: UpdateTask | None = None  # whose tile is in it: what it reads and writes must stay as long
    block: slice = field(default_factory=lambda: slice(0, 0))  # from disk: what it holds of the task's shard

    def wait_writes(self) -> None:
        """Return when nothing is on its way out."""
        for write in self.writes:
            write.synchronize()
        for memory in self.memory.values() if self.writes else ():
            if memory.device.type == "cpu":  # on a device it is poisoned in the stream
                poison(memory)
        self.writes.clear()

    def views(self, tensors: Mapping[str, torch.Tensor | TierTensor], numel: int) -> Tensors:
        """Return the memory as tensors of the dtypes of `tensors`."""
        return {name: self.view(name, tensor.dtype, numel) for name, tensor in tensors.items()}

    def view(self, name: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self.memory[name][: numel * dtype.itemsize].view(dtype)


def tile_numel(most: int, stretches: Iterable[Portion | StateShard]) -> int:
    """Return the elements of a tile: `most`, or fewer where that would be one tile for the longest stretch, so that
    buffers stay small beside what they serve. 0 if there is none."""
    longest = max((stretch.numel for stretch in stretches), default=0)
    if longest >= most:
        return most
    shorter = min(longest, max(LEAST, -(-longest // FEW)))
    return min(most, -(-shorter // UNIT) * UNIT)


def widest_dtypes(shards: Iterable[StateShard]) -> dict[str, torch.dtype]:
    """Return the widest dtype of each tensor of the shards, by name."""
    dtypes: dict[str, torch.dtype] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            dtypes[name] = torch.promote_types(dtypes.get(name, tensor.dtype), tensor.dtype)
    return dtypes


@dataclass(eq=False)
class StreamedUpdater:
    """Updates tiles of `shards` on the device, in a thread of its own."""

    inner: Optimizer
    shards: Sequence[StateShard]
    tile_numel: int
    allocator: TierAllocator
    streams: Streams
    busy_s: float = field(init=False, default=0.0)  # that the thread has worked or waited for slots, in all

    def __post_init__(self) -> None:
        self.device = self.allocator.device
        self.ledger = self.allocator.ledger
        self.worker = Worker("the update on the device of states in host memory", self.device)
        self.allocator.before_close(self.worker.stop)
        self.clone = clone_optimizer(self.inner)
        self._turn = 0
        dtypes = widest_dtypes(self.shards)
        sizes = {name: self.tile_numel * dtype.itemsize for name, dtype in _slot_dtypes(dtypes).items()}
        allocate = partial(torch.empty, dtype=torch.uint8, device=self.device)
        self._slots = [StagingSlot({name: allocate(size) for name, size in sizes.items()}) for _ in range(NUM_SLOTS)]
        self.ledger.enter(Kind.BUFFERS, self.buffer_bytes(dtypes, self.tile_numel))

    @staticmethod
    def buffer_bytes(dtypes: Mapping[str, torch.dtype], tile_numel: int) -> int:
        """Return the bytes that the slots take on the device; `dtypes` are those of master and states."""
        return NUM_SLOTS * tile_numel * sum(dtype.itemsize for dtype in _slot_dtypes(dtypes).values())

    @property
    def memories(self) -> list[torch.Tensor]:
        """The slots on the device."""
        return [memory for slot in self._slots for memory in slot.memory.values()]

    def close(self) -> None:
        """End the thread and give the slots back."""
        self.worker.stop()
        self.allocator.forget_stop(self.worker.stop)
        self.ledger.leave(Kind.BUFFERS, sum(memory.nbytes for slot in self._slots for memory in slot.memory.values()))
        self._slots = []

    def launch(self, task: UpdateTask) -> Transfer:
        """Start an update; done when the new parameters are where they belong."""
        return task.submit(self.worker, self._do, self.tile_numel)

    # In the thread

    def _do(self, task: UpdateTask, tile: slice) -> None:
        begun = time.perf_counter()
        span = task.span
        source, target = task.tensors_of(tile)
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
        self._turn = (self._turn + 1) % NUM_SLOTS
        slot = self._slots[self._turn]
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
                if task.span.scalars is not None or name == MASTER:
                    staged[name].copy_(tensor, non_blocking=True)
            if incoming.device != self.device:
                incoming = slot.view(LANDING, incoming.dtype, numel).copy_(incoming, non_blocking=True)
            up = self.streams.up.record_event()
        with self.streams.update.after(up, task.ready), within("update", "update"):
            gradient.copy_(incoming)
            if task.options.factor is not None:
                gradient.mul_(task.options.factor)
            scalars = update_by_clone(self.clone, task.options, task.span, staged, gradient)
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


def _slot_dtypes(dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Return what a slot has room for: master, states, and the gradient twice."""
    return {**dtypes, GRADIENT: dtypes[MASTER], LANDING: dtypes[MASTER]}
