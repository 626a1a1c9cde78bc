"""Let a model sleep: its state on the device moves to host memory, and back when the model wakes.

For loops in which two models take turns on one device, as the trainer and the generator of reinforcement learning do.
Parameters, states and gradients keep their tensors and lose only the memory, so nothing has to be built again, and
values come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from zerostd.engine.runtime import Runtime, runtime_of
from zerostd.errors import MisuseError
from zerostd.policy import Kind

ASLEEP = "the model sleeps, so its parameters are not on the device: call zerostd.wake(model) first"


@torch.no_grad()
def sleep(model: nn.Module) -> None:
    """Move parameters, gradients and optimizer states from the device to host memory, until `zerostd.wake(model)`.

    Another model can then use the device. The host memory stays allocated for the next sleep. Using a sleeping model
    raises an error. Buffers of modules stay on the device. On several ranks, each rank sleeps independently.

    Args:
        model: The module that prepare or dispatch was called on.

    Raises:
        PrepareError: The host has too little memory; the message has the numbers. Nothing was changed.
        MisuseError: The model sleeps already, or a forward, a backward or `zerostd.gathered` uses it.
    """
    runtime = runtime_of(model, "sleep")
    if runtime.resources.aside.is_out:
        raise MisuseError("zerostd.sleep of a model that sleeps already: call zerostd.wake(model) first")
    with runtime.turn:
        _check_idle(runtime)
        runtime.wait_gradients()
        if runtime.gradients.refusal is not None:
            raise MisuseError(f"zerostd.sleep(): {runtime.gradients.refusal}")
        runtime.finish_updates()
        runtime.gatherer.wait_all()
        runtime.gatherer.drop_kept(runtime.groups)
        runtime.access.forget()
        runtime.gradients.give_back()
        runtime.resources.staging.give_back()
        runtime.resources.aside.put(list(_kept(runtime)), list(_scratch(runtime)))
        for group in runtime.groups:
            group.hide()
        runtime.gradients.refusal = ASLEEP
        runtime.turn.refusal = ASLEEP
    if runtime.world.device.type != "cpu":
        torch.accelerator.empty_cache()


@torch.no_grad()
def wake(model: nn.Module) -> None:
    """Move the state of a sleeping model back to the device, bit for bit.

    Args:
        model: The module that sleeps.

    Raises:
        torch.OutOfMemoryError: The device has too little memory; the model still sleeps.
        MisuseError: The model does not sleep.
    """
    runtime = runtime_of(model, "wake")
    aside = runtime.resources.aside
    if not aside.is_out:
        raise MisuseError("zerostd.wake of a model that does not sleep: call zerostd.sleep(model) first")
    runtime.turn.refusal = None
    try:
        with runtime.turn:
            aside.bring()
    except BaseException:
        runtime.turn.refusal = ASLEEP
        raise
    runtime.gradients.refusal = None
    for group in runtime.groups:
        group.show()


def _check_idle(runtime: Runtime) -> None:
    if runtime.backward.is_running:
        raise MisuseError("zerostd.sleep inside a backward pass: call it when backward has returned")
    if runtime.hooks.is_running:
        raise MisuseError("zerostd.sleep inside a forward of the model: call it when the forward has returned")
    if any(group.num_pins for group in runtime.groups):
        raise MisuseError("zerostd.sleep inside zerostd.gathered(): leave the context first")


def _kept(runtime: Runtime) -> Iterator[tuple[Kind, torch.Tensor]]:
    """Yield memory whose values must be kept; several tensors may share memory."""
    for group in runtime.groups:
        for flat in group.flats:
            if not flat.gives_back:
                yield Kind.PARAMETERS, flat.full
            if flat.secondary is not None:
                yield Kind.BUFFERS, flat.secondary.values
            if flat.gradient is not None:
                for tensor in flat.gradient.memories:
                    yield Kind.GRADIENTS, tensor
    yield from runtime.resources.allocator.device_tensors()
    if runtime.optimizer is not None:
        for tensor in runtime.optimizer.updater.resident.long_states():
            yield Kind.OPTIMIZER_STATES, tensor


def _scratch(runtime: Runtime) -> Iterator[torch.Tensor]:
    """Yield working memory, whose values need not be kept."""
    if runtime.optimizer is not None:
        yield from runtime.optimizer.updater.scratch_memory()
