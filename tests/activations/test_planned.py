"""A plan that does something with activations is obeyed, and what it predicts comes true."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zerostd
from planning.machines import LAPTOP
from zerostd import Budget
from zerostd.policy import Kind, Tier

WIDTH, ROWS = 64, 4096


class Wide(nn.Module):
    """Keeps many times what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.gelu(self.inner(x))
        return x + self.outer(torch.tanh(y) * torch.sigmoid(y))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Wide() for _ in range(8)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if not hasattr(optimizer, "backward_updates") else zerostd.full_state_dict(model)


@pytest.fixture(scope="module")
def kept() -> int:
    """Bytes of activations where nothing is done with them."""
    model = make()
    batch = torch.randn(ROWS, WIDTH)
    plan = zerostd.plan(
        model, torch.optim.AdamW(model.parameters()), batch=batch, groups=["*"], accumulate=1, machine=LAPTOP
    )
    assert set(plan.activations.values()) <= {"keep"}
    return plan.predicted.bytes[Tier.DEVICE][Kind.ACTIVATIONS]


def test_a_tight_budget_is_met_by_recomputing_some_groups(kept: int, tmp_path: Path) -> None:
    model, batch = make(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    budget = Budget(device=int(0.6 * kept) + 2**22)
    plan = zerostd.plan(model, optimizer, batch=batch, groups=["*"], budget=budget, accumulate=1, machine=LAPTOP)
    ways = {name: plan.activations_of(name) for name in map(str, range(8))}
    assert "recompute" in ways.values() and "Activations take" in plan.explain()
    assert plan.predicted.total(Tier.DEVICE) <= int(0.6 * kept) + 2**22
    plan.save(tmp_path / "plan.json")
    _, prepared = zerostd.prepare(model, optimizer, plan=tmp_path / "plan.json", groups=["*"], accumulate=1)
    again = {name for name, module in model.named_children() if "forward" in module.__dict__}
    assert again == {name for name, way in ways.items() if way == "recompute"}
    other = make()
    plain = train(other, torch.optim.AdamW(other.parameters(), 1e-3))
    state = train(model, prepared)
    assert all(torch.allclose(state[name], value, atol=1e-6) for name, value in plain.items())
