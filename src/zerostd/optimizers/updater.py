"""The update of one group.

Resident states: the user's own optimizer is called with that group's spans in its param_groups, so working memory is
one group's gradient in fp32, and a group's new parameters can leave while the next one is updated. States elsewhere are
updated by `OffloadUpdater`, beside it and beyond it: what is not done yet is left in `group.updates`. Seen from the
optimizer it is one step all the same: options are those the user set, and counters in its param_groups move once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zerostd.monitoring import Ledger
from zerostd.optimizers.elementwise import writes_options
from zerostd.optimizers.offload_updater import OffloadUpdater
from zerostd.optimizers.spans import UpdateSpan, UpdateSpans
from zerostd.optimizers.tasks import StepOptions, UpdateTask, snapshot
from zerostd.parameters import Flat, Group
from zerostd.policy import Kind


class Scope(enum.Enum):
    """Which spans of a group are updated."""

    ALL = "all of them"
    SPECULATIVE = "those with spare tensors: into these, for `commit_speculative` to make them count"
    REST = "those without"


class Updater:
    """Updates groups."""

    inner: torch.optim.Optimizer
    user_groups: list[dict[str, Any]]  # the user's param_groups
    spans: dict[Flat, UpdateSpans]
    offload: OffloadUpdater | None  # for states off the device; None if there are none
    counts_in_groups: bool  # a step changes param_groups, so it must be complete before they are read again
    states: dict[str, torch.dtype]  # long states the optimizer will make, as far as known
    scratch: torch.Tensor  # fp32, as long as the largest group's resident part: gradients as the update reads them
    num_elements: int  # updated by this rank

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        groups: tuple[Group, ...],
        device: torch.device,
        ledger: Ledger,
        offload: OffloadUpdater | None,
        states: Mapping[str, torch.dtype],
    ) -> None:
        self.inner = inner
        self.ledger = ledger
        self.user_groups = inner.param_groups
        self.states = dict(states)
        self._param_group_of = {p: index for index, group in enumerate(self.user_groups) for p in group["params"]}
        flats = [flat for group in groups for flat in group.trainable]
        self.spans = {flat: self.make_spans(flat) for flat in flats}
        self.num_elements = sum(flat.region.stop - flat.region.start for flat in flats)
        self.scratch = torch.empty(0, dtype=torch.float32, device=device)
        self._num_counted = 0  # tensors with states that the ledger knows
        self._num_booked = 0  # bytes of states that the ledger knows
        self._set_offload(groups, offload)

    def make_spans(self, flat: Flat) -> UpdateSpans:
        """Return the spans of a flat as it is now, without states."""
        return UpdateSpans(flat, [self._param_group_of.get(p) for p in flat.parameters], self.inner.state)

    def moved(self, groups: tuple[Group, ...], offload: OffloadUpdater | None) -> None:
        """Go on with states that are kept elsewhere now."""
        self._set_offload(groups, offload)
        self._num_counted = -1
        self._count()

    def _set_offload(self, groups: tuple[Group, ...], offload: OffloadUpdater | None) -> None:
        self.offload = offload
        self.counts_in_groups = offload is not None and writes_options(self.inner)
        self._has_memory = False
        resident = [sum(_resident_numel(flat) for flat in group.trainable) for group in groups]
        gradients = [flat.gradient for group in groups for flat in group.trainable if flat.gradient is not None]
        num_bytes = self.buffer_bytes(resident, [(gradient.dtype, gradient.comes_up) for gradient in gradients])
        self.ledger.leave(Kind.BUFFERS, self.scratch.nbytes)
        self.scratch = self.scratch.new_empty(num_bytes // 4)
        self.ledger.enter(Kind.BUFFERS, num_bytes)

    @staticmethod
    def buffer_bytes(resident: Iterable[int], gradients: Iterable[tuple[torch.dtype, bool]]) -> int:
        """Return the bytes of the scratch, from the resident elements of each group, and for each gradient its dtype
        and whether it comes up from the host."""
        needs_scratch = any(dtype.itemsize < 4 or comes_up for dtype, comes_up in gradients)
        return 4 * max(resident, default=0) if needs_scratch else 0

    def step_options(self, factor: torch.Tensor | None) -> StepOptions:
        """Return what a step that begins now says to its updates; `factor` is on its gradients, None for one."""
        param_groups = snapshot(self.user_groups)
        if factor is None or self.offload is None:
            return StepOptions(param_groups, factor)
        host_factor, arrived = self.offload.copy_to_host(factor)
        return StepOptions(param_groups, factor, host_factor, arrived)

    def update(
        self, group: Group, options: StepOptions, scope: Scope = Scope.ALL, *, is_complete: bool = False
    ) -> None:
        """Start the update of the spans of `group` that have gradients; `is_complete` says that all have."""
        group.pending_save.wait()
        resident: list[UpdateSpan] = []
        used = 0
        is_speculative = scope is Scope.SPECULATIVE
        for flat in group.trainable:
            has_gradient = [is_complete or parameter.grad is not None for parameter in flat.parameters]
            if not any(has_gradient):
                continue
            for span in self.spans[flat].active(has_gradient):
                if scope is not Scope.ALL and bool(span.shard.spare) != is_speculative:
                    continue
                if span.tensor is not None:
                    used = self._give_gradient(flat, span, options.factor, used)
                    resident.append(span)
                    continue
                assert self.offload is not None
                step = self.ledger.events.step
                task = UpdateTask.make(group, flat, span, options, step=step, is_speculative=is_speculative)
                group.updates.append(self.offload.launch(task))
            if flat.gradient is not None and flat.gradient.host_copy is not None:
                flat.gradient.host_copy.drop_overwritten()
            torch.autograd.graph.increment_version(flat.parameters)  # a graph from before must not run on new values
        if resident:
            self._update_resident(group, resident, options)

    def commit_speculative(self, group: Group) -> None:
        """Make the speculative updates of a group count; they may still be going on."""
        for flat in group.trainable:
            for span in self.spans[flat]:
                span.is_committed = bool(span.shard.spare)
            for shard in flat.state_shards:
                if shard.spare:
                    shard.commit_speculative()

    def check_memory(self) -> None:
        """Take the memory that the first update will need, and give it back to the allocator: if there is not enough,
        this raises before anything has changed."""
        if self._has_memory or self.scratch.device.type == "cpu":
            return
        resident = [span.tensor for spans in self.spans.values() for span in spans if span.tensor is not None]
        states = [
            torch.empty_like(tensor, dtype=dtype)
            for tensor in resident
            if tensor not in self.inner.state
            for dtype in self.states.values()
        ]
        del states
        self._has_memory = True

    def _update_resident(self, group: Group, spans: list[UpdateSpan], options: StepOptions) -> None:
        """Let the inner optimizer update these spans. What it writes into its param_groups beside the parameters is
        kept in `options`: the last group's word counts, and all groups start from the user's values."""
        param_groups: list[dict[str, Any]] = [
            {**options_of_group, "params": [span.tensor for span in spans if span.param_group == index]}
            for index, options_of_group in enumerate(options.param_groups)
        ]
        self.inner.param_groups = param_groups
        try:
            with self.ledger.events.within("update", "compute", group.name, device=self.scratch.device):
                self.inner.step()
        finally:
            self.inner.param_groups = self.user_groups
        options.written.update({index: used for index, used in enumerate(param_groups) if used["params"]})
        for span in spans:
            assert span.tensor is not None
            span.tensor.grad = None
        for flat in group.trainable:
            flat.round_masters(only_resident=True)
        self._count()

    def _give_gradient(self, flat: Flat, span: UpdateSpan, factor: torch.Tensor | None, used: int) -> int:
        """Set a resident span's gradient, in the master's dtype and with the factor; returns the scratch used."""
        assert flat.gradient is not None and span.tensor is not None
        gradient = flat.gradient.current[span.region]
        if gradient.dtype != span.tensor.dtype or gradient.device != span.tensor.device:
            gradient = self.scratch[used : used + span.numel]
            flat.gradient.copy_to(gradient, span.region)
            used += span.numel
        if factor is not None:
            gradient.mul_(factor)
        span.tensor.grad = gradient
        return used

    def keep_counters(self, options: StepOptions) -> None:
        """After all groups: make what the optimizer wrote into its param_groups the user's."""
        for index, group in list(options.written.items()):  # threads may add to it
            for key, value in group.items():
                if key != "params" and not isinstance(value, torch.Tensor):
                    self.user_groups[index][key] = value

    def _count(self) -> None:
        """Enter the memory of states that the inner optimizer made into the ledger; cut spans share theirs."""
        if len(self.inner.state) == self._num_counted:
            return
        self._num_counted = len(self.inner.state)
        sizes = {
            state.untyped_storage().data_ptr(): state.untyped_storage().nbytes()
            for states in self.inner.state.values()
            for state in states.values()
            if isinstance(state, torch.Tensor) and state.dim()
        }
        total = sum(sizes.values())
        self.ledger.enter(Kind.OPTIMIZER_STATES, total - self._num_booked)
        self._num_booked = total

    def parameters(self) -> list[nn.Parameter]:
        """Return the user's parameters, group by group."""
        return [parameter for group in self.user_groups for parameter in group["params"]]


def _resident_numel(flat: Flat) -> int:
    return sum(shard.numel for shard in flat.state_shards if shard.is_resident)
