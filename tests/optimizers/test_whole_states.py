"""Whole states load on ranks that keep a part of each, as the parts themselves do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zerostd
from support.compare import assert_bitwise
from support.side_by_side import data, seeded
from zerostd import Placement

State = dict[str, torch.Tensor]


def reloaded(rank: int, is_whole: bool) -> State:
    """Three steps, of which the last one starts from the states after the first."""
    model = seeded(lambda: nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 3)))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zerostd.prepare(model, optimizer, stage=2, placement=Placement())

    def step(number: int) -> None:
        model(data(2, 256, number=number, rank=rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    saved = optimizer.state_dict()
    if is_whole:
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        saved["state"] = {number: {name: state[name].clone() for name in state} for number, state in enumerate(states)}
    step(1)
    optimizer.load_state_dict(saved)
    step(2)
    return zerostd.full_state_dict(model)


def test_whole_states_load_as_the_parts_of_a_rank_do(ranks: Any) -> None:
    assert_bitwise(ranks(2, reloaded, True)[0], ranks(2, reloaded, False)[0])
