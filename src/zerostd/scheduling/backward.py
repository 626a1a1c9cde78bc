"""One backward pass, from its first hook to its end.

Gradients come in by their parameters' hooks. When the last gradient of a group is there, the group is released and
reduced, in one order that all ranks share. So ranks that use different parameters still meet in every collective. A
gradient that never arrives counts as zero and is sent when the pass ends. Then ranks agree which parameters anyone
used: those without a gradient anywhere keep `p.grad is None`, as in torch. In the last pass of a step, a group whose
gradient has landed and whose parameters backward needs no more may be updated, while the pass goes on for others.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import nn

from zerostd.communication.peers import BACKWARD
from zerostd.compat import at_end_of_backward, in_backward, no_torch_function
from zerostd.errors import MisuseError
from zerostd.monitoring.events import LoopPhase
from zerostd.parameters import GradientHandle, Group
from zerostd.parameters.observing import StepObserver
from zerostd.parameters.prepared import GRAD
from zerostd.scheduling.activations import Activations
from zerostd.scheduling.gathering import Gatherer
from zerostd.scheduling.reducing import GroupGradients, Reducer, TrainedParameter
from zerostd.tiers.debug import DEBUG, trace_non_finite


class GroupUpdates(Protocol):
    """Updates that begin inside the last backward pass of a step, made by the optimizer."""

    keeps_gradients: bool  # until the step

    @property
    def has_begun(self) -> bool: ...  # in this step

    def make_room(self, group: Group) -> None: ...  # for its gradient, where gradients are not kept

    def updated(self, group: Group) -> None: ...  # its gradient may go, where gradients are not kept

    def start(self, group: Group) -> None: ...

    def abandon(self) -> None: ...  # the pass has failed


class BackwardPass:
    """Tracks the progress of the running pass, group by group."""

    def __init__(self, order: Sequence[Group]) -> None:
        self.gradients = {group: GroupGradients(group) for group in order}  # in the order in which they are sent
        self.late: dict[Group, GroupGradients] = {}  # came by a nested backward after their group was sent
        self.completed: list[Group] = []  # as their last gradient came in
        self.passed: set[Group] = set()  # backward needs their parameters no more
        self.landed: set[Group] = set()  # their gradients are in their home
        self.reported: set[Group] = set()  # as ready for their update
        self.keeps_graph = torch.is_grad_enabled()  # create_graph=True: this pass will have a backward of its own
        self._to_send = list(self.gradients.values())[::-1]

    def is_complete(self, group: Group) -> bool:
        """Return whether all gradients of a group are here; always true for a frozen group."""
        return group not in self.gradients or self.gradients[group].num_missing == 0

    def next_to_send(self, *, only_complete: bool) -> GroupGradients | None:
        """Return the next group's gradients in the shared order, once; None if it must wait or all are sent."""
        if not self._to_send or (only_complete and self._to_send[-1].num_missing):
            return None
        return self._to_send.pop()

    def report(self, group: Group) -> bool:
        """Return whether a group is ready for its update. True once."""
        is_ready = group in self.passed and group in self.landed and group not in self.reported
        if is_ready:
            self.reported.add(group)
        return is_ready


class PassCounter:
    """Counts backward passes since the last step, and knows which is the last one before the next."""

    def __init__(self, accumulate: int | None) -> None:
        self.accumulate = accumulate  # passes in a step, if the user has said so
        self.num_done = 0
        self.num_before = 1  # in the step before
        self.num_steps = 0
        self.input_bytes = 0  # of the forward of training that began last

    @property
    def is_last(self) -> bool:
        """Whether the running pass completes the step; a guess, unless the user has said how many passes do."""
        return self.num_done + 1 == (self.accumulate or self.num_before)

    @property
    def is_certain(self) -> bool:
        """Whether the previous step had as many passes as the user has said."""
        return self.num_steps > 0 and self.num_before == self.accumulate

    def check(self, *, updates_began: bool) -> None:
        """Refuse a pass whose gradients a running update would miss."""
        if updates_began:
            raise MisuseError(
                f"backward pass {self.num_done + 1} since the last step, but prepare(accumulate={self.accumulate}) "
                f"says that {self.accumulate} make a step, and the update has begun: call optimizer.step() after "
                f"{self.accumulate} passes, or pass the actual number"
            )

    def step(self) -> None:
        """Count a step, and reset the count of passes."""
        self.num_before = max(1, self.num_done)
        self.num_done = 0
        self.num_steps += 1


class Backward:
    """Coordinates gathering, reducing and agreeing during backward passes."""

    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        gatherer: Gatherer,
        reducer: Reducer,
        activations: Activations,
        observers: Sequence[StepObserver],
        *,
        accumulate: int | None,
    ) -> None:
        self.trained = tuple(trained)  # in the same order on all ranks
        self.gatherer = gatherer
        self.reducer = reducer
        self.activations = activations
        self.observers = observers
        self.group_updates: GroupUpdates | None = None  # None: updates wait for step()
        # In which groups are reduced, and in which they are updated and gathered again: the same on all ranks.
        self.order = [group for group in reversed(gatherer.groups) if group.trainable]
        self.update_order = list(gatherer.groups)
        self.order_is_learnt = False  # to be learnt anew when groups move in another way
        self.passes = PassCounter(accumulate)
        self.num_gradients = 0  # of parameters that have one, when ranks last agreed
        self.is_syncing = True  # False inside no_sync: gradients are summed locally
        self.weight = 1.0  # of this rank's gradients in the mean; 0: they count as none, see engine/joining.py
        self._pass: BackwardPass | None = None  # the one that runs now
        self._used: set[TrainedParameter] = set()  # since ranks last agreed

    @property
    def is_running(self) -> bool:
        return self._pass is not None

    @property
    def _syncs(self) -> bool:
        """Whether this pass sends gradients. A worker of parameter servers sends them once a step, in the last pass."""
        return self.is_syncing and (self.passes.is_last or not self.gatherer.wires.world.is_worker)

    def begin(self, trainer: threading.Thread | None = None) -> BackwardPass:
        """Begin a pass of the thread `trainer`, by default this one, if none is running. Any hook may call it first."""
        turn = self.gatherer.turn
        if self._pass is not None:
            if trainer is not None:
                turn.claim_pass(trainer)
            return self._pass
        if trainer is not None:
            turn.check_trainer(trainer)
        with turn:
            self.reducer.wait()
            self.passes.check(updates_began=self.group_updates is not None and self.group_updates.has_begun)
            for observer in self.observers:
                observer.before_backward()
            turn.begin_pass(trainer)
            self._pass = BackwardPass(self.order)
            self.gatherer.timer.mark(LoopPhase.BACKWARD)
            at_end_of_backward(self.end)
            self.gatherer.wires.world.enter(BACKWARD)
            self.gatherer.wires.in_backward = True
            self.gatherer.begin(LoopPhase.BACKWARD)
            self.reducer.begin()
            return self._pass

    def abandon(self) -> None:
        """Forget a pass that ended with an exception, so that autograd never called `end`; keep what had landed."""
        if in_backward():
            return
        with self.gatherer.turn:
            self.activations.offloader.end_backward()
            if self._pass is None:
                return
            self.reducer.wait()
            self.gatherer.release_all(is_backward=True)
            self.gatherer.wires.in_backward = False
            self._pass = None
            self.gatherer.turn.end_pass()
            if self.group_updates is not None:
                self.group_updates.abandon()
            self.gatherer.timer.mark(LoopPhase.OUTSIDE)

    def arrived(self, trained: TrainedParameter, parameter: nn.Parameter) -> None:
        """Take the gradient that autograd has put into `parameter.grad`, or added to its handle."""
        running = self._pass or self.begin()
        with no_torch_function():
            grad = GRAD.__get__(parameter)
            if grad is None:  # a hook of the user's has dropped it
                return
            GRAD.__set__(parameter, None)
        adds = isinstance(grad, GradientHandle)
        if adds:
            grad = grad.take_incoming()
        if trained.handle.spec is not None:
            grad = trained.flat.local(trained.index, grad)
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if grad.requires_grad:
            grad = grad.detach()
        if self.weight not in (0.0, 1.0):
            grad = grad * self.weight
        if DEBUG:
            where = f"rank {self.gatherer.wires.world.rank}, step {self.passes.num_steps + 1}"
            trace_non_finite(grad, f"{where}: the gradient of {trained.handle.of!r}")
        group = trained.group
        if group in running.reported:
            raise MisuseError(
                f"a nested backward brought another gradient for {trained.handle.of!r}, whose group is already being "
                "updated: leave accumulate out of prepare, so that updates wait for optimizer.step()"
            )
        arrivals = running.gradients[group]
        if self.weight == 0.0:
            with no_torch_function():
                GRAD.__set__(parameter, trained.handle if adds else None)  # what earlier passes brought stays
            if not arrivals.skip(trained):
                return
        elif not arrivals.num_missing:  # a nested backward brought more for a group that has left already
            running.late.setdefault(group, GroupGradients(group)).take(trained, grad, adds=True)
            return
        else:
            arrivals.take(trained, grad, adds=adds)
        if not arrivals.num_missing:
            with self.gatherer.turn:
                running.completed.append(group)
                self.done_with(group)
                self._send(running, only_complete=True)

    def done_with(self, group: Group) -> None:
        """Release a group that backward no longer needs: all its gradients are here, and those of its modules' inputs.
        Its own gradients are not enough, since a frozen or detached weight may still be needed. Groups whose inputs get
        no gradient are the first of the model: backward reaches them last, and they stay until it ends."""
        running = self._pass
        if running is not None and group.is_passed and running.is_complete(group) and not running.keeps_graph:
            group.end_backward()
            self.gatherer.release(group)
            running.passed.add(group)
            self._report(running, group)

    def _report(self, running: BackwardPass, group: Group) -> None:
        """Start the update of a group, if it may begin inside this pass and the group is ready."""
        updates = self.group_updates
        if updates is None or not (self.passes.is_last and self._syncs):
            return
        if (self.passes.is_certain or not updates.keeps_gradients) and running.report(group):
            updates.start(group)

    def _send(self, running: BackwardPass, *, only_complete: bool) -> None:
        """Reduce groups in the shared order, up to the first incomplete one."""
        while (gradients := running.next_to_send(only_complete=only_complete)) is not None:
            self.gatherer.wait_updates(gradients.group)  # its last update reads what is now overwritten
            if self.group_updates is not None:
                self.group_updates.make_room(gradients.group)
            landed = self.reducer.launch(gradients, sync=self._syncs, is_last=self.passes.is_last)
            if only_complete:
                for group in landed:
                    running.landed.add(group)
                    self._report(running, group)

    def end(self) -> None:
        """End the pass: send the remaining gradients, show handles, and let ranks agree which parameters were used."""
        with self.gatherer.turn:
            self._end()

    def _end(self) -> None:
        running = self._pass
        assert running is not None
        self.activations.offloader.end_backward()
        self._send(running, only_complete=False)
        arrived = [t for t in self.trained if running.gradients[t.group].arrived[t.flat][t.index]]
        with no_torch_function():
            for trained in arrived:
                GRAD.__set__(trained.parameter, trained.handle)
        for late in running.late.values():
            self.reducer.launch(late, sync=self._syncs)
        if not running.keeps_graph:  # else its backward, or the next forward, ends with that
            self.gatherer.release_all(is_backward=True)
        self.gatherer.wires.in_backward = False
        self._used.update(arrived)
        self._pass = None
        self.gatherer.turn.end_pass()
        self.gatherer.timer.mark(LoopPhase.OUTSIDE)
        for observer in self.observers:
            observer.after_backward()
        if not self._syncs and (self.gatherer.wires.world.size > 1 or not self.gatherer.wires.is_alone):
            self.passes.num_done += bool(arrived) or self.weight == 0.0
            return
        if self.gatherer.wires.world.size > 1:
            used = [trained in self._used and trained.parameter.grad is not None for trained in self.trained]
            facts = [fact for observer in self.observers for fact in observer.facts()]
            flags = [*used, self.gatherer.is_short]
            *used_anywhere, is_short = self.reducer.control.agree(flags, self.gatherer.sequence, facts)
            if is_short:
                self.gatherer.gather_on_demand()
            with no_torch_function():
                for trained, is_used in zip(self.trained, used_anywhere, strict=True):
                    if is_used and trained.parameter.grad is None:  # only other ranks had a gradient
                        trained.parameter.grad = trained.handle
                self.num_gradients = sum(trained.parameter.grad is not None for trained in self.trained)
            self.passes.num_done += any(used_anywhere)
        else:
            self.passes.num_done += bool(arrived)
        self._used.clear()
        self.gatherer.sequence.clear()
        if not self.order_is_learnt:
            self._learn_order(running.completed)

    def _learn_order(self, completed: list[Group]) -> None:
        """Reduce groups from now on in the order in which they completed on rank 0, and update them in the order in
        which rank 0 needed them. Ranks that saw another order follow: all ranks must use the same order."""
        groups = self.gatherer.groups
        index = {group: position for position, group in enumerate(groups)}
        needed_here = self.gatherer.order.in_forward(groups)
        seen = ([index[group] for group in completed], [index[group] for group in needed_here])
        complete, needed = self.reducer.control.collect(seen)[0]
        first = dict.fromkeys(groups[position] for position in complete)
        self.order = [*first, *(group for group in self.order if group not in first)]
        self.update_order = [groups[position] for position in needed]
        for place, group in enumerate(self.update_order):
            group.place = place
        self.order_is_learnt = True

    def resume(self, num_passes: int, names: Collection[str]) -> None:
        """Continue a step after this number of passes; the gradients of these parameters have landed."""
        for trained in self.trained:
            has_landed = trained.handle.of in names
            assert trained.flat.gradient is not None
            trained.flat.gradient.resume(trained.index, has_landed=has_landed)
            trained.parameter.grad = trained.handle if has_landed else None
        for observer in self.observers:
            observer.before_backward()
        self.passes.num_done = num_passes
        self.num_gradients = sum(trained.handle.of in names for trained in self.trained)

    @property
    def has_gradients(self) -> bool:
        """Whether any trained parameter has a gradient."""
        with no_torch_function():
            for trained in self.trained:  # each step asks: a generator would take a call for each parameter
                if GRAD.__get__(trained.parameter) is not None:
                    return True
        return False

    @property
    def has_unsynced(self) -> bool:
        """Whether gradients still wait for a pass outside no_sync."""
        with no_torch_function():
            return any(GRAD.__get__(trained.parameter) is not None for trained in self._used)
