"""A gradient that is freed as soon as its group is updated, inside backward.

It is on the device from its reduce to its update, so only a few groups have a gradient at a time.
`optimizers/passing.py` says when it is freed. Nobody can read it after that, and the next pass cannot add to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zerostd.errors import MisuseError
from zerostd.parameters.gradient import Gradient
from zerostd.tiers import Transfer

REMEDY = "leave keep_gradients=False out of the Placement, or, if the planner chose it, allow more memory"


@dataclass(eq=False, repr=False)
class PassingGradient(Gradient):
    """One flat gradient, which is not kept until the step."""

    is_kept = False
    readers: list[Transfer] = field(init=False, default_factory=list)  # updates that were started with it
    _is_freed: bool = field(init=False, default=False)  # after an update, and nothing has landed since

    def __post_init__(self) -> None:
        super().__post_init__()
        self.give_back()

    def hold(self, until: Transfer) -> None:
        """Keep the memory until an update is over."""
        self.readers.append(until)

    def free(self) -> None:
        """Give the memory back. The device first waits for the updates that read the gradient. The host waits only
        until those updates have queued their work."""
        for reader in self.readers:
            reader.wait()
        self.readers.clear()
        self.give_back()
        self._is_freed = True

    def prepare_landing(self, wanted: Sequence[bool]) -> bool:
        """Prepare for a pass to land; no other pass may be added to it."""
        if self._is_freed and any(wanted):
            raise MisuseError(
                f"a backward pass would add to the gradient of {self.layout.intervals[0].name!r} or of another "
                "parameter of its group, which was freed when they were updated: call optimizer.zero_grad() after "
                f"step(), or {REMEDY}"
            )
        self._is_freed = False
        return super().prepare_landing(wanted)

    def resume(self, index: int, *, has_landed: bool) -> None:
        """Treat a given gradient as landed."""
        self._is_freed = self._is_freed and not has_landed
        super().resume(index, has_landed=has_landed)

    def wait_landed(self) -> torch.Tensor:
        """Return the gradient when it has landed; raise if it was freed."""
        if self._is_freed:
            raise MisuseError(
                f"the gradient of {self.layout.intervals[0].name!r} was freed when its group was updated inside "
                f"backward, so it cannot be read: {REMEDY}"
            )
        return super().wait_landed()
