"""What zerostd keeps for one prepared model: the parts, wired together. The front door (api.py) makes and asks it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zerostd.checkpointing.storage.writing import Saving
from zerostd.communication import Control, Wires, World
from zerostd.errors import MisuseError
from zerostd.monitoring import Ledger
from zerostd.monitoring.loop_timer import LoopPhase
from zerostd.optimizers.adopting import Adoption
from zerostd.optimizers.gradients import Gradients
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.scaling import LossScale, scale_gradient
from zerostd.parameters import GradientHandle, Group
from zerostd.parameters.blueprints import Blueprint
from zerostd.parameters.checking import MARK
from zerostd.preparing.groups import Ground
from zerostd.preparing.settings import Settings
from zerostd.scheduling.activations import Activations
from zerostd.scheduling.backward import Backward
from zerostd.scheduling.gathering import Gatherer
from zerostd.scheduling.guards import Guards
from zerostd.scheduling.hooks import Hooks, RootRules
from zerostd.scheduling.reducing import Reducer, Slot
from zerostd.tiers import Streams, TierAllocator, Uploader

__all__ = ["Runtime", "runtime_of"]

PREFETCH_DEPTH = 1

Casts = tuple[torch.dtype, torch.dtype] | None
OnTensor = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Roads:
    """The tiers of one prepared model and the ways between them."""

    ground: Ground
    inbound: Uploader
    num_threads: int  # for updates on the processor
    found: tuple[Blueprint, ...]  # of the groups, in their order

    @property
    def stores(self) -> TierAllocator:
        """Where bytes rest."""
        return self.ground.stores

    @property
    def streams(self) -> Streams:
        """Queues of work on the device."""
        return self.ground.streams


@dataclass
class Listeners:
    """Who is told of what training does."""

    forward: Callable[[], None] = lambda: None  # before each forward of training
    step: Callable[[], None] = lambda: None  # after each step


class Runtime:
    """One prepared model. Also the `Schedule` its optimizer sees."""

    model: nn.Module
    original_dtypes: dict[nn.Parameter, torch.dtype]  # what release and full_state_dict give back
    optimizer: ZeroOptimizer | None
    settings: Settings  # with everything that was left open decided

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        wires: Wires,
        control: Control,
        roads: Roads,
        *,
        settings: Settings,
        original_dtypes: dict[nn.Parameter, torch.dtype],
    ) -> None:
        self.model = model
        self.roads = roads
        self.optimizer = None
        self.adoption: Adoption | None = None
        self.original_dtypes = original_dtypes
        self.settings = settings
        self.loss_scale = LossScale() if settings.precision.scales_loss else None
        self.gatherer = Gatherer(tuple(groups), wires, control, roads.inbound, prefetch_depth=PREFETCH_DEPTH)
        self.gradients = Gradients(self.groups, wires, self.loss_scale)
        self.backward = Backward(self._slots(), self.gatherer, Reducer(wires, control, wires.ledger), control)
        self.gradients.settle = self.backward.settle
        self.backward.on_begin = self.gradients.forget_norms
        self.guards = Guards(model, self.gatherer)
        self.guards.finish_updates = self.finish_updates
        self.saving: Saving | None = None  # a checkpoint on its way
        self.listeners = Listeners()
        self._buffers_moved = True  # rank 0's buffers have to go to all before the next forward

    @property
    def groups(self) -> tuple[Group, ...]:
        """In the order of the model."""
        return self.gatherer.groups

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

    def _slots(self) -> list[Slot]:
        slots = []
        for group in self.groups:
            for flat in group.trainable:
                for index, (parameter, interval) in enumerate(zip(flat.parameters, flat.layout.intervals, strict=True)):
                    handle = GradientHandle(interval.name, parameter, self.gradients)
                    self.gradients.add(interval.name, flat, index)
                    slots.append(Slot(group, flat, index, parameter, handle))
        return slots

    def install(self, casts: Casts, activations: Activations) -> None:
        """Enter the model's forward and backward. `casts`: (outside, inside) dtypes of the root, if they differ."""
        self.backward.reducer.reserve(self.groups)
        rules = RootRules(self._on_input(casts), self._on_output(casts), self._before_forward)
        weakref.finalize(self.model, self.world.close)
        weakref.finalize(self.model, self.roads.stores.close_aside)
        self.backward.on_end = activations.settle
        self.hooks = Hooks(self.model, self.gatherer, self.backward, activations, rules)
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
        if model.training and torch.is_grad_enabled():
            self.listeners.forward()
        if self._buffers_moved and self.world.size > 1:
            self.wires.broadcast(list(model.buffers()))
        self._buffers_moved = model.training and torch.is_grad_enabled() and self.backward.is_syncing

    # Schedule, as the optimizer sees it

    def settle(self) -> None:
        """Return when all gradients have landed."""
        self.backward.settle()

    def update_order(self) -> list[Group]:
        """Groups, those the next forward needs first in front."""
        return self.backward.update_order

    def renew(self, group: Group) -> None:
        """The group's masters have changed."""
        self.gatherer.renew(group)

    def stepped(self) -> None:
        """A step was taken."""
        self.backward.passes.step()
        if self.saving is not None:
            self.saving.poll()
            self.saving = None if self.saving.is_finished else self.saving
        self.gatherer.watch.mark(LoopPhase.OUTSIDE)
        self.listeners.step()

    def finish_updates(self) -> None:
        """Return when updates that go on after the step are done."""
        if self.optimizer is not None:
            self.optimizer.synchronize()
        for group in self.groups:
            group.kept.wait()

    def check_step(self) -> None:
        """A step begins; raise if it would lose gradients."""
        self.gatherer.watch.mark(LoopPhase.STEP)
        if self.backward.has_unsynced:
            raise MisuseError(
                "optimizer.step() after backward passes under zerostd.no_sync that no later pass has reduced: run "
                "the last backward pass of a step outside no_sync"
            )
        for slot in self.backward.slots:
            if slot.parameter.grad is not None and slot.parameter.grad is not slot.handle:
                raise MisuseError(
                    f"the gradient of {slot.handle.of!r} was replaced by a tensor: a prepared model keeps gradients "
                    "sharded, so what is assigned to p.grad would be ignored. Change the loss instead"
                )
        self.guards.check_frozen()


def runtime_of(model: nn.Module, call: str) -> Runtime:
    """What prepare left on a model; `call` is what the user asked for."""
    runtime = model.__dict__.get(MARK)
    if not isinstance(runtime, Runtime):
        raise MisuseError(f"zerostd.{call} needs the module that zerostd.prepare was called on")
    return runtime
