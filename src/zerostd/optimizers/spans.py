"""Spans, the stretches of a region that are updated together, and update tasks.

Neighbouring parameters with equal options whose states are in one shard form one span, so an optimizer sees long flat
tensors instead of many small ones. When some parameters of a span get no gradient in a step, the span is cut there, and
its states with it: untouched parameters stay untouched and keep their own step count.

Updates continue after step() has returned. By then, a scheduler may have changed the user's options, and a commit the
tensors of a shard. So a task fixes both when the update is requested. `Updater` makes one for each span off the device.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import nn

from zerostd.errors import MisuseError
from zerostd.kernels import Rule, Split, join_into, split_into
from zerostd.parameters import Flat, Group
from zerostd.parameters.state_shard import HIGH, LOW, MASTER, OF_MASTER, StateShard, is_in_memory, memory_of
from zerostd.policy import Route, Tier
from zerostd.sharding import Piece
from zerostd.tiers import AllOf, Done, TierTensor, Transfer, Work, Worker, record_event
from zerostd.tiers.debug import DEBUG, Seals

Options = dict[str, Any]  # of one param_group
ScalarStates = dict[str, Any]  # states of one value for all elements, such as the count of steps
Tensors = dict[str, torch.Tensor]


@dataclass(eq=False)
class UpdateSpan:
    """Neighbouring pieces of parameters with equal options in one shard."""

    pieces: tuple[Piece, ...]  # without gaps between them
    param_group: int  # index of the user's param_group; -1: it was taken out of them
    shard: StateShard
    # Of resident shards that are not coded: its master, the key of its states
    tensor: torch.Tensor | None = field(init=False, default=None)
    blank: torch.Tensor = field(init=False)  # resident, split: a NaN of its length, which it shows between updates
    scalars: ScalarStates | None = None  # not resident: None before the first update
    speculative_scalars: ScalarStates | None = None  # as a speculative update left them
    is_committed: bool = False  # the speculative update counts, as soon as it is done

    def __post_init__(self) -> None:
        start = self.pieces[0].offset
        stop = self.pieces[-1].place.stop
        self.numel = stop - start
        self.region = slice(start, stop)  # its place in the flat's region
        self.in_shard = slice(start - self.shard.start, stop - self.shard.start)  # its place in its shard
        if not self.shard.is_resident or self.shard.is_coded:
            return
        if self.shard.is_split:
            low = self.shard.tensors[LOW].tensor
            assert low is not None
            self.blank = torch.full((), float("nan"), dtype=torch.float32, device=low.device).expand(self.numel)
            self.tensor = self.blank.detach()
        else:
            assert self.shard.master.tensor is not None
            self.tensor = self.shard.master.tensor[self.in_shard].detach()

    def show_master(self, memory: torch.Tensor) -> None:
        """Join a split master in this memory, for an update of a resident span."""
        assert self.tensor is not None
        self.tensor.data = memory
        join_into(self.halves, memory)

    def hide_master(self) -> None:
        """Keep the halves of an updated master, and let the tensor have no memory."""
        assert self.tensor is not None
        split_into(self.tensor, self.halves)
        self.tensor.data = self.blank

    @property
    def halves(self) -> Split:
        """Return the halves of the master of a resident span."""
        high = self.shard.tensors[HIGH].tensor
        low = self.shard.tensors[LOW].tensor
        assert high is not None and low is not None
        return Split(high[self.in_shard], low[self.in_shard])

    def keep(self, scalars: ScalarStates | None, *, is_speculative: bool) -> None:
        """Keep the scalar states that an update left."""
        if is_speculative:
            self.speculative_scalars = scalars
        else:
            self.scalars = scalars
            self.speculative_scalars = None

    def finish_commit(self) -> None:
        """Take the scalar states of a committed speculative update over; it must be done."""
        if self.is_committed:
            self.keep(self.speculative_scalars, is_speculative=False)
            self.is_committed = False


class UpdateSpans:
    """The spans of one flat. `param_groups` has an index for each parameter; None: the user's optimizer does not have
    it. `state` is the inner optimizer's, keyed by the tensors of resident spans."""

    def __init__(self, flat: Flat, param_groups: Sequence[int | None], state: MutableMapping[Any, Any]) -> None:
        self.flat = flat
        self.state = state
        self._spans: list[UpdateSpan] = []
        region = flat.layout.pieces(flat.region)
        for shard in flat.state_shards:
            parts = [part for part, _ in shard.parts(region)]
            jumps = [before.place.stop < after.offset for before, after in pairwise(parts)]
            numbers = accumulate(jumps, initial=0)  # of stretches without gaps
            labels = [(param_groups[part.index], number) for part, number in zip(parts, numbers, strict=False)]
            for (index, _), pieces in groupby(zip(labels, parts, strict=True), lambda pair: pair[0]):
                if index is not None:
                    self._spans.append(UpdateSpan(tuple(part for _, part in pieces), index, shard))

    def __iter__(self) -> Iterator[UpdateSpan]:
        return iter(self._spans)

    def active(self, has_gradient: Sequence[bool]) -> list[UpdateSpan]:
        """Return the spans of the parameters with `has_gradient`; spans are cut where needed."""
        if not all(has_gradient):
            self.cut(has_gradient)
        return [span for span in self if has_gradient[span.pieces[0].index] and span.param_group >= 0]

    def regroup(self, param_groups: Sequence[int | None]) -> None:
        """Follow parameters to other param_groups. Those of None keep their states and are not updated."""
        self.cut(param_groups)
        for span in self:
            index = param_groups[span.pieces[0].index]
            span.param_group = -1 if index is None else index

    def cut(self, labels: Sequence[Hashable]) -> None:
        """Cut spans so that all parameters of a span have one label; their states are cut with them."""
        self._spans = [part for span in self for part in self._cut(span, labels)]

    def isolate(self, index: int) -> list[tuple[UpdateSpan, Piece]]:
        """Cut spans so that one parameter shares none, and return its places."""
        for span, piece in self.places_of(index):
            at = bisect_left(span.pieces, piece.offset, key=_offset)
            cuts = [cut for cut in (span.pieces[:at], (piece,), span.pieces[at + 1 :]) if cut]
            number = bisect_left(self._spans, span.region.start, key=_start)
            self._spans[number : number + 1] = self._split(span, cuts)
        return self.places_of(index)

    def _cut(self, span: UpdateSpan, labels: Sequence[Hashable]) -> list[UpdateSpan]:
        return self._split(span, [tuple(cut) for _, cut in groupby(span.pieces, lambda piece: labels[piece.index])])

    def _split(self, span: UpdateSpan, cuts: Sequence[tuple[Piece, ...]]) -> list[UpdateSpan]:
        if len(cuts) == 1:
            return [span]
        span.finish_commit()
        parts = [UpdateSpan(pieces, span.param_group, span.shard) for pieces in cuts]
        states = self.state.pop(span.tensor, None) if span.tensor is not None else None
        for part in parts:
            part.scalars = copy.deepcopy(span.scalars)
            if states and span.tensor is not None:
                start = part.region.start - span.region.start
                self.state[part.tensor] = {
                    key: value[start : start + part.numel] if _is_as_long(value, span.tensor) else copy.deepcopy(value)
                    for key, value in states.items()
                }
        return parts

    def by_parameter(self) -> dict[nn.Parameter, list[tuple[UpdateSpan, Piece]]]:
        """Return where the states of each parameter are, in the order of its elements: one place for each shard."""
        places: dict[nn.Parameter, list[tuple[UpdateSpan, Piece]]] = {}
        for span in self:
            for piece in span.pieces:
                places.setdefault(self.flat.parameters[piece.index], []).append((span, piece))
        return places

    def places_of(self, index: int) -> list[tuple[UpdateSpan, Piece]]:
        """Return where the states of one parameter are, in the order of its elements: one place for each shard."""
        whole = self.flat.layout.piece_of(index, self.flat.region)
        if whole is None:
            return []
        places = []
        first = max(0, bisect_right(self._spans, whole.offset, key=_start) - 1)
        for number in range(first, bisect_left(self._spans, whole.place.stop, key=_start)):
            span = self._spans[number]
            piece = span.pieces[bisect_right(span.pieces, max(whole.offset, _start(span)), key=_offset) - 1]
            if piece.index == index:
                places.append((span, piece))
        return places

    def long_states(self, span: UpdateSpan) -> dict[str, tuple[TierTensor, int]]:
        """Return the states of a span that have a value for each element, each with the element of the region that it
        begins at."""
        span.finish_commit()
        if span.tensor is None:
            tensors = span.shard.tensors.items() if span.scalars is not None else ()
            return {name: (tensor, span.shard.start) for name, tensor in tensors if name not in OF_MASTER}
        values = self.state.get(span.tensor, {}).items()
        return {name: _on_device(value, span) for name, value in values if _is_as_long(value, span.tensor)}

    def make_long_state(self, span: UpdateSpan, name: str, dtype: torch.dtype) -> tuple[TierTensor, int]:
        """Return one of `long_states`, or the master. On the device the first call makes it; elsewhere it has room."""
        if name == MASTER:
            return span.shard.master, span.shard.start
        if span.tensor is not None:
            states = self.state[span.tensor]
            if name not in states:
                states[name] = torch.zeros(span.numel, dtype=dtype, device=span.tensor.device)
            return _on_device(states[name], span)
        if name not in span.shard.tensors:
            raise MisuseError(
                f"there is no room for the state {name!r} off the device, since the optimizer did not make it in its "
                "trial at prepare: it was saved by another optimizer, or with other options"
            )
        span.scalars = span.scalars or {}
        return span.shard.tensors[name], span.shard.start

    def forget(self, span: UpdateSpan) -> None:
        """Let a span have no states, as before its first update."""
        span.finish_commit()
        if span.tensor is not None:
            self.state.pop(span.tensor, None)
            return
        span.scalars = None
        for name, tensor in span.shard.tensors.items():
            if name not in OF_MASTER:
                tensor.write(span.in_shard, torch.zeros(span.numel, dtype=tensor.dtype))

    def scalar_states(self, span: UpdateSpan) -> ScalarStates:
        """Return copies of the other states of a span."""
        span.finish_commit()
        if span.tensor is None:
            return copy.deepcopy(span.scalars or {})
        states = self.state.get(span.tensor, {})
        return {name: copy.deepcopy(value) for name, value in states.items() if not _is_as_long(value, span.tensor)}

    def read(
        self, span: UpdateSpan, piece: Piece, *, with_master: bool = True, scalars: ScalarStates | None = None
    ) -> dict[str, Any]:
        """Return the states of one piece of a span, in memory, with the master where parameters are rounded. Scalar
        states are copies, or those that are passed."""
        states = self.scalar_states(span) if scalars is None else dict(scalars)
        tensors = self.long_states(span)
        if with_master and span.shard.master.dtype != self.flat.dtype:
            tensors[MASTER] = (span.shard.master, span.shard.start)
        for name, (tensor, origin) in tensors.items():
            states[name] = tensor.read(piece.place_from(origin))
        return states


def _start(span: UpdateSpan) -> int:
    return span.pieces[0].offset


def _offset(piece: Piece) -> int:
    return piece.offset


def _on_device(state: torch.Tensor, span: UpdateSpan) -> tuple[TierTensor, int]:
    return TierTensor(state.numel(), state.dtype, Tier.DEVICE, state), span.region.start


def _is_as_long(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


@dataclass(frozen=True)
class StepOptions:
    """Options and factor of one step, shared by its updates."""

    param_groups: list[Options]  # a snapshot, without "params"
    factor: torch.Tensor | None = None  # on the gradients: one element, fp32, on the device; None: one
    host_factor: torch.Tensor | None = None  # the same, in host memory
    arrived: Transfer = field(default_factory=Done)  # when `host_factor` is there
    written: dict[int, Options] = field(default_factory=dict)  # param_groups as an update has left them, by index

    def read_factor(self) -> float:
        """Return the factor as a number; holds the calling thread until it has arrived."""
        if self.host_factor is None:
            return 1.0
        self.arrived.synchronize()
        return self.host_factor.item()


def snapshot(param_groups: Sequence[Options]) -> list[Options]:
    """Return the options as they are now, without parameters; later changes do not reach it."""
    return [copy_values({key: value for key, value in group.items() if key != "params"}) for group in param_groups]


def copy_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as they are now: tensors are cloned."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


@dataclass(frozen=True, eq=False)
class UpdateTask:
    """The update of one span by one step."""

    group: Group
    flat: Flat
    span: UpdateSpan
    options: StepOptions
    step: int  # that asks for it, as events count
    source: dict[str, TierTensor]  # those of the moment: a commit may exchange the shard's before it is carried out
    target: dict[str, TierTensor]  # the source itself, or the spare tensors
    asked: Transfer  # the device's work so far: parameters are read no more, and the factor is known
    gradient: torch.Tensor  # of the span; on the host for the CPU
    ready: Transfer  # when the update can begin
    weights: torch.Tensor | None  # where new parameters belong; None: on disk, or the master is the parameter
    host_weights: torch.Tensor | None = None  # CPU only: where it writes them; they go to `weights` from there
    rule: Rule | None = None  # None: a clone of the user's optimizer does the arithmetic
    transfer: Work = field(default_factory=Work)  # done when new parameters are where they belong

    @classmethod
    def make(
        cls, group: Group, flat: Flat, span: UpdateSpan, options: StepOptions, *, step: int, is_speculative: bool
    ) -> UpdateTask:
        """Fix the update of a span as of now. It can begin when the gradient is there and the device has reached this
        point. The gradient may be there long before that, but an update that began then would delay its stream and
        everything behind it."""
        span.finish_commit()
        shard = span.shard
        target = shard.spare if is_speculative else shard.tensors
        asked = record_event(flat.full.device)
        assert flat.gradient is not None
        if shard.route is Route.CPU:
            gradient, arrived = flat.gradient.host_view(span.region)
        else:
            gradient = flat.gradient.current[span.region]
            arrived = flat.gradient.arrived
        place = None if shard.holds_parameters else flat.parameters_of(shard)
        weights = None if place is None else place[span.in_shard]
        ready = AllOf(arrived, asked)
        return cls(group, flat, span, options, step, shard.tensors, target, asked, gradient, ready, weights)

    @property
    def on_disk(self) -> dict[str, TierTensor]:
        """What is read from disk, and written back."""
        return {name: tensor for name, tensor in self.source.items() if not is_in_memory(tensor)}

    @property
    def is_speculative(self) -> bool:
        return self.target is not self.source  # and counts only if it is committed

    def submit(self, worker: Worker, update_tile: Callable[[UpdateTask, slice], None], tile_numel: int) -> Transfer:
        """Let a thread update the span tile by tile, so that more urgent work can run in between. Groups that forward
        needs first come first. Tiles are slices that count from the span's start."""
        numel = self.span.numel
        tiles = [slice(start, min(numel, start + tile_numel)) for start in range(0, numel, tile_numel)]
        update = partial(self._update_sealed, update_tile) if "checksums" in DEBUG else partial(update_tile, self)
        parts = [partial(update, tile) for tile in tiles]
        return worker.submit(*parts, place=self.group.place, ready=self.ready, work=self.transfer)

    def _update_sealed(self, update_tile: Callable[[UpdateTask, slice], None], tile: slice) -> None:
        """Update a tile whose bytes in host memory must be those of the last update; see `tiers/debug.py`."""
        start = self.span.in_shard.start
        part = slice(start + tile.start, start + tile.stop)
        seals = self.span.shard.seals
        for name, tensor in self.source.items():
            if tensor.tier is Tier.HOST and tensor.tensor is not None and tensor in seals:
                seals[tensor].check(tensor.tensor, part, f"{name!r} of group {self.group.name!r}")
        update_tile(self, tile)
        if self.flat.full.device.type != "cpu":
            torch.accelerator.synchronize(self.flat.full.device)  # new states are home
        for tensor in self.target.values():
            if tensor.tier is Tier.HOST and tensor.tensor is not None:
                seals.setdefault(tensor, Seals()).close(tensor.tensor, part)

    def tensors_of(self, tile: slice) -> tuple[Tensors, Tensors]:
        """Return the tensors in memory that a tile reads and writes."""
        start = self.span.in_shard.start
        part = slice(start + tile.start, start + tile.stop)

        def cut(tensors: dict[str, TierTensor]) -> Tensors:
            there = {name: memory_of(tensor, part) for name, tensor in tensors.items() if is_in_memory(tensor)}
            if "checksums" in DEBUG:  # versions count the writes of others
                there = {name: tensor.data for name, tensor in there.items()}
            return there

        source = cut(self.source)
        return source, cut(self.target) if self.is_speculative else source
