"""Undo prepare: give parameters their full values, and remove everything of zerostd from the model. `zerostd.release`
calls it on all ranks."""

from __future__ import annotations

import torch

from zerostd.checkpointing.full_state import full_values
from zerostd.checkpointing.saving import finish_saves
from zerostd.engine.runtime import Runtime


@torch.no_grad()
def release_model(runtime: Runtime) -> None:
    """Make the model an ordinary one again, with parameters in the dtypes they had."""
    with runtime.turn:
        runtime.wait_gradients()
        runtime.gradients.check_unlocked("zerostd.release()")
        runtime.gatherer.control.confirm("zerostd.release()")
        finish_saves(runtime)
        runtime.hooks.remove()
        runtime.guards.remove()
        runtime.finish_updates()
        values = {p: value.clone() for group in runtime.groups for p, value in full_values(runtime, group)}
        runtime.access.remove()
        for group in runtime.groups:
            for flat in group.flats:
                for index, parameter in enumerate(flat.parameters):
                    flat.set_values(index, values.pop(parameter))
        for parameter in runtime.model.parameters():
            parameter.grad = None
        if runtime.late_optimizer is not None:
            runtime.late_optimizer.end()
        if runtime.optimizer is not None:
            runtime.optimizer.retire()
        runtime.disown()
