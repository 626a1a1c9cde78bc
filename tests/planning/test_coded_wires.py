"""Plans that send parameters and gradients as codes: only where the user allows it, and the wires are worth it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from planning.machines import LAPTOP
from support.processes import doing
from support.side_by_side import adamw, data, seeded
from zerostd import Placement, Plan, PrepareError
from zerostd.communication import World
from zerostd.engine.settings import Settings
from zerostd.measuring import TrialSizes
from zerostd.measuring.rates import wire_rates
from zerostd.planning import MachineProfile
from zerostd.planning.profiles import CODABLE, WIRES, Wire
from zerostd.preparing.options import check_settings

WIDTH = 64
SIZE = 2
FAST = Wire("world", SIZE, 1e13, 1e-6)
SLOW = Wire("world", SIZE, 2e7, 1e-5)
BOTH = {"gather": "int8", "reduce": "int8"}
TINY = TrialSizes(parameters=1 << 14, cpu_side=64, wire=1 << 20, turns=1, seconds=0.05)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def on(wire: Wire) -> MachineProfile:
    return replace(LAPTOP, wires=(wire,), ranks_per_node=1)


def planned(wire: Wire, **options: Any) -> Plan:
    model = seeded(Net)
    options = {"stage": 3, "exact": False, "world_size": SIZE, **options}
    return zerostd.plan(model, adamw(model), machine=on(wire), batch=data(4, WIDTH), **options)


def test_wires_are_coded_where_they_are_the_bottleneck_and_that_is_allowed() -> None:
    exact, coded = planned(SLOW, exact=True), planned(SLOW)
    assert exact.codec == {} and coded.codec == BOTH
    assert coded.predicted.step_s is not None and exact.predicted.step_s is not None
    assert coded.predicted.step_s < 0.4 * exact.predicted.step_s  # fp32: 17/64 of the bytes
    assert coded.predicted.busy["wire"] == pytest.approx(exact.predicted.busy["wire"] * 17 / 64, rel=0.1)
    assert "Coded: gather (int8), reduce (int8). Results differ" in coded.explain()
    assert Plan.from_json(coded.to_json()) == coded


def test_fast_wires_stay_exact() -> None:
    assert planned(FAST).codec == {}


def test_wires_on_which_coding_takes_longer_stay_exact() -> None:
    assert planned(replace(SLOW, coded=SLOW.bandwidth / 2)).codec == {}
    assert planned(replace(SLOW, coded=SLOW.bandwidth)).codec == BOTH, "16-bit numbers; fp32 ones take twice as long"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_only_gradients_are_coded(stage: int) -> None:
    exact, coded = planned(SLOW, stage=stage, exact=True), planned(SLOW, stage=stage)
    assert coded.codec == {"reduce": "int8"}
    saved = 1 - coded.predicted.busy["wire"] / exact.predicted.busy["wire"]
    assert saved == pytest.approx((1 if stage == 0 else 0.5) * 47 / 64, rel=0.1)


def test_one_rank_and_an_unknown_batch_stay_exact() -> None:
    assert planned(SLOW, world_size=1).codec == {}
    model = seeded(Net)
    assert zerostd.plan(model, adamw(model), machine=on(SLOW), world_size=SIZE, exact=False).codec == {}


def test_states_and_wires_are_coded_together() -> None:
    budget = {"device": "470KiB", "host": 0}  # 500 KiB with exact states
    with pytest.raises(PrepareError, match="is missing"):
        planned(SLOW, budget=budget, exact=True)
    plan = planned(SLOW, budget=budget)
    assert plan.codec == {"optimizer_states": "int8", **BOTH}


def train(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    for step in range(3):
        model(data(4, WIDTH, number=step, rank=rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for value in zerostd.full_state_dict(model).values()]


def on_ranks(rank: int) -> dict[str, Any]:
    doing("the plan")
    plan = planned(SLOW)
    model = seeded(Net)
    model, optimizer = zerostd.prepare(model, adamw(model), plan=plan, exact=False)
    values = train(model, optimizer, rank)
    sent = zerostd.memory(model).sent
    doing("by hand")
    other = seeded(Net)
    other, own = zerostd.prepare(other, adamw(other), stage=3, placement=Placement(codec=BOTH), exact=False)
    alike = all(map(torch.equal, values, train(other, own, rank)))
    doing("refused")
    refused = ""
    try:
        zerostd.prepare(third := seeded(Net), adamw(third), plan=plan)
    except PrepareError as error:
        refused = str(error)
    doing("measured")
    (wire,) = wire_rates(World.discover(torch.device("cpu")), TINY)
    return {"alike": alike, "sent": sent, "refused": refused, "rates": (wire.bandwidth, wire.coded)}


def test_two_ranks_train_as_planned(ranks: Any) -> None:
    for outcome in ranks(SIZE, on_ranks):
        assert outcome["alike"]
        assert "exact=False" in outcome["refused"]
        assert min(outcome["rates"]) > 0


def test_sums_are_never_coded() -> None:
    """Coded gradients are averaged."""
    model = seeded(Net)
    settings = check_settings(Settings(codable=CODABLE, reduce="sum"), model, adamw(model))
    assert WIRES not in settings.codable and not settings.exact
