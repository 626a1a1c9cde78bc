"""Shares of a placement are honoured: groups are cut between parameters, or the placement is refused with the nearest
one that works. Results do not change by a bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerostd
from support.compare import assert_bitwise
from support.side_by_side import data, seeded
from zerostd import Placement, PrepareError
from zerostd.policy import Budget

WIDTH = 64
HALVES = {"device": 0.5, "host": 0.5}
QUARTERS = {"device": 0.25, "host": 0.25, "disk": 0.5}


def layers() -> nn.Module:
    """A small model, which is one group by itself."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)), nn.Linear(WIDTH, 2))


def trained(placement: Placement, path: str, steps: int = 3, **options: object) -> nn.Module:
    model = seeded(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"stage": 3, "precision": "bf16"} | options  # in fp32 parameters would be their own masters
    model, optimizer = zerostd.prepare(model, optimizer, placement=placement, budget=Budget(disk_path=path), **options)
    for step in range(steps):
        model(data(4, WIDTH, number=step)).square().mean().backward()
        optimizer.step()
        if step < steps - 1:
            optimizer.zero_grad()
    return model


def parts(model: nn.Module, kind: str) -> dict[str, float]:
    """The part of a kind that each tier holds."""
    held = {tier: kinds[kind] for tier, kinds in zerostd.memory(model).now.items() if kinds.get(kind)}
    return {tier: size / sum(held.values()) for tier, size in held.items()}


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer_states"])
@pytest.mark.parametrize("shares", [HALVES, QUARTERS], ids=["halves", "quarters"])
def test_a_small_model_is_cut_at_the_shares(kind, shares, tmp_path):
    model = trained(Placement(**{kind: shares}), str(tmp_path))
    held = parts(model, kind)
    assert set(held) == set(shares)
    for tier, share in shares.items():
        assert held[tier] == pytest.approx(share, abs=0.1), held
    assert_bitwise(zerostd.full_state_dict(model), zerostd.full_state_dict(trained(Placement(), str(tmp_path))))


def train_sharded(rank: int, stage: int, path: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    placement = Placement(optimizer_states=HALVES)
    if stage == 3:
        placement = Placement(parameters=QUARTERS, gradients=HALVES, optimizer_states=HALVES)
    model = trained(placement, path, stage=stage)
    return parts(model, "optimizer_states"), zerostd.full_state_dict(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_cut_where_one_does(ranks, stage, tmp_path):
    expected = zerostd.full_state_dict(trained(Placement(), str(tmp_path)))
    for held, state in ranks(2, train_sharded, stage, str(tmp_path)):
        assert held == {tier: pytest.approx(0.5, abs=0.1) for tier in HALVES}
        assert_bitwise(state, expected)


def test_shares_that_whole_parameters_miss_are_refused_with_the_nearest():
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 20))
    optimizer = torch.optim.AdamW(model.parameters())
    for kind in ("parameters", "gradients"):
        with pytest.raises(PrepareError) as caught:
            zerostd.prepare(model, optimizer, placement=Placement(**{kind: HALVES}))
        message = str(caught.value)
        assert "'0.weight' alone is 90 %" in message and "{'device': 0.9, 'host': 0.1}" in message, message
    model, _ = zerostd.prepare(model, optimizer, placement=Placement(parameters={"device": 0.9, "host": 0.1}))
    assert parts(model, "parameters")["host"] == pytest.approx(0.1, abs=0.1)  # a page more


def test_a_very_small_model_is_kept_in_whole_groups_and_the_log_says_how_far_off(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zerostd.prepare(model, torch.optim.AdamW(model.parameters()), placement=Placement(parameters=HALVES))
    assert "The nearest is {'device': 1.0, 'host': 0.0}" in caplog.text
