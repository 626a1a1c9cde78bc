"""Checkpoints without what does not train: small, and complete for a model that has the rest already."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zerostd
from zerostd import CheckpointError, MisuseError, Placement
from zerostd.checkpointing.storage.manifest import seal

WIDTH = 64


class Adapted(nn.Module):
    """A frozen base, and little beside it that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def prepared(seed: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(3)))
    torch.manual_seed(seed)
    for one in model:
        nn.init.normal_(one.up.weight, std=0.1)  # type: ignore[arg-type, union-attr]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return zerostd.prepare(model, torch.optim.AdamW(trained, 1e-2), groups=["*"], **options)


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        loss = (model(torch.randn(8, WIDTH)) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("home", ["device", "host"])
def test_training_goes_on_from_what_trains_alone(home: str, tmp_path: Path) -> None:
    placement = Placement(optimizer_states=home)
    model, optimizer = prepared(placement=placement)
    train(model, optimizer, 3)
    zerostd.save(tmp_path / "all", model, optimizer)
    zerostd.save(tmp_path / "some", model, optimizer, frozen=False)
    losses = train(model, optimizer, 3)
    size, whole = (sum(one.stat().st_size for one in (tmp_path / name).iterdir()) for name in ("some", "all"))
    assert whole - size > 3 * WIDTH * WIDTH * 4
    other, more = prepared(seed=9, placement=placement)
    train(other, more, 1)
    zerostd.load(tmp_path / "some", other, more)
    assert train(other, more, 3) == losses
    states = zerostd.full_state_dict(model), zerostd.full_state_dict(other)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_what_trains_now_must_be_there(tmp_path: Path) -> None:
    model, optimizer = prepared(placement=Placement())
    zerostd.save(tmp_path / "some", model, optimizer, frozen=False)
    torch.manual_seed(0)
    whole = nn.Sequential(*(Adapted().requires_grad_() for _ in range(3)))
    _, other = zerostd.prepare(whole, torch.optim.AdamW(whole.parameters()), placement=Placement(), groups=["*"])
    with pytest.raises(CheckpointError, match=r"parameter '0\.base\.weight' is not in the checkpoint"):
        zerostd.load(tmp_path / "some", whole, other)


def test_nothing_trains(tmp_path: Path) -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    zerostd.prepare(model, placement=Placement())
    with pytest.raises(MisuseError, match="all parameters of the model are frozen"):
        zerostd.save(tmp_path / "none", model, frozen=False)
    assert not (tmp_path / "none").exists()


def test_merged_it_is_what_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = prepared(placement=Placement())
    zerostd.save(tmp_path / "some", model, optimizer, frozen=False)
    with caplog.at_level(logging.WARNING, "zerostd"):
        zerostd.merge(tmp_path / "some", tmp_path / "merged")
    assert "not a whole model" in caplog.text
    (file,) = (tmp_path / "merged").glob("*.safetensors")
    state, whole = load_file(file), zerostd.full_state_dict(model)
    assert set(state) == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(torch.equal(value, whole[name]) for name, value in state.items())


def test_a_manifest_that_says_it_wrongly(tmp_path: Path) -> None:
    model, optimizer = prepared(placement=Placement())
    zerostd.save(tmp_path / "some", model, optimizer, frozen=False)
    (path,) = (tmp_path / "some").glob("*.json")
    data = {**json.loads(path.read_text()), "frozen": "no"}
    del data["crc32"]
    path.write_text(seal(data))
    with pytest.raises(CheckpointError, match="frozen is 'no'"):
        zerostd.load(tmp_path / "some", model, optimizer)
