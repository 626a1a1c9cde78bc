"""What one step says to all its updates: the options as they were when it began, and the factor on all gradients.

Updates go on after step() has returned, when a scheduler may have changed the user's options already: an update reads
the snapshot, never the options themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerostd.tiers import Done, Transfer, synchronize

__all__ = ["StepOptions", "snapshot"]

Options = dict[str, Any]


@dataclass(frozen=True)
class StepOptions:
    """Options and factor of one step, shared by its updates."""

    param_groups: list[Options]  # a snapshot, without "params"
    factor: torch.Tensor | None = None  # on the gradients: one element, fp32, on the device; None: one
    host_factor: torch.Tensor | None = None  # the same, in host memory
    arrived: Transfer = field(default_factory=Done)  # when `host_factor` is there
    written: dict[int, Options] = field(default_factory=dict)  # param_groups as an update has left them, by index

    def read_factor(self) -> float:
        """Return the factor as a number; holds the calling thread until it has arrived."""
        if self.host_factor is None:
            return 1.0
        synchronize(self.arrived)
        return self.host_factor.item()


def snapshot(param_groups: Sequence[Options]) -> list[Options]:
    """Return the options as they are now, without parameters; later changes do not reach it."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in param_groups
    ]
