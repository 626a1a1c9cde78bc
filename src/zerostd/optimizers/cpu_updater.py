"""The CPU route: states in host memory are updated by the CPU, in a thread.

    gradient -> host          copied down when it lands, or there already
    kernel                    one pass over gradient, master and states; new parameters out in their own dtype
    parameters -> their home  up to the device tile by tile, while the kernel goes on, or to the disk from the master

Optimizers that the kernels do not have run as a clone of the user's own, on the CPU.

States on disk are read ahead, tile by tile, into slots of host memory, updated there, and written back behind: by the
CPU in place, or through the device as on the streamed route. Tiles are read as blocks of whole pages, so neighbouring
spans may share a page: a page that is being written is finished before it is read again.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice

import torch
from torch.optim import Optimizer

from zerostd import kernels
from zerostd.errors import MisuseError
from zerostd.kernels import NUM_SLOTS, Rule, Split, column_bytes
from zerostd.optimizers.elementwise import clone_optimizer, coded_rule, native_rule, next_scalars, update_by_clone
from zerostd.optimizers.spans import ScalarStates, Tensors, UpdateTask
from zerostd.optimizers.staging import Column, StagingSlot, tile_numel, widest_dtypes
from zerostd.optimizers.streamed_updater import StreamedUpdater
from zerostd.parameters import Flat
from zerostd.parameters.gradient import HostGradientCopy
from zerostd.parameters.host_gradient import UP
from zerostd.parameters.state_shard import HIGH, LOW, MASTER, OF_MASTER, CodedTensor, StateShard, kept_as
from zerostd.policy import Kind, Route, Tier
from zerostd.sharding.layout import UNIT
from zerostd.tiers import AllOf, Done, Streams, TierAllocator, TierTensor, Transfer, Worker
from zerostd.tiers.host import PAGE

TILE_NUMEL = 16 << 20  # elements updated before their new parameters start on their way
DISK_TILE_NUMEL = 4 << 20


@dataclass(eq=False)
class CpuUpdater:
    """Updates spans in a separate thread."""

    name = "the update on the CPU"
    inner: Optimizer
    placed: Sequence[tuple[Flat, StateShard]]  # the shards it updates, with their flats
    allocator: TierAllocator
    streams: Streams
    num_threads: int
    busy_s: float = field(init=False, default=0.0)  # that the thread has worked, in all

    def __post_init__(self) -> None:
        self.clone = clone_optimizer(self.inner)
        self.worker = Worker(self.name, self.allocator.device)
        self.allocator.before_close(self.worker.stop)
        self._weights: dict[StateShard, torch.Tensor] = {}  # on the host: new parameters on their way
        self.serve(self.placed)

    def serve(self, placed: Sequence[tuple[Flat, StateShard]]) -> None:
        """Update these shards from now on. No update of other shards may be under way."""
        self.placed = placed
        served = {shard for _, shard in placed}
        for shard in [shard for shard in self._weights if shard not in served]:
            self.allocator.host.free(self._weights.pop(shard))
        if self.allocator.device.type == "cpu":
            return
        for flat, shard in placed:  # host memory where new parameters cannot take the place of the gradient's copy
            takes_its_place = _is_upper_half(shard) or (not shard.spare and _fitting_copy(flat) is not None)
            if shard.route is Route.CPU and flat.rest.tier is Tier.DEVICE and not takes_its_place:
                self._weights_of(flat, shard)

    def close(self) -> None:
        """End the thread and give its memory back."""
        self.worker.stop()
        self.allocator.forget_stop(self.worker.stop)
        for memory in self._weights.values():
            self.allocator.host.free(memory)
        self._weights.clear()

    def launch(self, task: UpdateTask) -> Transfer:
        """Start an update. The update is done when the new parameters have arrived in their tier."""
        span = task.span
        host_weights = self._host_weights(task) if span.shard.route is Route.CPU else None
        rule = self._rule(task)
        task = replace(task, host_weights=host_weights, rule=rule)
        if rule is not None:
            span.keep(next_scalars(rule, span.scalars), is_speculative=task.is_speculative)
        is_cut = task.rule is not None and span.shard.tier is Tier.HOST  # from disk, tiles overlap inside the thread
        return task.submit(self.worker, self._do, TILE_NUMEL if is_cut else span.numel)

    def _rule(self, task: UpdateTask) -> Rule | None:
        """Return a native rule if the numbers are fp32 and the user has not asked for torch's fused kernel here."""
        options = task.options.param_groups[task.span.param_group]
        is_on_cpu = self.allocator.device.type == "cpu"
        if task.span.shard.is_coded:
            return coded_rule(self.inner, options, task.span.scalars)
        if task.span.shard.route is Route.STREAMED:
            return None
        if (options.get("fused") and is_on_cpu) or task.span.shard.master.dtype != torch.float32:
            return None
        rule = native_rule(self.inner, options, task.span.scalars, exact_root=not is_on_cpu)
        if rule is None:
            return None
        missing = [name for name in rule.state_names if name not in task.source]
        if missing:
            raise MisuseError(
                f"the optimizer now needs the state {missing[0]!r}, which it did not need with its options at prepare: "
                "set the options before prepare, so that there is room for the state"
            )
        return rule

    def _host_weights(self, task: UpdateTask) -> torch.Tensor | None:
        """Return where the kernel writes new parameters; None: the master is the parameter, or is written to disk."""
        span = task.span
        if span.shard.holds_parameters or task.flat.rest.tier is Tier.DISK:
            return None
        if task.weights is not None and task.weights.device.type == "cpu":
            return task.weights
        if _is_upper_half(span.shard):
            high = task.target[HIGH].tensor
            assert high is not None
            return high[span.in_shard]
        copy = None if task.is_speculative else _fitting_copy(task.flat)
        if copy is not None:
            return copy.copy_of(span.region, upload=task.transfer).view(task.flat.rest.dtype)
        return self._weights_of(task.flat, span.shard)[span.in_shard]

    def _weights_of(self, flat: Flat, shard: StateShard) -> torch.Tensor:
        """Return host memory for a shard's new parameters; the first call takes it."""
        if shard not in self._weights:
            memory = self.allocator.host.allocate(shard.numel * flat.rest.dtype.itemsize, Kind.BUFFERS)
            self._weights[shard] = memory.view(flat.rest.dtype)
        return self._weights[shard]

    # In the thread

    def _do(self, task: UpdateTask, tile: slice) -> None:
        task.ready.synchronize()
        factor = task.options.read_factor()
        begun = time.perf_counter()
        source, target = task.tensors_of(tile)
        num_bytes = sum(tensor.nbytes for tensor in source.values())
        with self.allocator.ledger.events.within("update", "cpu", task.group.name, num_bytes, step=task.step):
            scalars = self.update_tile(task, tile, source, target, factor)
        self.send_weights(task, tile, target)
        if tile.stop == task.span.numel and task.rule is None:
            task.span.keep(scalars, is_speculative=task.is_speculative)
        self.busy_s += time.perf_counter() - begun

    def update_tile(
        self, task: UpdateTask, tile: slice, source: Tensors, target: Tensors, factor: float
    ) -> ScalarStates | None:
        """Update one tile by the kernel, or by the clone; the latter returns its scalar states."""
        scalars: ScalarStates | None = None
        is_split = LOW in source
        weights = None if task.host_weights is None else task.host_weights[tile]
        if task.rule is None:
            scalars = self._update_by_clone(task, tile, source, target, factor)
        else:
            names = task.rule.state_names
            kernels.update(
                task.rule,
                task.gradient[tile],
                (_master_of(source), *(source[name] for name in names)),
                None if target is source else (_master_of(target), *(target[name] for name in names)),
                factor=factor,
                weight=None if is_split else weights,
                num_threads=self.num_threads,
            )
        if weights is not None and is_split and weights.data_ptr() != target[HIGH].data_ptr():
            weights.copy_(target[HIGH])
        return scalars

    def _update_by_clone(
        self, task: UpdateTask, tile: slice, source: Tensors, target: Tensors, factor: float
    ) -> ScalarStates:
        """Update one tile by the clone, which is given whole masters."""
        if target is not source:
            for name, tensor in source.items():
                target[name].copy_(tensor)
        halves = _master_of(target)
        master = kernels.join(halves) if isinstance(halves, Split) else halves
        gradient = task.gradient[tile].to(master.dtype, copy=True)
        if factor != 1.0:
            gradient.mul_(factor)
        states = {MASTER: master} | {name: tensor for name, tensor in target.items() if name not in OF_MASTER}
        scalars = update_by_clone(self.clone, task.options, task.span, states, gradient)
        if isinstance(halves, Split):
            kernels.split_into(master, halves)
        elif task.host_weights is not None:
            task.host_weights[tile].copy_(master)
        return scalars

    def send_weights(self, task: UpdateTask, tile: slice, updated: Tensors) -> None:
        """Start new parameters of a tile on their way to the device; write those to disk that are kept there."""
        if task.flat.rest.tier is Tier.DISK:
            start = task.span.region.start
            place = slice(start + tile.start, start + tile.stop)
            task.flat.rest.write(place, updated[HIGH if LOW in updated else MASTER])
        if task.weights is None or task.host_weights is None or task.weights.device.type == "cpu":
            return
        target = task.weights[tile]
        within = partial(self.allocator.ledger.events.within, "transfer", "up", way=UP, device=target.device)
        with self.streams.up.after(task.asked), within(task.group.name, target.nbytes, step=task.step):
            target.copy_(task.host_weights[tile], non_blocking=True)
            task.transfer.event = self.streams.up.record_event()


def _is_upper_half(shard: StateShard) -> bool:
    """Return whether new parameters are in memory as the upper halves of masters."""
    return shard.is_split and shard.tier is Tier.HOST


def _master_of(tensors: Tensors) -> torch.Tensor | Split:
    return Split(tensors[HIGH], tensors[LOW]) if LOW in tensors else tensors[MASTER]


def _fitting_copy(flat: Flat) -> HostGradientCopy | None:
    """Return the host's copy of the gradient, if new parameters fit where it was."""
    assert flat.gradient is not None
    is_as_wide = flat.gradient.rest_dtype.itemsize == flat.rest.dtype.itemsize
    return flat.gradient.host_copy if flat.rest.tensor is not None and is_as_wide else None


def dtypes_on_disk(shard: StateShard) -> dict[str, Column]:
    """Return the dtypes of columns that are read from disk, by name."""
    return {name: kept_as(tensor) for name, tensor in shard.tensors.items() if tensor.tier is Tier.DISK}


def disk_unit(columns: Iterable[Column]) -> int:
    """Return the number of elements after which every column begins a page."""
    unit = UNIT
    for column in columns:
        while column_bytes(column, unit) % PAGE:
            unit *= 2
    return unit


def _stored(tensor: TierTensor, start: int) -> tuple[TierTensor, int]:
    """Return the tier tensor of a column on disk, and the place of element `start` in it."""
    if isinstance(tensor, CodedTensor):
        return tensor.codes, tensor.moment.num_elements(start)
    return tensor, start


class DiskUpdater(CpuUpdater):
    """Updates spans whose states are on disk, in a separate thread."""

    name = "the update of states on disk"

    def __post_init__(self) -> None:
        super().__post_init__()
        allocator = self.allocator
        shards = [shard for _, shard in self.placed]
        dtypes = widest_dtypes(dtypes_on_disk(shard) for shard in shards)
        self._unit = disk_unit(dtypes.values())
        self._tile_numel = tile_numel(DISK_TILE_NUMEL, shards, self._unit)
        streamed = [shard for shard in shards if shard.route is Route.STREAMED]
        self.streamed: StreamedUpdater | None = None  # for those that pass through the device
        if streamed:
            self.streamed = StreamedUpdater(self.inner, streamed, self._tile_numel, allocator, self.streams)
        sizes = {name: column_bytes(dtype, self._tile_numel) for name, dtype in dtypes.items()}
        self._slots = [
            StagingSlot({name: allocator.host.allocate(size, Kind.BUFFERS) for name, size in sizes.items()})
            for _ in range(NUM_SLOTS)
        ]

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
            slot.wait_writes()

    # In the thread

    def _do(self, task: UpdateTask, tile: slice) -> None:
        span = task.span
        is_streamed = span.shard.route is Route.STREAMED
        if not is_streamed:
            task.ready.synchronize()
        factor = 1.0 if is_streamed else task.options.read_factor()
        begun = time.perf_counter()
        events = self.allocator.ledger.events
        num_bytes = 2 * sum(column_bytes(kept_as(tensor), span.numel) for tensor in task.on_disk.values())
        event = events.begin("update", "disk", task.group.name, num_bytes, step=task.step)
        place = span.in_shard
        end = min(span.shard.numel, -(-place.stop // self._unit) * self._unit)
        starts = range(place.start // self._unit * self._unit, place.stop, self._tile_numel)
        blocks = [slice(start, min(end, start + self._tile_numel)) for start in starts]  # of the shard, whole pages
        to_read = zip(blocks, cycle(self._slots))
        reading = deque(self._read(task, block, slot) for block, slot in islice(to_read, NUM_SLOTS - 1))
        scalars: ScalarStates | None = None
        while reading:
            reading.extend(self._read(task, block, slot) for block, slot in islice(to_read, 1))
            slot = reading.popleft()
            block = slot.block
            for read in slot.reads:
                read.wait()
            staged = _staged(task, slot)
            low = max(block.start, place.start)
            high = min(block.stop, place.stop)
            part = slice(low - place.start, high - place.start)
            here = slice(low - block.start, high - block.start)
            states = {name: _cut(task.on_disk[name], tensor, here) for name, tensor in staged.items()}
            states |= task.tensors_of(part)[0]  # parameters that are upper halves
            if is_streamed:
                assert self.streamed is not None
                scalars, landed = self.streamed.update_tile(task, part, states, states, after=Done())
                landed.synchronize()
            else:
                scalars = self.update_tile(task, part, states, states, factor)
            for name, tensor in task.on_disk.items():
                column, start = _stored(tensor, block.start)
                slot.writes.append(column.start_write(start, staged[name]))
            self.send_weights(task, part, states)
        span.shard.landed = AllOf(*(write for slot in self._slots for write in slot.writes))
        if task.rule is None:
            span.keep(scalars, is_speculative=task.is_speculative)
        events.end(event)
        self.busy_s += time.perf_counter() - begun

    def _read(self, task: UpdateTask, block: slice, slot: StagingSlot) -> StagingSlot:
        """Start reading a block into a slot, when what overlaps it has been written; returns the slot."""
        slot.wait_writes()
        for writing in self._slots:
            is_shards = writing.task is not None and writing.task.span.shard is task.span.shard
            if is_shards and writing.block.start < block.stop and block.start < writing.block.stop:
                writing.wait_writes()
        slot.task = task
        slot.block = block
        staged = _staged(task, slot)
        slot.reads.clear()
        for name, tensor in task.on_disk.items():
            column, start = _stored(tensor, block.start)
            slot.reads.append(column.start_read(start, staged[name]))
        return slot


def _staged(task: UpdateTask, slot: StagingSlot) -> Tensors:
    """Return a block of the task's shard as it is in a slot."""
    columns = {name: kept_as(tensor) for name, tensor in task.on_disk.items()}
    return slot.views(columns, slot.block.stop - slot.block.start)


def _cut(column: TierTensor, staged: torch.Tensor, part: slice) -> torch.Tensor:
    """Return a part of a staged column."""
    _, start = _stored(column, part.start)
    _, stop = _stored(column, part.stop)
    return staged[start:stop]
