"""Peers: ranks of a user's process group that compute the same activations, so that each keeps a slice of them.

`Placement(same_activations=group)` names them; `scheduling` gathers through them what it offloaded in slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerostd.communication.wires import Wires
from zerostd.communication.world import World
from zerostd.errors import MisuseError, PrepareError
from zerostd.monitoring import Ledger


class Peers:
    """The ranks of one process group."""

    def __init__(self, group: dist.ProcessGroup, world: World, ledger: Ledger) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._wires = Wires(world.inside(group), ledger)

    def gather(self, full: torch.Tensor) -> None:
        """Fill `full`, in which this rank's slice is in its place, with the slices of all."""
        self._wires.gather(full, full.view(self.size, -1)[self.rank]).wait()

    def check_same(self, name: str, sizes: Sequence[int]) -> None:
        """Raise on all peers if the activations of a group differ in number or size."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, list(sizes), group=self._group)
        if any(theirs != everyone[0] for theirs in everyone):
            counts = [f"rank {rank}: {len(theirs)} of {sum(theirs)} bytes" for rank, theirs in enumerate(everyone)]
            raise MisuseError(
                f"Placement(same_activations=...): the ranks of that process group have different activations in group "
                f"{name!r} ({', '.join(counts)}); name a group whose ranks run the same forward on the same batch"
            )


def find_peers(group: Any, world: World, ledger: Ledger) -> Peers | None:
    """Return the peers in a process group that a user named; None if it is this rank alone."""
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise PrepareError(
            f"Placement(same_activations={group!r}) must be a process group that this rank is in, as "
            "torch.distributed.new_group returns it"
        )
    return Peers(group, world, ledger) if dist.get_world_size(group) > 1 else None
