"""Passes for real: they are timed, and leave no trace."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerostd
from planning.machines import LAPTOP
from zerostd.measuring.model import profile_model


class Slow(nn.Module):
    """Forward takes 30 ms, backward 60 ms."""

    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.03)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            time.sleep(0.06)
            return grad

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.last(self.Waiting.apply(self.drop(self.norm(self.first(x)))))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_passes_are_timed_and_leave_no_trace(precision: str) -> None:
    model, batch = Slow(), torch.randn(4, 8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    profile = profile_model(model, precision=precision, batch=batch, probe=True)
    assert profile.forward_s is not None and 0.03 <= profile.forward_s < 1.0
    assert profile.backward_s is not None and 0.06 <= profile.backward_s < 1.0
    assert profile.activation_bytes is None and profile.activations() > 0  # the processor does not say: counted
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_gradients_and_hooks_of_the_user_stay() -> None:
    model, called = nn.Linear(4, 4), []
    model.weight.grad = torch.ones(4, 4)
    model.weight.register_hook(called.append)
    assert profile_model(model, batch=torch.randn(2, 4), probe=True).forward_s
    assert torch.equal(model.weight.grad, torch.ones(4, 4)) and not called


def test_what_is_not_real_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        without_memory = nn.Linear(4, 4)
    for model, batch in (
        (without_memory, torch.randn(2, 4, device="meta")),
        (nn.Linear(4, 4), torch.randn(2, 4, device="meta")),
    ):
        profile = profile_model(model, batch=batch, probe=True)
        assert (profile.forward_s, profile.samples) == (None, 2)

    class Broken(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(x)
            out.register_hook(lambda grad: 1 // 0)
            return out

    with caplog.at_level(logging.INFO, "zerostd"):
        profile = profile_model(Broken(4, 4), batch=torch.randn(2, 4), probe=True)
    assert profile.forward_s is None and profile.groups[0].forward_flops > 0
    assert "could not be run with the batch (ZeroDivisionError" in caplog.text


def test_plans_for_this_machine_are_probed_and_for_others_not(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROSTD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    model, batch = Slow(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    here = zerostd.plan(model, optimizer, batch=batch)
    assert here.predicted.step_s is not None and here.predicted.step_s >= 0.09
    other = zerostd.plan(model, optimizer, batch=batch, machine=LAPTOP)
    assert other.predicted.step_s is not None and other.predicted.step_s < 0.09


class Recomputing(nn.Module):
    def __init__(self, num_recomputed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.num_recomputed = num_recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index < self.num_recomputed else block(x)
        return x


@pytest.mark.parametrize(("num_recomputed", "share"), [(0, 0.0), (1, 0.25), (4, 1.0)])
def test_what_the_model_itself_recomputes_takes_time(num_recomputed: int, share: float) -> None:
    model = Recomputing(num_recomputed)
    profile = profile_model(model, groups=["blocks.*"], batch=torch.randn(8, 16))
    assert profile.recomputed == pytest.approx(share)
    options: dict[str, Any] = {"batch": torch.randn(8, 16), "machine": LAPTOP, "groups": ["blocks.*"]}
    recomputing = zerostd.plan(model, torch.optim.SGD(model.parameters(), lr=0.1), **options).predicted
    model.num_recomputed = 0
    keeping = zerostd.plan(model, torch.optim.SGD(model.parameters(), lr=0.1), **options).predicted
    assert recomputing.compute_s is not None and keeping.compute_s is not None
    forward = sum(group.forward_flops for group in profile.groups) * 8 / (4e11 * 0.65)
    assert recomputing.compute_s - keeping.compute_s == pytest.approx(share * forward, rel=1e-6, abs=1e-13)
