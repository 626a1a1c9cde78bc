"""One backward pass from its first sign to its end.

Gradients come in by their parameters' hooks. When the last of a group is there, the group is released and reduced;
groups are reduced in one order that all ranks share, so that a rank which uses other parameters than its peers still
meets them in every collective. What never arrives counts as zero and is sent when the pass ends. Then ranks agree which
parameters anyone used: those without a gradient anywhere keep `p.grad is None`, as in torch.

In the last pass of a step each group is reported as ready, when its gradient has landed and backward needs its
parameters no more: from then on it may be updated, while the pass goes on for others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from zerostd.compat import at_end_of_backward, in_backward
from zerostd.errors import MisuseError
from zerostd.monitoring.loop_timer import LoopPhase
from zerostd.parameters import GradientHandle, Group
from zerostd.parameters.observing import StepObserver
from zerostd.scheduling.activations import Activations
from zerostd.scheduling.gathering import Gatherer, Phase
from zerostd.scheduling.reducing import Arrivals, Reducer, Slot

__all__ = ["Backward"]


class GroupUpdates(Protocol):
    """Updates that begin inside the last backward pass of a step."""

    def start(self, group: Group) -> None:
        """Update a group: its gradient has landed, and backward needs its parameters no more."""


class Backward:
    """Coordinates gathering, reducing and agreeing during backward passes."""

    slots: tuple[Slot, ...]  # in the same order on all ranks
    order: list[Group]  # in which groups are reduced: the same on all ranks
    update_order: list[Group]  # in which groups are updated and gathered again: likewise
    group_updates: GroupUpdates | None  # None: updates wait for step()
    is_syncing: bool  # False inside no_sync: gradients are summed locally

    def __init__(
        self,
        slots: Sequence[Slot],
        gatherer: Gatherer,
        reducer: Reducer,
        activations: Activations,
        observers: Sequence[StepObserver],
        *,
        accumulate: int | None,
    ) -> None:
        self.slots = tuple(slots)
        self.gatherer = gatherer
        self.reducer = reducer
        self.control = reducer.control
        self.activations = activations
        self.observers = observers
        self.group_updates: GroupUpdates | None = None
        self.order = [group for group in reversed(gatherer.groups) if group.trainable]
        self.update_order = list(gatherer.groups)
        self.passes = Passes(accumulate)
        self.is_syncing = True
        self.is_running = False
        self._pass = Pass()
        self._used: set[nn.Parameter] = set()  # since ranks last agreed
        self._order_is_learnt = False

    def begin(self) -> None:
        """A pass begins, if none is running. Its first sign may be any hook."""
        if self.is_running:
            return
        self.settle()
        self.passes.check(updates_early=self.group_updates is not None)
        for observer in self.observers:
            observer.before_backward()
        self.is_running = True
        self.gatherer.timer.mark(LoopPhase.BACKWARD)
        at_end_of_backward(self.end)
        self.control.begin_backward()
        self.gatherer.begin(Phase.BACKWARD)
        self.reducer.begin()
        self._pass = Pass({group: Arrivals(group) for group in self.order})

    def abandon(self) -> None:
        """A pass ended with an exception, so autograd never called `end`: forget it, keep what had landed."""
        if not self.is_running or in_backward():
            return
        self.reducer.settle()
        self.gatherer.release_all()
        self._pass, self.is_running = Pass(), False
        self.gatherer.timer.mark(LoopPhase.OUTSIDE)

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
        arrivals = self._pass.arrivals[group]
        if group in self._pass.reported:
            raise MisuseError(
                f"a nested backward brought another gradient for {slot.handle.of!r}, whose group is being updated "
                "already: leave accumulate out of prepare, so that updates wait for optimizer.step()"
            )
        if arrivals.missing == 0:  # a nested backward brought more for a group that has left already
            self._pass.late.setdefault(group, Arrivals(group)).take(slot, grad, adds=True)
            return
        arrivals.take(slot, grad, adds=adds)
        if arrivals.missing == 0:
            self._pass.complete.append(group)
            self.done_with(group)
            self._send()

    def done_with(self, group: Group) -> None:
        """Release a group that backward needs no more: all its gradients are here, and those of its modules' inputs.
        Gradients alone say too little, since a frozen or detached weight may still be needed. Groups whose inputs get
        no gradient are the first of the model: backward comes to them last, and they stay until it ends."""
        if group.num_inputs_awaited == 0 and (not group.trainable or self._pass.arrivals[group].missing == 0):
            group.in_backward = False
            self.gatherer.release(group)
            self._pass.passed.add(group)
            self._report(group)

    def _report(self, group: Group) -> None:
        """Tell that a group is ready, once, if it is."""
        if self.group_updates is None or not self.passes.is_last or not self.is_syncing:
            return
        ready = self._pass
        if group in ready.passed and group in ready.landed and group not in ready.reported:
            ready.reported.add(group)
            self.group_updates.start(group)

    def _send(self, *, all_of_them: bool = False) -> None:
        """Reduce in the shared order, as far as groups are complete."""
        while self._pass.num_sent < len(self.order):
            arrivals = self._pass.arrivals[self.order[self._pass.num_sent]]
            if arrivals.missing and not all_of_them:
                return
            self._pass.num_sent += 1
            self.gatherer.complete(arrivals.group)  # its last update reads what is now overwritten
            landed = self.reducer.launch(arrivals, sync=self.is_syncing, is_last=self.passes.is_last)
            if not all_of_them:
                for group in landed:
                    self._pass.landed.add(group)
                    self._report(group)

    def end(self) -> None:
        """The pass has ended: send what is left, show handles, ask who used what."""
        self.activations.settle()
        self._send(all_of_them=True)
        arrived = [slot for slot in self.slots if slot.parameter in self._pass.arrivals[slot.group].arrived]
        for slot in arrived:
            slot.parameter.grad = slot.handle
        for late in self._pass.late.values():
            self.reducer.launch(late, sync=self.is_syncing)
        self.gatherer.release_all()
        self._used.update(slot.parameter for slot in arrived)
        complete = self._pass.complete
        self._pass, self.is_running = Pass(), False
        self.gatherer.timer.mark(LoopPhase.OUTSIDE)
        self.passes.count()
        if self.control.world.size > 1:
            if not self.is_syncing:
                return
            self._agree()
        self._used.clear()
        self.gatherer.sequence.clear()
        if not self._order_is_learnt:
            self._learn_order(complete)

    def _agree(self) -> None:
        """Show a handle also where only other ranks had a gradient."""
        used = [slot.parameter in self._used and slot.parameter.grad is not None for slot in self.slots]
        for slot, is_used in zip(self.slots, self.control.agree(used, self.gatherer.sequence), strict=True):
            if is_used and slot.parameter.grad is None:
                slot.parameter.grad = slot.handle

    def _learn_order(self, seen_complete: list[Group]) -> None:
        """From now on reduce in the order in which rank 0 saw groups complete, and update in the order in which it
        needed them. Ranks that saw another order follow: what matters is that all have the same."""
        seen = ([group.index for group in seen_complete], [g.index for g in self.gatherer.in_forward_order()])
        complete, needed = self.control.collect(seen)[0]
        by_index = {group.index: group for group in self.gatherer.groups}
        first = [by_index[index] for index in complete]
        self.order = [*first, *(group for group in self.order if group not in first)]
        self.update_order = [by_index[index] for index in needed]
        for place, group in enumerate(self.update_order):
            group.place = place
        self._order_is_learnt = True

    def learn_again(self) -> None:
        """Groups move in another way now: the next pass shows in which order."""
        self._order_is_learnt = False

    def settle(self) -> None:
        """Return when all gradients have landed."""
        self.reducer.settle()

    def resume(self, num_passes: int, names: Collection[str]) -> None:
        """So many passes of a step are done, and the gradients of these parameters, no others, have landed."""
        for slot in self.slots:
            slot.parameter.grad = slot.handle if slot.handle.of in names else None
            gradient = slot.flat.gradient
            assert gradient is not None
            gradient.has_landed[slot.index] = slot.handle.of in names
            gradient.changed()
        for observer in self.observers:
            observer.before_backward()
        self.passes.num_done = num_passes

    @property
    def has_unsynced(self) -> bool:
        """Whether gradients that are still wanted wait for a pass outside no_sync."""
        return any(slot.parameter in self._used and slot.parameter.grad is not None for slot in self.slots)


@dataclass
class Pass:
    """How far one pass has come."""

    arrivals: dict[Group, Arrivals] = field(default_factory=dict)
    late: dict[Group, Arrivals] = field(default_factory=dict)
    complete: list[Group] = field(default_factory=list)  # as their last gradient came in
    num_sent: int = 0  # groups of `order` that were reduced
    passed: set[Group] = field(default_factory=set)  # backward needs their parameters no more
    landed: set[Group] = field(default_factory=set)  # their gradients are where they rest
    reported: set[Group] = field(default_factory=set)  # both, and told so


class Passes:
    """Backward passes since the last step, and which of them is the last one before the next."""

    def __init__(self, accumulate: int | None) -> None:
        self.accumulate = accumulate  # passes in a step, if the user has said so
        self.num_done = 0
        self.num_before = 1  # in the step before
        self.num_steps = 0

    @property
    def is_last(self) -> bool:
        """Whether the pass that runs now makes the step complete; a guess, unless the user has said how many do."""
        return self.num_done + 1 == (self.accumulate or self.num_before)

    def check(self, *, updates_early: bool) -> None:
        """Refuse a pass that a running update would miss."""
        if updates_early and self.accumulate is not None and self.num_done >= self.accumulate:
            raise MisuseError(
                f"backward pass {self.num_done + 1} since the last step, but prepare(accumulate={self.accumulate}) "
                f"said that {self.accumulate} make a step, and the update has begun: call optimizer.step() after "
                f"{self.accumulate} passes, or say how many there are"
            )

    def count(self) -> None:
        """A pass has ended."""
        self.num_done += 1

    def step(self) -> None:
        """A step was taken."""
        self.num_before = max(1, self.num_done)
        self.num_done = 0
        self.num_steps += 1
