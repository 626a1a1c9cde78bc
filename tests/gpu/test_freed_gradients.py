"""Gradients freed inside backward, on a device: the same bits, and less memory by the allocator's own count."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from zerostd import Placement

pytestmark = pytest.mark.gpu

WIDTH, DEPTH, STEPS = 2048, 24, 5
GROUP = 2 * WIDTH * (WIDTH + 1)  # bytes of a gradient


def train(**placement: Any) -> tuple[list[float], dict[str, Tensor], int]:
    """Return losses, values, and the most that was allocated from the second step on."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).to("cuda", torch.bfloat16)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    placed = Placement(**placement)
    model, optimizer = zerostd.prepare(model, optimizer, precision="bf16", accumulate=1, placement=placed, groups=["*"])
    losses = []
    source = torch.Generator("cuda").manual_seed(1)
    for step in range(STEPS):
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        x = torch.randn(64, WIDTH, generator=source, device="cuda", dtype=torch.bfloat16)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    optimizer.synchronize()
    most = torch.cuda.max_memory_allocated()
    values = zerostd.full_state_dict(model)
    zerostd.release(model)
    return [loss.item() for loss in losses], values, most


@pytest.mark.parametrize(
    "placement",
    [
        {},
        {"optimizer_states": "host", "cpu_share": 0.0},
        {"optimizer_states": "host", "cpu_share": 0.5},
        {"optimizer_states": {"device": 0.5, "host": 0.5}, "cpu_share": 0.3},
        {"parameters": "host", "optimizer_states": "host"},
    ],
    ids=["device", "streamed", "both", "shares", "all on host"],
)
def test_the_bits_are_the_same_in_less_memory(placement: dict[str, Any]) -> None:
    losses, values, most = train(**placement)
    same, same_values, less = train(keep_gradients=False, **placement)
    assert same == losses
    assert all(torch.equal(same_values[name], value) for name, value in values.items())
    assert most - less > (DEPTH - 6) * GROUP, (most / GROUP, less / GROUP)
