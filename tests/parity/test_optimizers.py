"""Any elementwise optimizer works on shards: as DDP with the same optimizer, within 1e-5.

The mixture of experts has parameters without gradients in some steps, which an optimizer must not touch nor count.
"""

from __future__ import annotations

import pytest

from support.agreement import agree, disagreements
from support.models import MODELS
from support.processes import doing
from support.reference import OPTIMIZERS, Recipe, train_ddp, train_zerostd


def compare_optimizer(rank, optimizer, lr_factors):
    failures = []
    for name in ("mlp", "experts"):
        case, recipe = MODELS[name], Recipe(optimizer=optimizer, lr_factors=lr_factors)
        reference = train_ddp(case, recipe)
        for stage in (1, 3):
            doing(f"{name}, stage {stage}, {recipe}")
            found = disagreements(case, recipe, train_zerostd(case, recipe, stage), reference)
            failures += [f"{name}, stage {stage}, {recipe}: rank {rank}: {text}" for text in found]
    return failures


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_on_shards_trains_as_on_whole_parameters(ranks, optimizer):
    agree(ranks(2, compare_optimizer, optimizer, ()))


@pytest.mark.parametrize("optimizer", ["adamw", "user's own"])
def test_learning_rate_scheduler_acts_on_the_prepared_optimizer(ranks, optimizer):
    agree(ranks(2, compare_optimizer, optimizer, (1.0, 0.5, 2.0, 0.1)))
