"""Parameters of a prepared model are read and written wherever they are touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from zerostd import MisuseError, Placement

PLACEMENTS = {
    "device": Placement(),
    "host": Placement(optimizer_states="host"),
    "all on the host": Placement(parameters="host", gradients="host", optimizer_states="host"),
}


@pytest.fixture(params=PLACEMENTS)
def trained(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared = zerostd.prepare(model, optimizer, groups=["*"], placement=PLACEMENTS[request.param])
    step(*prepared)
    return prepared


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_changes_from_before_a_context_are_none_of_its_own(trained: tuple[Any, Any]) -> None:
    model, _ = trained
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    wanted = model[0].weight.detach().clone()
    with zerostd.gathered(model):
        assert torch.equal(model[0].weight, wanted)


def test_contexts_nest(trained: tuple[Any, Any]) -> None:
    model, _ = trained
    with zerostd.gathered(model, write=True):
        with zerostd.gathered(model[0]):
            model[0].weight.sum()
        with torch.no_grad():
            model[0].weight.fill_(2.0)
    assert (zerostd.full_state_dict(model)["0.weight"] == 2.0).all()


def test_a_change_without_write_is_refused(trained: tuple[Any, Any]) -> None:
    model, _ = trained
    with pytest.raises(MisuseError, match="write=True"), zerostd.gathered(model), torch.no_grad():
        model[0].weight.fill_(3.0)


def test_a_parameter_takes_a_view_of_its_own_values(trained: tuple[Any, Any]) -> None:
    model, _ = trained
    wanted = model[2].weight.detach().t().clone()
    model[2].weight.data = model[2].weight.data.t()
    assert torch.equal(model[2].weight, wanted)
    assert torch.equal(zerostd.full_state_dict(model)["2.weight"], wanted)


def test_a_change_that_torch_refuses_leaves_the_values(trained: tuple[Any, Any]) -> None:
    model, _ = trained
    before = model[2].weight.detach().clone()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        model[2].weight.mul_(3.0)
    assert torch.equal(model[2].weight, before)


def test_states_that_were_cleared_begin_anew(trained: tuple[Any, Any]) -> None:
    model, optimizer = trained
    assert len(optimizer.state) == 4
    optimizer.state.clear()
    assert len(optimizer.state) == 0
    step(model, optimizer)
    assert {float(optimizer.state[p]["step"]) for p in model.parameters()} == {1.0}
