"""Adam with split masters in one pass: torch's numbers, the same bits resident and streamed, and it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from zerostd import Placement
from zerostd.kernels import Adam, Split, adam_on, join, split
from zerostd.optimizers import elementwise

pytestmark = pytest.mark.gpu

WIDTH = 256


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("count", [1, 1024, 100_003])
def test_numbers_are_torchs(decoupled: bool, weight_decay: float, maximize: bool, count: int) -> None:
    kernel = adam_on("cuda")
    assert kernel is not None
    source = torch.Generator("cuda").manual_seed(count)
    values = torch.randn(count, device="cuda", generator=source)
    halves = split(values)
    master = nn.Parameter(join(halves))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([master], lr=1e-3, weight_decay=weight_decay, maximize=maximize)
    averages = [torch.zeros_like(values), torch.zeros_like(values)]
    step = torch.zeros((), device="cuda")
    factor = torch.tensor([0.7], device="cuda")
    rule = Adam(1e-3, weight_decay, maximize, 0.9, 0.999, 1e-8, decoupled, 0, True)
    for _ in range(20):
        gradient = torch.randn(count, device="cuda", generator=source).bfloat16()
        master.grad = gradient.float() * factor
        optimizer.step()
        step += 1
        kernel.adam(rule, step, gradient, factor, halves, halves.high, averages)
    assert torch.allclose(join(halves), master, rtol=2e-6, atol=2e-7)
    state = optimizer.state[master]
    assert torch.allclose(averages[0], state["exp_avg"], rtol=1e-5, atol=1e-7)
    assert torch.allclose(averages[1], state["exp_avg_sq"], rtol=1e-5, atol=1e-9)


def test_a_count_of_steps_on_the_host_gives_the_same_bits() -> None:
    kernel = adam_on("cuda")
    assert kernel is not None
    rule = Adam(3e-4, 0.1, False, 0.9, 0.999, 1e-8, True, 0, True)
    source = torch.Generator("cuda").manual_seed(1)
    values = torch.randn(100_003, device="cuda", generator=source)
    found = []
    gradients = [torch.randn(values.numel(), device="cuda", generator=source).bfloat16() for _ in range(5)]
    for place in ("cpu", "cuda"):
        halves = split(values)
        states = [torch.zeros_like(values), torch.zeros_like(values)]
        for step, gradient in enumerate(gradients, start=1000):
            kernel.adam(rule, torch.tensor(float(step), device=place), gradient, None, halves, halves.high, states)
        found.append([halves.high, halves.low, *states])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_high_half_elsewhere_leaves_the_old_one() -> None:
    kernel = adam_on("cuda")
    assert kernel is not None
    halves = split(torch.randn(5000, device="cuda"))
    old = Split(halves.high.clone(), halves.low.clone())
    high = torch.empty_like(halves.high)
    rule = Adam(1e-2, 0.0, False, 0.9, 0.999, 1e-8, True, 0, True)
    states = [torch.zeros(5000, device="cuda"), torch.zeros(5000, device="cuda")]
    kernel.adam(rule, torch.ones(()), torch.randn(5000, device="cuda"), None, halves, high, states)
    assert torch.equal(halves.high, old.high) and not torch.equal(high, old.high)
    assert (join(Split(high, halves.low)) - join(old)).abs().max() <= 1.1e-2


def train(placement: Placement, clip: float | None, fused: bool | None, steps: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(4))
    model: Any = nn.Sequential(*blocks).to("cuda", torch.bfloat16)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    model, optimizer = zerostd.prepare(
        model, optimizer, precision="bf16", accumulate=1, max_grad_norm=clip, placement=placement, groups=["*"]
    )
    data = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16, generator=data)
        (model(x).float() - x.float().roll(1, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = zerostd.full_state_dict(model)
    zerostd.release(model)
    return values


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_resident_and_streamed_give_the_same_bits(clip: float | None, fused: bool | None) -> None:
    resident = train(Placement(), clip, fused)
    streamed = train(Placement(optimizer_states="host", cpu_share=0.0), clip, fused)
    assert all(torch.equal(resident[name], streamed[name]) for name in resident)


@pytest.mark.parametrize("place", ["device", "host"])
def test_it_is_used_and_close_to_torchs_optimizer(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = elementwise.DeviceUpdate.make

    def counted(self: Any, gradient: torch.Tensor, *rest: Any) -> None:
        made.append(gradient.numel())
        make(self, gradient, *rest)

    monkeypatch.setattr(elementwise.DeviceUpdate, "make", counted)
    placement = Placement(optimizer_states=place, cpu_share=0.0)
    at_once = train(placement, None, True)
    assert sum(made) >= 5 * 4 * WIDTH * WIDTH  # all steps but the first, which makes the states
    monkeypatch.setattr(elementwise, "adam_on", lambda device_type: None)
    made.clear()
    by_torch = train(placement, None, True)
    assert not made
    for name, value in by_torch.items():
        assert torch.allclose(at_once[name].float(), value.float(), rtol=0.02, atol=2e-4), name
