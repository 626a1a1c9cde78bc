"""Ranks of several hosts gather around a ring: the same bits, and slices cross between hosts once."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostd
from support.side_by_side import data, seeded
from zerostd.communication import peers, wires


class Tower(nn.Module):
    """Groups of two dtypes, one of which gloo does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.turn = nn.Parameter(torch.randn(24, dtype=torch.complex64))
        self.last = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(x) * self.turn).real.to(self.last.weight.dtype))


def train(rank: int, stage: int, host: str, precision: str | None) -> tuple[list[float], dict[str, Any], int]:
    """Return losses, parameters, and how many gathers went around a ring."""
    model = seeded(Tower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (
        mock.patch.object(peers, "host_name", lambda: host),
        mock.patch.object(wires, "all_gather", side_effect=wires.all_gather) as ring,
    ):
        model, optimizer = zerostd.prepare(model, optimizer, stage=stage, groups=["first", "last"], precision=precision)
        losses = []
        for number in range(3):
            loss = model(data(2, 16, number=number, rank=rank)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        values = zerostd.full_state_dict(model)
    zerostd.release(model)
    return losses, values, ring.call_count


def compare(rank: int, stage: int, num_hosts: int) -> list[str]:
    problems = []
    host = f"host {rank * num_hosts // dist.get_world_size()}"
    for precision in (None, "bf16") if stage == 3 else (None,):
        losses, values, num_rings = train(rank, stage, host, precision)
        expected, others, num_none = train(rank, stage, "", precision)
        if losses != expected or not all(torch.equal(values[name], others[name]) for name in others):
            problems.append(f"{precision}: other bits, {losses} and {expected}")
        if not num_rings or num_none:
            problems.append(f"{precision}: {num_rings} and {num_none} gathers around a ring")
    return problems


@pytest.mark.parametrize(("size", "num_hosts"), [(2, 2), (3, 2), (4, 2)])
def test_ranks_of_several_hosts_have_the_same_bits(ranks: Any, size: int, num_hosts: int) -> None:
    for stage in (0, 1, 3) if size == 2 else (2, 3):
        assert ranks(size, compare, stage, num_hosts) == [[]] * size
