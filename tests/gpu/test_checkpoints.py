"""Checkpoints of models whose states are on a CUDA device or off it: they go on bit by bit, from any home to any other.

Every placement here updates with torch's own kernels on the device, so the same bits are due whatever the homes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from support.compare import assert_bitwise
from zerostd import Budget, Placement

pytestmark = pytest.mark.gpu

WIDTH, DEPTH, ROWS = 256, 6, 32
HOMES = {
    "device": Placement(),
    "streamed": Placement(optimizer_states="host", cpu_share=0.0),
    "all on host": Placement(parameters="host", gradients="host", optimizer_states="host", cpu_share=0.0),
    "disk": Placement(optimizer_states={"host": 0.5, "disk": 0.5}, cpu_share=0.0),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "plain": {"foreach": True},
}


def prepared(homes: str, options: str, path: Path, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(DEPTH)]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **OPTIONS[options])
    told: dict[str, Any] = {"placement": HOMES[homes], "budget": Budget(disk_path=str(path))}
    return zerostd.prepare(model, optimizer, precision="bf16", accumulate=1, **told)


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("saved", "loaded"), [(a, b) for a in HOMES for b in HOMES])
def test_training_goes_on_bit_by_bit_from_any_home_to_any_other(
    saved: str, loaded: str, options: str, tmp_path: Path
) -> None:
    model, optimizer = prepared(saved, options, tmp_path)
    train(model, optimizer, 3)
    saving = zerostd.save(tmp_path / "one", model, optimizer, {"step": 3}, wait=False)
    expected = train(model, optimizer, 3)  # while it is being written
    saving.wait()
    state = zerostd.full_state_dict(model)
    zerostd.release(model)
    other, going_on = prepared(loaded, options, tmp_path, seed=1)
    train(other, going_on, 1)
    assert zerostd.load(tmp_path / "one", other, going_on) == {"step": 3}
    assert train(other, going_on, 3) == expected
    assert_bitwise(zerostd.full_state_dict(other), state)
    zerostd.release(other)


def test_what_the_processor_updated_goes_on_on_the_device(tmp_path: Path) -> None:
    """The count of steps rests where the optimizer wants it: fused ones on the device, native kernels nowhere."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH).to("cuda", torch.bfloat16)
    made = torch.optim.AdamW(model.parameters(), fused=True)
    placement = Placement(optimizer_states="host", cpu_share=1.0)
    model, optimizer = zerostd.prepare(model, made, precision="bf16", accumulate=1, placement=placement)
    train(model, optimizer, 3)
    zerostd.save(tmp_path / "one", model, optimizer)
    state = optimizer.state_dict()["state"]
    zerostd.release(model)
    other = nn.Linear(WIDTH, WIDTH).to("cuda", torch.bfloat16)
    made = torch.optim.AdamW(other.parameters(), fused=True)
    other, going_on = zerostd.prepare(other, made, precision="bf16", accumulate=1)
    zerostd.load(tmp_path / "one", other, going_on)
    found = going_on.state_dict()["state"]
    for number, states in state.items():
        assert_bitwise(
            {key: value.cpu() for key, value in found[number].items()},
            {key: value.cpu() for key, value in states.items()},
        )
    train(other, going_on, 1)
    assert {float(one["step"]) for one in going_on.state_dict()["state"].values()} == {4.0}
