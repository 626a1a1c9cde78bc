"""The optimizer users get back: a torch.optim.Optimizer whose step updates this rank's shards.

    step:  gradients have landed  ->  clip and scale factors  ->  update group by group in forward order
           ->  each group's new parameters start on their way as soon as it is updated

Updates of states off the device go on after step() has returned, and each group's next forward waits for its own.
When prepare was told how many passes make a step and nothing has to be known of all gradients first, they begin inside
the last backward pass (early.py).

`param_groups` are the user's own dicts with the user's own parameters, so schedulers and edits work as ever.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from zerostd.communication import World
from zerostd.communication.world import thread_budget
from zerostd.compat import note_step
from zerostd.errors import MisuseError
from zerostd.monitoring.ledger import explain_out_of_memory
from zerostd.optimizers.arithmetic import Terms
from zerostd.optimizers.early import Early
from zerostd.optimizers.elementwise import writes_options
from zerostd.optimizers.gradients import Gradients
from zerostd.optimizers.scaling import LossScale
from zerostd.optimizers.states import load_states, save_states
from zerostd.optimizers.update import Updater
from zerostd.parameters import Group
from zerostd.tiers.debug import DEBUG

__all__ = ["Schedule", "ZeroOptimizer"]

THREADED_FROM = 1_000_000  # elements: below, waking threads costs more than they bring


class Schedule(Protocol):
    """What the optimizer asks of the schedule; it never learns how groups move."""

    def settle(self) -> None:
        """Return when all gradients have landed."""

    def update_order(self) -> list[Group]:
        """Groups, those the next forward needs first in front."""

    def renew(self, group: Group) -> None:
        """The group's masters have changed."""

    def check_step(self) -> None:
        """Raise if a step now would lose gradients."""

    def stepped(self) -> None:
        """A step was taken, or skipped."""


class ZeroOptimizer(torch.optim.Optimizer):
    """Wraps the user's optimizer; see the module's docstring."""

    inner: torch.optim.Optimizer
    max_grad_norm: float | None
    loss_scale: LossScale | None
    counts_in_groups: bool  # a step changes param_groups, so it must be complete before they are read again
    grad_norm: torch.Tensor | None  # of the last step that clipped or scaled, before clipping

    def __init__(
        self,
        updater: Updater,
        gradients: Gradients,
        schedule: Schedule,
        world: World,
        *,
        max_grad_norm: float | None,
        loss_scale: LossScale | None,
    ) -> None:
        self.early: Early | None = None
        self._is_built = self._is_retired = False
        self.inner = updater.inner
        self._updater = updater
        self._gradients = gradients
        self._schedule = schedule
        self._world = world
        self.max_grad_norm = max_grad_norm
        self.loss_scale = loss_scale
        self.grad_norm = None
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        self.counts_in_groups = self.counts_in_groups_with(updater.routes)
        self._num_threads = thread_budget(world.local_size) if world.device.type == "cpu" else 1
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # once a step, not once a group
            setattr(self, hooks, getattr(self.inner, hooks))
            setattr(self.inner, hooks, OrderedDict())
        self._is_built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: shards and buffers are laid out when the model is prepared."""
        if not self._is_built:
            self.param_groups.append(param_group)
            return
        raise MisuseError(
            "add_param_group on a prepared optimizer: its shards are laid out already. Put all parameters into the "
            "optimizer before zerostd.prepare; parameters that should train later can have lr=0 until then"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. With a closure, it is called once, before the update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_retired:
            raise MisuseError("step() of an optimizer whose model was released: build a new optimizer on the model")
        self._schedule.check_step()
        self._schedule.settle()
        note_step(self.inner)
        if self._updater.routes is not None:
            self._updater.routes.check()
        if self._is_skipped():
            self._schedule.stepped()
            return loss
        factor = self._gradients.take_factor()
        with self._threads(), explain_out_of_memory(self._updater.ledger):
            self._updater.claim()
            self._update(factor)
        if DEBUG.is_serial or self.counts_in_groups:
            self.synchronize()
        self._updater.keep_counters()
        self._schedule.stepped()
        return loss

    def counts_in_groups_with(self, routes: object | None) -> bool:
        """Whether a step by these routes must be complete before param_groups are read again."""
        return routes is not None and writes_options(self.inner)

    def check_whole(self, call: str) -> None:
        """Refuse `call` on states of which an update has failed, or has done a part."""
        if self._updater.routes is not None:
            self._updater.routes.check()
        self._gradients.check_taken(call)

    def synchronize(self) -> None:
        """Return when every update so far is done, also those that go on after step(), and a save has read all it
        needs. For timing; nothing else needs it."""
        if self._updater.routes is not None:
            self._updater.routes.drain()
        for group in self._schedule.update_order():
            group.pending_save.wait()

    def _update(self, factor: torch.Tensor | None) -> None:
        """Every group, those that the last backward has not updated already."""
        order = self._schedule.update_order()
        updated = self.early.finish(factor, order) if self.early is not None else set()
        if len(updated) == len(order):
            return
        terms = self._updater.terms = self.terms(factor)
        if self.early is not None and not updated:
            self.early.learn(terms.on_host)
        for group in order:
            if group not in updated:
                self._updater.update(group, terms)
                self._schedule.renew(group)

    def terms(self, factor: torch.Tensor | None) -> Terms:
        """What a step that begins now says to its updates."""
        routes = self._updater.routes
        return Terms(self._updater.options_now(), factor, routes.to_host(factor) if routes is not None else None)

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """All threads this rank may have, for an update on the CPU that is long enough to pay for waking them."""
        before = torch.get_num_threads()
        if self._num_threads <= before or self._updater.num_elements < THREADED_FROM:
            yield
            return
        torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _is_skipped(self) -> bool:
        """Take the norm where one is asked for; True if gradients overflowed and this step must not happen."""
        if self.loss_scale is not None:
            self._gradients.factor = self._gradients.factor / self.loss_scale.value
        if self.max_grad_norm is not None:
            self.grad_norm = self._gradients.clip(self.max_grad_norm)
        elif self.loss_scale is not None:
            self.grad_norm = self._gradients.total_norm()
        if self.loss_scale is None:
            return False
        assert self.grad_norm is not None
        overflowed = not bool(torch.isfinite(self.grad_norm))
        self.loss_scale.update(overflowed=overflowed)
        if overflowed:
            self._gradients.take_factor()
        return overflowed

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients to a global norm, exactly; returns the norm before clipping. Every rank must call it."""
        if self.max_grad_norm is not None:
            raise MisuseError(
                f"clip_grad_norm_({max_norm}) on an optimizer prepared with max_grad_norm={self.max_grad_norm}, which "
                "clips in step(): use one of the two"
            )
        self._gradients.check_taken("clip_grad_norm_()")
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        self.grad_norm = self._gradients.clip(max_norm * scale, norm_type) / scale
        return self.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. With set_to_none=False they become zeros, as in torch."""
        self._schedule.settle()
        self._gradients.check_taken("zero_grad()")
        self._gradients.take_factor()
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    self._gradients.scale(parameter.grad, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """torch's format. In a world of one it is what the inner optimizer would give; on several ranks each state
        holds this rank's interval of it, and loads on the same rank of as many ranks."""
        self.check_whole("state_dict()")
        self.synchronize()
        return save_states(self._updater, self._world, self.loss_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The counterpart of state_dict, checked before anything changes."""
        self.check_whole("load_state_dict()")
        self.synchronize()
        load_states(self._updater, self._world, self.loss_scale, state_dict)
        for group in self._schedule.update_order():
            self._schedule.renew(group)

    def retire(self) -> None:
        """The model is an ordinary one again: there are no shards left to update."""
        self._is_retired = True

    def __repr__(self) -> str:
        return f"ZeroOptimizer({self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError("a prepared optimizer cannot be copied or pickled: use zerostd.save, or its state_dict()")
