"""zerostd trains as plain torch on one rank and as DDP on several: every stage, precision, accumulation and clipping.

One training a test; the ranks keep each reference and compare all stages with it. The limits and their reasons are in
`support/agreement.py`. In bf16 the reference is data parallel by hand, with fp32 masters (`support/reference.py`),
because DDP has none. On one and on two ranks every combination is trained; three and four, where most of the time goes
into waiting for each other, share them with each other and with the other models. `make test` trains a sample in which
every two of model, recipe, stage and number of ranks occur together, `make test-all` the rest.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict

import pytest
import torch.distributed as dist

from support.agreement import agree, disagreements
from support.models import MODELS
from support.processes import doing
from support.reference import Recipe, Trained, train_by_hand, train_ddp, train_plain, train_zerostd
from support.samples import marked, pairwise

STAGES = (0, 1, 2, 3)
MAX_NORM = 0.3  # below most of the norms of these models and above some
RECIPES = [
    Recipe(precision=precision, accumulate=accumulate, max_norm=max_norm, steps=10 if accumulate == 1 else 6)
    for precision, accumulate, max_norm in itertools.product(("fp32", "bf16"), (1, 3), (None, MAX_NORM))
]
WAYS = [  # to accumulate, to clip
    ("declaring", "declaring"),
    ("backward", "calling"),
    ("backward", "declaring"),
    ("no_sync", "calling"),
]


@functools.cache  # in each rank: all stages are compared with one reference
def reference_of(name: str, recipe: Recipe, world_size: int) -> Trained:
    if recipe.precision != "fp32":
        return train_by_hand(MODELS[name], recipe)
    return train_plain(MODELS[name], recipe) if world_size == 1 else train_ddp(MODELS[name], recipe)


def groups_for(recipe: Recipe) -> dict[str, None]:
    """On 3 and 4 ranks a collective costs milliseconds whatever its size: three passes a step go as one group there."""
    return {"groups": None} if recipe.accumulate > 1 and dist.get_world_size() > 2 else {}


def is_sampled(recipe: Recipe, name: str, world_size: int) -> bool:
    """Of each two recipes that differ in one thing, one: the other with the next model, or the next number of ranks."""
    bits = (recipe.precision == "bf16") + (recipe.accumulate > 1) + (recipe.max_norm is not None)
    return (bits + [*MODELS].index(name) + world_size) % 2 == 0


def jobs_for(name: str, world_size: int) -> dict[Recipe, tuple[int, ...]]:
    """Recipes and the stages to train them at: all, or, on so many ranks, the share that is this model's."""
    if world_size < 3:
        return dict.fromkeys(RECIPES, STAGES)
    turn = [*MODELS].index(name)
    jobs: dict[Recipe, tuple[int, ...]] = {}
    for recipe in RECIPES:  # of its stages the even or the odd ones
        if is_sampled(recipe, name, world_size):
            jobs[recipe] = STAGES[(len(jobs) + turn // 2) % 2 :: 2]
    return jobs


def compare(rank, name, recipe, stage, options):
    """On every rank: what disagrees with the reference, in words."""
    world_size = dist.get_world_size()
    doing(f"{name}, reference, {recipe}")
    reference = reference_of(name, recipe, world_size)
    doing(f"{name}, {world_size} ranks, stage {stage}, {recipe}, {options}")
    trained = train_zerostd(MODELS[name], recipe, stage, **options, **groups_for(recipe))
    return disagreements(MODELS[name], recipe, trained, reference)


def label(recipe: Recipe) -> str:
    return f"{recipe.precision}-{recipe.accumulate} passes-{'clipped' if recipe.max_norm else 'unclipped'}"


ALL_CASES = [
    (world_size, name, recipe, stage)
    for world_size, name in itertools.product((1, 2, 3, 4), MODELS)
    for recipe, stages in jobs_for(name, world_size).items()
    for stage in stages
]
SAMPLE = pairwise(ALL_CASES)
STAGE_CASES = [
    pytest.param(
        *(world_size, name, recipe, stage),
        id=f"{world_size} ranks-{name}-{label(recipe)}-stage {stage}",
        marks=() if (world_size, name, recipe, stage) in SAMPLE else pytest.mark.full,
    )
    for world_size, name, recipe, stage in ALL_CASES
]


@pytest.mark.parametrize(("world_size", "name", "recipe", "stage"), STAGE_CASES)
def test_every_stage_trains_as_the_reference(ranks, world_size, name, recipe, stage):
    options = {"clip_by": "calling" if recipe.accumulate == 1 else "declaring"}
    agree(ranks(world_size, compare, name, recipe, stage, options, timeout=280))


def test_three_and_four_ranks_have_every_combination_between_them():
    trained: dict[tuple[Recipe, int], set[str]] = defaultdict(set)
    for name, world_size in itertools.product(MODELS, (3, 4)):
        jobs = jobs_for(name, world_size)
        assert {stage for stages in jobs.values() for stage in stages} == set(STAGES)
        for recipe, stages in jobs.items():
            for stage in stages:
                trained[recipe, stage].add(name)
    assert all(len(trained[job]) >= 2 for job in itertools.product(RECIPES, STAGES)), trained


@pytest.mark.parametrize(
    ("way", "stage", "precision", "world_size"),
    marked([*itertools.product(WAYS, STAGES, ("fp32", "bf16"), (1, 2))]),
)
def test_every_way_to_accumulate_and_clip_trains_as_the_reference(ranks, world_size, precision, stage, way):
    accumulate_by, clip_by = way
    recipe = Recipe(accumulate=3, max_norm=MAX_NORM, precision=precision)
    options = {"accumulate_by": accumulate_by, "clip_by": clip_by}
    agree(ranks(world_size, compare, "mlp", recipe, stage, options))


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_process_group_it_is_plain_torch(stage):
    assert not dist.is_initialized()
    case, recipe = MODELS["gpt"], Recipe(max_norm=MAX_NORM)
    trained = train_zerostd(case, recipe, stage, clip_by="calling")
    assert not (found := disagreements(case, recipe, trained, train_plain(case, recipe))), found
