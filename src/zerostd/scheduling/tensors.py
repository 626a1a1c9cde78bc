"""Tensors inside the arguments and results of a forward."""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield tensors inside tuples, lists, dicts and attributes of objects, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif _is_record(value):
        for item in vars(value).values():
            yield from tensors_in(item)


def _is_record(value: Any) -> bool:
    """Return whether an object carries values: a dataclass or a user's class, not a module, a type or a function."""
    plain = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, (type, types.ModuleType))
    return plain and not isinstance(value, nn.Module)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same structure with `function` applied to its floating-point tensors."""
    if isinstance(value, torch.Tensor):
        return function(value) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(item, function) for item in value])
    if isinstance(value, dict):
        return _with_items(value, {key: map_tensors(item, function) for key, item in value.items()})
    if _is_record(value):
        changed = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(changed, name, map_tensors(item, function))
        return changed
    return value


def _with_items(original: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    if type(original) is dict:
        return items
    try:
        return type(original)(**items)  # e.g. transformers.ModelOutput, a dataclass that is a dict
    except TypeError:
        return type(original)(items)


class LeftTensors:
    """Finds tensors that a forward left as attributes beside its output, such as an auxiliary loss, which has its own
    backward. The dicts of a module's parts are remembered: to walk through them takes longer than to look into them."""

    def __init__(self) -> None:
        # By module: of each part the dict of its own parts, these, and the dict of its attributes.
        self._parts: weakref.WeakKeyDictionary[nn.Module, list[tuple[Any, Any, dict[str, Any]]]]
        self._parts = weakref.WeakKeyDictionary()

    def on(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the tensors on a module and on its parts."""
        parts = self._parts.get(module)
        if parts is None or any(tuple(inner.values()) != known for inner, known, _ in parts):
            parts = [(part._modules, tuple(part._modules.values()), vars(part)) for part in module.modules()]
            self._parts[module] = parts
        return [left for *_, attributes in parts for left in attributes.values() if isinstance(left, torch.Tensor)]
