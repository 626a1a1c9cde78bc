"""The loss scale of fp16, which keeps small gradients above fp16's smallest numbers.

It enters at the root's outputs in backward, so the user's loop stays as it is, and the update takes it out again. A
step whose gradients overflowed on any rank is skipped on all, and the scale halved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch


@dataclass
class LossScale:
    """The scale and its history, as torch.amp.GradScaler keeps them."""

    value: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    steps_since_overflow: int = 0
    num_skipped: int = 0

    def update(self, *, overflowed: bool) -> None:
        """Learn from one step."""
        if overflowed:
            self.value *= self.backoff_factor
            self.steps_since_overflow = 0
            self.num_skipped += 1
            return
        self.steps_since_overflow += 1
        if self.steps_since_overflow >= self.growth_interval:
            self.value *= self.growth_factor
            self.steps_since_overflow = 0


def scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a view of `tensor` through which gradients flow back multiplied by `factor`."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    view = tensor.view_as(tensor)
    view.register_hook(partial(torch.mul, other=factor))
    return view
