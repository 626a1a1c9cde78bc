"""Coded moments on a GPU: Triton's kernel and torch's operations give the bits of the CPU, and all routes agree."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zerostd
from support.compare import assert_bitwise
from support.moments import arrays, assert_same_arrays, numbers
from support.side_by_side import seeded
from zerostd import Placement
from zerostd.kernels import MOMENT_CODECS, Adam, Split, moments, native, update
from zerostd.kernels.rules import UpdateArguments

pytestmark = pytest.mark.gpu

ADAM = Adam(1e-3, 0.1, False, beta1=0.9, beta2=0.95, eps=1e-8, decoupled=True, step=3)
RULES = {"AdamW": ADAM, "Adam": dataclasses.replace(ADAM, decoupled=False, maximize=True, step=400)}
each_codec = pytest.mark.parametrize("codec", MOMENT_CODECS)
HOMES = {
    "device": Placement(),
    "cpu": Placement(optimizer_states="host", cpu_share=1.0),
    "streamed": Placement(optimizer_states="host", cpu_share=0.0),
    "halves": Placement(optimizer_states={"device": 0.3, "host": 0.7}, cpu_share=0.5),
    "everything on host": Placement(parameters="host", gradients="host", optimizer_states="host", cpu_share=0.5),
    "disk": Placement(optimizer_states="disk", cpu_share=0.5),
}


def on_gpu(tensors: tuple) -> tuple:
    return tuple(Split(*(h.cuda() for h in t)) if isinstance(t, Split) else t.cuda() for t in tensors)


@each_codec
@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_updates_have_the_bits_of_the_cpu(has_triton, rule, dtype, codec, monkeypatch):
    assert native.load() is not None
    if not has_triton:
        monkeypatch.setattr(moments, "_device_moments", lambda device_type: None)
    for numel, is_split, any_bits in (
        (n, s, b) for n in (1, 64, 100_003) for s in (True, False) for b in (True, False)
    ):
        gradient = numbers(numel, seed=1, any_bits=any_bits).to(dtype)
        expected = arrays(numel, codec, is_split=is_split, any_bits=any_bits)
        found = on_gpu(expected)
        weights = [None if is_split else torch.empty(numel, dtype=torch.float16, device=d) for d in ("cpu", "cuda")]
        for factor in (1.0, 0.3):
            update(rule, gradient, expected, factor=factor, weight=weights[0], num_threads=4)
            update(rule, gradient.cuda(), found, factor=torch.tensor(factor).cuda(), weight=weights[1])
        assert_same_arrays((*found, weights[1]), (*expected, weights[0]), f"{numel} numbers, split {is_split}")


def test_triton_works_here():
    pytest.importorskip("triton")
    moments._device_moments.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert moments._device_moments("cuda") is not None


@each_codec
def test_every_instruction_set_of_this_processor_has_the_bits_of_torch(codec):
    library = native.load()
    assert library is not None
    expected = arrays(1_000_003, codec, is_split=True, any_bits=True)
    gradient = numbers(1_000_003, seed=1, any_bits=True).bfloat16()
    before = arrays(1_000_003, codec, is_split=True, any_bits=True)
    moments.update(UpdateArguments(ADAM, gradient, 0.5, expected, expected, None))
    for level in range(library.zs_limit_instructions(9), -1, -1):
        library.zs_limit_instructions(level)
        found = tuple(Split(*(h.clone() for h in t)) if isinstance(t, Split) else t.clone() for t in before)
        update(ADAM, gradient, found, factor=0.5, num_threads=8)
        assert_same_arrays(found, expected, f"instructions {level}")
    library.zs_limit_instructions(9)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(203, 203) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def train(home: str, folder: Path, precision: str, codec: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model: Any = seeded(Net).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    model, optimizer = zerostd.prepare(
        model,
        optimizer,
        precision=precision,
        accumulate=1,
        groups=["layers.*"],
        placement=dataclasses.replace(HOMES[home], codec={"optimizer_states": codec}),
        budget=zerostd.Budget(disk_path=str(folder)),
        exact=False,
    )
    losses = []
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        batch, wanted = (torch.randn(16, 203, generator=generator).cuda() for _ in range(2))
        loss = F.mse_loss(model(batch).float(), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zerostd.save(folder / "checkpoint", model, optimizer)
    found = dict(zerostd.full_state_dict(model))
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": optimizer.state[p][key].clone() for key in ("exp_avg", "exp_avg_sq")}
    zerostd.release(model)
    return losses, {name: value.cpu() for name, value in found.items()}


@each_codec
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_all_routes_have_the_same_bits(precision, codec, tmp_path):
    runs = {}
    for home in HOMES:
        (tmp_path / home).mkdir()
        runs[home] = train(home, tmp_path / home, precision, codec)
    losses, expected = runs["device"]
    for home, (found, tensors) in runs.items():
        assert found == losses, home
        assert_bitwise(tensors, expected, home)
