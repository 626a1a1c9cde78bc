"""What the optimizer keeps for one portion of a region: the master and the states, by name, at their home.

Resident portions have the master only; their states are made by the user's optimizer. A spare set of columns is there
where updates speculate: they are written beside the true ones and trade places with them when they turn out right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zerostd.policy import Route
from zerostd.sharding import Portion
from zerostd.tiers import Done, TierTensor, Transfer

__all__ = ["MASTER", "StateShard"]

MASTER = "master"


@dataclass(eq=False)
class StateShard:
    """Columns of one portion, each as long as it."""

    portion: Portion
    columns: dict[str, TierTensor]
    spare: dict[str, TierTensor] = field(default_factory=dict)
    holds_parameters: bool = False  # the master is the parameter itself, not a copy at another precision or place
    landed: Transfer = field(default_factory=Done)  # the last update's way home

    @property
    def master(self) -> TierTensor:
        """fp32, or the parameters' own dtype if that is wider."""
        return self.columns[MASTER]

    @property
    def is_resident(self) -> bool:
        """Whether the user's optimizer updates it in place, on the device."""
        return self.portion.route is Route.RESIDENT

    def adopt_spare(self) -> None:
        """What was written beside becomes the truth."""
        self.columns, self.spare = self.spare, self.columns

    def overlap(self, start: int, stop: int) -> tuple[slice, slice] | None:
        """The part of [start, stop) of the region that lies here: where here, and where in [start, stop)."""
        low, high = max(start, self.portion.start), min(stop, self.portion.stop)
        if low >= high:
            return None
        base = self.portion.start
        return slice(low - base, high - base), slice(low - start, high - start)

    def read_master(self) -> torch.Tensor:
        """The whole master, in memory."""
        return self.master.read(slice(0, self.portion.numel))
