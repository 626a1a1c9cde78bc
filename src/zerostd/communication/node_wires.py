"""Wires inside a node: gathers from the secondary shards that its ranks keep (parameters/secondary.py).

The inputs are a flat buffer and this rank's slice of it, one for each rank of the node; the result is a `Transfer`.
Nothing leaves the node, and the ledger enters the bytes by themselves. Secondary shards hold decoded values, so they
are sent as they are, even if the wires between all ranks use codes.
"""

from __future__ import annotations

import torch.distributed as dist

from zerostd.communication.wires import Wires


class NodeWires(Wires):
    """The gathers of one prepared model inside this rank's node."""

    gather_entry = "node"

    def __init__(self, wires: Wires) -> None:
        """Take the wires between all ranks, which know the pass that runs."""
        channels = wires.world.channels
        assert channels is not None and channels.node is not None and channels.node_regather is not None
        super().__init__(wires.world.inside(channels.node, channels.node_regather), wires.ledger)
        self._everywhere = wires

    @property
    def _gathering(self) -> dist.ProcessGroup:
        return self._channels.regather if self._everywhere.in_backward else self._channels.gather
