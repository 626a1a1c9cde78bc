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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.optim import Optimizer

from zerostd import kernels
from zerostd.compat import is_profiling
from zerostd.kernels import (
    NUM_SLOTS,
    KernelCall,
    Moment,
    Rule,
    Split,
    TileQueue,
    UpdateArguments,
    column_bytes,
    device_driver,
    stream_handle,
)
from zerostd.optimizers.elementwise import (
    DeviceUpdate,
    clone_optimizer,
    coded_rule,
    device_update,
    next_scalars,
    update_by_clone,
)
from zerostd.optimizers.spans import ScalarStates, Tensors, UpdateTask, copy_values
from zerostd.optimizers.staging import (
    Column,
    StagingSlot,
    TileUpdate,
    copy_pairs,
    staged_dtypes,
    widest_dtypes,
)
from zerostd.parameters.gradient import DOWN
from zerostd.parameters.host_gradient import UP
from zerostd.parameters.state_shard import HIGH, LOW, MASTER, OF_MASTER, StateShard, kept_as
from zerostd.policy import Kind
from zerostd.tiers import Streams, TierAllocator, Transfer, Worker
from zerostd.tiers.debug import DEBUG, poison
from zerostd.tiers.transfer import StreamEvent

# A model that asks the device for a number, as `nonzero` does, waits until the tile that is being copied has arrived.
# So tiles are as short as the link allows. Torch's optimizers take longer to launch, so their tiles are longer.
TILE_NUMEL = 2 << 20
TILE_NUMEL_BY_TORCH = 8 << 20
GRADIENT = "(gradient)"  # in a slot, beside master and states: as the update reads it
LANDING = "(landing)"  # likewise: gradients that come from the host, and parameters that go there


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
        self._tiles = self._make_queue(dtypes)

    def _make_queue(self, columns: Mapping[str, Column]) -> TileQueue | None:
        """Return what queues tiles by native code; None: torch's operations do."""
        handle = device_driver(self.device.type)
        if handle is None or DEBUG & {"poison", "checksums"}:
            return None
        streams = [self.streams.up.stream, self.streams.update.stream, self.streams.down.stream]
        on_device = [stream for stream in streams if stream is not None]
        events = []
        for slot in self._slots:
            moments = [StreamEvent(stream, self.device) for stream in on_device]
            slot.moments = moments
            events.append([moment.event.event_id for moment in moments])
        memories = [slot.memory for slot in self._slots]
        units = {
            column.dtype: (column.block, column.num_bytes(column.block))
            for column in columns.values()
            if isinstance(column, Moment)
        }
        return TileQueue(handle, [stream_handle(stream) for stream in on_device], events, memories, units)

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
        return task.submit(self.worker, self._do, self.tile_numel * (1 if self._tiles is None else NUM_SLOTS))

    # In the thread

    def _do(self, task: UpdateTask, part: slice) -> None:
        begun = time.perf_counter()
        span = task.span
        after = span.shard.landed
        start, scalars, landed = self._queue(task, part, after)
        for first in range(start, part.stop, self.tile_numel):
            tile = slice(first, min(part.stop, first + self.tile_numel))
            source, target = task.tensors_of(tile)
            scalars, landed = self.update_tile(task, tile, source, target, after=after)
        if part.stop == span.numel:
            span.shard.landed = landed
            if task.rule is None:
                span.keep(scalars, is_speculative=task.is_speculative)
        self.busy_s += time.perf_counter() - begun

    def _queue(self, task: UpdateTask, part: slice, after: Transfer) -> tuple[int, ScalarStates, Transfer]:
        """Queue tiles of a part by native code, if it can. Returns the first element that is left, the scalar states
        after the update, and when the new states are home."""
        stop = part.start + TileQueue.whole(part.stop - part.start, self.tile_numel)
        if self._tiles is None or stop == part.start or self.ledger.events.wants(task.step) or is_profiling():
            return part.start, {}, after
        part = slice(part.start, stop)
        source, target = task.tensors_of(part)
        first = (self._turn + 1) % NUM_SLOTS
        update = self._layout(task, part, source, target, self._slots[first])
        call, scalars = self._call(task, {**source, **update.tensors}, update)
        if call is None or not self._tiles.takes(update.moves, call):
            return part.start, {}, after
        num_tiles = -(-(part.stop - part.start) // self.tile_numel)
        used = [self._slots[(first + number) % NUM_SLOTS] for number in range(num_tiles)]
        for slot in used:
            if slot.writes and slot.writes[0] is not slot.moments[-1]:
                slot.wait_writes()
        self._wait_gradient(task)
        with self.streams.up.after(after):
            pass
        with self.streams.update.after(task.ready):
            pass
        for slot in used:
            slot.task = task
            slot.writes[:] = slot.moments[-1:]
        self._tiles.queue(update.moves, call, part.stop - part.start, self.tile_numel, first)
        self._turn = (self._turn + num_tiles) % NUM_SLOTS
        landed = self.streams.down.record_event()
        task.transfer.event = self.streams.update.record_event() if update.is_shown else landed
        return stop, scalars, landed

    def _call(self, task: UpdateTask, tensors: Tensors, update: TileUpdate) -> tuple[KernelCall | None, ScalarStates]:
        """Return the one kernel that makes this update, if there is one, and the scalar states after it."""
        if task.rule is not None:
            arguments = coded_arguments(task.rule, update.incoming, tensors, update.rounded, task.options.factor)
            return kernels.moments_call(arguments), {}
        states = {name: tensor for name, tensor in tensors.items() if name not in OF_MASTER}
        one_pass, scalars = self._one_pass(task, states, is_split=LOW in tensors)
        if one_pass is None:
            return None, {}
        assert update.rounded is not None
        master = Split(tensors[HIGH], tensors[LOW])
        return one_pass.call(update.incoming, task.options.factor, master, update.rounded), scalars

    def _one_pass(
        self, task: UpdateTask, states: Tensors, *, is_split: bool
    ) -> tuple[DeviceUpdate | None, ScalarStates]:
        """Return the update of a split master in one pass, if there is one, and the scalar states that it counts in."""
        if not is_split or task.span.scalars is None:
            return None, {}
        count = task.span.scalars.get("step")
        if isinstance(count, torch.Tensor) and count.device.type != "cpu":  # as a fused optimizer has made it
            with self.streams.update.after():
                task.span.scalars = {**task.span.scalars, "step": count.cpu()}
        scalars = copy_values(task.span.scalars)
        options = task.options.param_groups[task.span.param_group]
        return device_update(self.inner, options, {**scalars, **states}, self.device), scalars

    def _wait_gradient(self, task: UpdateTask) -> None:
        """Wait for a gradient on the host here, lest the stream wait with everything behind it."""
        if task.gradient.device != self.device:
            task.ready.synchronize()

    def _layout(self, task: UpdateTask, tile: slice, source: Tensors, target: Tensors, slot: StagingSlot) -> TileUpdate:
        """Return the update of a tile that passes through a slot. A longer one stands for several tiles, which pass
        through slots one after the other; its tensors in slots are those of the first."""
        numel = min(tile.stop - tile.start, self.tile_numel)
        moved = {name: tensor for name, tensor in source.items() if name != HIGH or tensor.device != self.device}
        staged = {}
        for name, tensor in moved.items():
            size = min(tensor.nbytes, column_bytes(kept_as(task.source[name]), self.tile_numel))
            staged[name] = slot.memory[name][:size].view(tensor.dtype)
        has_states = task.span.scalars is not None or task.rule is not None
        up = [(tensor, staged[name]) for name, tensor in moved.items() if has_states or name in OF_MASTER]
        beside: list[tuple[torch.Tensor, torch.Tensor]] = []
        down = [(tensor, target[name]) for name, tensor in staged.items()]
        incoming = task.gradient[tile]
        weights = None if task.weights is None else task.weights[tile]
        shown = weights if weights is not None or HIGH in staged else target.get(HIGH)  # new parameters, when done
        is_shown = shown is not None and shown.device == self.device
        rounded = weights if is_shown or weights is None else slot.view(LANDING, weights.dtype, numel)
        if LOW in staged:
            rounded = staged.get(HIGH, target[HIGH])
        if incoming.device != self.device:
            up.append((incoming, slot.view(LANDING, incoming.dtype, numel)))
            incoming = up[-1][1]
        if weights is not None and rounded is not None and weights is not rounded:
            (beside if is_shown else down).append((rounded, weights))
        num_bytes = sum(tensor.nbytes for tensor in moved.values())
        return TileUpdate(staged, incoming, rounded, is_shown, {"up": up, "update": beside, "down": down}, num_bytes)

    def update_tile(
        self, task: UpdateTask, tile: slice, source: Tensors, target: Tensors, *, after: Transfer
    ) -> tuple[ScalarStates, Transfer]:
        """Update one tile of states on the host, which come up when `after` is over. Returns the scalar states, and
        when the new states are home."""
        self._turn = (self._turn + 1) % NUM_SLOTS
        slot = self._slots[self._turn]
        slot.wait_writes()
        slot.task = task
        update = self._layout(task, tile, source, target, slot)
        self._wait_gradient(task)
        within = partial(
            self.ledger.events.within,
            group=task.group.name,
            num_bytes=update.num_bytes,
            device=self.device,
            step=task.step,
        )
        with self.streams.up.after(after), within("transfer", "up", way=UP):
            copy_pairs(update.moves["up"])
            up = self.streams.up.record_event()
        with self.streams.update.after(up, task.ready), within("update", "update"):
            scalars = self._compute(task, {**source, **update.tensors}, update.incoming, update.rounded, slot)
            copy_pairs(update.moves["update"])
            updated = self.streams.update.record_event()
        with self.streams.down.after(updated), within("transfer", "down", way=DOWN):
            copy_pairs(update.moves["down"])
            for memory in slot.memory.values():
                poison(memory)
            landed = self.streams.down.record_event()
        slot.writes.append(landed)
        task.transfer.event = updated if update.is_shown else landed
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
        one_pass, scalars = self._one_pass(task, states, is_split=is_split)
        if one_pass is not None:
            assert rounded is not None
            one_pass.make(incoming, task.options.factor, Split(tensors[HIGH], tensors[LOW]), rounded)
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
    step = coded_arguments(rule, gradient, tensors, weight, factor)
    kernels.update(
        rule, gradient, step.source, step.target, factor=step.factor, weight=step.weight, num_threads=num_threads
    )


def coded_arguments(
    rule: Rule, gradient: torch.Tensor, tensors: Tensors, weight: torch.Tensor | None, factor: torch.Tensor | None
) -> UpdateArguments:
    """Return the arguments of an update of coded states in place."""
    master: torch.Tensor | Split = Split(tensors[HIGH], tensors[LOW]) if LOW in tensors else tensors[MASTER]
    states = [tensors[name] for name in rule.state_names]
    target = master if weight is None or not isinstance(master, Split) else Split(weight, master.low)
    shown = None if isinstance(master, Split) else weight
    factor_or_one = 1.0 if factor is None else factor
    return UpdateArguments(rule, gradient, factor_or_one, (master, *states), (target, *states), shown)


def most_numel(columns: Mapping[str, Column]) -> int:
    """Return the elements of a tile at most, where these are staged."""
    return TILE_NUMEL if LOW in columns or _is_coded(columns) else TILE_NUMEL_BY_TORCH


def _slot_dtypes(dtypes: Mapping[str, Column]) -> dict[str, Column]:
    """Return what a slot has room for: master, states, and the gradient as it comes and as the update reads it."""
    wide = dtypes.get(MASTER, torch.float32)
    return {**dtypes, LANDING: wide} if _is_coded(dtypes) else {**dtypes, GRADIENT: wide, LANDING: wide}


def _joined_numel(dtypes: Mapping[str, Column], tile_numel: int) -> int:
    return tile_numel if LOW in dtypes and not _is_coded(dtypes) else 0


def _is_coded(dtypes: Mapping[str, Column]) -> bool:
    return any(isinstance(dtype, Moment) for dtype in dtypes.values())
