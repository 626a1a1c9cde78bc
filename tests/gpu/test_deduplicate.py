"""Equal frozen parameters in pinned memory and on disk, shared by models on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd

pytestmark = pytest.mark.gpu

WIDTH = 1024
DEVICE = "cuda"


def make(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).requires_grad_(False).to(device)


def dispatched(tier: str, folder: Path, device: str) -> nn.Module:
    plan = zerostd.Plan.from_json(f'{{"homes": {{"*": {{"parameters": "{tier}"}}}}}}')
    budget: dict[str, Any] = {"disk_path": str(folder)}
    return zerostd.dispatch(make(device), plan=plan, budget=budget, groups=["*"], device=device)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_models_share_while_they_compute(tier: str, tmp_path: Path) -> None:
    share_and_write(tier, tmp_path, DEVICE)


def share_and_write(tier: str, folder: Path, device: str) -> None:
    """Forwards that stream ahead run before and after memory is shared, copied and handed on."""
    models = [dispatched(tier, folder, device) for _ in range(3)]
    x = torch.randn(4, WIDTH, device=device)
    with torch.inference_mode():
        expected = make(device)(x)
        assert all(torch.equal(model(x), expected) for model in models)
        alone = zerostd.memory(models[0]).now[tier]["parameters"]
        assert zerostd.deduplicate(*models) == 2 * alone
        assert sum(zerostd.memory(model).now[tier]["parameters"] for model in models) == alone
        assert all(torch.equal(model(x), expected) for _ in range(3) for model in models)
    with torch.no_grad():
        models[0][3].weight.mul_(2.0)
    changed = make(device)
    with torch.no_grad():
        changed[3].weight.mul_(2.0)
    with torch.inference_mode():
        assert torch.equal(models[0](x), changed(x))
        zerostd.release(models[0])  # it allocated, and pinned, what the others read
        assert all(torch.equal(model(x), expected) for _ in range(3) for model in models[1:])
        zerostd.release(models[1])
        assert torch.equal(models[2](x), expected)
    zerostd.release(models[2])
