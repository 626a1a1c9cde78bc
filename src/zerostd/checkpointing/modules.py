"""What modules save: the names of their tensors, persistent buffers, and extra states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zerostd.checkpointing.storage.manifest import StoreTensor, encode_value
from zerostd.compat import persistent_buffers
from zerostd.errors import CheckpointError


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by name, each under the first name of its module."""
    return {
        f"{prefix}.{short}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        for short, buffer in persistent_buffers(module).items()
    }


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, object]]:
    """Yield every name in a state_dict, its tensor and owner: the parameter, or a buffer's module and short name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, parameter
    for prefix, module in model.named_modules(remove_duplicate=False):
        for short, buffer in persistent_buffers(module).items():
            yield f"{prefix}.{short}".lstrip("."), buffer, (module, short)


def extra_states(model: nn.Module, store: StoreTensor) -> dict[str, Any]:
    """Return what modules give in `get_extra_state`, by name, as JSON; `store` takes the tensors in it."""
    states: dict[str, Any] = {}
    for name, module in modules_with_own(model, "get_extra_state").items():
        where = f"get_extra_state() of module {name!r} ({type(module).__name__})"
        try:
            state = module.get_extra_state()
        except Exception as error:  # whatever the user's code raises
            raise CheckpointError(f"{where} failed: {type(error).__name__}: {error}") from error
        states[name] = encode_value(state, store, where)
    return states


def modules_with_own(model: nn.Module, method: str) -> dict[str, nn.Module]:
    """Return the modules that override a method of nn.Module, by name."""
    inherited = getattr(nn.Module, method)
    return {name: module for name, module in model.named_modules() if getattr(type(module), method) is not inherited}
