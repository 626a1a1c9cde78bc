"""The streamed route: states in host memory pass through the device, tile by tile, and are updated there.

    up: states of a tile -> a slot        update: a clone of the user's optimizer on the slot, parameters published
    down: the slot -> home                free: when it is down, the slot takes the next tile

Upper halves of split masters are not transferred if they are parameters on the device. Halves are joined into one tile
of fp32 masters for the update, and split again.

Four slots are in flight at once, so both directions of the link and the device work at the same time. A thread queues
tiles only as slots become free: until then, tiles that forward needs first may still overtake. The arithmetic is the
user's optimizer on the device, as for resident states: the same bits. States that are kept as codes pass as codes, and
one kernel updates them.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.optim import Optimizer

from zerostd import kernels
from zerostd.kernels import Moment, Rule, Split, column_bytes
from zerostd.optimizers.elementwise import clone_optimizer, coded_rule, device_update, next_scalars, update_by_clone
from zerostd.optimizers.spans import ScalarStates, Tensors, UpdateTask, copy_values
from zerostd.parameters.gradient import DOWN
from zerostd.parameters.host_gradient import UP
from zerostd.parameters.state_shard import HIGH, LOW, MASTER, OF_MASTER, StateShard, kept_as
from zerostd.policy import Kind, Tier
from zerostd.sharding import Portion
from zerostd.sharding.layout import UNIT
from zerostd.tiers import Streams, TierAllocator, Transfer, Worker
from zerostd.tiers.debug import poison

TILE_NUMEL = 8 << 20
NUM_SLOTS = 4
FEW = 4  # tiles that a shard is cut into if one tile could hold it
LEAST = 1 << 16
Column = torch.dtype | Moment  # how a master or a state is kept
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

    def views(self, columns: Mapping[str, Column], numel: int) -> Tensors:
        """Return the memory as tensors of this many numbers, coded or not."""
        return {name: self.view(name, column, numel) for name, column in columns.items()}

    def view(self, name: str, column: Column, numel: int) -> torch.Tensor:
        memory = self.memory[name][: column_bytes(column, numel)]
        return memory.view(column.dtype if isinstance(column, Moment) else column)


def tile_numel(most: int, stretches: Iterable[Portion | StateShard], unit: int = UNIT) -> int:
    """Return the elements of a tile: `most`, or fewer where that would be one tile for the longest stretch, so that
    buffers stay small beside what they serve. 0 if there is none."""
    longest = max((stretch.numel for stretch in stretches), default=0)
    if longest >= most:
        return most
    shorter = min(longest, max(LEAST, -(-longest // FEW)))
    return min(most, -(-shorter // unit) * unit)


def widest_dtypes(many: Iterable[Mapping[str, Column]]) -> dict[str, Column]:
    """Return the widest dtype of each name; what is coded is so everywhere."""
    dtypes: dict[str, Column] = {}
    for columns in many:
        for name, dtype in columns.items():
            known = dtypes.get(name, dtype)
            if not isinstance(known, Moment) and not isinstance(dtype, Moment):
                dtype = torch.promote_types(known, dtype)
            dtypes[name] = dtype
    return dtypes


def staged_dtypes(shard: StateShard, device: torch.device) -> dict[str, Column]:
    """Return the dtypes of what passes through a slot of the device: all but upper halves that are there."""
    return {
        name: kept_as(tensor)
        for name, tensor in shard.tensors.items()
        if name != HIGH or not (device.type == "cpu" or tensor.tier is Tier.DEVICE)
    }


@dataclass(eq=False)
class StreamedUpdater:
    """Updates tiles of `shards` on the device, in a separate thread."""

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
        dtypes = widest_dtypes(staged_dtypes(shard, self.device) for shard in self.shards)
        sizes = {name: column_bytes(dtype, self.tile_numel) for name, dtype in _slot_dtypes(dtypes).items()}
        allocate = partial(torch.empty, dtype=torch.uint8, device=self.device)
        self._slots = [StagingSlot({name: allocate(size) for name, size in sizes.items()}) for _ in range(NUM_SLOTS)]
        # Joined masters of the tile that is updated; tiles are updated one after the other
        self._masters = torch.empty(_joined_numel(dtypes, self.tile_numel), dtype=torch.float32, device=self.device)
        self.ledger.enter(Kind.BUFFERS, self.buffer_bytes(dtypes, self.tile_numel))

    @staticmethod
    def buffer_bytes(dtypes: Mapping[str, Column], tile_numel: int) -> int:
        """Return the bytes that slots and joined masters take on the device; `dtypes` are those of what is staged."""
        in_slots = NUM_SLOTS * sum(column_bytes(dtype, tile_numel) for dtype in _slot_dtypes(dtypes).values())
        return in_slots + 4 * _joined_numel(dtypes, tile_numel)

    @property
    def memories(self) -> list[torch.Tensor]:
        """The slots on the device, and the tile of joined masters."""
        return [*(memory for slot in self._slots for memory in slot.memory.values()), self._masters]

    def close(self) -> None:
        """End the thread and give the slots back."""
        self.worker.stop()
        self.allocator.forget_stop(self.worker.stop)
        in_slots = sum(memory.nbytes for slot in self._slots for memory in slot.memory.values())
        self.ledger.leave(Kind.BUFFERS, in_slots + self._masters.nbytes)
        self._slots = []
        self._masters = self._masters.new_empty(0)

    def launch(self, task: UpdateTask) -> Transfer:
        """Start an update; it is done when the new parameters have arrived."""
        span = task.span
        if span.shard.is_coded:
            rule = coded_rule(self.inner, task.options.param_groups[span.param_group], span.scalars)
            task = replace(task, rule=rule)
            span.keep(next_scalars(rule, span.scalars), is_speculative=task.is_speculative)
        return task.submit(self.worker, self._do, self.tile_numel)

    # In the thread

    def _do(self, task: UpdateTask, tile: slice) -> None:
        begun = time.perf_counter()
        span = task.span
        source, target = task.tensors_of(tile)
        scalars, landed = self.update_tile(task, tile, source, target, after=span.shard.landed)
        if tile.stop == span.numel:
            span.shard.landed = landed
            if task.rule is None:
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
        moved = {name: tensor for name, tensor in source.items() if name != HIGH or tensor.device != self.device}
        staged = {name: slot.memory[name][: tensor.nbytes].view(tensor.dtype) for name, tensor in moved.items()}
        incoming = task.gradient[tile]
        weights = None if task.weights is None else task.weights[tile]
        shown = weights if weights is not None or HIGH in staged else target.get(HIGH)  # new parameters, when done
        is_on_device = shown is not None and shown.device == self.device
        rounded = weights if is_on_device or weights is None else slot.view(LANDING, weights.dtype, numel)
        if LOW in staged:
            rounded = staged.get(HIGH, target[HIGH])
        if incoming.device != self.device:
            task.ready.synchronize()  # here, lest the stream wait with everything behind it
        within = partial(
            self.ledger.events.within,
            group=task.group.name,
            num_bytes=sum(tensor.nbytes for tensor in moved.values()),
            device=self.device,
            step=task.step,
        )
        with self.streams.up.after(after), within("transfer", "up", way=UP):
            for name, tensor in moved.items():
                if task.span.scalars is not None or name in OF_MASTER or task.rule is not None:
                    staged[name].copy_(tensor, non_blocking=True)
            if incoming.device != self.device:
                incoming = slot.view(LANDING, incoming.dtype, numel).copy_(incoming, non_blocking=True)
            up = self.streams.up.record_event()
        with self.streams.update.after(up, task.ready), within("update", "update"):
            scalars = self._compute(task, {**source, **staged}, incoming, rounded, slot)
            if weights is not None and rounded is not None and is_on_device and weights is not rounded:
                weights.copy_(rounded)
            updated = self.streams.update.record_event()
        with self.streams.down.after(updated), within("transfer", "down", way=DOWN):
            if weights is not None and rounded is not None and not is_on_device:
                weights.copy_(rounded, non_blocking=True)
            for name, tensor in staged.items():
                target[name].copy_(tensor, non_blocking=True)
            for memory in slot.memory.values():
                poison(memory)
            landed = self.streams.down.record_event()
        slot.writes.append(landed)
        task.transfer.event = updated if is_on_device else landed
        return scalars, landed

    def _compute(
        self,
        task: UpdateTask,
        tensors: Tensors,
        incoming: torch.Tensor,
        rounded: torch.Tensor | None,
        slot: StagingSlot,
    ) -> ScalarStates:
        """Update master and states on the device, and write new parameters to `rounded`. The slot has room for
        the gradient as torch's optimizer reads it."""
        is_split = LOW in tensors
        if task.rule is not None:
            update_coded(task.rule, incoming, tensors, rounded, task.options.factor)
            return {}
        states = {name: tensor for name, tensor in tensors.items() if name not in OF_MASTER}
        if is_split and task.span.scalars is not None:
            scalars = copy_values(task.span.scalars)
            options = task.options.param_groups[task.span.param_group]
            update = device_update(self.inner, options, {**scalars, **states}, self.device)
            if update is not None:
                assert rounded is not None
                update.make(incoming, task.options.factor, Split(tensors[HIGH], tensors[LOW]), rounded)
                return scalars
        master = self._masters[: incoming.numel()] if is_split else tensors[MASTER]
        gradient = slot.view(GRADIENT, master.dtype, incoming.numel()).copy_(incoming)
        if task.options.factor is not None:
            gradient.mul_(task.options.factor)
        if is_split:
            kernels.join_into(Split(tensors[HIGH], tensors[LOW]), master)
        scalars = update_by_clone(self.clone, task.options, task.span, {MASTER: master, **states}, gradient)
        if is_split:
            assert rounded is not None
            kernels.split_into(master, Split(rounded, tensors[LOW]))
        elif rounded is not None:
            rounded.copy_(master)
        return scalars


def update_coded(
    rule: Rule,
    gradient: torch.Tensor,
    tensors: Tensors,
    weight: torch.Tensor | None,
    factor: torch.Tensor | None,
    num_threads: int = 1,
) -> None:
    """Update a master and coded states in place, on their device. New parameters go to `weight`; that of a split master
    is the upper half."""
    master: torch.Tensor | Split = Split(tensors[HIGH], tensors[LOW]) if LOW in tensors else tensors[MASTER]
    states = [tensors[name] for name in rule.state_names]
    target = master if weight is None or not isinstance(master, Split) else Split(weight, master.low)
    kernels.update(
        rule,
        gradient,
        (master, *states),
        (target, *states),
        factor=1.0 if factor is None else factor,
        weight=None if isinstance(master, Split) else weight,
        num_threads=num_threads,
    )


def _slot_dtypes(dtypes: Mapping[str, Column]) -> dict[str, Column]:
    """Return what a slot has room for: master, states, and the gradient as it comes and as the update reads it."""
    wide = dtypes.get(MASTER, torch.float32)
    return {**dtypes, LANDING: wide} if _is_coded(dtypes) else {**dtypes, GRADIENT: wide, LANDING: wide}


def _joined_numel(dtypes: Mapping[str, Column], tile_numel: int) -> int:
    return tile_numel if LOW in dtypes and not _is_coded(dtypes) else 0


def _is_coded(dtypes: Mapping[str, Column]) -> bool:
    return any(isinstance(dtype, Moment) for dtype in dtypes.values())
