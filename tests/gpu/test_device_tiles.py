"""Tiles that native code queues: the bits of those that torch's operations queue, and they are queued by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from zerostd import Placement
from zerostd.kernels import adam_on, device_driver, device_tiles, native
from zerostd.optimizers import streamed_updater

pytestmark = pytest.mark.gpu

WIDTH = 256
ODD = 77  # a width whose parameters do not fill whole vectors


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of each request that native code was given."""
    assert adam_on("cuda") is not None and device_driver("cuda") is not None
    requests: list[int] = []
    queue = native.queue_tiles

    def counted(driver: int, words: Any) -> None:
        requests.append(words[0])
        queue(driver, words)

    monkeypatch.setattr(device_tiles.native, "queue_tiles", counted)
    return requests


def train(
    placement: Placement,
    clip: float | None = None,
    steps: int = 6,
    *,
    width: int = WIDTH,
    fused: bool | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(4))
    model: Any = nn.Sequential(*blocks).to("cuda", torch.bfloat16)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
    model, optimizer = zerostd.prepare(
        model, optimizer, precision="bf16", accumulate=1, max_grad_norm=clip, placement=placement, groups=["*"],
        **options,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    data = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, width, device="cuda", dtype=torch.bfloat16, generator=data)
        (model(x).float() - x.float().roll(1, 0)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    values = zerostd.full_state_dict(model)
    for index, state in optimizer.state_dict()["state"].items():
        values.update({f"{index}.{name}": torch.as_tensor(value) for name, value in state.items()})
    zerostd.release(model)
    return values


def by_torch(monkeypatch: pytest.MonkeyPatch, work: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(streamed_updater, "device_driver", lambda _: None)
        return work()


CASES = {
    "states": (Placement(optimizer_states="host", cpu_share=0.0), {}),
    "a fused optimizer": (Placement(optimizer_states="host", cpu_share=0.0), {"fused": True}),
    "clipped": (Placement(optimizer_states="host", cpu_share=0.0), {"clip": 0.05}),
    "speculating": (Placement(optimizer_states="host", cpu_share=0.0, speculate=True), {"clip": 0.3}),
    "half by the CPU": (Placement(optimizer_states="host", cpu_share=0.5), {}),
    "gradients on the host": (Placement(optimizer_states="host", gradients="host", cpu_share=0.0), {"clip": 1.0}),
    "all on the host": (Placement("host", "host", "host", cpu_share=0.0), {}),
    "a part": (Placement(optimizer_states={"device": 0.3, "host": 0.7}, cpu_share=0.0), {}),
    "odd widths": (Placement(optimizer_states="host", cpu_share=0.0), {"width": ODD}),
    "int8": (Placement(optimizer_states="host", cpu_share=0.0, codec={"optimizer_states": "int8"}), {"exact": False}),
    "bf16": (Placement(optimizer_states="host", cpu_share=0.0, codec={"optimizer_states": "bf16"}), {"exact": False}),
    "int8, odd widths": (
        Placement(optimizer_states="host", cpu_share=0.0, codec={"optimizer_states": "int8"}),
        {"exact": False, "width": ODD, "clip": 0.1},
    ),
}


@pytest.mark.parametrize("tile", [1 << 12, 1 << 15, 8 << 20])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_tiles_that_torch_queues(
    case: str, tile: int, queued: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, options = CASES[case]
    monkeypatch.setattr(streamed_updater, "TILE_NUMEL", tile)
    expected = by_torch(monkeypatch, lambda: train(placement, **options))
    assert not queued
    values = train(placement, **options)
    assert queued or options.get("width") == ODD  # where one tile takes a whole span
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("fused", [None, True])
def test_all_tiles_but_those_of_the_first_step_are_queued(fused: bool | None, queued: list[int]) -> None:
    """A fused optimizer makes its count of steps on the device; it is kept on the host from the second step on."""
    train(Placement(optimizer_states="host", cpu_share=0.0), steps=5, fused=fused)
    size = 4 * (WIDTH * WIDTH + 3 * WIDTH)
    assert sum(queued) == 4 * size


def test_an_optimizer_without_a_kernel_goes_tile_by_tile(queued: list[int]) -> None:
    model: Any = nn.Linear(WIDTH, WIDTH).to("cuda", torch.bfloat16)
    optimizer: Any = torch.optim.RMSprop(model.parameters())
    placement = Placement(optimizer_states="host", cpu_share=0.0)
    model, optimizer = zerostd.prepare(model, optimizer, precision="bf16", placement=placement)
    for _ in range(3):
        model(torch.ones(4, WIDTH, device="cuda", dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    zerostd.release(model)
    assert not queued
