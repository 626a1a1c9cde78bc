"""The resident route: states on the device, which are updated inside the step, one group at a time.

begin     a group is updated next
add       reads the gradient of one of its spans, and notes the update
finish    makes the updates

The user's own optimizer is called with these spans in its param_groups, so working memory is one group's gradient in
fp32. Adam with split masters needs none, nor do states that are kept as codes: one kernel makes the update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from zerostd.compat import plain_step
from zerostd.monitoring import Ledger
from zerostd.optimizers.elementwise import coded_rule, device_update, next_scalars
from zerostd.optimizers.spans import StepOptions, UpdateSpan
from zerostd.optimizers.streamed_updater import update_coded
from zerostd.parameters import Flat, Gradient, Group
from zerostd.parameters.state_shard import memory_of
from zerostd.policy import Kind, Tier


class ResidentUpdater:
    """Updates spans whose states are on the device. `dtypes` are those of the long states that the optimizer makes."""

    def __init__(
        self, inner: Optimizer, dtypes: Mapping[str, torch.dtype], device: torch.device, ledger: Ledger
    ) -> None:
        self.device = device
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)  # keyed by the tensors of spans
        # For the largest group: gradients as the update reads them, and behind them joined masters. It has memory in a
        # step, from the first update that needs it.
        self.scratch = torch.empty(0, dtype=torch.float32, device=device)
        self._scratch_numel = 0
        self._inner = inner
        self._dtypes = dtypes
        self._ledger = ledger
        self._spans: list[UpdateSpan] = []  # that the inner optimizer updates
        self._at_once: list[Callable[[], None]] = []  # updates that a kernel makes
        self._used = 0  # elements of the scratch
        self._has_memory = False  # for the states of the first update
        self._num_counted = -1  # tensors with states that the ledger knows
        self._num_booked = 0  # bytes of states that the ledger knows

    def fit(self, groups: Sequence[Group]) -> None:
        """Make the scratch as large as the shards on the device need it."""
        self._has_memory = False
        self._num_counted = -1
        shards = [[shard for flat in group.trainable for shard in flat.state_shards] for group in groups]
        resident = [[shard for shard in of_group if shard.is_resident] for of_group in shards]
        numels = [sum(shard.numel for shard in of_group) for of_group in resident]
        split = [sum(shard.numel for shard in of_group if shard.is_split) for of_group in resident]
        gradients = [flat.gradient for group in groups for flat in group.trainable if flat.gradient is not None]
        comes_up = [(gradient.dtype, gradient.comes_up) for gradient in gradients]
        is_coded = any(shard.is_coded for of_group in shards for shard in of_group)
        num_bytes = self.buffer_bytes(numels, comes_up, split, is_coded=is_coded)
        self._give_back()
        self._scratch_numel = num_bytes // 4

    @staticmethod
    def buffer_bytes(
        resident: Iterable[int],
        gradients: Iterable[tuple[torch.dtype, bool]],
        split: Iterable[int],
        *,
        is_coded: bool = False,
    ) -> int:
        """Return the bytes of the scratch, from the resident elements of each group, for each gradient its dtype and
        whether it comes up, and the resident elements of each group with split masters. The kernel for
        coded states reads gradients of any dtype, and masters that are split."""
        copied = [dtype for dtype, comes_up in gradients if (dtype.itemsize < 4 and not is_coded) or comes_up]
        joined = 0 if is_coded else 4 * max(split, default=0)
        width = max((max(4, dtype.itemsize) for dtype in copied), default=0)
        return width * max(resident, default=0) + joined

    def _take_scratch(self) -> None:
        storage = self.scratch.untyped_storage()
        if storage.nbytes():
            return
        if self.scratch.numel() == self._scratch_numel:
            storage.resize_(self.scratch.nbytes)
        else:
            self.scratch = self.scratch.new_empty(self._scratch_numel)
        self._ledger.enter(Kind.BUFFERS, self.scratch.nbytes)

    def _give_back(self) -> None:
        storage = self.scratch.untyped_storage()
        self._ledger.leave(Kind.BUFFERS, storage.nbytes())
        storage.resize_(0)

    def check_memory(self, spans: Iterable[UpdateSpan]) -> None:
        """Take the memory that the first update of these spans will need, and give it back to the allocator: if there
        is not enough, this raises before anything has changed."""
        if self._has_memory or self.device.type == "cpu":
            return
        tensors = [span.tensor for span in spans if span.tensor is not None]
        missing = [tensor for tensor in tensors if tensor not in self.state]
        states = [torch.empty_like(tensor, dtype=dtype) for tensor in missing for dtype in self._dtypes.values()]
        states.append(self.scratch.new_empty(self._scratch_numel))
        del states
        self._has_memory = True

    # The update of a group

    def begin(self) -> None:
        """Begin with the next group."""
        self._spans = []
        self._at_once = []
        self._used = 0

    def add(self, flat: Flat, span: UpdateSpan, options: StepOptions) -> None:
        """Note a span of the group. Its gradient is read now, unless a kernel reads it where it is."""
        assert flat.gradient is not None
        if span.tensor is None:
            self._at_once.append(partial(self._update_coded, flat.gradient, span, options))
            return
        if span.shard.is_split and not flat.gradient.comes_up:
            states = self.state.get(span.tensor, {})
            update = device_update(self._inner, options.param_groups[span.param_group], states, self.device)
            if update is not None:
                gradient = flat.gradient.current[span.region]
                halves = span.halves
                self._at_once.append(partial(update.make, gradient, options.factor, halves, halves.high))
                return
        self._give_gradient(flat.gradient, span, options.factor)
        self._spans.append(span)

    def finish(self, group: Group, options: StepOptions) -> None:
        """Update the spans that were added."""
        if self._spans:
            self._update_by_inner(group, options)
        if self._at_once:  # they may use the scratch, too
            with self._ledger.events.within("update", "compute", group.name, device=self.device):
                for make_update in self._at_once:
                    make_update()
        for flat in group.trainable if self._spans or self._at_once else ():
            flat.round_masters(only_resident=True)

    def _give_gradient(self, source: Gradient, span: UpdateSpan, factor: torch.Tensor | None) -> None:
        """Set a span's gradient, in the master's dtype and with the factor."""
        assert span.tensor is not None
        gradient = source.current[span.region]
        is_as_read = gradient.dtype == span.tensor.dtype and gradient.device == span.tensor.device
        if not is_as_read or source.tier is Tier.DISK:  # the next one from disk may come to the same place
            self._take_scratch()
            end = self._used + span.numel * span.tensor.dtype.itemsize // 4
            gradient = self.scratch[self._used : end].view(span.tensor.dtype)
            source.copy_to(gradient, span.region)
            self._used = end
        if factor is not None:
            gradient.mul_(factor)
        span.tensor.grad = gradient

    def _update_by_inner(self, group: Group, options: StepOptions) -> None:
        """Let the inner optimizer update spans. What it writes into its param_groups beside the parameters is kept in
        `options`: the last group's word counts, and all groups start from the user's values."""
        param_groups: list[dict[str, Any]] = [
            {**options_of_group, "params": [span.tensor for span in self._spans if span.param_group == index]}
            for index, options_of_group in enumerate(options.param_groups)
        ]
        split = [span for span in self._spans if span.shard.is_split]
        if split:
            self._take_scratch()
        for span in split:
            span.show_master(self.scratch[self._used : self._used + span.numel])
            self._used += span.numel
        state = self._inner.state
        user_groups = self._inner.param_groups
        self._inner.param_groups = param_groups
        self._inner.state = self.state
        try:
            with self._ledger.events.within("update", "compute", group.name, device=self.device):
                plain_step(self._inner)
        finally:
            self._inner.param_groups = user_groups
            self._inner.state = state
        options.written.update({index: used for index, used in enumerate(param_groups) if used["params"]})
        for span in self._spans:
            assert span.tensor is not None
            span.tensor.grad = None
        for span in split:
            span.hide_master()

    def _update_coded(self, source: Gradient, span: UpdateSpan, options: StepOptions) -> None:
        """Update a span whose states are kept as codes, in place."""
        gradient = source.current[span.region]
        if gradient.device != self.device or source.tier is Tier.DISK:
            self._take_scratch()
            gradient = self.scratch[: span.numel]
            source.copy_to(gradient, span.region)
        rule = coded_rule(self._inner, options.param_groups[span.param_group], span.scalars)
        tensors = {name: memory_of(tensor, span.in_shard) for name, tensor in span.shard.tensors.items()}
        update_coded(rule, gradient, tensors, None, options.factor, torch.get_num_threads())
        span.scalars = next_scalars(rule, span.scalars)

    # After the last group

    def end_step(self) -> None:
        """Give the scratch back, since forward and backward need its memory, and count new states."""
        self._give_back()
        self.count_states()

    def count_states(self) -> None:
        """Enter memory that the inner optimizer allocated for states into the ledger. Cut spans share theirs."""
        if len(self.state) == self._num_counted:
            return
        self._num_counted = len(self.state)
        sizes = {
            state.untyped_storage().data_ptr(): state.untyped_storage().nbytes()
            for states in self.state.values()
            for state in states.values()
            if isinstance(state, torch.Tensor) and state.dim()
        }
        total = sum(sizes.values())
        if total != self._num_booked:
            self._ledger.enter(Kind.OPTIMIZER_STATES, total - self._num_booked)
            self._num_booked = total

    def long_states(self) -> list[torch.Tensor]:
        """Return the states on the device that have an element for each of their spans."""
        states = [state for states in self.state.values() for state in states.values()]
        return [s for s in states if isinstance(s, torch.Tensor) and s.dim() and s.device == self.device]
