"""Hooks on the user's modules: the only place where zerostd enters their forward and backward.

The root takes and returns the dtype it had before, whatever it computes in. A group is gathered before its modules'
forward and before their backward, and released after. Every hook can be removed; then nothing of zerostd is left on the
module.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerostd.compat import calls_of, in_transform, no_dynamo
from zerostd.monitoring.events import LoopPhase
from zerostd.monitoring.ledger import KeptGraphs
from zerostd.monitoring.texts import size_text
from zerostd.parameters import Group
from zerostd.parameters.prepared import LAST_HOOK
from zerostd.policy import Tier
from zerostd.scheduling.access import ParameterAccess
from zerostd.scheduling.activations import Passed
from zerostd.scheduling.backward import Backward
from zerostd.scheduling.tensors import LeftTensors, map_tensors, tensors_in
from zerostd.scheduling.turns import Turn

OnTensor = Callable[[torch.Tensor], torch.Tensor]


class Hooks:
    """Installs and removes everything on one prepared model. `before_forward` is called when the root is entered;
    `on_input` and `on_output` are applied to the floating-point tensors it takes and returns."""

    def __init__(
        self,
        root: nn.Module,
        backward: Backward,
        access: ParameterAccess,
        before_forward: Callable[[nn.Module, Any], None],
        on_input: OnTensor | None,
        on_output: OnTensor | None,
    ) -> None:
        self._root = weakref.ref(root)
        self.backward = backward
        self.gatherer = backward.gatherer
        self.activations = backward.activations
        self._before_forward = before_forward
        self._on_input = on_input
        self._on_output = on_output
        self._hooks: list[RemovableHandle] = []
        self._knows_groups = False  # whether groups have hooks
        self._of_root = [group for group in self.gatherer.groups if root in group.blueprint.modules]
        self._active = access.active
        self._recomputed: Group | None = None  # by activation checkpointing, in the backward that runs now
        self._depth = 0  # calls of the root, one inside the other
        self._graphs = KeptGraphs()
        self._left = LeftTensors()

    @property
    def _turn(self) -> Turn:
        return self.gatherer.turn

    @property
    def is_running(self) -> bool:
        """Whether a forward of the root runs."""
        return bool(self._depth)

    def install(self) -> None:
        """Register everything."""
        self.activations.install()
        self.renew()
        root = self._root()
        assert root is not None, "hooks of a model that has gone"
        self._add(root, self._before_root, self._after_root)
        for index, trained in enumerate(self.backward.trained):
            hook = functools.partial(_arrived, weakref.ref(self.backward), index)
            handle = trained.parameter.register_post_accumulate_grad_hook(hook)
            trained.parameter.__dict__[LAST_HOOK] = handle
            self._hooks.append(handle)

    def _add(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Call functions before and after a module's forward, the latter even if the forward failed."""
        self._hooks += (
            module.register_forward_pre_hook(no_dynamo(before), prepend=True, with_kwargs=True),
            module.register_forward_hook(no_dynamo(after), with_kwargs=True, always_call=True),
        )

    def renew(self) -> None:
        """Give hooks to groups, if they have none and something moves now. May be called inside the root's own hook,
        so the root's hooks stay as they are."""
        groups = self.gatherer.groups
        moves = any(group.is_in_slices or group.ends_in_backward for group in groups)
        if self._knows_groups or not (moves or self.activations.is_on):
            return
        self._knows_groups = True
        for group in groups:
            before = functools.partial(self._before_group, group)
            after = functools.partial(self._after_group, group)
            for module in [module for module in group.blueprint.modules if module is not self._root()]:
                self._add(module, before, after)

    def remove(self) -> None:
        """Leave the modules as they were."""
        self.activations.remove()
        while self._hooks:
            self._hooks.pop().remove()
        self._knows_groups = False

    def _before_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_transform():  # its parameters bring their values by themselves
            return self._cast_inputs(args, kwargs)
        self._turn.take(module)
        with self._turn:
            if self._depth and calls_of(module) < 2:  # an earlier call was interrupted: no hook saw its end
                self._depth = 0
                self._active.clear()
                self._turn.restart(module)
            self._depth += 1
            changed = None
            if self._depth == 1:  # else it calls itself: this is no new pass
                self._begin_forward(module, (args, kwargs))
                changed = self._cast_inputs(args, kwargs)
            if self._knows_groups:
                for group in self._of_root:
                    self._before_group(group, module, *(changed or (args, kwargs)))
        return changed

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        self.backward.abandon()
        if not self.backward.is_running:
            self.gatherer.wires.world.enter("forward")
            self._before_forward(module, inputs)
            self.gatherer.timer.mark(LoopPhase.FORWARD if torch.is_grad_enabled() else LoopPhase.OUTSIDE)
            self.activations.begin()
            self.gatherer.begin(LoopPhase.FORWARD)
            self._graphs.begin(self.backward.passes.num_steps)

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._on_input is None:
            return None
        return map_tensors(args, self._on_input), map_tensors(kwargs, self._on_input)

    def _after_root(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if in_transform():
            return None if self._on_output is None else map_tensors(output, self._on_output)
        if not self._turn.is_mine:  # it was refused
            return None
        with self._turn:
            self._turn.give()
            self._depth = max(0, self._depth - 1)
            if self._knows_groups:
                for group in self._of_root:
                    self._after_group(group, module, args, kwargs, output)
            return None if self._depth else self._end_forward(output)

    def _end_forward(self, output: Any) -> Any:
        self._active.clear()
        if not self.backward.is_running:
            self.gatherer.release_all(is_backward=False, but_kept=output is not None)  # None: it failed
            self.gatherer.timer.mark(LoopPhase.OUTSIDE)
        if output is None:
            self._explain(sys.exception())
            return None
        if self._on_output is not None:
            output = map_tensors(output, self._on_output)
        if torch.is_grad_enabled():
            hook = functools.partial(self._backward_begins, threading.current_thread())
            self._graphs.add(hook, self.gatherer.groups[-1].name)
            for tensor in tensors_in(output):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(hook)
        return output

    def _explain(self, error: BaseException | None) -> None:
        """Add to an error of torch's allocator the bytes that the model holds on the device, and what would help."""
        if isinstance(error, torch.OutOfMemoryError):
            held = self.gatherer.wires.ledger.memory().now.get(Tier.DEVICE.value, {})
            kinds = ", ".join(f"{kind.replace('_', ' ')} {size_text(size)}" for kind, size in held.items() if size)
            error.add_note(
                f"zerostd: apart from activations, the device holds {kinds or 'nothing'} of this model. Use fewer "
                "samples in a pass, Placement(activations='recompute'), or Budget(device=...), which plans what fits"
            )

    def _backward_begins(self, trainer: threading.Thread, grad: torch.Tensor) -> None:
        self.backward.begin(trainer)

    def _before_group(self, group: Group, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_transform():
            return
        with self._turn:
            self._turn.take(module)
            phase = LoopPhase.FORWARD
            if self.backward.is_running:
                phase = LoopPhase.BACKWARD
                self._let_go(group)
            self._active.append(group)
            self.gatherer.need(group, phase)
            if group.ends_in_backward and torch.is_grad_enabled():
                inputs = _signs_of_passing(args, kwargs)
                if inputs:
                    group.await_inputs(_InputsHook(inputs, self, group))
            self.activations.enter(group, module, (args, kwargs))

    def inputs_done(self, group: Group, forward: object) -> None:
        """Take note that backward has passed one forward."""
        with self._turn:
            group.inputs_arrived(forward)
            if self.backward.is_running:
                self.backward.done_with(group)

    def _after_group(self, group: Group, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_transform() or not self._turn.is_mine:
            return
        with self._turn:
            self._turn.give()
            self._end_group(group, module, (args, kwargs), output)

    def _end_group(self, group: Group, module: nn.Module, inputs: Any, output: Any) -> None:
        passed = self.activations.leave(group, module, output)
        if group in self._active:
            del self._active[len(self._active) - 1 - self._active[::-1].index(group)]
        moving = [needed for needed in group.needed if needed.gives_back]
        if not moving and passed is None:
            return
        made = list(_made_by(inputs, output, self._left.on(module))) if torch.is_grad_enabled() else []
        if passed is not None:
            for tensor in made[:1]:
                tensor.register_hook(functools.partial(_passed_back, weakref.ref(self), passed))
        if not moving:
            return
        hook = functools.partial(self.before_backward, group)
        self._graphs.add(hook, group.name)
        for tensor in made:
            tensor.register_hook(hook)
        if self.backward.is_running:
            self._recomputed = group  # its backward comes next, unless another one is recomputed first
        elif module is group.blueprint.modules[-1]:
            for moved in moving:
                if not moved.in_backward and moved not in self._active:
                    self.gatherer.end_use(moved)

    def _let_go(self, but: Group) -> None:
        """Release the group that was recomputed last, if its backward has not begun."""
        group = self._recomputed
        self._recomputed = None
        if group is not None and group is not but and not group.in_backward and group not in self._active:
            self.gatherer.release(group)

    def before_backward(self, group: Group, grad: torch.Tensor) -> None:
        """Gather a group whose backward comes next."""
        with self._turn:
            self.backward.begin()
            for needed in group.needed:
                needed.begin_backward()
            self.gatherer.need(group, LoopPhase.BACKWARD)


def _arrived(backward: weakref.ref[Backward], index: int, parameter: nn.Parameter) -> None:
    """Handle a gradient that has arrived. Parameters hold this hook in C++, unseen by Python's garbage collector: its
    references are weak."""
    alive = backward()
    if alive is not None:
        alive.arrived(alive.trained[index], parameter)


def _passed_back(hooks: weakref.ref[Hooks], passed: Passed, grad: torch.Tensor) -> None:
    """Handle a gradient that reached an output; one that forward itself asks for is ignored. References are weak."""
    alive = hooks()
    if alive is not None and not alive._depth:
        activations, size = passed
        alive.activations.offloader.pass_back(activations(), size)


def _signs_of_passing(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the inputs of a forward that tell when backward has passed it. Inputs inside an object, such as keys and
    values that other blocks left in a cache, are used only if there are no other inputs."""
    direct = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.requires_grad]
    return direct or [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]


class _InputsHook:
    """A hook on the inputs of one forward of a group, until backward has passed it.

    [Note: passed] Of the nodes of a graph that are ready, autograd runs the one that was made last. When it comes to
    the node that made an input, it has run all nodes of the forward that took this input. So the first input is enough.
    Other inputs, such as a position bias, may be shared with earlier blocks and get their gradients much later. Leaves
    tell less, since their nodes run as soon as they can: all leaves must have their gradients.

    torch's own register_multi_grad_hook would hold the graph that it waits for, which then is never freed if its
    backward does not run.
    """

    def __init__(self, inputs: list[torch.Tensor], hooks: Hooks, group: Group) -> None:
        self._hooks = hooks
        self._group = group
        made = [tensor for tensor in inputs if tensor.grad_fn is not None]
        self._num_missing = 1 if made else len(inputs)
        inputs = made or inputs
        self._removables = [tensor.register_hook(self) for tensor in inputs]

    def __call__(self, grad: torch.Tensor) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            for removable in self._removables:
                removable.remove()
            self._hooks.inputs_done(self._group, self)


def _made_by(inputs: Any, output: Any, left: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a forward made and backward comes back through: its output, and tensors that it left on
    modules. A tensor that a forward takes and passes on, such as a position bias, was made by another forward."""
    taken = {id(tensor) for tensor in tensors_in(inputs)}
    for tensor in (*tensors_in(output), *left):
        if tensor.requires_grad and tensor.grad_fn is not None and id(tensor) not in taken:
            yield tensor
