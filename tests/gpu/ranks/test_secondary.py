"""Secondary shards over nccl: models train as at flat stage 3, with gathers on two streams."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zerostd
from support.agreement import agree
from support.models import MODELS, on_device
from support.reference import Recipe, train_zerostd

pytestmark = pytest.mark.gpu

CLOSE = 1e-5  # nccl sums in its own order
PLACES = {"device": {}, "host": {"optimizer_states": "host"}, "recompute": {"activations": "recompute"}}


def trains(rank: int, precision: str) -> list[str]:
    case = on_device(MODELS["gpt"], "cuda")
    recipe = Recipe(precision=precision, steps=12, max_norm=0.5)
    torch.cuda.init()  # else the mesh gives each rank a device of its own
    mesh = init_device_mesh("cuda", (2, 2))
    failures = []
    for name, place in PLACES.items():
        flat = train_zerostd(case, recipe, 3, placement=zerostd.Placement(**place))
        placement = zerostd.Placement(**place, secondary_shards=True)
        kept = train_zerostd(case, recipe, 3, placement=placement, mesh=mesh)
        gaps = [abs(a - b) / abs(b) for a, b in zip(kept.losses, flat.losses, strict=True)]
        if not max(gaps) < CLOSE:
            failures.append(f"{name}, {precision}, rank {rank}: losses are off by {max(gaps)}")
    return failures


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_train_as_at_flat_stage_3(cuda_ranks, precision):
    agree(cuda_ranks(4, trains, precision))
