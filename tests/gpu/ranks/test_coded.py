"""Codes over nccl: models train nearly as without, on 2 and 4 ranks."""

from __future__ import annotations

import pytest

import zerostd
from support.agreement import agree
from support.models import MODELS, on_device
from support.reference import Recipe, train_zerostd

pytestmark = pytest.mark.gpu

CODECS = {2: {"reduce": "int8"}, 3: {"gather": "int8", "reduce": "int8"}, 0: {"reduce": "int8"}}


def trains(rank: int, stage: int, precision: str) -> list[str]:
    case = on_device(MODELS["gpt"], "cuda")
    recipe = Recipe(precision=precision, steps=12, max_norm=0.5)
    exact = train_zerostd(case, recipe, stage)
    placement = zerostd.Placement(codec=CODECS[stage])
    near = train_zerostd(case, recipe, stage, placement=placement, exact=False)
    gaps = [abs(a - b) / abs(b) for a, b in zip(near.losses, exact.losses, strict=True)]
    return [] if 0 < max(gaps) < 0.02 else [f"stage {stage}, {precision}: losses are off by {max(gaps)}"]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", list(CODECS))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_train_nearly_as_without(cuda_ranks, world_size, stage, precision):
    agree(cuda_ranks(world_size, trains, stage, precision))
