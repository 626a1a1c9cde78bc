"""Many ranks, many groups, many parameters and one large parameter: the same numbers as plain torch. Threads do not
grow with groups; files do, with at most three a group. `test_granularity.py` counts the lines that are run."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from checkpoints.runs import PLACEMENTS
from support.processes import RankPool, doing
from zerostd import Budget, Placement

NUM_RANKS = 8
WIDTH = 8
STEPS = 2
EVERYWHERE = Placement(
    parameters={"device": 0.4, "host": 0.3, "disk": 0.3}, optimizer_states={"device": 0.2, "host": 0.5, "disk": 0.3}
)


def chain(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: Any, ranks: range) -> None:
    for step in range(STEPS):
        model(torch.cat([batch(step, rank) for rank in ranks])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_result(depth: int, ranks: range) -> dict[str, Tensor]:
    model = chain(depth)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), ranks)
    return {name: value.detach() for name, value in model.state_dict().items()}


def train_everywhere(rank: int, folder: str) -> list[str]:
    """Train at stage 3 with every placement; return those that differ from plain torch."""
    expected = plain_result(5, range(NUM_RANKS))
    wrong = []
    for name, placement in PLACEMENTS.items():
        doing(name)
        model: Any = chain(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        budget = Budget(disk_path=folder)
        model, optimizer = zerostd.prepare(model, optimizer, stage=3, placement=placement, budget=budget, groups=["*"])
        train(model, optimizer, range(rank, rank + 1))
        state = zerostd.full_state_dict(model)
        if not all(torch.allclose(state[key], expected[key], rtol=1e-5, atol=1e-6) for key in expected):
            wrong.append(name)
        zerostd.release(model)
    return wrong


def test_eight_ranks_train_as_plain_torch_in_every_tier(tmp_path: Path) -> None:
    with RankPool(NUM_RANKS) as pool:
        assert pool.run(train_everywhere, str(tmp_path), timeout=280) == [[]] * NUM_RANKS


def prepared(depth: int, placement: Placement, folder: Path, **options: Any) -> tuple[Any, Any]:
    model = chain(depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    budget = Budget(disk_path=str(folder))
    return zerostd.prepare(model, optimizer, placement=placement, budget=budget, **options)


@pytest.mark.full
@pytest.mark.parametrize("placement", [PLACEMENTS["parameters on host"], EVERYWHERE], ids=["host", "everywhere"])
def test_a_thousand_groups_train_as_plain_torch(placement: Placement, tmp_path: Path) -> None:
    expected = plain_result(1000, range(1))
    threads = threading.active_count()
    files = len(os.listdir("/proc/self/fd"))
    model, optimizer = prepared(1000, placement, tmp_path, groups=["*"])
    train(model, optimizer, range(1))
    assert threading.active_count() - threads <= 10
    assert len(os.listdir("/proc/self/fd")) - files <= 3 * 1000 * ("disk" in str(placement))
    state = zerostd.full_state_dict(model)
    zerostd.release(model)
    assert len(os.listdir("/proc/self/fd")) == files
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.full
def test_twenty_thousand_parameters_train_as_plain_torch(tmp_path: Path) -> None:
    expected = plain_result(10_000, range(1))
    model, optimizer = prepared(10_000, Placement(optimizer_states="host"), tmp_path)
    assert sum(1 for _ in model.parameters()) == 20_000
    train(model, optimizer, range(1))
    state = zerostd.full_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


class Large(nn.Module):
    """One parameter whose bytes a signed number of 32 bits cannot count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2**29 + 3))

    def forward(self, factor: Tensor) -> Tensor:
        return (self.weight * factor).sum()


@pytest.mark.full
@pytest.mark.timeout(900)  # a busy machine reads and writes 10 GiB
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a_parameter_of_more_than_2_gib_is_updated_to_its_end(tier: str, tmp_path: Path) -> None:
    model: Any = Large()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    budget = Budget(disk_path=str(tmp_path))
    model, optimizer = zerostd.prepare(model, optimizer, placement=Placement(parameters=tier), budget=budget)
    model(torch.tensor(2.0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with zerostd.gathered(model):
        assert model.weight.numel() == 2**29 + 3
        assert bool((model.weight == 0.5).all())
    zerostd.release(model)
