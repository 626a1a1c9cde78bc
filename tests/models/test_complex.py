"""Complex parameters, as Fourier layers have them, train as in plain torch: in every tier, on ranks, from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerostd

WIDTH, MODES, STEPS = 16, 6, 4
FORMS: dict[str, dict[str, Any]] = {
    "device": {"placement": {}},
    "host": {"placement": {"parameters": "host", "gradients": "host", "optimizer_states": "host"}},
    "disk": {"placement": {"parameters": "disk", "gradients": "disk", "optimizer_states": "disk"}},
    "routes": {"placement": {"optimizer_states": {"device": 0.3, "host": 0.4, "disk": 0.3}, "cpu_share": 0.5}},
    "early": {"placement": {"optimizer_states": "host"}, "accumulate": 1},
    "clipped": {"placement": {"optimizer_states": "host", "speculate": True}, "accumulate": 1, "max_grad_norm": 0.2},
    "recomputed": {"placement": {"activations": "recompute", "parameters": "host"}},
    "planned": {"budget": {"device": "64MiB", "host": "256MiB"}},
}


class Spectral(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, dtype=torch.cfloat) / WIDTH)
        self.beside = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x)
        mixed = torch.zeros_like(waves)
        mixed[..., :MODES] = torch.einsum("bix,iox->box", waves[..., :MODES], self.weight)
        return F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.beside(x))


def make(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, WIDTH, 1), *(Spectral() for _ in range(3)), nn.Conv1d(WIDTH, 1, 1)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, number: int) -> Tensor:
    x = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(number))
    return model(x.to(next(model.parameters()).device)).square().mean()


def train_plain(
    norm: float | None = None, num_ranks: int = 1, device: str = "cpu"
) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = make(device)
    losses = []
    for step in range(STEPS):
        loss = torch.stack([loss_of(model, 100 * step + rank) for rank in range(num_ranks)]).mean()
        loss.backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def train(model: nn.Module, optimizer: Any, rank: int = 0) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, 100 * step + rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare_form(form: str, folder: Path, device: str = "cpu") -> None:
    """Train in a form, and see that losses and values are those of plain torch. On an accelerator the CPU's updates
    take other square roots, and plans leave 128 MiB of a budget to libraries."""
    options = FORMS[form]
    budget = {"disk_path": str(folder), **options.get("budget", {})}
    near = 0.0 if device == "cpu" else 1e-4
    if device != "cpu" and "device" in budget:
        budget["device"] = "2GiB"
    losses, values = train_plain(options.get("max_grad_norm"), device=device)
    model, optimizer = zerostd.prepare(*make(device), **{**options, "budget": budget})
    assert train(model, optimizer) == pytest.approx(losses, rel=1e-5, abs=near * losses[0])
    state = zerostd.full_state_dict(model)
    assert state["1.weight"].dtype == torch.complex64
    for name, value in values.items():
        if device == "cpu":
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
        else:  # a gradient near zero decides the direction of a whole step of Adam
            far = (state[name] - value.cpu()).abs() > 1e-4
            assert far.float().mean() < 0.01, name
    zerostd.release(model)


@pytest.mark.parametrize("form", FORMS)
def test_forms_train_as_plain_torch(form: str, tmp_path: Path) -> None:
    compare_form(form, tmp_path)


def _train_rank(rank: int, stage: int, tier: str) -> tuple[list[float], Tensor]:
    placement = {} if tier == "device" else {"optimizer_states": tier}
    if tier == "host" and stage == 3:
        placement |= {"parameters": "host", "gradients": "host"}
    model, optimizer = zerostd.prepare(*make(), stage=stage, placement=placement)
    losses = train(model, optimizer, rank)
    weight: Tensor = zerostd.full_state_dict(model)["2.weight"]
    zerostd.release(model)
    return losses, weight


@pytest.mark.parametrize(("stage", "tier"), [(0, "device"), (1, "device"), (2, "host"), (3, "device"), (3, "host")])
def test_ranks_train_as_plain_torch(ranks: Any, stage: int, tier: str) -> None:
    losses, values = train_plain(num_ranks=2)
    (first, weight), (second, _) = ranks(2, _train_rank, stage, tier)
    means = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(weight, values["2.weight"], rtol=1e-4, atol=1e-5)


def test_checkpoints_resume_and_merge_bit_for_bit(tmp_path: Path) -> None:
    placement = zerostd.Placement(optimizer_states="host")
    model, optimizer = zerostd.prepare(*make(), placement=placement)
    train(model, optimizer)
    zerostd.save(tmp_path / "checkpoint", model, optimizer)
    merged = zerostd.full_state_dict(model)
    momentum = optimizer.state[model[1].weight]["exp_avg"]
    assert momentum.dtype == torch.complex64 and momentum.shape == (WIDTH, WIDTH, MODES)
    expected = train(model, optimizer)
    zerostd.release(model)
    other, other_optimizer = zerostd.prepare(*make(), placement=placement)
    zerostd.load(tmp_path / "checkpoint", other, other_optimizer)
    assert train(other, other_optimizer) == expected
    zerostd.release(other)
    zerostd.merge(tmp_path / "checkpoint", tmp_path / "model")
    from safetensors.torch import load_file

    files = list((tmp_path / "model").glob("*.safetensors"))
    values = {name: value for file in files for name, value in load_file(file).items()}
    assert all(torch.equal(values[name], value) for name, value in merged.items())


def _train_worker(rank: int, servers: int) -> list[float]:
    try:
        options: dict[str, Any] = {"servers": servers} if servers else {"stage": 1, "placement": {}}
        model, optimizer = zerostd.prepare(*make(), **options)
    except SystemExit:
        return []
    losses = train(model, optimizer, rank)
    zerostd.release(model)
    return losses


def test_servers_give_the_bits_of_stage_1_without_them(ranks: Any) -> None:
    assert ranks(3, _train_worker, 1)[:2] == ranks(2, _train_worker, 0)
