"""Groups of one small parameter in a world of one, made by hand: no prepare, no optimizer, no process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zerostd.communication import Wires, World
from zerostd.monitoring import Ledger
from zerostd.parameters import Flat, Gradient, Group
from zerostd.parameters.blueprints import Blueprint
from zerostd.policy import Tier
from zerostd.sharding.layout import make_layout
from zerostd.tiers import Streams, TierAllocator, TierTensor, Transfer, Uploader
from zerostd.tiers.host import Host

CPU = torch.device("cpu")
SHAPE = (4, 8)


class Update(Transfer):
    """Work that is done when somebody waits for it."""

    def __init__(self, work: Callable[[], object] = lambda: None) -> None:
        self.num_waits = 0
        self._work = work

    def wait(self) -> None:
        if self.num_waits == 0:
            self._work()
        self.num_waits += 1

    def is_done(self) -> bool:
        return self.num_waits > 0


class Bench:
    """What groups of one model share."""

    def __init__(self, world_size: int = 1) -> None:
        self.ledger = Ledger()
        self.world = World(0, world_size, 1, CPU, 60.0, None)
        self.wires = Wires(self.world, self.ledger)
        self.allocator = TierAllocator(CPU, Host(CPU, self.ledger, 1), None, self.ledger)
        self.uploader = Uploader(self.allocator, Streams(CPU), largest_on_disk=0)

    def group(
        self,
        name: str = "block",
        *,
        rests_on: Tier = Tier.HOST,
        trains: bool = False,
        keeps_whole: bool = False,
        shape: tuple[int, int] = SHAPE,
    ) -> Group:
        """A group whose parameter is filled with 1; on the host it is released, on the device gathered. One that keeps
        gradients whole is updated by every rank, as at stage 0."""
        parameter = nn.Parameter(torch.ones(shape))
        layout = make_layout([(f"{name}.weight", shape)], self.world.size, 4)
        region = slice(0, layout.numel) if keeps_whole else layout.shard(self.world.rank)
        flat = Flat(layout, [parameter], torch.float32, self.allocator, region=region, state_shards=())
        flat.adopt(0, parameter.detach().clone())
        if rests_on is Tier.HOST:
            rest = TierTensor(layout.numel, torch.float32, Tier.HOST, torch.empty(layout.numel))
            flat.keep(rest, is_sharded=False)
        else:
            flat.keep(None, is_sharded=False)
        if trains:
            flat.gradient = Gradient(layout, region, torch.float32, self.allocator, keep_whole=keeps_whole)
        return Group(Blueprint(name, (), ()), 0, [flat], self.wires, self.uploader)


def parameter_of(group: Group) -> nn.Parameter:
    return group.flats[0].parameters[0]


def write(group: Group, value: float) -> None:
    """What an update does: new values where the parameters rest."""
    rest = group.flats[0].rest.tensor
    assert rest is not None
    rest.fill_(value)
