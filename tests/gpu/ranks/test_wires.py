"""The wires over nccl: what lands is there for what follows on the current stream, with no wait of the host."""

from __future__ import annotations

import pytest
import torch

from zerostd.communication.wires import Wires
from zerostd.communication.world import World
from zerostd.monitoring import Ledger

pytestmark = pytest.mark.gpu

NUMEL = 1 << 20
CLOSE = 1e-6  # nccl sums in its own order


def complaints(rank: int) -> list[str]:
    """On every rank: which collectives wrote something wrong."""
    device = torch.device("cuda", 0)
    world = World.discover(device)
    try:
        ledger = Ledger()
        wires = Wires(world, ledger)
        values = torch.randn(world.size, NUMEL, generator=torch.Generator().manual_seed(3)).to(device)
        wires.reserve(values[0].nbytes)
        wrong = []
        size = NUMEL // world.size
        mine = slice(rank * size, rank * size + size)
        full = torch.zeros(NUMEL, device=device)
        shard = values[0, mine].clone()
        wires.gather(full, shard).wait()
        if not torch.equal(full, values[0]):
            wrong.append("gather")
        mean = values.mean(0)
        land = torch.ones(size, device=device)
        gradient = values[rank].clone()
        wires.reduce(gradient, land).wait()
        if not torch.allclose(land, mean[mine], atol=CLOSE):
            wrong.append("reduce")
        shard = values[1, mine].clone()
        for transfer in [wires.reduce(gradient, land, accumulate=True), wires.gather(full, shard)]:
            transfer.wait()
        if not torch.allclose(land, 2 * mean[mine], atol=CLOSE):
            wrong.append("reduce that adds")
        if not torch.equal(full, values[1]):
            wrong.append("gather beside a reduce")
        wires.reduce_everywhere(gradient).wait()
        if not torch.allclose(gradient, mean, atol=CLOSE):
            wrong.append("reduce everywhere")
        sent = {"gather": 2 * 4 * size * (world.size - 1), "reduce": 4 * 4 * size * (world.size - 1)}
        if {name: ledger.sent[name] for name in sent} != sent:
            wrong.append(f"bytes {dict(ledger.sent)} instead of {sent}")
        return wrong
    finally:
        world.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_lands_is_there_for_the_current_stream(cuda_ranks, world_size):
    assert cuda_ranks(world_size, complaints) == [[]] * world_size
