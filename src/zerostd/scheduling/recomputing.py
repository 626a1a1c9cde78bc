"""Recomputing: a forward that keeps its inputs only, and runs again in backward.

torch's checkpointing does it, with the random states and the autocasting of the first time. It would hold the inputs
where they are. Here they may rest elsewhere meanwhile, so `Activations` says how an input is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerostd.compat import in_backward
from zerostd.scheduling.tensors import map_tensors

Keep = Callable[[torch.Tensor], Callable[[], torch.Tensor]]  # takes an input, returns what gives it back


def is_worth_recomputing(module: nn.Module) -> bool:
    """Return whether a module has parts: one without keeps its inputs and little else."""
    return next(module.children(), None) is not None


def recompute(module: nn.Module, device: torch.device, keep: Keep) -> Callable[[], None]:
    """Replace a module's forward by one that is recomputed in backward; return a function that puts it back."""
    forward = module.forward
    had_own = "forward" in module.__dict__
    marker = torch.empty(0, device=device)  # tells checkpointing whose random states count

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or in_backward():
            return forward(*args, **kwargs)
        return checkpoint(_run_twice(module, forward, keep, (args, kwargs)), marker, use_reentrant=False)

    def recomputed(*args: Any, **kwargs: Any) -> Any:  # a function, since torch.compile looks into those
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return run(args, kwargs)

    def undo() -> None:
        if had_own:
            module.forward = forward
        else:
            del module.forward

    module.forward = recomputed
    return undo


def _run_twice(
    module: nn.Module, forward: Callable[..., Any], keep: Keep, inputs: tuple[tuple[Any, ...], dict[str, Any]]
) -> Callable[[torch.Tensor], Any]:
    """Return one call of a forward: with its inputs the first time, with what was kept of them from then on."""
    kept: dict[int, tuple[Callable[[], torch.Tensor], bool]] = {}  # by placeholder; whether it gets a gradient
    first: list[tuple[tuple[Any, ...], dict[str, Any]]] = [inputs]

    def put(tensor: torch.Tensor) -> torch.Tensor:
        placeholder = tensor.new_empty(0)
        kept[id(placeholder)] = (keep(tensor), tensor.requires_grad)
        return placeholder

    def take(placeholder: torch.Tensor) -> torch.Tensor:
        give_back, requires_grad = kept[id(placeholder)]
        return give_back().detach().requires_grad_(requires_grad)

    structure = map_tensors(inputs, put)

    def run(marker: torch.Tensor) -> Any:
        if first:
            args, kwargs = first.pop()
            return forward(*args, **kwargs)
        args, kwargs = map_tensors(structure, take)
        with _without_statistics(module):
            return forward(*args, **kwargs)

    return run


@contextlib.contextmanager
def _without_statistics(module: nn.Module) -> Iterator[None]:
    """Let batch-norm count in copies meanwhile: it counts a batch once, however often it sees it."""
    counting = [m for m in module.modules() if m.training and getattr(m, "track_running_stats", False)]
    originals = [dict(norm._buffers) for norm in counting]
    for norm, buffers in zip(counting, originals, strict=True):
        norm._buffers.update({name: None if value is None else value.clone() for name, value in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(counting, originals, strict=True):
            norm._buffers.update(buffers)
