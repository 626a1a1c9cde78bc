"""fp64 models on several ranks: reduced, summed and updated in fp64, as plain torch does it with all batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from support.processes import doing
from zerostd import Placement
from zerostd.kernels import sum_slices

SIZE, STEPS = 2, 3
CASES: list[tuple[int, Placement, float | None, int]] = [  # stage, placement, max_grad_norm, passes
    *((stage, Placement(), None, 1) for stage in range(4)),
    (0, Placement(), 0.05, 2),
    (2, Placement(optimizer_states="host", cpu_share=1.0), None, 2),
    (3, Placement(optimizer_states="host", cpu_share=0.0), 0.05, 1),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def batch(step: int, part: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(4, 8, dtype=torch.float64, generator=generator)


def plain(max_norm: float | None, passes: int) -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for part in range(passes):
            for rank in range(SIZE):
                (model(batch(step, part, rank)).square().mean() / SIZE).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert all(one.dtype == torch.float64 for one in found.values())
    return max(((found[name] - one).abs().max() / one.abs().max()).item() for name, one in expected.items())


def train(rank: int, stage: int, placement: Placement, max_norm: float | None, passes: int) -> float:
    doing(f"stage {stage}, {placement}, clip {max_norm}, {passes} passes")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zerostd.prepare(model, optimizer, stage=stage, placement=placement, max_grad_norm=max_norm)
    for step in range(STEPS):
        for part in range(passes):
            model(batch(step, part, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    error = worst(zerostd.full_state_dict(model), plain(max_norm, passes))
    zerostd.release(model)
    return error


def unsynced(rank: int) -> float:
    model = net()
    model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(STEPS):
        with zerostd.no_sync(model):
            model(batch(step, 0, rank)).square().mean().backward()
        model(batch(step, 1, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    error = worst(zerostd.full_state_dict(model), plain(None, 2))
    zerostd.release(model)
    return error


@pytest.mark.parametrize(("stage", "placement", "max_norm", "passes"), CASES)
def test_two_ranks_are_as_exact_as_one(
    ranks: Any, stage: int, placement: Placement, max_norm: float | None, passes: int
) -> None:
    """In fp32 anywhere on the way they would be apart by 1e-8 and more. Only the factor of clipping is fp32."""
    errors = ranks(SIZE, train, stage, placement, max_norm, passes)
    assert max(errors) < (1e-12 if max_norm is None else 1e-7)


def test_passes_under_no_sync(ranks: Any) -> None:
    assert max(ranks(SIZE, unsynced)) < 1e-12


def test_slices_are_summed_in_fp64() -> None:
    received = torch.randn(3 * 1000, dtype=torch.float64)
    expected = (received[:1000] + received[1000:2000] + received[2000:]) * 0.5
    out = torch.ones(1000, dtype=torch.float64)
    sum_slices(received, 3, 0.5, out, accumulate=True)
    assert torch.equal(out, 1 + expected)
    with pytest.raises(ValueError, match=r"received is torch\.float64"):
        sum_slices(received, 3, 0.5, torch.ones(1000))
