"""The private names of torch that zerostd needs, all of them, each with a test.

They differ between torch releases and may move; nothing else in the library touches a name with a leading underscore.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "at_end_of_backward",
    "calls_of",
    "default_store",
    "foreach_add_",
    "foreach_copy_",
    "has_saved_tensor_hooks",
    "in_backward",
    "is_profiling",
    "no_dynamo",
    "note_step",
    "version_of",
]


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` once when the backward pass that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass (recomputed forwards run there too)."""
    return bool(torch._C._current_graph_task_id() != -1)


def calls_of(module: torch.nn.Module) -> int:
    """How many calls of a module are going on in this thread, one inside the other. Walks the stack."""
    code, count = torch.nn.Module._call_impl.__code__, 0
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        count += frame.f_code is code and frame.f_locals.get("self") is module
    return count


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors with one launch."""
    torch._foreach_copy_(targets, sources)


def foreach_add_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Add many tensors with one launch."""
    torch._foreach_add_(targets, sources)


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def is_profiling() -> bool:
    """Whether torch's profiler is running."""
    return bool(torch._C._autograd._profiler_enabled())


def no_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a hook so that torch.compile calls it instead of tracing into it."""
    disabled: Callable[..., Any] = torch._dynamo.disable(function, recursive=True)
    return disabled


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """A step of it was taken, though not by its own `step`: its schedulers would warn that there was none."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor, or another one with the same memory, was changed in place."""
    return int(tensor._version)


def has_saved_tensor_hooks() -> bool:
    """Whether somebody packs what autograd saves now; checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
