"""A graph that the user keeps alive for steps is reported once, with who made it and the remedy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from zerostd import Placement

STEPS = 9
Keep = Callable[[Tensor], object]


def train(keep: Keep, caplog: pytest.LogCaptureFixture, *, placement: Placement | None = None) -> list[str]:
    """Train with something kept of each loss; return the warnings."""
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zerostd.prepare(model, optimizer, placement=placement or Placement(), groups=["*"])
    kept = []
    with caplog.at_level(logging.WARNING, logger="zerostd"):
        for _ in range(STEPS):
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(keep(loss))
    return [record.getMessage() for record in caplog.records if "autograd graph" in record.getMessage()]


@pytest.mark.parametrize("placement", [Placement(), Placement(parameters="host")], ids=["device", "host"])
def test_losses_in_a_list_are_reported_once(placement: Placement, caplog: pytest.LogCaptureFixture) -> None:
    (said,) = train(lambda loss: loss, caplog, placement=placement)
    assert "an autograd graph up to group '2'" in said and "alive in step 4" in said
    assert "loss.item()" in said and "loss.detach()" in said


def test_a_running_sum_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    total = torch.zeros(())

    def add(loss: Tensor) -> None:
        nonlocal total
        total = 0.9 * total + loss

    assert len(train(add, caplog)) == 1


@pytest.mark.parametrize("keep", [lambda loss: loss.item(), lambda loss: loss.detach()], ids=["item", "detach"])
def test_the_remedies_are_not_reported(keep: Keep, caplog: pytest.LogCaptureFixture) -> None:
    assert train(keep, caplog) == []


def test_cycles_that_the_collector_finds_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    def tie(loss: Tensor) -> None:
        cycle: list[object] = [loss]
        cycle.append(cycle)

    assert train(tie, caplog) == []


def test_many_losses_of_one_step_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), placement=Placement())
    with caplog.at_level(logging.WARNING, logger="zerostd"):
        for _ in range(STEPS):
            losses = [model(torch.ones(2, 8)).square().mean() for _ in range(6)]
            torch.stack(losses).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not caplog.records


def test_features_of_a_block_name_its_group(caplog: pytest.LogCaptureFixture) -> None:
    """The outputs of the model have gone: only the graph up to the block is there."""
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zerostd.prepare(model, optimizer, placement=Placement(parameters="host"), groups=["*"])
    features: list[Tensor] = []
    model[1].register_forward_hook(lambda module, inputs, output: features.append(output))
    with caplog.at_level(logging.WARNING, logger="zerostd"):
        for _ in range(STEPS):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (record,) = caplog.records
    assert "an autograd graph up to group '1'" in record.getMessage()
