"""The cpu route: states that rest on the host are updated by the processor, in a thread.

    gradient -> host          copied down when it lands, or there already
    kernel                    one pass over gradient, master and states; new parameters out in their own dtype
    parameters -> their home  up to the device tile by tile, while the kernel goes on

Optimizers that the kernels do not have run as the user's own object, on the processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zerostd import kernels
from zerostd.errors import MisuseError
from zerostd.kernels import Rule
from zerostd.optimizers.arithmetic import Twin, copies, native_rule, next_singles, state_names, take_new
from zerostd.optimizers.orders import Order
from zerostd.optimizers.runs import Run
from zerostd.parameters import Flat, Gradient
from zerostd.parameters.state_shard import MASTER, StateShard
from zerostd.policy import Kind, Route, Tier
from zerostd.tiers import QueuedTransfer, Streams, TierAllocator, TierTensor, Transfer, Worker

__all__ = ["Job", "OnCpu", "cut"]

UP = (Tier.HOST.value, Tier.DEVICE.value)
TILE_NUMEL = 16 << 20  # elements updated before their new parameters start on their way

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Job:
    """An order and the memory it is carried out in."""

    order: Order
    gradient: torch.Tensor  # on the host
    ready: Transfer  # when it can begin
    weights: torch.Tensor | None  # on the host: where new parameters are written; None: the master is the parameter
    target: torch.Tensor | None  # on the device: where they go from there
    rule: Rule | None
    relay: QueuedTransfer

    @property
    def run(self) -> Run:
        """What is updated."""
        return self.order.run


class OnCpu:
    """Updates runs in a thread of its own."""

    def __init__(
        self, inner: torch.optim.Optimizer, stores: TierAllocator, streams: Streams, *, num_threads: int, name: str
    ) -> None:
        self.inner = inner
        self.twin = Twin(inner)
        self.stores = stores
        self.streams = streams
        self.num_threads = num_threads
        self.worker = Worker(name, stores.device)
        self.busy_s = 0.0  # that the thread has worked, in all
        self._weights: dict[StateShard, torch.Tensor] = {}

    def close(self) -> None:
        """End the thread and give its memory back."""
        self.worker.stop()
        for memory in self._weights.values():
            self.stores.host.free(memory)
        self._weights.clear()

    def launch(self, order: Order) -> Transfer:
        """Start the update of a run; done when the new parameters are where they rest."""
        flat, run = order.flat, order.run
        assert flat.gradient is not None
        gradient, arrived = flat.gradient.host_view(run.region)
        ready = order.can_begin(arrived)
        rule = self._rule(order.options, run)
        weights, target = self._weights_of(flat, run, on_trial=order.on_trial)
        relay = QueuedTransfer()
        job = Job(order, gradient, ready, weights, target, rule, relay)
        if rule is not None:
            order.keep(next_singles(rule, run.singles))
        relay.work = self.worker.submit_parts(self.parts(job), order.place, ready)
        return relay

    def parts(self, job: Job) -> list[Callable[[], None]]:
        """What the thread does, tile by tile, so that what is needed sooner can come in between."""
        step = job.run.numel if job.rule is None else TILE_NUMEL
        starts = range(0, job.run.numel, step)
        return [partial(self._do, job, slice(low, min(job.run.numel, low + step))) for low in starts]

    def _rule(self, options: dict[str, Any], run: Run) -> Rule | None:
        """Native, if the numbers are fp32 and the user has not asked for torch's fused kernel on this processor."""
        is_asked_for_fused = bool(options.get("fused")) and self.stores.device.type == "cpu"
        if is_asked_for_fused or run.shard.master.dtype != torch.float32:
            return None
        rule = native_rule(self.inner, options, run.singles, exact_root=self.stores.device.type != "cpu")
        missing = [name for name in (state_names(rule) if rule is not None else ()) if name not in run.shard.columns]
        if missing:
            raise MisuseError(
                f"the optimizer now needs the state {missing[0]!r}, which its options at prepare did not: set them "
                "before prepare, so that there is room for it"
            )
        return rule

    def _weights_of(self, flat: Flat, run: Run, *, on_trial: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Where the kernel writes new parameters, and where they go from there."""
        if run.shard.holds_parameters:
            return None, None
        place = flat.parameters_of(run.shard)
        if place is not None and place.device.type == "cpu":
            return place[run.part], None
        target = None if place is None else place[run.part]
        if flat.gradient is not None and not on_trial and _fits(flat, flat.gradient):
            return flat.gradient.overwrite_host_copy(run.region).view(flat.rest.dtype), target
        self.reserve(flat, run.shard)
        return self._weights[run.shard][run.part], target

    def reserve(self, flat: Flat, shard: StateShard) -> None:
        """Take host memory for a portion's new parameters."""
        if shard not in self._weights:
            dtype = flat.rest.dtype
            memory = self.stores.host.allocate(shard.portion.numel * dtype.itemsize, Kind.BUFFERS)
            self._weights[shard] = memory.view(dtype)

    def reserve_all(self, flats: list[Flat]) -> None:
        """Beforehand, where new parameters cannot take the place of the gradient's copy."""
        for flat in flats:
            gradient = flat.gradient
            if gradient is None or self.stores.device.type == "cpu" or flat.rest.tier is Tier.HOST:
                continue
            for shard in flat.state_shards:
                takes_its_place = not shard.spare and _fits(flat, gradient)
                if shard.portion.route is Route.CPU and not takes_its_place:
                    self.reserve(flat, shard)

    # In the thread

    def _do(self, job: Job, tile: slice) -> None:
        job.ready.synchronize()
        factor = job.order.terms.host_factor()
        begun = time.perf_counter()
        source = cut(_cut(job.order.source, job.run.part), tile)
        target = cut(_cut(job.order.target, job.run.part), tile) if job.order.on_trial else source
        order, events = job.order, self.stores.ledger.events
        with events.within("update", "cpu", order.group, num_bytes=_bytes(source), step=order.step):
            singles = self.update(job, source, target, tile, factor)
        self.send(job, tile)
        if tile.stop == job.run.numel:
            self.end(job, singles)
        self.busy_s += time.perf_counter() - begun

    def update(self, job: Job, source: Tensors, target: Tensors, tile: slice, factor: float) -> dict[str, Any] | None:
        """One tile of a run by the kernel, or by the user's optimizer; the latter returns its states of one value."""
        if job.rule is None:
            return self._by_twin(job, source, target, tile, factor)
        names = (MASTER, *state_names(job.rule))
        kernels.update(
            job.rule,
            job.gradient[tile],
            tuple(source[name] for name in names),
            None if target is source else tuple(target[name] for name in names),
            factor=factor,
            weight=None if job.weights is None else job.weights[tile],
            num_threads=self.num_threads,
        )
        return None

    def _by_twin(self, job: Job, source: Tensors, target: Tensors, tile: slice, factor: float) -> dict[str, Any]:
        if target is not source:
            for name, column in source.items():
                target[name].copy_(column)
        master = target[MASTER]
        gradient = job.gradient[tile].to(master.dtype, copy=True)
        if factor != 1.0:
            gradient.mul_(factor)
        long = {name: column for name, column in target.items() if name != MASTER}
        singles = job.run.singles
        states = None if singles is None else {**copies(singles), **long}
        made = self.twin.step(job.order.terms, job.run.options, master, states, gradient)
        take_new(made, long)
        if job.weights is not None:
            job.weights[tile].copy_(master)
        return {name: value for name, value in made.items() if name not in long}

    def end(self, job: Job, singles: dict[str, Any] | None) -> None:
        """After the last tile: what is kept of the run, and parameters that rest on disk."""
        if job.rule is None:
            job.order.keep(singles)
        rest = job.order.flat.rest
        if rest.tensor is None and job.weights is not None:
            rest.write(job.run.region, job.weights)

    def send(self, job: Job, tile: slice) -> None:
        """New parameters of a tile on their way to the device."""
        if job.target is None or job.weights is None:
            return
        target, events = job.target[tile], self.stores.ledger.events
        told: dict[str, Any] = {"group": job.order.group, "num_bytes": target.nbytes, "step": job.order.step}
        with (
            self.streams.up.after(job.order.asked),
            events.within("transfer", "up", way=UP, device=target.device, **told),
        ):
            target.copy_(job.weights[tile], non_blocking=True)
            job.relay.event = self.streams.up.record_event()


def _cut(columns: dict[str, TierTensor], part: slice) -> Tensors:
    return {name: column.tensor[part] for name, column in columns.items() if column.tensor is not None}


def _bytes(columns: Tensors) -> int:
    return sum(column.nbytes for column in columns.values())


def cut(columns: Tensors, part: slice) -> Tensors:
    """A part of every column."""
    return {name: column[part] for name, column in columns.items()}


def _fits(flat: Flat, gradient: Gradient) -> bool:
    """Whether new parameters fit where the host's copy of their gradient was."""
    is_as_wide = gradient.rest_dtype.itemsize == flat.rest.dtype.itemsize
    return gradient.has_host_copy and flat.rest.tensor is not None and is_as_wide
