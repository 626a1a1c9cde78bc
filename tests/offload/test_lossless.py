"""Frozen parameters that are packed on disk: the same bits as without, fewer bytes, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd

CODEC = {"parameters": "lossless"}
WIDTH = 768


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def make_model(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(3))).to(device)


def train(
    folder: str, codec: dict[str, str], device: str = "cpu", **options: Any
) -> tuple[list[float], zerostd.Memory, dict[str, Any]]:
    model = make_model(device)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    model, prepared = zerostd.prepare(
        model,
        optimizer,
        placement=zerostd.Placement(parameters="disk", optimizer_states="host", codec=codec),
        budget=zerostd.Budget(disk_path=folder),
        groups=["*"],
        **options,
    )
    losses = []
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x.to(device)).square().mean()
        loss.backward()
        prepared.step()
        prepared.zero_grad()
        losses.append(loss.item())
    memory = zerostd.memory(model)
    values = zerostd.full_state_dict(model)
    zerostd.release(model)
    return losses, memory, values


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_training_beside_packed_parameters_has_the_same_bits(tmp_path: Path, precision: str) -> None:
    expected, plain, values = train(str(tmp_path), {}, precision=precision)
    losses, packed, packed_values = train(str(tmp_path), CODEC, precision=precision)
    assert losses == expected
    assert all(torch.equal(values[name], packed_values[name]) for name in values)
    assert not plain.coded and plain.unpacking_s == 0
    size, held = packed.coded["parameters"]
    assert held < (0.7 if precision == "bf16" else 0.88) * size
    saved = plain.now["disk"]["parameters"] - packed.now["disk"]["parameters"]
    assert saved == size - held
    assert packed.unpacking_s > 0
    assert "parameters of " in str(packed) and "unpacking took" in str(packed)


def test_prediction_counts_what_packing_needs(tmp_path: Path) -> None:
    """The host's peak is inside a budget of exactly what `prepare` asks for."""
    placement = zerostd.Placement(parameters="disk", codec=CODEC)

    def prepare(host: int) -> nn.Module:
        model = make_model().requires_grad_(False)
        budget = zerostd.Budget(disk_path=str(tmp_path), host=host)
        model, _ = zerostd.prepare(model, placement=placement, budget=budget, groups=["*"])
        return model

    with pytest.raises(zerostd.PrepareError) as refusal:
        prepare(1)
    assert "budget" in str(refusal.value)
    model = prepare(64 << 20)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    most = sum(zerostd.memory(model).peak["host"].values())
    zerostd.release(model)
    zerostd.release(prepare(most))


def test_edits_and_checkpoints_of_packed_parameters(tmp_path: Path) -> None:
    model = make_model().requires_grad_(False)
    placement = zerostd.Placement(parameters="disk", codec=CODEC)
    model, _ = zerostd.prepare(model, placement=placement, budget={"disk_path": str(tmp_path)}, groups=["*"])
    with zerostd.gathered(model, write=True), torch.no_grad():
        model[1].base.weight.mul_(2.0)
    with torch.no_grad():
        model[2].base.bias.fill_(0.25)
    zerostd.save(tmp_path / "checkpoint", model, frozen=True)
    expected = make_model()
    with torch.no_grad():
        expected[1].base.weight.mul_(2.0)
        expected[2].base.bias.fill_(0.25)
    state = zerostd.full_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    zerostd.release(model)
    other = make_model().requires_grad_(False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other, _ = zerostd.prepare(other, placement=placement, budget={"disk_path": str(tmp_path)}, groups=["*"])
    zerostd.load(tmp_path / "checkpoint", other)
    state = zerostd.full_state_dict(other)
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    zerostd.release(other)


def test_a_plan_may_pack_for_inference(tmp_path: Path) -> None:
    x = torch.randn(2, WIDTH)
    model = make_model()
    with torch.no_grad():
        expected = model(x)
    plan = zerostd.Plan.from_json('{"homes": {"*": {"parameters": "disk"}}, "codec": {"parameters": "lossless"}}')
    assert plan.explain().endswith("Coded: parameters (lossless).")
    model = zerostd.dispatch(model, plan=plan, budget={"disk_path": str(tmp_path)}, groups=["*"], device="cpu")
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    size, held = zerostd.memory(model).coded["parameters"]
    assert held < 0.88 * size
    zerostd.release(model)


def _train_ranks(rank: int, folder: str) -> list[list[float]]:
    return [train(folder, codec, stage=3)[0] for codec in ({}, CODEC)]


def test_ranks_pack_their_shards(ranks: Any, tmp_path: Path) -> None:
    for plain, packed in ranks(2, _train_ranks, str(tmp_path)):
        assert plain == packed


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"parameters": "host", "codec": CODEC}, "packs frozen parameters on disk.*there are none"),
        ({"parameters": "disk", "codec": {"parameters": "int8"}}, "no codec 'int8' for 'parameters'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, placement: dict[str, Any], message: str) -> None:
    model = make_model().requires_grad_(False)
    with pytest.raises(zerostd.PrepareError, match=message):
        zerostd.prepare(model, placement=placement, budget={"disk_path": str(tmp_path)})
    assert type(model[0].base.weight) is nn.Parameter


def test_trained_parameters_on_disk_are_not_packed(tmp_path: Path) -> None:
    model = make_model().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(zerostd.PrepareError, match="there are none"):
        zerostd.prepare(
            model,
            optimizer,
            placement=zerostd.Placement(parameters="disk", optimizer_states="disk", codec=CODEC),
            budget={"disk_path": str(tmp_path)},
        )
