"""The CPU route: states in host memory are updated by the CPU, in a thread.

    gradient -> host          copied down when it lands, or there already
    kernel                    one pass over gradient, master and states; new parameters out in their own dtype
    parameters -> their home  up to the device tile by tile, while the kernel goes on

Optimizers that the kernels do not have run as a clone of the user's own, on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from zerostd import kernels
from zerostd.errors import MisuseError
from zerostd.kernels import Rule
from zerostd.optimizers.arithmetic import OptimizerClone, native_rule, next_scalars, state_names
from zerostd.optimizers.spans import ScalarStates
from zerostd.optimizers.tasks import Tensors, UpdateTask
from zerostd.parameters import Flat
from zerostd.parameters.flat import MASTER, StateShard
from zerostd.policy import Kind, Route, Tier
from zerostd.tiers import Streams, TierAllocator, Transfer, Worker

UP = (Tier.HOST.value, Tier.DEVICE.value)
TILE_NUMEL = 16 << 20  # elements updated before their new parameters start on their way


class CpuUpdater:
    """Updates spans in a thread of its own."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        placed: Sequence[tuple[Flat, StateShard]],
        allocator: TierAllocator,
        streams: Streams,
        *,
        num_threads: int,
        name: str = "the update on the CPU",
    ) -> None:
        """`placed` are its shards, with their flats."""
        self.inner = inner
        self.clone = OptimizerClone(inner)
        self.allocator = allocator
        self.streams = streams
        self.num_threads = num_threads
        self.worker = Worker(name, allocator.device)
        self.busy_s = 0.0  # that the thread has worked, in all
        self._weights: dict[StateShard, torch.Tensor] = {}  # on the host: new parameters on their way
        self._reserve(placed)

    def close(self) -> None:
        """End the thread and give its memory back."""
        self.worker.stop()
        for memory in self._weights.values():
            self.allocator.host.free(memory)
        self._weights.clear()

    def launch(self, task: UpdateTask) -> Transfer:
        """Start an update; done when the new parameters are where they belong."""
        rule = self._rule(task)
        task = replace(task, rule=rule, host_weights=self._host_weights(task))
        if rule is not None:
            task.span.keep(next_scalars(rule, task.span.scalars), is_speculative=task.is_speculative)
        return self.submit(task)

    def submit(self, task: UpdateTask) -> Transfer:
        """Put a task into the thread tile by tile, so that what is needed sooner can come in between."""
        numel = task.span.numel
        length = numel if task.rule is None else TILE_NUMEL
        tiles = [slice(start, min(numel, start + length)) for start in range(0, numel, length)]
        return task.submit(self.worker, [partial(self._do, task, tile) for tile in tiles])

    def _rule(self, task: UpdateTask) -> Rule | None:
        """Return a native rule if the numbers are fp32 and the user has not asked for torch's fused kernel here."""
        options = task.options.param_groups[task.span.param_group]
        is_on_cpu = self.allocator.device.type == "cpu"
        is_asked_for_fused = bool(options.get("fused")) and is_on_cpu
        if is_asked_for_fused or task.span.shard.master.dtype != torch.float32:
            return None
        rule = native_rule(self.inner, options, task.span.scalars, exact_root=not is_on_cpu)
        if rule is None:
            return None
        missing = [name for name in state_names(rule) if name not in task.source]
        if missing:
            raise MisuseError(
                f"the optimizer now needs the state {missing[0]!r}, which its options at prepare did not: set them "
                "before prepare, so that there is room for it"
            )
        return rule

    def _host_weights(self, task: UpdateTask) -> torch.Tensor | None:
        """Return where the kernel writes new parameters; None: the master is the parameter."""
        shard = task.span.shard
        if shard.holds_parameters:
            return None
        if task.weights is not None and task.weights.device.type == "cpu":
            return task.weights
        copy = None if task.flat.gradient is None else task.flat.gradient.host_copy
        if copy is not None and not task.is_speculative and _fits_gradient_copy(task.flat):
            return copy.overwrite(task.span.region).view(task.flat.rest.dtype)
        return self._weights_of(task.flat, shard)[task.span.in_shard]

    def _weights_of(self, flat: Flat, shard: StateShard) -> torch.Tensor:
        """Return host memory for a shard's new parameters; the first call takes it."""
        if shard not in self._weights:
            dtype = flat.rest.dtype
            memory = self.allocator.host.allocate(shard.numel * dtype.itemsize, Kind.BUFFERS)
            self._weights[shard] = memory.view(dtype)
        return self._weights[shard]

    def _reserve(self, placed: Sequence[tuple[Flat, StateShard]]) -> None:
        """Take host memory beforehand where new parameters cannot take the place of the gradient's copy."""
        if self.allocator.device.type == "cpu":
            return
        for flat, shard in placed:
            takes_its_place = not shard.spare and _fits_gradient_copy(flat)
            if shard.route is Route.CPU and flat.rest.tier is not Tier.HOST and not takes_its_place:
                self._weights_of(flat, shard)

    # In the thread

    def _do(self, task: UpdateTask, tile: slice) -> None:
        task.ready.synchronize()
        factor = task.options.read_factor()
        begun = time.perf_counter()
        source = task.source_tile(tile)
        target = task.target_tile(tile) if task.is_speculative else source
        num_bytes = sum(tensor.nbytes for tensor in source.values())
        with self.allocator.ledger.events.within("update", "cpu", task.group.name, num_bytes, step=task.step):
            scalars = self.update_tile(task, tile, source, target, factor)
        self.send_weights(task, tile)
        if tile.stop == task.span.numel:
            self.finish(task, scalars)
        self.busy_s += time.perf_counter() - begun

    def update_tile(
        self, task: UpdateTask, tile: slice, source: Tensors, target: Tensors, factor: float
    ) -> ScalarStates | None:
        """Update one tile by the kernel, or by the clone; the latter returns its scalar states."""
        if task.rule is None:
            return self._update_by_clone(task, tile, source, target, factor)
        names = (MASTER, *state_names(task.rule))
        kernels.update(
            task.rule,
            task.gradient[tile],
            tuple(source[name] for name in names),
            None if target is source else tuple(target[name] for name in names),
            factor=factor,
            weight=None if task.host_weights is None else task.host_weights[tile],
            num_threads=self.num_threads,
        )
        return None

    def _update_by_clone(
        self, task: UpdateTask, tile: slice, source: Tensors, target: Tensors, factor: float
    ) -> ScalarStates:
        if target is not source:
            for name, tensor in source.items():
                target[name].copy_(tensor)
        master = target[MASTER]
        gradient = task.gradient[tile].to(master.dtype, copy=True)
        if factor != 1.0:
            gradient.mul_(factor)
        long_states = {name: tensor for name, tensor in target.items() if name != MASTER}
        span = task.span
        scalars = self.clone.update(task.options, span.param_group, master, long_states, span.scalars, gradient)
        if task.host_weights is not None:
            task.host_weights[tile].copy_(master)
        return scalars

    def send_weights(self, task: UpdateTask, tile: slice) -> None:
        """Start new parameters of a tile on their way to the device."""
        if task.weights is None or task.host_weights is None or task.weights.device.type == "cpu":
            return
        target = task.weights[tile]
        within = partial(self.allocator.ledger.events.within, "transfer", "up", way=UP, device=target.device)
        with self.streams.up.after(task.asked), within(task.group.name, target.nbytes, step=task.step):
            target.copy_(task.host_weights[tile], non_blocking=True)
            task.transfer.event = self.streams.up.record_event()

    def finish(self, task: UpdateTask, scalars: ScalarStates | None) -> None:
        """Keep what the last tile left, and write parameters that are kept on disk."""
        if task.rule is None:
            task.span.keep(scalars, is_speculative=task.is_speculative)
        rest = task.flat.rest
        if rest.tensor is None and task.host_weights is not None:
            rest.write(task.span.region, task.host_weights)


def _fits_gradient_copy(flat: Flat) -> bool:
    """Whether new parameters fit where the host's copy of their gradient was."""
    gradient = flat.gradient
    assert gradient is not None
    is_as_wide = gradient.rest_dtype.itemsize == flat.rest.dtype.itemsize
    return gradient.host_copy is not None and flat.rest.tensor is not None and is_as_wide
