"""Plans that keep Adam's moments in 8 bits: only where the user allows it, and only where that is worth it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from planning.machines import GIB, H200, closed_form, gpt, request_of
from zerostd import Budget, Placement, Plan
from zerostd.engine.settings import Settings
from zerostd.errors import PrepareError
from zerostd.measuring import TrialSizes, load_or_measure
from zerostd.planning.planner import Counted
from zerostd.planning.profiles import CODABLE
from zerostd.planning.searching import search, search_coded
from zerostd.policy import Kind, Tier
from zerostd.preparing.scaling import plan_numbers

INT8 = {"optimizer_states": "int8"}
TINY = TrialSizes(parameters=1 << 16, cpu_side=64, turns=1, seconds=0.01)
WIDTH = 256
DEPTH = 8


# -- on paper --


def chosen(device: int, compute_s: float) -> Counted:
    """The best plan of a GPT of 1.3 B parameters on this much of the device, beside plenty of the host."""
    request = request_of(gpt(2048, 24, compute_s, shared_bytes=2), {Tier.DEVICE: device, Tier.HOST: 100 * GIB})
    exact = search([request], closed_form, may_speculate=False).best
    best = search_coded([request], closed_form, may_speculate=False).best
    if best.solution.request.codec:
        assert best.seconds < 0.95 * exact.seconds
    else:
        assert best.seconds == exact.seconds
    return best


def test_what_fits_on_the_device_stays_exact() -> None:
    assert not chosen(100 * GIB, 0.02).solution.request.codec


def test_codes_are_taken_where_the_link_is_the_bottleneck() -> None:
    assert chosen(4 * GIB, 0.1).solution.request.codec == INT8


def test_codes_that_save_nothing_are_left_out() -> None:
    assert not chosen(10 * GIB, 0.2).solution.request.codec, "states come and go while the device computes"


def test_the_cpu_is_counted_on_for_less_with_codes() -> None:
    request = request_of(gpt(2048, 24, 0.1))
    slow = replace(H200, processor=replace(H200.processor, coded_factor=3.0))
    coded = replace(request, machine=slow, model=request.model.with_codes())
    assert coded.cpu_s == pytest.approx(3 * request.cpu_s)
    assert coded.resident_s == request.resident_s
    alone = replace(coded, machine=replace(slow, link=None))
    assert alone.resident_s == pytest.approx(3 * request.resident_s), "the device is the CPU"


def test_a_model_that_fits_only_with_codes_is_planned_with_them() -> None:
    model = gpt(6144, 44, shared_bytes=2)  # 20 B parameters
    settings = Settings(budget=Budget(device="120GiB", host="60GiB"))
    machine = replace(H200, disk=None)
    with pytest.raises(PrepareError, match="is missing"):
        plan_numbers(model, machine, settings)
    plan = plan_numbers(model, machine, replace(settings, codable=CODABLE))
    assert plan.codec == INT8
    assert "Coded: optimizer states (int8). Results differ" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan


# -- for real --


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def made() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Blocks()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: Any, optimizer: Any, num_steps: int = 4) -> list[float]:
    losses = []
    for number in range(num_steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def least_budget() -> int:
    """Bytes of the device with which everything fits there."""
    model, optimizer = made()
    plan = zerostd.plan(model, optimizer, budget=Budget(device="1GiB"))
    return plan.predicted.total(Tier.DEVICE)


@pytest.fixture
def budget(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Budget:
    """Too little for exact states, and enough for coded ones. The machine is measured once, and little of it."""
    monkeypatch.setenv("ZEROSTD_CACHE", str(tmp_path_factory.getbasetemp() / "little"))
    load_or_measure("cpu", sizes=TINY)
    numel = sum(p.numel() for p in Blocks().parameters())
    return Budget(device=least_budget() - 4 * numel, host="64KiB")


def test_prepare_codes_states_where_nothing_else_fits(budget: Budget) -> None:
    with pytest.raises(PrepareError, match="is missing"):
        zerostd.prepare(*made(), budget=budget)
    model, optimizer = zerostd.prepare(*made(), budget=budget, exact=False)
    losses = train(model, optimizer)
    held = zerostd.memory(model)
    numel = sum(p.numel() for p in model.parameters())
    assert held.now["device"][Kind.OPTIMIZER_STATES.value] < 2.2 * numel
    assert sum(held.peak["device"].values()) <= budget.device
    by_hand, other = zerostd.prepare(*made(), placement=Placement(codec=INT8), exact=False)
    assert losses == train(by_hand, other)


def test_a_plan_with_codes_is_obeyed_and_refused_as_a_placement_is(budget: Budget, tmp_path: Path) -> None:
    plan = zerostd.plan(*made(), budget=budget, exact=False)
    assert plan.codec == INT8
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PrepareError, match="exact=False"):
        zerostd.prepare(*made(), plan=tmp_path / "plan.json")
    model, _ = made()
    with pytest.raises(PrepareError, match="the optimizer is SGD"):
        zerostd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, exact=False)
    losses = train(*zerostd.prepare(*made(), plan=tmp_path / "plan.json", exact=False))
    assert losses == train(*zerostd.prepare(*made(), placement=Placement(codec=INT8), exact=False))


def test_an_optimizer_that_cannot_have_codes_is_planned_without(budget: Budget) -> None:
    model, _ = made()
    with pytest.raises(PrepareError, match="is missing"):
        zerostd.prepare(model, torch.optim.NAdam(model.parameters()), budget=budget, exact=False)
