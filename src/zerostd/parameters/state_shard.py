"""What the optimizer keeps for one stretch of a region: the master and the states, by name, in one tier.

Resident shards have the master only; their states are made by the user's optimizer. Where updates speculate there is a
spare set of tensors: an update is written to it, and it trades places with the true one when the update is committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zerostd.policy import Route, Tier
from zerostd.sharding import Portion
from zerostd.tiers import Done, TierTensor, Transfer

MASTER = "master"


@dataclass(eq=False)
class StateShard:
    """A stretch of a region with one tier and one route, and its tensors, each as long as the stretch."""

    start: int  # elements of the region
    stop: int
    tier: Tier
    route: Route
    tensors: dict[str, TierTensor]
    spare: dict[str, TierTensor] = field(default_factory=dict)
    holds_parameters: bool = False  # the master is the parameter itself, not a copy at another precision or place
    landed: Transfer = field(default_factory=Done)  # when the last streamed update is back in `tier`

    @property
    def portion(self) -> Portion:
        """The plan it was made from."""
        return Portion(self.start, self.stop, self.tier, self.route)

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def region(self) -> slice:
        """Where it lies in the region."""
        return slice(self.start, self.stop)

    @property
    def master(self) -> TierTensor:
        """fp32, or the parameters' own dtype if that is wider."""
        return self.tensors[MASTER]

    @property
    def is_resident(self) -> bool:
        """Whether the user's optimizer updates it in place, on the device."""
        return self.route is Route.RESIDENT

    def commit_speculative(self) -> None:
        """Make the spare tensors, which a speculative update has written, the true ones."""
        self.tensors, self.spare = self.spare, self.tensors

    def overlap(self, start: int, stop: int) -> tuple[slice, slice] | None:
        """Return the part of [start, stop) of the region that lies here: where here, and where in [start, stop)."""
        low = max(start, self.start)
        high = min(stop, self.stop)
        if low >= high:
            return None
        return slice(low - self.start, high - self.start), slice(low - start, high - start)

    def read_master(self) -> torch.Tensor:
        """Return the whole master, in memory."""
        return self.master.read(slice(0, self.numel))
