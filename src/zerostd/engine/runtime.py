"""The parts of one prepared model, wired together. `prepare` makes it; the other public functions ask it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zerostd.communication import Wires, World
from zerostd.compat import no_torch_function
from zerostd.engine.settings import Settings
from zerostd.errors import MisuseError
from zerostd.monitoring import Ledger
from zerostd.monitoring.events import LoopPhase
from zerostd.optimizers.gradients import Gradients, LossScale, scale_gradient
from zerostd.optimizers.optimizer import LateOptimizer, ZeroOptimizer
from zerostd.parameters import Group
from zerostd.parameters.blueprints import MARK, OWNER, Blueprint
from zerostd.parameters.host_gradient import Staging
from zerostd.parameters.observing import StepObserver
from zerostd.policy import root_casts
from zerostd.scheduling.access import ParameterAccess
from zerostd.scheduling.activations import Activations
from zerostd.scheduling.backward import Backward
from zerostd.scheduling.gathering import Gatherer
from zerostd.scheduling.guards import Guards
from zerostd.scheduling.hooks import Hooks
from zerostd.scheduling.reducing import Reducer, TrainedParameter
from zerostd.tiers import Streams, TierAllocator, Uploader

Casts = tuple[torch.dtype, torch.dtype] | None
OnTensor = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Resources:
    """The memory, streams and threads of one prepared model: what groups are built on and updates run on."""

    allocator: TierAllocator  # memory of each tier
    streams: Streams  # queues of work on the device
    uploader: Uploader  # brings parameters that rest elsewhere to the device
    staging: Staging  # buffers on the device for gradients that rest on the host
    num_threads: int  # for updates on the CPU


class Runtime:
    """One prepared model. Also the `Schedule` its optimizer sees."""

    model: nn.Module
    settings: Settings  # with everything that was left open decided
    original_dtypes: dict[nn.Parameter, torch.dtype]  # what release and full_state_dict give back
    optimizer: ZeroOptimizer | None
    late_optimizer: LateOptimizer | None  # waits for an optimizer that is made after prepare
    observers: list[StepObserver]

    def __init__(
        self,
        model: nn.Module,
        gatherer: Gatherer,
        activations: Activations,
        resources: Resources,
        *,
        settings: Settings,
        original_dtypes: dict[nn.Parameter, torch.dtype],
    ) -> None:
        self.model = model
        self.gatherer = gatherer
        self.resources = resources
        self.settings = settings
        self.original_dtypes = original_dtypes
        self.optimizer = None
        self.late_optimizer = None
        self.loss_scale = LossScale() if settings.precision.scales_loss else None
        reducer = Reducer(self.wires, gatherer.control)
        self.gradients = Gradients(self.groups, self.wires, self.loss_scale, reducer.wait)
        self.observers = [self.gradients]
        self.backward = Backward(
            self._trained(), gatherer, reducer, activations, self.observers, accumulate=settings.accumulate
        )
        casts = root_casts(settings.precision, original_dtypes.values())
        self.access = ParameterAccess(gatherer, self.gradients)
        self.hooks = Hooks(
            model, self.backward, self.access, self._before_forward, self._on_input(casts), self._on_output(casts)
        )
        self.guards = Guards(model, self.access, self.finish_updates)
        self._buffers_moved = True  # rank 0's buffers have to go to all before the next forward

    @property
    def groups(self) -> tuple[Group, ...]:
        """In the order of the model."""
        return self.gatherer.groups

    @property
    def blueprints(self) -> list[Blueprint]:
        """The blueprints that the groups were made from."""
        return [group.blueprint for group in self.groups]

    @property
    def wires(self) -> Wires:
        """Between the ranks."""
        return self.gatherer.wires

    @property
    def world(self) -> World:
        """This process among the others."""
        return self.wires.world

    @property
    def ledger(self) -> Ledger:
        """The book of bytes."""
        return self.wires.ledger

    def _trained(self) -> list[TrainedParameter]:
        trained = []
        for group in self.groups:
            for flat in group.trainable:
                for index, (parameter, interval) in enumerate(zip(flat.parameters, flat.layout.intervals, strict=True)):
                    handle = self.gradients.make_handle(interval.name, parameter)
                    trained.append(TrainedParameter(group, flat, index, parameter, handle))
        return trained

    def install(self) -> None:
        """Enter the model's forward and backward."""
        self.backward.reducer.reserve(self.groups)
        weakref.finalize(self.model, self.world.close)
        weakref.finalize(self.model, self.resources.allocator.close_aside)
        self.access.install()
        self.hooks.install()
        self.guards.install()

    def _on_input(self, casts: Casts) -> OnTensor | None:
        if casts is None and self.loss_scale is None:
            return None

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            if self.loss_scale is not None:
                tensor = scale_gradient(tensor, 1.0 / self.loss_scale.value)
            return tensor.to(casts[1]) if casts is not None and tensor.dtype == casts[0] else tensor

        return enter

    def _on_output(self, casts: Casts) -> OnTensor | None:
        if casts is None and self.loss_scale is None:
            return None

        def leave(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.to(casts[0]) if casts is not None and tensor.dtype == casts[1] else tensor
            if self.loss_scale is not None and tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(functools.partial(torch.mul, other=self.loss_scale.value))
            return tensor

        return leave

    def _before_forward(self, model: nn.Module) -> None:
        """Whoever looks after the plan comes first. Then DDP's rule for buffers: after a forward that may have changed
        them, all ranks take rank 0's."""
        if self.optimizer is not None and self.gradients.locked is not None:
            self.optimizer.check_consistent("a forward")
        self.access.forget()
        if model.training and torch.is_grad_enabled():
            for observer in self.observers:
                observer.before_forward()
        self.share_buffers()
        self._buffers_moved = model.training and torch.is_grad_enabled() and self.backward.is_syncing

    def share_buffers(self) -> None:
        """Let all ranks take rank 0's buffers, if a forward may have changed them."""
        if self._buffers_moved and self.world.size > 1:
            self.wires.broadcast(list(self.model.buffers()))
        self._buffers_moved = False

    # Schedule, as the optimizer sees it

    def wait_gradients(self) -> None:
        """Return when all gradients have landed. A pass that failed is given up, and its memory with it."""
        self.backward.abandon()
        self.backward.reducer.wait()

    def update_order(self) -> list[Group]:
        """Groups, those the next forward needs first in front."""
        return self.backward.update_order

    def renew(self, group: Group) -> None:
        """The group's masters have changed."""
        self.access.forget()
        self.gatherer.renew(group)

    def stepped(self) -> None:
        """A step was taken."""
        self.backward.passes.step()
        self.gatherer.timer.mark(LoopPhase.OUTSIDE)
        for observer in self.observers:
            observer.after_step()

    def finish_updates(self) -> None:
        """Return when updates that go on after the step are done."""
        if self.optimizer is not None:
            self.optimizer.synchronize()
        for group in self.groups:
            group.wait_readers()
            group.commit_edits()

    def check_step(self) -> None:
        """A step begins; raise if it would lose gradients."""
        self.gatherer.timer.mark(LoopPhase.STEP)
        if any(group.num_pins for group in self.groups):
            raise MisuseError(
                "optimizer.step() inside zerostd.gathered() or average.applied(): leave the context before the step"
            )
        if self.backward.has_unsynced:
            raise MisuseError(
                "optimizer.step() after backward passes under zerostd.no_sync that no later pass has reduced: run "
                "the last backward pass of a step outside no_sync"
            )
        with no_torch_function():
            for trained in self.backward.trained:
                if trained.parameter.grad is not None and trained.parameter.grad is not trained.handle:
                    raise MisuseError(
                        f"the gradient of {trained.handle.of!r} was replaced by a tensor: a prepared model keeps "
                        "gradients sharded, so what is assigned to p.grad would be ignored. Change the loss instead"
                    )
        self.guards.check_frozen()


def owner_of(module: nn.Module) -> Runtime:
    """Return the runtime of a prepared model or of a module inside one."""
    root = module.__dict__.get(OWNER, lambda: None)()
    if root is None:
        raise MisuseError("zerostd.gathered needs a prepared model or a module inside one")
    return runtime_of(root, "gathered")


def runtime_of(model: nn.Module, call: str) -> Runtime:
    """Return the runtime that prepare left on a model; `call` is what the user asked for."""
    runtime = model.__dict__.get(MARK)
    if not isinstance(runtime, Runtime):
        raise MisuseError(f"zerostd.{call} needs the module that zerostd.prepare was called on")
    return runtime
