"""One backward pass from its first sign to its end.

Gradients come in by their parameters' hooks. When the last of a group is there, the group is released and reduced;
groups are reduced in one order that all ranks share, so that a rank which uses other parameters than its peers still
meets them in every collective. What never arrives counts as zero and is sent when the pass ends. Then ranks agree which
parameters anyone used: those without a gradient anywhere keep `p.grad is None`, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from zerostd.communication import Control
from zerostd.compat import at_end_of_backward, in_backward
from zerostd.parameters import GradientHandle, Group
from zerostd.scheduling.gathering import Gatherer, Phase
from zerostd.scheduling.reducing import Arrivals, Reducer, Slot

__all__ = ["Backward"]


class Backward:
    """Coordinates gathering, reducing and agreeing during backward passes."""

    slots: tuple[Slot, ...]  # in the same order on all ranks
    order: list[Group]  # in which groups are reduced: the same on all ranks
    update_order: list[Group]  # in which groups are updated and gathered again: likewise
    is_syncing: bool  # False inside no_sync: gradients are summed locally

    def __init__(self, slots: Sequence[Slot], gatherer: Gatherer, reducer: Reducer, control: Control) -> None:
        self.slots = tuple(slots)
        self.gatherer = gatherer
        self.reducer = reducer
        self.control = control
        control.num_flags = len(self.slots)
        self.order = [group for group in reversed(gatherer.groups) if group.trainable]
        self.update_order = list(gatherer.groups)
        self.on_begin: Callable[[], None] = _nothing
        self.is_syncing = True
        self.is_running = False
        self._arrivals: dict[Group, Arrivals] = {}
        self._late: dict[Group, Arrivals] = {}
        self._complete: list[Group] = []  # as their last gradient came in
        self._num_sent = 0  # groups of `order` that this pass has reduced
        self._used: set[nn.Parameter] = set()  # since ranks last agreed
        self._order_is_learnt = False

    def begin(self) -> None:
        """A pass begins, if none is running. Its first sign may be any hook."""
        if self.is_running:
            return
        self.settle()
        self.on_begin()
        self.is_running = True
        at_end_of_backward(self.end)
        self.control.begin_backward()
        self.gatherer.begin(Phase.BACKWARD)
        self._arrivals = {group: Arrivals(group) for group in self.order}
        self._complete = []
        self._num_sent = 0

    def abandon(self) -> None:
        """A pass ended with an exception, so autograd never called `end`: forget it, keep what had landed."""
        if not self.is_running or in_backward():
            return
        self.reducer.settle()
        self.gatherer.release_all()
        self._arrivals, self._late, self.is_running = {}, {}, False

    def arrived(self, slot: Slot, parameter: nn.Parameter) -> None:
        """Autograd has put a gradient into `parameter.grad`, or added one to its handle."""
        self.begin()
        grad, adds = parameter.grad, False
        if isinstance(grad, GradientHandle):
            grad, adds = grad.take_incoming(), True
        parameter.grad = None
        assert grad is not None
        grad = (grad if grad.layout is torch.strided else grad.to_dense()).detach()
        group = slot.group
        arrivals = self._arrivals[group]
        if arrivals.missing == 0:  # a nested backward brought more for a group that has left already
            self._late.setdefault(group, Arrivals(group)).take(slot, grad, adds=True)
            return
        arrivals.take(slot, grad, adds=adds)
        if arrivals.missing == 0:
            self._complete.append(group)
            self.done_with(group)
            self._send()

    def done_with(self, group: Group) -> None:
        """Release a group that backward needs no more: all its gradients are here, and those of its modules' inputs.
        Gradients alone say too little, since a frozen or detached weight may still be needed. Groups whose inputs get
        no gradient are the first of the model: backward comes to them last, and they stay until it ends."""
        if group.num_inputs_awaited == 0 and (not group.trainable or self._arrivals[group].missing == 0):
            group.in_backward = False
            self.gatherer.release(group)

    def _send(self, *, all_of_them: bool = False) -> None:
        """Reduce in the shared order, as far as groups are complete."""
        while self._num_sent < len(self.order):
            arrivals = self._arrivals[self.order[self._num_sent]]
            if arrivals.missing and not all_of_them:
                return
            self._num_sent += 1
            self.reducer.launch(arrivals, sync=self.is_syncing)

    def end(self) -> None:
        """The pass has ended: send what is left, show handles, ask who used what."""
        self._send(all_of_them=True)
        arrived = [slot for slot in self.slots if slot.parameter in self._arrivals[slot.group].arrived]
        for slot in arrived:
            slot.parameter.grad = slot.handle
        for late in self._late.values():
            self.reducer.launch(late, sync=self.is_syncing)
        self.gatherer.release_all()
        self._used.update(slot.parameter for slot in arrived)
        self._arrivals, self._late, self.is_running = {}, {}, False
        if self.control.world.size > 1:
            if not self.is_syncing:
                return
            self._agree()
        self._used.clear()
        self.gatherer.sequence.clear()
        if not self._order_is_learnt:
            self._learn_order()

    def _agree(self) -> None:
        """Show a handle also where only other ranks had a gradient."""
        used = [slot.parameter in self._used and slot.parameter.grad is not None for slot in self.slots]
        for slot, is_used in zip(self.slots, self.control.agree(used, self.gatherer.sequence), strict=True):
            if is_used and slot.parameter.grad is None:
                slot.parameter.grad = slot.handle

    def _learn_order(self) -> None:
        """From now on reduce in the order in which rank 0 saw groups complete, and update in the order in which it
        needed them. Ranks that saw another order follow: what matters is that all have the same."""
        seen = ([group.index for group in self._complete], [g.index for g in self.gatherer.in_forward_order()])
        complete, needed = self.control.collect(seen)[0]
        by_index = {group.index: group for group in self.gatherer.groups}
        first = [by_index[index] for index in complete]
        self.order = [*first, *(group for group in self.order if group not in first)]
        self.update_order = [by_index[index] for index in needed]
        self._order_is_learnt = True

    def settle(self) -> None:
        """Return when all gradients have landed."""
        self.reducer.settle()

    @property
    def has_unsynced(self) -> bool:
        """Whether gradients that are still wanted wait for a pass outside no_sync."""
        return any(slot.parameter in self._used and slot.parameter.grad is not None for slot in self.slots)


def _nothing() -> None:
    return None
