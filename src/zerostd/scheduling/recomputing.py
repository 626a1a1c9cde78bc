"""Recomputing: a forward that keeps its inputs only, and runs again in backward.

torch's checkpointing does it, with the random states and the autocasting of the first time. It would hold the inputs
where they are; here they may rest elsewhere meanwhile, so they are handed in and out by whoever keeps them.
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

__all__ = ["Recomputed", "is_worth_recomputing"]

Keep = Callable[[torch.Tensor], Any]
Give = Callable[[Any], torch.Tensor]


def is_worth_recomputing(module: nn.Module) -> bool:
    """A module without parts keeps its inputs and little else."""
    return next(module.children(), None) is not None


class Recomputed:
    """In place of a module's forward. `keep` takes an input, `give` gives it back for what `keep` returned."""

    def __init__(self, module: nn.Module, device: torch.device, keep: Keep, give: Give) -> None:
        self.module = module
        self.marker = torch.empty(0, device=device)  # tells checkpointing whose random states count
        self.had_own = "forward" in module.__dict__
        self._forward = module.forward
        self._keep = keep
        self._give = give

    def install(self) -> None:
        """Put it on the module. A function, since torch.compile looks into those."""
        forward = self._forward

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            return self._run(args, kwargs)

        self.module.forward = recomputed

    def remove(self) -> None:
        """Leave the module as it was."""
        if self.had_own:
            self.module.forward = self._forward
        else:
            del self.module.forward

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or in_backward():
            return self._forward(*args, **kwargs)
        return checkpoint(_Again(self, args, kwargs), self.marker, use_reentrant=False)


class _Again:
    """One forward: with its inputs the first time, with what was kept of them from then on."""

    def __init__(self, recomputed: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._owner = recomputed
        self._first: tuple[Any, Any] | None = (args, kwargs)
        self._kept: dict[int, tuple[Any, bool]] = {}  # by place: what was kept, and whether it gets a gradient
        self._structure = map_tensors((args, kwargs), self._put)

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.new_empty(0)
        self._kept[id(place)] = (self._owner._keep(tensor), tensor.requires_grad)
        return place

    def _take(self, place: torch.Tensor) -> torch.Tensor:
        kept, requires_grad = self._kept[id(place)]
        return self._owner._give(kept).detach().requires_grad_(requires_grad)

    def __call__(self, marker: torch.Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            return self._owner._forward(*args, **kwargs)
        args, kwargs = map_tensors(self._structure, self._take)
        with _without_statistics(self._owner.module):
            return self._owner._forward(*args, **kwargs)


@contextlib.contextmanager
def _without_statistics(module: nn.Module) -> Iterator[None]:
    """Batch-norm counts a batch once, however often it sees it: meanwhile it counts in copies."""
    counting = [m for m in module.modules() if m.training and getattr(m, "track_running_stats", False)]
    originals = [dict(one._buffers) for one in counting]
    for one, buffers in zip(counting, originals, strict=True):
        one._buffers.update({name: None if value is None else value.clone() for name, value in buffers.items()})
    try:
        yield
    finally:
        for one, buffers in zip(counting, originals, strict=True):
            one._buffers.update(buffers)
