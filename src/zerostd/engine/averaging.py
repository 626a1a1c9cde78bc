"""A running average of the trained parameters of a prepared model, in shards as the masters are, in any tier.

    after step    each state shard's part of the average moves towards its master: at once where the user's optimizer
                  has updated it on the device, else in a thread when the update is done, beside the next forward.
                  The next update of the group waits until its masters are read
    applied()     masters and averages trade places; parameters are rounded and gathered from what is there then

`zerostd.averaged` makes an `Average`, and `zerostd.save` and `zerostd.load` find it among the model's observers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from zerostd.engine.intervals import SavedInterval, pieces_in, saved_interval
from zerostd.engine.runtime import Runtime, runtime_of
from zerostd.errors import MisuseError, PrepareError, check_flag, is_number, is_whole
from zerostd.parameters import Flat, Group
from zerostd.parameters.observing import StepObserver
from zerostd.parameters.state_shard import LOW, MASTER, StateShard
from zerostd.policy import Kind, Tier, limit_of
from zerostd.scheduling.access import not_writable
from zerostd.tiers import AllOf, Streams, TierTensor, Transfer, Worker, record_event
from zerostd.tiers.host import PAGE, check_host, padded

TILE_NUMEL = 1 << 20  # elements that are read at once from another tier
READ_ONLY = "average.applied(), where changes of parameters would be lost: make them outside the context"
COUNTS = ("num_steps", "num_averaged")  # what checkpoints keep of an average beside its tensors

Decay = float | Callable[[int], float] | None


@dataclass(frozen=True)
class AverageOptions:
    """The options of `zerostd.averaged`."""

    decay: Decay  # None: all averaged steps count alike
    start: int  # steps before the first that is averaged
    every: int  # average one step in this many
    tier: Tier | None  # None: that of most of a group's masters
    use_buffers: bool

    def __post_init__(self) -> None:
        decay = self.decay
        if not (decay is None or callable(decay) or (is_number(decay) and 0.0 <= decay < 1.0)):
            raise PrepareError(
                f"averaged(decay={decay!r}) must be from 0 to less than 1, such as 0.999, or a function of the step"
            )
        check_flag("use_buffers", self.use_buffers)
        for name, least in (("start", 0), ("every", 1)):
            value = getattr(self, name)
            if not is_whole(value, least):
                raise PrepareError(f"averaged({name}={value!r}) must be a whole number of steps, {least} or more")

    def describe(self) -> list[str]:
        """Return a line for each setting that must be the same on all ranks."""
        decay = "a function" if callable(self.decay) else self.decay
        return [f"decay {decay}", *(f"{name} {getattr(self, name)}" for name in ("start", "every", "tier"))]

    def weight(self, step: int, num_averaged: int) -> float:
        """Return how far the average moves towards the parameters in a step; the first time, all the way."""
        if num_averaged == 0:
            return 1.0
        if self.decay is None:
            return 1.0 / (num_averaged + 1)
        decay = self.decay(step) if callable(self.decay) else self.decay
        if not is_number(decay) or not 0.0 <= decay <= 1.0:
            raise MisuseError(f"decay({step}) of zerostd.averaged returned {decay!r}: return a number from 0 to 1")
        return 1.0 - decay


class Average(StepObserver):
    """Holds a running average of a model's parameters. `zerostd.averaged` makes one; `optimizer.step()` updates it.

    `num_steps` and `num_averaged` count the steps since it was made, and those of them that are averaged.
    """

    def __init__(self, runtime: Runtime, options: AverageOptions) -> None:
        self.model = runtime.model
        self.options = options
        self.num_steps = 0
        self.num_averaged = 0
        taken = [int(average.name) for average in averages_of(runtime)]
        self.name: str = str(1 + max(taken, default=-1))  # in checkpoints
        self.is_applied = False
        self._runtime = runtime
        self._columns: dict[Flat, TierTensor] = {}  # of each trained flat: the average of its region
        self.buffers: dict[str, torch.Tensor] = {}  # their averages, by name
        self._masters: dict[StateShard, TierTensor] = {}  # while the average is in their place
        self._tiles: list[torch.Tensor] = []  # host memory that other tiers are read into: masters, averages
        self._worker = Worker("the update of an average", runtime.world.device)
        runtime.resources.allocator.before_close(self._worker.stop)

    @property
    def _flats(self) -> list[Flat]:
        return [flat for flat in self._runtime.trained_flats if flat.layout.numel]

    def _shards_of(self, group: Group) -> Iterator[tuple[StateShard, TierTensor]]:
        """Yield the state shards of a group, each with its part of the average."""
        for flat in group.trainable:
            for shard in flat.state_shards if flat in self._columns else ():
                yield shard, self._columns[flat].part(shard.region)

    def allocate(self) -> None:
        """Allocate memory and start averaging. Raises PrepareError if there is too little, or the budget allows less;
        nothing was allocated then."""
        runtime = self._runtime
        allocator = runtime.resources.allocator
        if not self._flats:
            raise PrepareError("the model has no trained parameters, so there is nothing to average")
        homes = {flat: self.options.tier or _tier_of_masters(flat) for flat in self._flats}
        need: Counter[Tier] = Counter()
        for flat, tier in homes.items():
            need[tier] += _column_bytes(flat)
        _check_limits(runtime, need)
        if need[Tier.DISK]:
            allocator.open_disk(runtime.settings.budget, runtime.world.local_size)
        try:
            for flat, tier in homes.items():
                owner = self._owner(flat)
                master = flat.state_shards[0].master
                numel = flat.region.stop - flat.region.start
                allocator.reserve(owner, tier, Kind.AVERAGES, _column_bytes(flat))
                self._columns[flat] = allocator.allocate(owner, tier, Kind.AVERAGES, numel, master.dtype)
        except BaseException:
            self._free()
            raise
        if self.options.use_buffers:
            self.buffers = {
                name: torch.zeros_like(buffer, dtype=torch.promote_types(buffer.dtype, torch.float32))
                for name, buffer in self.model.named_buffers()
                if buffer.is_floating_point()
            }
            runtime.ledger.enter(Kind.AVERAGES, sum(average.nbytes for average in self.buffers.values()))
        runtime.observers.insert(0, self)  # before the adapter, which may move masters

    def close(self) -> None:
        """Stop averaging and free the memory."""
        if self.is_applied:
            raise MisuseError("average.close() inside average.applied(): leave the context first")
        if self not in self._runtime.observers:
            return
        self._runtime.finish_updates()
        self._runtime.observers.remove(self)
        self._worker.stop()
        self._free()

    def _free(self) -> None:
        allocator = self._runtime.resources.allocator
        for flat in self._flats:
            allocator.free(self._owner(flat), Kind.AVERAGES)
        for tile in self._tiles:
            allocator.host.free(tile)
        self._runtime.ledger.leave(Kind.AVERAGES, sum(average.nbytes for average in self.buffers.values()))
        self._columns = {}
        self._tiles = []
        self.buffers = {}

    def _owner(self, flat: Flat) -> str:
        return f"average {self.name} of {flat.layout.intervals[0].name}"

    # Updating

    def before_forward(self) -> None:
        """Refuse to train on averages."""
        if self.is_applied:
            raise MisuseError(
                "training inside average.applied(): evaluate there, with model.eval() or under torch.no_grad(), and "
                "leave the context to train"
            )

    before_backward = before_forward

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the average towards the parameters that the step leaves."""
        self.num_steps += 1
        past = self.num_steps - self.options.start
        if past <= 0 or past % self.options.every:
            return
        weight = self.options.weight(self.num_steps, self.num_averaged)
        self.num_averaged += 1
        for group in self._runtime.update_order():
            group.wait_readers()  # of the average itself: a checkpoint
            updated = AllOf(record_event(self._runtime.world.device), *group.updates)
            for shard, average in self._shards_of(group):
                self._start(group, shard, average, weight, updated)
        buffers = dict(self.model.named_buffers()) if self.buffers else {}
        for name, averaged in self.buffers.items():
            averaged.lerp_(buffers[name].to(averaged.dtype), weight)

    def _start(self, group: Group, shard: StateShard, average: TierTensor, weight: float, updated: Transfer) -> None:
        """Move the average of one shard towards its master, now or when it is updated."""
        kept = shard.tensors[LOW if shard.is_split else MASTER].tensor
        is_beside = kept is not None and average.tensor is not None and kept.device == average.tensor.device
        if shard.is_resident and is_beside:
            assert average.tensor is not None
            for tile in _tiles_of(shard.numel):
                average.tensor[tile].lerp_(shard.master.read(tile), weight)
            return
        if not is_beside:
            self._make_tiles()
        resources = self._runtime.resources
        move = partial(_move_towards, shard, average, weight, self._tiles, resources.streams)
        tiles = [partial(move, part=part) for part in _tiles_of(average.numel)]
        parts: list[Callable[[], None]] = [updated.synchronize, shard.wait_landed, *tiles]
        if shard.is_resident and shard.holds_parameters:  # the user may write to it as soon as step() returns
            for do_part in parts:
                do_part()
            return
        moved = self._worker.submit(*parts, place=group.place, ready=updated, pace=resources.allocator.pace)
        group.add_reader(moved)
        if shard.is_split and shard.holds_parameters:
            group.add_update(moved)  # the user cannot write to what is read before

    def _make_tiles(self) -> None:
        if not self._tiles:
            host = self._runtime.resources.allocator.host
            columns = self._columns.values()
            longest = max(min(column.numel, TILE_NUMEL) * column.dtype.itemsize for column in columns)
            self._tiles = [host.allocate(longest + PAGE, Kind.BUFFERS) for _ in range(2)]

    # Using it

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Set parameters to their averages inside the context. Afterwards parameters, masters and buffers are bit for
        bit as before. Collective.

        The model can be evaluated and read there, and given to `zerostd.full_state_dict`. Training and changes of
        parameters are refused. Before the first averaged step, parameters are as they are.
        """
        runtime = runtime_of(self.model, "averaged")
        if self not in runtime.observers:
            raise MisuseError("average.applied() after average.close(): make another one with zerostd.averaged")
        if any(group.num_pins for group in runtime.groups):
            raise MisuseError("average.applied() inside average.applied() or zerostd.gathered(): leave it first")
        if runtime.optimizer is not None:
            runtime.optimizer.check_consistent("average.applied()")
        runtime.finish_updates()
        runtime.share_buffers()
        kept = {buffer: buffer.clone() for buffer in self.model.buffers()}
        self._exchange()
        self._apply_buffers()
        self.is_applied = True
        try:
            with runtime.access.pinned(runtime.groups, READ_ONLY):
                yield self.model
            edited = [flat for flat in self._flats if flat.awaits_commit]
        finally:
            self.is_applied = False
            self._exchange()
            with torch.no_grad():
                for buffer, values in kept.items():
                    buffer.copy_(values)
        if edited:
            raise not_writable(edited[0].layout.intervals[0].name, READ_ONLY)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Let masters and averages trade places. All ranks call it."""
        if not self.num_averaged:
            return
        self._runtime.gatherer.wait_all(on_host=True)
        for group in self._runtime.groups:
            for shard, average in self._shards_of(group):
                self._exchange_shard(shard, average)
            for flat in group.trainable:
                flat.round_masters()
                flat.mark_updated()  # a graph of the one must not run on the other
            self._runtime.renew(group)

    @torch.no_grad()
    def _apply_buffers(self) -> None:
        """Copy rank 0's averages to the buffers of all ranks."""
        if self.buffers and self.num_averaged:
            self._runtime.wires.broadcast(list(self.buffers.values()))
            buffers = dict(self.model.named_buffers())
            for name, averaged in self.buffers.items():
                buffers[name].copy_(averaged)

    def _exchange_shard(self, shard: StateShard, average: TierTensor) -> None:
        if not (shard.is_split or shard.holds_parameters):
            there = shard.tensors[MASTER]
            shard.tensors[MASTER] = self._masters.pop(shard, average)
            if shard.tensors[MASTER] is average:
                self._masters[shard] = there
            return
        for tile in _tiles_of(shard.numel):
            values = shard.master.read(tile).clone()
            shard.master.write(tile, average.read(tile))
            average.write(tile, values)

    # In checkpoints

    def counts(self) -> dict[str, int]:
        """Return its counts of steps by name."""
        return {name: getattr(self, name) for name in COUNTS}

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """Go on from the counts of a checkpoint."""
        for name in COUNTS:
            setattr(self, name, counts[name])

    def records(self, flat: Flat, mine: slice, group: str, *, is_loaded: bool = False) -> Iterator[SavedInterval]:
        """Yield where the average of a flat is kept, as far as it lies in `mine`. Before the first averaged step there
        is none to save."""
        has_any = flat in self._columns and (is_loaded or self.num_averaged)
        for part in pieces_in(mine, flat) if has_any else ():
            of = flat.layout.intervals[part.index]
            column = self._columns[flat]
            yield saved_interval("average", of, part, column, part.offset, state=self.name, group=group)


def make_average(runtime: Runtime, options: AverageOptions) -> Average:
    """Return an average of a model, or raise PrepareError on all ranks. All ranks call it."""
    runtime.world.check_here("zerostd.averaged()")
    control = runtime.gatherer.control
    control.check_equal("options of zerostd.averaged", options.describe())
    average = Average(runtime, options)
    try:
        control.on_all_ranks(average.allocate, "zerostd.averaged()", PrepareError)
    except PrepareError:
        average.close()
        raise
    return average


def averages_of(runtime: Runtime) -> list[Average]:
    """Return the averages of a prepared model, in the order of their names."""
    averages = [observer for observer in runtime.observers if isinstance(observer, Average)]
    return sorted(averages, key=lambda average: int(average.name))


def _column_bytes(flat: Flat) -> int:
    """Return the bytes of a flat's average: whole pages."""
    return padded((flat.region.stop - flat.region.start) * flat.state_shards[0].master.dtype.itemsize)


def _tier_of_masters(flat: Flat) -> Tier:
    """Return the tier that has most of a flat's masters."""
    numels: Counter[Tier] = Counter()
    for shard in flat.state_shards:
        numels[shard.master.tier] += shard.numel
    return numels.most_common(1)[0][0]


def _check_limits(runtime: Runtime, need: Counter[Tier]) -> None:
    """Refuse an average that does not fit beside the allocated memory. A disk knows its own limit."""
    budget = runtime.settings.budget
    taken: Counter[Tier] = Counter()
    for (tier, _), num_bytes in runtime.ledger.now.items():
        taken[tier] += num_bytes
    limit = limit_of(budget.device)
    if limit is not None and need[Tier.DEVICE] and taken[Tier.DEVICE] + need[Tier.DEVICE] > limit:
        raise PrepareError(
            f"the average needs {need[Tier.DEVICE]} bytes on the device, {taken[Tier.DEVICE]} bytes are used, and "
            f"Budget(device={budget.device!r}) allows {limit}: keep it on the host with averaged(tier='host')"
        )
    if need[Tier.HOST]:
        local_size = runtime.world.local_size
        limit = limit_of(budget.host)
        left = None if limit is None else max(0, limit - taken[Tier.HOST] * local_size)
        check_host(need[Tier.HOST] * local_size, f"the average on {local_size} rank(s) of this machine", left)


def _tiles_of(numel: int) -> list[slice]:
    return [slice(start, min(numel, start + TILE_NUMEL)) for start in range(0, numel, TILE_NUMEL)]


def _move_towards(
    shard: StateShard, average: TierTensor, weight: float, tiles: list[torch.Tensor], streams: Streams, *, part: slice
) -> None:
    """Move a part of the average of a shard towards its master, which is updated. Values on disk, and masters on the
    device whose average is elsewhere, pass through `tiles`."""
    with streams.down.after():  # halves on the device come down
        values = shard.master.read(part, tiles[0] if tiles else None)
    is_down = average.tensor is None or average.tensor.device.type == "cpu"
    if is_down and values.device.type != "cpu":
        with streams.down.after():
            values = tiles[0][: values.nbytes].view(values.dtype).copy_(values, non_blocking=True)
            streams.down.record_event().synchronize()
    if average.tensor is None:
        averaged = average.read(part, tiles[1]).lerp_(values, weight)
        average.write(part, averaged)  # it may share pages with its neighbours
    elif is_down:
        average.tensor[part].lerp_(values, weight)
    else:
        with streams.update.after():
            average.tensor[part].lerp_(values.to(average.tensor.device, non_blocking=True), weight)
            streams.update.record_event().synchronize()
