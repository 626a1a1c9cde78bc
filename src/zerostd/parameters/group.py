"""A group: the parameters that travel together. Scheduling, optimizers and checkpoints meet here.

RELEASED --start--> GATHERING --finish--> GATHERED --release--> RELEASED
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from torch import nn

from zerostd.parameters.blueprints import Blueprint
from zerostd.parameters.flat import Flat
from zerostd.tiers import Done, Transfer

__all__ = ["Group", "GroupState"]


class GroupState(enum.Enum):
    """What a group holds now, and what that costs."""

    RELEASED = "this rank's shards; parameters show NaN"
    GATHERING = "shards, and buffers that are being filled"
    GATHERED = "shards, and all parameters on the device (nothing extra where they are not sharded)"


class Group:
    """Holder of one group's flat buffers and of what is pending on them."""

    blueprint: Blueprint  # what it was made from
    name: str
    index: int  # position among the groups, the same on every rank
    place: int  # in the order in which forward needs groups, as far as known
    modules: tuple[nn.Module, ...]  # whose forward needs it, in registration order; the last one ends its use
    flats: tuple[Flat, ...]
    state: GroupState
    pending: list[Transfer]  # gathers in flight, one per flat
    updates: list[Transfer]  # of its parameters, still going on; the next gather waits for them
    borrowed: dict[str, Group]  # groups whose parameters this one's modules read, learnt as it happens

    def __init__(self, blueprint: Blueprint, index: int, flats: Sequence[Flat]) -> None:
        self.blueprint = blueprint
        self.name = blueprint.name
        self.index = self.place = index
        self.modules = blueprint.modules
        self.flats = tuple(flats)
        self.state = GroupState.GATHERED
        self.pending = []
        self.updates = []
        self.borrowed = {}
        self.in_backward = False  # its backward has begun and has not done with it
        self.num_inputs_awaited: int | None = (
            None  # forwards whose inputs get gradients and have not yet; None: no sign
        )
        self.num_pins = 0  # users who hold it gathered
        self.pending_save: Transfer = Done()  # a save reads masters and states; they must not change before

    @property
    def trainable(self) -> list[Flat]:
        """Flats that are updated."""
        return [flat for flat in self.flats if flat.gradient is not None]

    @property
    def gives_back(self) -> bool:
        """Whether releasing gives memory back."""
        return any(flat.gives_back for flat in self.flats)

    @property
    def is_updated_later(self) -> bool:
        """Whether its updates go on after the step has returned."""
        return any(flat.is_updated_later for flat in self.flats)

    @property
    def is_in_slices(self) -> bool:
        """Whether ranks update different slices of it, so that an update must be gathered again."""
        return any(flat.region.stop - flat.region.start < flat.layout.numel for flat in self.trainable)
