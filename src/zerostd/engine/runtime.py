"""The parts of one prepared model, wired together. `prepare` makes it; the other public functions ask it."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerostd.communication import NodeWires, Wires, World
from zerostd.communication.peers import STEP
from zerostd.compat import no_torch_function, runs_in_ddp
from zerostd.engine.agreeing import StepAgreement
from zerostd.engine.settings import Settings
from zerostd.errors import MisuseError
from zerostd.monitoring import Ledger, Memory
from zerostd.monitoring.events import LoopPhase
from zerostd.optimizers.gradients import Gradients
from zerostd.optimizers.loss_scale import LossScale, scale_gradient
from zerostd.optimizers.optimizer import LateOptimizer, ZeroOptimizer
from zerostd.parameters import Flat, Group
from zerostd.parameters.blueprints import MARK, OWNER, Blueprint, RootCasts, root_casts
from zerostd.parameters.disk_gradient import Windows
from zerostd.parameters.host_gradient import Staging
from zerostd.parameters.observing import StepObserver
from zerostd.parameters.prepared import GRAD
from zerostd.policy import Kind
from zerostd.scheduling.access import ParameterAccess
from zerostd.scheduling.activations import Activations
from zerostd.scheduling.backward import Backward
from zerostd.scheduling.gathering import Gatherer
from zerostd.scheduling.guards import Guards
from zerostd.scheduling.hooks import Hooks
from zerostd.scheduling.reducing import Reducer, TrainedParameter
from zerostd.scheduling.tensors import tensors_in
from zerostd.scheduling.turns import Turn
from zerostd.sharding import Interval
from zerostd.tiers import Aside, Streams, TierAllocator, Uploader
from zerostd.tiers.shared_tensors import shared_bytes

OnTensor = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Resources:
    """The memory, streams and threads of one prepared model, which its groups and updates use."""

    allocator: TierAllocator  # memory of each tier
    streams: Streams  # queues of work on the device
    uploader: Uploader  # brings parameters that are kept elsewhere to the device
    staging: Staging  # buffers on the device for gradients that are kept on the host
    windows: Windows  # host memory for gradients that are kept on disk
    aside: Aside  # where everything goes while the model sleeps
    num_threads: int  # for updates on the CPU
    node_wires: NodeWires | None = None  # between ranks that keep secondary shards


@dataclass(frozen=True)
class Owner:
    """Stands for a prepared model in its modules, which alone hold this object. When the last of them is deleted,
    channels, threads, files and host memory are freed at once, without the garbage collector."""

    runtime: weakref.ref[Runtime]


class Runtime:
    """One prepared model. It is also the `Schedule` of the optimizer."""

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
        self._model = weakref.ref(model)
        self.gatherer = gatherer
        self.resources = resources
        self.settings = settings
        self.original_dtypes = original_dtypes
        self.optimizer = None
        self.late_optimizer = None
        reducer = Reducer(self.wires, gatherer.control)
        loss_scale = LossScale() if settings.precision.scales_loss else None
        self.gradients = Gradients(self.groups, self.wires, loss_scale, reducer.wait)
        self.observers = [self.gradients]
        self.backward = Backward(
            self._trained(), gatherer, reducer, activations, self.observers, accumulate=settings.accumulate
        )
        self.agreement = StepAgreement(self.backward, self.gradients)
        self.observers.append(self.agreement)
        casts = root_casts(settings.precision, original_dtypes.values())
        self.access = ParameterAccess(gatherer, self.gradients)
        self.hooks = Hooks(
            model, self.backward, self.access, self._before_forward, self._on_input(casts), self._on_output(casts)
        )
        self.guards = Guards(model, self.access, self.finish_updates)
        self._buffers_moved = True  # rank 0's buffers have to go to all before the next forward

    @property
    def has_states_off(self) -> bool:
        """Whether optimizer states are off the device."""
        return self.optimizer is not None and self.optimizer.updater.offload is not None

    @property
    def model(self) -> nn.Module:
        """The user's module, which the runtime does not keep alive."""
        model = self._model()
        if model is None:
            raise MisuseError("the model of this optimizer no longer exists: keep a reference to the model")
        return model

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.gatherer.groups

    @property
    def flats(self) -> list[Flat]:
        return [flat for group in self.groups for flat in group.flats]

    @property
    def trained_flats(self) -> list[Flat]:
        return [flat for group in self.groups for flat in group.trainable]

    def parameters(self) -> Iterator[tuple[Flat, nn.Parameter, Interval]]:
        """Yield every parameter with its flat and its interval there, which has its name."""
        for flat in self.flats:
            for parameter, interval in zip(flat.parameters, flat.layout.intervals, strict=True):
                yield flat, parameter, interval

    @property
    def blueprints(self) -> list[Blueprint]:
        return [group.blueprint for group in self.groups]

    @property
    def wires(self) -> Wires:
        return self.gatherer.wires

    @property
    def world(self) -> World:
        return self.wires.world

    @property
    def loss_scale(self) -> LossScale | None:
        """Of fp16; None: gradients are not scaled."""
        return self.gradients.loss_scale

    @property
    def ledger(self) -> Ledger:
        return self.wires.ledger

    def memory(self) -> Memory:
        """Return the bytes of the ledger, with the sizes of coded and of shared state."""
        coded: dict[str, tuple[int, int]] = {}
        for flat in self.flats:
            for kind, size, held in flat.coded_bytes():
                before = coded.get(kind.value, (0, 0))
                coded[kind.value] = (before[0] + size, before[1] + held)
        shared = shared_bytes(flat.rest for flat in self.flats)
        return self.ledger.memory(coded, {Kind.PARAMETERS.value: shared} if any(shared) else {})

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
        self.resources.windows.fit()
        owner = Owner(weakref.ref(self))
        for close in (self.world.close, self.resources.allocator.close_aside):
            weakref.finalize(owner, _close_in, os.getpid(), close)
        for module in self.model.modules():
            module.__dict__[OWNER] = owner
        self.access.install()
        self.hooks.install()
        self.guards.install()

    def disown(self) -> None:
        """Detach from the modules, and free their state off the device."""
        for module in self.model.modules():
            module.__dict__.pop(OWNER, None)
        self.world.close()
        self.resources.allocator.close()
        for observer in self.observers:
            observer.after_release()

    def _on_input(self, casts: RootCasts | None) -> OnTensor | None:
        if casts is None and self.loss_scale is None:
            return None

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            if self.loss_scale is not None:
                tensor = scale_gradient(tensor, 1.0 / self.loss_scale.value)
            return tensor.to(casts.inside) if casts is not None and tensor.dtype in casts.taken else tensor

        return enter

    def _on_output(self, casts: RootCasts | None) -> OnTensor | None:
        if casts is None and self.loss_scale is None:
            return None

        def leave(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.to(casts.returned) if casts is not None and tensor.dtype == casts.inside else tensor
            if self.loss_scale is not None and tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(functools.partial(torch.mul, other=self.loss_scale.value))
            return tensor

        return leave

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Let the planner act first. Then apply DDP's rule for buffers: after a forward that may have changed
        them, all ranks take rank 0's."""
        if runs_in_ddp(model):
            raise MisuseError(
                "the prepared model runs inside DistributedDataParallel, which would reduce gradients a second time: "
                "delete the line that wraps it, and write model where the script says model.module"
            )
        if self.optimizer is not None and self.gradients.locked is not None:
            self.optimizer.check_consistent("a forward")
        self.access.forget()
        self.gradients.give_back()
        if model.training and torch.is_grad_enabled():
            self.backward.passes.input_bytes = sum(tensor.nbytes for tensor in tensors_in(inputs))
            for observer in self.observers:
                observer.before_forward()
        self.share_buffers()
        self._buffers_moved = model.training and torch.is_grad_enabled() and self.backward.is_syncing

    def share_buffers(self) -> None:
        """Let all ranks take rank 0's buffers, if a forward may have changed them."""
        if self._buffers_moved and self.world.size > 1:
            with self.world.at("the broadcast of buffers"):
                self.wires.broadcast(list(self.model.buffers()))
        self._buffers_moved = False

    # Schedule, as the optimizer sees it

    @property
    def turn(self) -> Turn:
        """The right to use the model: one thread has it, and no signal interrupts it."""
        return self.gatherer.turn

    def wait_gradients(self) -> None:
        """Return when all gradients have landed. A failed pass is dropped, and its memory is freed."""
        self.backward.abandon()
        self.backward.reducer.wait()

    def update_order(self) -> list[Group]:
        """Return groups in the order in which the next forward needs them."""
        return self.backward.update_order

    def renew(self, group: Group) -> None:
        """Note that the group's masters have changed."""
        if self.backward.group_updates is not None:
            self.backward.group_updates.updated(group)
        self.access.forget()
        self.gatherer.renew(group)

    def stepped(self) -> None:
        """Note that a step was taken."""
        self.backward.passes.step()
        self.gatherer.timer.mark(LoopPhase.OUTSIDE)
        for observer in self.observers:
            observer.after_step()

    def finish_updates(self) -> None:
        """Return when updates that continue after the step are done."""
        if self.optimizer is not None:
            self.optimizer.synchronize()
        for group in self.groups:
            group.wait_readers()
            group.commit_edits()

    def check_step(self) -> None:
        """Begin a step; raise if it would lose gradients, or change held values."""
        self.gatherer.check_unpinned(self.groups)
        self.gatherer.timer.mark(LoopPhase.STEP)
        self.world.enter(STEP)
        if self.backward.has_unsynced:
            raise MisuseError(
                "optimizer.step() after backward passes under zerostd.no_sync that no later pass has reduced: run "
                "the last backward pass of a step outside no_sync. With servers, prepare(accumulate=...) says how many "
                "passes make a step"
            )
        if self.world.is_worker and any(flat.awaits_commit for flat in self.trained_flats):
            raise MisuseError(
                "parameters were changed on a worker, but the servers' values would replace them: change them "
                "before zerostd.prepare, or load a checkpoint"
            )
        num_gradients = 0
        with no_torch_function():
            for trained in self.backward.trained:
                grad = GRAD.__get__(trained.parameter)
                num_gradients += grad is not None
                if grad is not None and grad is not trained.handle:
                    raise MisuseError(
                        f"the gradient of {trained.handle.of!r} was replaced by a tensor: a prepared model keeps "
                        "gradients sharded, so the assigned tensor would be ignored. Change the loss instead"
                    )
        self.guards.check_frozen()
        if self.world.size > 1:
            self.agreement.check_step(num_gradients)
        for group in self.groups:
            group.drop_secondary()


def owner_of(module: nn.Module) -> Runtime:
    """Return the runtime of a prepared model or of a module inside one."""
    owner = vars(module).get(OWNER) if isinstance(module, nn.Module) else None
    runtime = owner.runtime() if isinstance(owner, Owner) else None
    if runtime is None:
        raise MisuseError("zerostd.gathered needs a prepared model or a module inside one")
    return _entered(runtime, "gathered")


def runtime_of(model: nn.Module, call: str) -> Runtime:
    """Return the runtime that prepare left on a model; `call` is what the user asked for."""
    runtime = vars(model).get(MARK) if isinstance(model, nn.Module) else None
    if not isinstance(runtime, Runtime):
        raise MisuseError(f"zerostd.{call} needs the module that zerostd.prepare was called on")
    return _entered(runtime, call)


def _entered(runtime: Runtime, call: str) -> Runtime:
    """Return the runtime, which the user calls in the process that made it."""
    runtime.turn.check_process()
    if call not in ("memory", "sleep", "wake"):
        runtime.turn.check_awake()
    runtime.world.enter(f"zerostd.{call}()")
    return runtime


def _close_in(process: int, close: Callable[[], None]) -> None:
    """Close in the process that prepared the model. A forked child has no threads, and its copies end with it."""
    if process == os.getpid():
        close()
