"""What a step asks of its updates: options as they were when it began, and one task for each span off the device.

Updates go on after step() has returned, when a scheduler may have changed the user's options already, and a commit the
tensors of a shard: both are fixed when the update is asked for. `Updater` makes tasks, and `OffloadUpdater` hands each
to the updater of its route, which puts it into its thread. Tiles of a task are slices that count from the span's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerostd.kernels import Rule
from zerostd.optimizers.spans import UpdateSpan
from zerostd.parameters import Flat, Group
from zerostd.policy import Route
from zerostd.tiers import AllOf, Done, TierTensor, Transfer, Work, Worker, record_event

Options = dict[str, Any]
Tensors = dict[str, torch.Tensor]


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
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in param_groups
    ]


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
    rule: Rule | None = None  # CPU only; None: a clone of the user's optimizer does the arithmetic
    transfer: Work = field(default_factory=Work)  # done when new parameters are where they belong

    @classmethod
    def make(
        cls, group: Group, flat: Flat, span: UpdateSpan, options: StepOptions, *, step: int, is_speculative: bool
    ) -> UpdateTask:
        """Fix the update of a span as of now. It can begin when the gradient is there and the device has come to this
        point. The gradient may be there long before: begun then, the update would hold up its stream, and everything
        behind it."""
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
    def is_speculative(self) -> bool:
        """Whether it is written to the spare tensors, and counts only if it is committed."""
        return self.target is not self.source

    def submit(self, worker: Worker, parts: Iterable[Callable[[], None]]) -> Transfer:
        """Let a thread carry the task out, part by part, those first whose group forward needs first."""
        return worker.submit(*parts, place=self.group.place, ready=self.ready, work=self.transfer)

    def source_tile(self, tile: slice) -> Tensors:
        """Return what a tile reads; in memory only."""
        return _in_memory(self.source, self.span.part_in_shard(tile))

    def target_tile(self, tile: slice) -> Tensors:
        """Return what a tile writes; in memory only."""
        return _in_memory(self.target, self.span.part_in_shard(tile))


def _in_memory(tensors: dict[str, TierTensor], part: slice) -> Tensors:
    return {name: tensor.tensor[part] for name, tensor in tensors.items() if tensor.tensor is not None}
