"""The optimizer users get back: a torch.optim.Optimizer whose step updates this rank's shards.

    step:  gradients have landed  ->  clip and scale factors  ->  update group by group in forward order
           ->  each group's new parameters start on their way as soon as it is updated

Updates of states off the device continue after step() has returned, and each group's next forward waits for the group's
update. If prepare was told how many passes make a step, and updates need no property of all gradients, they begin
inside the last backward pass (backward_updates.py).

`param_groups` are the user's own dicts with the user's own parameters, so schedulers and edits work as in torch.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerostd.communication.world import thread_budget
from zerostd.compat import move_step_hooks, no_torch_function, note_step, run_state_hooks, share_state_hooks
from zerostd.errors import MisuseError
from zerostd.monitoring.ledger import explain_out_of_memory
from zerostd.optimizers.backward_updates import BackwardUpdates
from zerostd.optimizers.elementwise import check_elementwise
from zerostd.optimizers.gradients import Gradients
from zerostd.optimizers.parameter_states import ParameterStates
from zerostd.optimizers.spans import StepOptions
from zerostd.optimizers.states import copied, load_states, save_states
from zerostd.optimizers.updater import Updater
from zerostd.parameters import Group
from zerostd.parameters.prepared import GRAD
from zerostd.tiers.debug import DEBUG

THREADED_FROM = 1_000_000  # elements: below, waking threads costs more than they bring


class Schedule(Protocol):
    """Names what a step asks of the schedule, in this order; the optimizer never learns how groups move."""

    @property
    def turn(self) -> contextlib.AbstractContextManager[None]: ...  # one thread, which no signal interrupts
    def check_step(self) -> None: ...  # raises if a step now would lose gradients
    def wait_gradients(self) -> None: ...  # returns when all have landed
    def update_order(self) -> list[Group]: ...  # those that the next forward needs first in front
    def renew(self, group: Group) -> None: ...  # notes that its masters have changed; once for each updated group
    def stepped(self) -> None: ...  # notes that the step was taken, or skipped


class ZeroOptimizer(torch.optim.Optimizer):
    """Wraps the user's optimizer; see the module's docstring."""

    def __init__(
        self,
        updater: Updater,
        states: ParameterStates,
        gradients: Gradients,
        schedule: Schedule,
        max_grad_norm: float | None,
    ) -> None:
        self._is_built = False
        self._is_retired = False
        self.inner = updater.inner
        self.updater = updater
        self._early: BackwardUpdates | None = None  # kept from plan to plan, since it knows which steps clipped
        self._gradients = gradients
        self._schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.compares_options = True  # with those of the other ranks, when a backward pass ends
        self.loss_scale = gradients.loss_scale
        self.grad_norm: torch.Tensor | None = None  # of the last step that clipped or scaled, before clipping
        self._is_clipped = False  # to max_grad_norm, before the step that would do it
        super().__init__(self.inner.param_groups, self.inner.defaults)
        world = gradients.wires.world
        num_elements = sum(flat.region.stop - flat.region.start for flat in updater.spans)
        is_long = world.device.type == "cpu" and num_elements >= THREADED_FROM
        self._num_threads = thread_budget(world.local_size) if is_long else 1  # for an update
        self._states = states
        self.inner.state = states  # type: ignore[assignment]  # a mapping like torch's
        move_step_hooks(self.inner, self)  # once a step, not once a group
        share_state_hooks(self.inner, self)
        self.inner.register_step_pre_hook(self._refuse_inner)
        self._is_built = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's own, with the user's own parameters."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        if self._is_built:
            self.inner.param_groups = param_groups

    @property
    def state(self) -> Any:
        """The states by parameter."""
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        if self._is_built and states is not self._states:
            self._states.replace(states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise MisuseError: shards and buffers are laid out when the model is prepared."""
        if not self._is_built:
            return
        raise MisuseError(
            "add_param_group on a prepared optimizer: its shards are already laid out. Put all parameters into the "
            "optimizer before zerostd.prepare; use lr=0 for parameters that should train later"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A closure is called once, before the update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_retired:
            _refuse_step()
        with self._schedule.turn:
            self._step()
        return loss

    def _step(self) -> None:
        if self.inner.state is not self._states:  # the user's own optimizer, taken over late, was given other states
            self.state = self.inner.state
            self.inner.state = self._states  # type: ignore[assignment]
        self._schedule.check_step()
        self._schedule.wait_gradients()
        note_step(self.inner)
        self.updater.check()
        if self._is_skipped():
            self._schedule.stepped()
            return
        factor = self._gradients.take_factor()
        with self._threads(), explain_out_of_memory(self.updater.ledger):
            self.updater.check_memory()
            options = self._update(factor)
            self.updater.resident.end_step()
        if "serial" in DEBUG or self.updater.counts_in_groups:
            self.synchronize()
        if options is not None:
            self.updater.keep_counters(options)
        self._schedule.stepped()

    def begin_backward_updates(
        self, *, knows_last_pass: bool, may_speculate: bool, keeps_gradients: bool
    ) -> BackwardUpdates | None:
        """Let updates begin inside backward from now on, if the last pass of a step is known and nothing has to wait
        for step(). Returns the object that backward reports groups to; None if all updates wait for step()."""
        is_speculative = self.max_grad_norm is not None
        waits_for_step = (
            (self.updater.offload is None and keeps_gradients)
            or self.updater.counts_in_groups
            or self.loss_scale is not None
            or (is_speculative and not may_speculate)
            or "serial" in DEBUG
        )
        if self._early is None:
            self._early = BackwardUpdates(self.updater, self._gradients, self._schedule.renew, is_speculative)
        self._early.look()
        self._early.keeps_gradients = keeps_gradients
        self._early.is_on = knows_last_pass and not waits_for_step
        return self.backward_updates

    @property
    def backward_updates(self) -> BackwardUpdates | None:
        """Updates inside backward; None if all wait for step()."""
        return self._early if self._early is not None and self._early.is_on else None

    def _refuse_inner(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse a step of the user's own optimizer on the user's own parameters."""
        if any(p in self.updater.param_group_of for group in optimizer.param_groups for p in group["params"]):
            raise MisuseError(
                "step() of the optimizer that was given to zerostd.prepare: call step() of the optimizer that it "
                "returned, model, optimizer = zerostd.prepare(model, optimizer)"
            )

    def check_consistent(self, call: str) -> None:
        """Refuse `call` if an update of the states has failed, or is only partly done."""
        self.updater.check()
        self._gradients.check_unlocked(call)

    def synchronize(self) -> None:
        """Wait until all updates are done, including those that run after step(), and until a save has read its values.
        Only timing needs it."""
        self.updater.drain()
        for group in self._schedule.update_order():
            group.wait_readers()

    def _update(self, factor: torch.Tensor | None) -> StepOptions | None:
        """Update every group that the last backward has not updated already; returns the options, if there was one."""
        order = self._schedule.update_order()
        updated = self.backward_updates.finish(factor, order) if self.backward_updates is not None else set()
        if len(updated) == len(order):
            return None
        options = self.updater.step_options(factor)
        if self._early is not None and not updated:
            self._early.watch(options)
        for group in order:
            if group not in updated:
                self.updater.update(group, options)
                self._schedule.renew(group)
        return options

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """Use all threads of this rank for an update on the CPU, if it is long enough to be worth waking them."""
        before = torch.get_num_threads()
        if self._num_threads <= before:
            yield
            return
        torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _is_skipped(self) -> bool:
        """Take the norm where one is asked for; True if gradients overflowed and this step must not happen."""
        gradients = self._gradients
        if self.loss_scale is not None:
            gradients.factor = gradients.factor / self.loss_scale.value
        elif self.max_grad_norm is None:
            return False
        if self.max_grad_norm is None:
            self.grad_norm = gradients.total_norm()
        elif not self._is_clipped:
            self.grad_norm = gradients.clip(self.max_grad_norm)
        self._is_clipped = False
        if self.loss_scale is None:
            return False
        assert self.grad_norm is not None
        overflowed = not bool(torch.isfinite(self.grad_norm))
        self.loss_scale.update(overflowed=overflowed)
        if overflowed:
            gradients.take_factor()
        return overflowed

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients to a global norm, exactly; returns the norm before clipping. Every rank must call it.

        With prepare(max_grad_norm=...), a loop may call it with the same norm to log the result: updates that have
        begun inside backward continue, and step() does not clip again. With an infinite norm nothing is clipped. The
        norm is a tensor on the device, and the host waits for it only when it is read.
        """
        self._gradients.wires.world.enter("optimizer.clip_grad_norm_()")
        scale = self._gradients.check_clip(max_norm, norm_type)
        if math.isinf(max_norm):
            return self._gradients.total_norm(norm_type) / scale
        if self.max_grad_norm is None:
            self._gradients.check_unlocked("clip_grad_norm_()")
        elif (max_norm, norm_type) != (self.max_grad_norm, 2.0):
            raise MisuseError(
                f"clip_grad_norm_({max_norm}, norm_type={norm_type}) on an optimizer prepared with "
                f"max_grad_norm={self.max_grad_norm}: use the same norm of order 2, or leave it out of prepare"
            )
        if not self._is_clipped:
            self.grad_norm = self._gradients.clip(max_norm * scale, norm_type) / scale
            self._is_clipped = self.max_grad_norm is not None
        assert self.grad_norm is not None
        return self.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. With set_to_none=False they become zeros, as in torch."""
        with self._schedule.turn:
            self._schedule.wait_gradients()
            self._gradients.check_unlocked("zero_grad()")
            self._gradients.take_factor()
            self._is_clipped = False
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            with no_torch_function():
                for parameter in parameters:
                    if set_to_none:
                        GRAD.__set__(parameter, None)
                    elif parameter.grad is not None:
                        self._gradients.scale(parameter.grad, 0.0)
            if set_to_none:
                self._gradients.drop(parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's format. On one rank it equals that of the inner optimizer. On several ranks it has this
        rank's shards: load it on the same rank, with the same number of ranks."""
        self._gradients.wires.world.check_here("optimizer.state_dict()")
        self.check_consistent("state_dict()")
        run_state_hooks(self, "state_dict_pre")
        self._commit_edits()
        return run_state_hooks(self, "state_dict_post", save_states(self.updater, self._gradients))  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict; everything is checked before anything changes."""
        self._gradients.wires.world.check_here("optimizer.load_state_dict()")
        self.check_consistent("load_state_dict()")
        state_dict = run_state_hooks(self, "load_state_dict_pre", copied(state_dict))
        with self._schedule.turn:
            self._commit_edits()
            load_states(self.updater, self._gradients, state_dict)
            for group in self._schedule.update_order():
                self._schedule.renew(group)
        run_state_hooks(self, "load_state_dict_post")

    def _commit_edits(self) -> None:
        """Wait for updates, and let masters follow what the user wrote to parameters."""
        self.synchronize()
        for group in self._schedule.update_order():
            group.commit_edits()

    def retire(self) -> None:
        """Refuse further steps, including those of the user's own optimizer: the model is an ordinary one again, and
        the states were freed with their shards."""
        self._is_retired = True
        self.inner.state = defaultdict(dict)
        move_step_hooks(self.inner)
        self.inner.register_step_pre_hook(_refuse_step)

    def __repr__(self) -> str:
        return f"ZeroOptimizer({self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError("a prepared optimizer cannot be copied or pickled: use zerostd.save, or its state_dict()")


def _refuse_step(*_: Any) -> None:
    raise MisuseError(
        "step() of an optimizer whose model was released: its states were freed with its shards. Make a new optimizer "
        "on the model, and load a state_dict() that this one returned before zerostd.release"
    )


class LateOptimizer:
    """Takes over an optimizer that was made after the model was prepared, at its first step.

    torch calls a hook before any optimizer's step. If the optimizer's parameters are those of the model, our step runs
    instead: the inner step that follows finds no parameters and does nothing. The user keeps the same optimizer object.
    """

    def __init__(self, make: Callable[[torch.optim.Optimizer], ZeroOptimizer], gradients: Gradients) -> None:
        self._make = make
        self._ours = {p for group in gradients.groups for flat in group.flats for p in flat.parameters}
        self._prepared: ZeroOptimizer | None = None
        self._is_stepping = False
        self._hidden: list[dict[str, Any]] | None = None
        self._removables = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def end(self) -> None:
        """Stop watching."""
        for removable in self._removables:
            removable.remove()
        if self._prepared is not None:
            for name in ("state_dict", "load_state_dict"):
                self._prepared.inner.__dict__.pop(name, None)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self._is_stepping or isinstance(optimizer, ZeroOptimizer):
            return None
        self._after_step(optimizer, args, kwargs)  # an interrupt may have kept it from being called
        if not any(p in self._ours for group in optimizer.param_groups for p in group["params"]):
            return None
        if self._prepared is None:
            foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in self._ours]
            if foreign:
                raise MisuseError(
                    f"an optimizer mixes parameters of a prepared model with {len(foreign)} others, the first of shape "
                    f"{tuple(foreign[0].shape)}: use a separate optimizer for them"
                )
            check_elementwise(optimizer)
            self._prepared = self._make(optimizer)
            optimizer.state_dict = self._prepared.state_dict  # type: ignore[method-assign]
            optimizer.load_state_dict = self._prepared.load_state_dict  # type: ignore[method-assign]
        elif self._prepared.inner is not optimizer:
            raise MisuseError(
                "a second optimizer steps on the parameters of one prepared model: prepare the model with one "
                "optimizer that has several param_groups"
            )
        self._is_stepping = True
        try:
            loss = self._prepared.step(*args[1:], **kwargs)
        finally:
            self._is_stepping = False
        self._hidden = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": []} for group in self._hidden]
        return (optimizer,), ({"closure": lambda: loss} if args[1:] or kwargs else {})

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        is_ours = self._prepared is not None and self._prepared.inner is optimizer
        if is_ours and self._hidden is not None and not self._is_stepping:
            optimizer.param_groups = self._hidden
            self._hidden = None
