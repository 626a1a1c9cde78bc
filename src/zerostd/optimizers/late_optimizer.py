"""Take over an optimizer that was made after the model was prepared, at its first step.

torch calls a hook before any optimizer's step. If the optimizer's parameters are ours, our step is run in its stead:
the inner step that follows finds no parameters and does nothing. The user's optimizer stays the object they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerostd.errors import MisuseError
from zerostd.optimizers.elementwise import check_elementwise
from zerostd.optimizers.gradients import Gradients
from zerostd.optimizers.optimizer import ZeroOptimizer


class LateOptimizer:
    """Watches for the step of an optimizer on one prepared model's parameters."""

    def __init__(self, make: Callable[[torch.optim.Optimizer], ZeroOptimizer], gradients: Gradients) -> None:
        self._make = make
        self._ours = {p for group in gradients.groups for flat in group.flats for p in flat.parameters}
        self._prepared: ZeroOptimizer | None = None
        self._is_stepping = False
        self._hidden: list[dict[str, Any]] | None = None
        self._removables = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def end(self) -> None:
        """Stop watching."""
        for removable in self._removables:
            removable.remove()
        if self._prepared is not None:
            for name in ("state_dict", "load_state_dict"):
                self._prepared.inner.__dict__.pop(name, None)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self._is_stepping or isinstance(optimizer, ZeroOptimizer):
            return None
        if not any(p in self._ours for group in optimizer.param_groups for p in group["params"]):
            return None
        if self._prepared is None:
            self._check(optimizer)
            self._prepared = self._make(optimizer)
            optimizer.state_dict = self._prepared.state_dict  # type: ignore[method-assign]
            optimizer.load_state_dict = self._prepared.load_state_dict  # type: ignore[method-assign]
        elif self._prepared.inner is not optimizer:
            raise MisuseError(
                "a second optimizer steps on the parameters of one prepared model: prepare the model with one "
                "optimizer that has several param_groups"
            )
        self._is_stepping = True
        try:
            loss = self._prepared.step(*args[1:], **kwargs)
        finally:
            self._is_stepping = False
        self._hidden = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": []} for group in self._hidden]
        return (optimizer,), ({"closure": lambda: loss} if args[1:] or kwargs else {})

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        is_ours = self._prepared is not None and self._prepared.inner is optimizer
        if is_ours and self._hidden is not None and not self._is_stepping:
            optimizer.param_groups = self._hidden
            self._hidden = None

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in self._ours]
        if foreign:
            raise MisuseError(
                f"an optimizer mixes parameters of a prepared model with {len(foreign)} others, the first of shape "
                f"{tuple(foreign[0].shape)}: give them an optimizer of their own"
            )
        check_elementwise(optimizer)
