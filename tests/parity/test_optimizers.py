"""Any elementwise optimizer works on shards: as DDP with the same optimizer, within 1e-5.

The mixture of experts has parameters without gradients in some steps, which an optimizer must not touch nor count.
"""

from __future__ import annotations

import functools

import pytest

from support.agreement import agree, disagreements
from support.models import MODELS
from support.processes import doing
from support.reference import OPTIMIZERS, Recipe, train_ddp, train_zerostd

each_model = pytest.mark.parametrize("name", ["mlp", "experts"])
each_stage = pytest.mark.parametrize("stage", [1, 3])


@functools.cache  # in each rank: the stages are compared with one reference
def reference_of(name, recipe):
    return train_ddp(MODELS[name], recipe)


def compare(rank, name, recipe, stage):
    doing(f"{name}, stage {stage}, {recipe}")
    trained = train_zerostd(MODELS[name], recipe, stage)
    return disagreements(MODELS[name], recipe, trained, reference_of(name, recipe))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@each_model
@each_stage
def test_optimizer_on_shards_trains_as_on_whole_parameters(ranks, optimizer, name, stage):
    agree(ranks(2, compare, name, Recipe(optimizer=optimizer), stage))


@pytest.mark.parametrize("optimizer", ["adamw", "user's own"])
@each_model
@each_stage
def test_learning_rate_scheduler_acts_on_the_prepared_optimizer(ranks, optimizer, name, stage):
    agree(ranks(2, compare, name, Recipe(optimizer=optimizer, lr_factors=(1.0, 0.5, 2.0, 0.1)), stage))
