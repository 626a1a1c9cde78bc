"""The update of one group.

Resident states: the user's own optimizer is called with that group's spans in its param_groups, so working memory is
one group's gradient in fp32. Adam with split masters needs none, nor do states that are kept as codes: one kernel makes
the update. States elsewhere are updated by `OffloadUpdater`, in threads beside the step and after it; pending updates
are in `group.updates`. For the optimizer it is still one step: options are those the user set, and counters in its
param_groups move once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from functools import partial
from operator import is_
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from zerostd.compat import no_torch_function, plain_step
from zerostd.errors import MisuseError
from zerostd.monitoring import Ledger
from zerostd.optimizers.elementwise import coded_rule, next_scalars, resident_update, written_options
from zerostd.optimizers.offload_updater import OffloadUpdater
from zerostd.optimizers.spans import StepOptions, UpdateSpan, UpdateSpans, UpdateTask, snapshot
from zerostd.optimizers.streamed_updater import StreamedUpdater, update_coded
from zerostd.parameters import Flat, Group
from zerostd.parameters.prepared import GRAD
from zerostd.parameters.state_shard import memory_of
from zerostd.policy import Kind, Tier

Scope = Literal["all", "speculative", "rest"]


@dataclass(eq=False, repr=False)
class Updater:
    """Updates groups."""

    inner: Optimizer
    groups: tuple[Group, ...]
    device: InitVar[torch.device]
    ledger: Ledger
    offload: OffloadUpdater | None  # None: all states are on the device
    states: Mapping[str, torch.dtype]  # long ones that the optimizer will make, as far as known

    def __post_init__(self, device: torch.device) -> None:
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)  # keyed by the tensors of resident spans
        self._note_members()
        self.spans = {flat: self.make_spans(flat) for group in self.groups for flat in group.trainable}
        # For the largest group's resident part: gradients as the update reads them, and behind them joined masters. It
        # has memory in a step.
        self.scratch = torch.empty(0, dtype=torch.float32, device=device)
        self._num_counted = 0  # tensors with states that the ledger knows
        self._num_booked = 0  # bytes of states that the ledger knows
        self._set_offload(self.offload)

    def make_spans(self, flat: Flat) -> UpdateSpans:
        """Return the spans of a flat as it is now, without states."""
        return UpdateSpans(flat, [self.param_group_of.get(p) for p in flat.parameters], self.state)

    @property
    def has_new_members(self) -> bool:
        """Whether parameters were taken out of param_groups, moved to others or put in since the last step."""
        groups = self.inner.param_groups
        members = [p for group in groups for p in group["params"]]
        indices = [index for index, group in enumerate(groups) for _ in group["params"]]
        return indices != list(self.param_group_of.values()) or not all(map(is_, members, self.param_group_of))

    def _note_members(self) -> None:
        self.user_groups = self.inner.param_groups
        self.param_group_of = {p: index for index, group in enumerate(self.user_groups) for p in group["params"]}

    def _follow_members(self) -> None:
        """Let spans follow parameters that were taken out of param_groups or moved to others."""
        members = [p for group in self.inner.param_groups for p in group["params"]]
        known = {p for flat in self.spans for p in flat.parameters}
        foreign = [p for p in members if p not in known]
        if foreign or len(set(members)) < len(members):
            raise MisuseError(
                f"param_groups have {len(foreign)} parameters that this optimizer was not prepared with, or one twice: "
                "shards are already laid out. Put all parameters into the optimizer before zerostd.prepare; use lr=0 "
                "for parameters that should train later"
            )
        if self.offload is not None:
            self.offload.drain()
        self._note_members()
        for flat, spans in self.spans.items():
            spans.regroup([self.param_group_of.get(p) for p in flat.parameters])

    def moved(self, offload: OffloadUpdater | None) -> None:
        """Continue with states that have moved."""
        self._set_offload(offload)
        self._num_counted = -1
        self.count_states()

    def _set_offload(self, offload: OffloadUpdater | None) -> None:
        self.offload = offload
        # A step changes param_groups, so it must be complete before they are read again
        self.counts_in_groups = offload is not None and bool(written_options(self.inner))
        self._has_memory = False
        shards = [[shard for flat in group.trainable for shard in flat.state_shards] for group in self.groups]
        resident = [[shard for shard in of_group if shard.is_resident] for of_group in shards]
        numels = [sum(shard.numel for shard in of_group) for of_group in resident]
        split = [sum(shard.numel for shard in of_group if shard.is_split) for of_group in resident]
        gradients = [flat.gradient for flat in self.spans if flat.gradient is not None]
        comes_up = [(gradient.dtype, gradient.comes_up) for gradient in gradients]
        is_coded = any(shard.is_coded for of_group in shards for shard in of_group)
        num_bytes = self.buffer_bytes(numels, comes_up, split, is_coded=is_coded)
        self.give_back()
        self.scratch = self.scratch.new_empty(num_bytes // 4)
        self.scratch.untyped_storage().resize_(0)

    def _take_scratch(self) -> None:
        storage = self.scratch.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.scratch.nbytes)
            self.ledger.enter(Kind.BUFFERS, self.scratch.nbytes)

    def give_back(self) -> None:
        """Give the memory of the scratch back after the last group: forward and backward need it."""
        storage = self.scratch.untyped_storage()
        self.ledger.leave(Kind.BUFFERS, storage.nbytes())
        storage.resize_(0)

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

    def step_options(self, factor: torch.Tensor | None) -> StepOptions:
        """Return the options that a step passes to its updates; `factor` is that of the gradients, None for one."""
        if self.has_new_members:
            self._follow_members()
        self.user_groups = self.inner.param_groups
        param_groups = snapshot(self.user_groups)
        if factor is None or self.offload is None:
            return StepOptions(param_groups, factor)
        return StepOptions(param_groups, factor, *self.offload.copy_to_host(factor))

    def update(self, group: Group, options: StepOptions, scope: Scope = "all", *, is_complete: bool = False) -> None:
        """Start the update of the spans of `group` that have gradients; `is_complete` says that all have. The scope
        "speculative" are those with spare tensors, which are updated into these; "rest" are those without."""
        group.wait_readers()
        group.commit_edits()
        resident: list[UpdateSpan] = []
        at_once: list[Callable[[], None]] = []
        used = 0
        is_speculative = scope == "speculative"
        for flat in group.trainable:
            with no_torch_function():
                has_gradient = [is_complete or GRAD.__get__(p) is not None for p in flat.parameters]
            if not any(has_gradient):
                continue
            for span in self.spans[flat].active(has_gradient):
                if scope != "all" and bool(span.shard.spare) != is_speculative:
                    continue
                if span.tensor is not None:
                    update = resident_update(self.inner, options, flat, span, self.state.get(span.tensor, {}))
                    if update is not None:
                        at_once.append(update)
                        continue
                    used = self._give_gradient(flat, span, options.factor, used)
                    resident.append(span)
                    continue
                if span.shard.is_resident:
                    at_once.append(partial(self._update_coded, flat, span, options))
                    continue
                assert self.offload is not None and flat.gradient is not None
                step = self.ledger.events.step
                task = UpdateTask.make(group, flat, span, options, step=step, is_speculative=is_speculative)
                transfer = self.offload.launch(task)
                flat.gradient.hold(transfer)
                group.add_update(transfer)
            if flat.gradient is not None and flat.gradient.host_copy is not None:
                flat.gradient.host_copy.drop_overwritten()
            flat.mark_updated()
        if resident:
            self._update_resident(group, resident, options, used)
        if at_once:  # they may use the scratch, too
            with self.ledger.events.within("update", "compute", group.name, device=self.scratch.device):
                for make_update in at_once:
                    make_update()
        for flat in group.trainable if resident or at_once else ():
            flat.round_masters(only_resident=True)

    def commit_speculative(self, group: Group) -> None:
        """Commit the speculative updates of a group, which may still be running."""
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
        missing = [tensor for tensor in resident if tensor not in self.state]
        states = [torch.empty_like(tensor, dtype=dtype) for tensor in missing for dtype in self.states.values()]
        states.append(torch.empty_like(self.scratch))
        del states
        self._has_memory = True

    def _update_resident(self, group: Group, spans: list[UpdateSpan], options: StepOptions, used: int) -> None:
        """Let the inner optimizer update these spans. What it writes into its param_groups beside the parameters is
        kept in `options`: the last group's word counts, and all groups start from the user's values. Gradients have
        `used` the beginning of the scratch."""
        param_groups: list[dict[str, Any]] = [
            {**options_of_group, "params": [span.tensor for span in spans if span.param_group == index]}
            for index, options_of_group in enumerate(options.param_groups)
        ]
        split = [span for span in spans if span.shard.is_split]
        if split:
            self._take_scratch()
        for span in split:
            span.show_master(self.scratch[used : used + span.numel])
            used += span.numel
        state = self.inner.state
        self.inner.param_groups = param_groups
        self.inner.state = self.state
        try:
            with self.ledger.events.within("update", "compute", group.name, device=self.scratch.device):
                plain_step(self.inner)
        finally:
            self.inner.param_groups = self.user_groups
            self.inner.state = state
        options.written.update({index: used for index, used in enumerate(param_groups) if used["params"]})
        for span in spans:
            assert span.tensor is not None
            span.tensor.grad = None
        for span in split:
            span.hide_master()

    def _update_coded(self, flat: Flat, span: UpdateSpan, options: StepOptions) -> None:
        """Update a resident span whose states are kept as codes, in place."""
        assert flat.gradient is not None
        gradient = flat.gradient.current[span.region]
        if gradient.device != self.scratch.device or flat.gradient.tier is Tier.DISK:
            self._take_scratch()
            gradient = self.scratch[: span.numel]
            flat.gradient.copy_to(gradient, span.region)
        rule = coded_rule(self.inner, options.param_groups[span.param_group], span.scalars)
        tensors = {name: memory_of(tensor, span.in_shard) for name, tensor in span.shard.tensors.items()}
        update_coded(rule, gradient, tensors, None, options.factor, torch.get_num_threads())
        span.scalars = next_scalars(rule, span.scalars)

    def _give_gradient(self, flat: Flat, span: UpdateSpan, factor: torch.Tensor | None, used: int) -> int:
        """Set a resident span's gradient, in the master's dtype and with the factor; returns the scratch used."""
        assert flat.gradient is not None and span.tensor is not None
        gradient = flat.gradient.current[span.region]
        is_as_read = gradient.dtype == span.tensor.dtype and gradient.device == span.tensor.device
        if not is_as_read or flat.gradient.tier is Tier.DISK:  # the next one from disk may come to the same place
            self._take_scratch()
            end = used + span.numel * span.tensor.dtype.itemsize // 4
            gradient = self.scratch[used:end].view(span.tensor.dtype)
            flat.gradient.copy_to(gradient, span.region)
            used = end
        if factor is not None:
            gradient.mul_(factor)
        span.tensor.grad = gradient
        return used

    def keep_counters(self, options: StepOptions) -> None:
        """Copy what the optimizer wrote into its param_groups to the user's, after all groups."""
        for index, group in list(options.written.items()):  # threads may add to it
            for key, value in group.items():
                if key != "params" and not isinstance(value, torch.Tensor):
                    self.user_groups[index][key] = value

    def resident_states(self) -> list[torch.Tensor]:
        """Return the states on the device that have an element for each of their spans."""
        states = [state for states in self.state.values() for state in states.values()]
        return [s for s in states if isinstance(s, torch.Tensor) and s.dim() and s.device == self.scratch.device]

    def scratch_memory(self) -> list[torch.Tensor]:
        """Return working memory on the device; nothing may be under way."""
        streamed = self.offload.updaters.get("streamed") if self.offload is not None else None
        return [self.scratch, *(streamed.memories if isinstance(streamed, StreamedUpdater) else ())]

    def count_states(self) -> None:
        """Enter memory that the inner optimizer allocated for states into the ledger, after all groups. Cut spans share
        theirs."""
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
        self.ledger.enter(Kind.OPTIMIZER_STATES, total - self._num_booked)
        self._num_booked = total
