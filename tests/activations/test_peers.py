"""Ranks that compute the same activations keep a slice of them each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostd
from zerostd import MisuseError, Placement

ROWS, WIDTH = 1030, 128  # bytes of a row block that no number of ranks divides into whole pages


def make() -> nn.Sequential:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    return nn.Sequential(*parts)


def train(way: str, *, shared: bool, rows: int = ROWS, **more: Any) -> tuple[dict[str, torch.Tensor], Any]:
    model = make()
    group = dist.group.WORLD if shared else None
    placement = Placement(activations=way, same_activations=group)
    _, optimizer = zerostd.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), placement=placement, groups=["*"], **more
    )
    torch.manual_seed(3)
    for _ in range(3):
        model(torch.randn(rows, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zerostd.full_state_dict(model), zerostd.memory(model)


def job(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    on_device, _ = train("device", shared=False)
    for way in ("device", "disk", "recompute+host"):
        kept, whole = train(way, shared=False)
        state, memory = train(way, shared=True)
        found[way] = (
            all(torch.equal(state[name], value) for name, value in on_device.items()),
            all(torch.equal(kept[name], value) for name, value in on_device.items()),
            whole.peak.get("host", {}).get("activations", 0),
            memory.peak.get("host", {}).get("activations", 0),
        )
    with pytest.raises(MisuseError, match=r"group '0'.*rank 0: \d+ of \d+ bytes, rank 1"):
        train("host", shared=True, rows=ROWS + 100 * rank)
    return found


def test_slices_on_three_ranks_give_the_same_bits(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(3, job):
        for way, (is_equal, is_equal_whole, whole, slices) in found.items():
            assert is_equal and is_equal_whole, way
            if "host" in way:
                assert whole / 3 <= slices <= whole / 3 + 64 * 4096
