"""The references agree with each other, the harness sees mistakes, and failing ranks are reported.

Nothing here uses zerostd: what the parity tests compare with must stand on its own.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from support.agreement import agree, disagreements
from support.compare import assert_bitwise, assert_close_states
from support.models import EXPERTS, MODELS, REST_LENGTH, topics
from support.processes import RankPool, doing, run_ranks
from support.reference import OPTIMIZERS, Recipe, train_by_hand, train_ddp, train_plain

each_recipe = pytest.mark.parametrize(
    "recipe",
    [Recipe(accumulate=k, max_norm=clip) for k in (1, 3) for clip in (None, 0.3)],
    ids=["one pass", "one pass, clipped", "three passes", "three passes, clipped"],
)


# -- references against each other --


def references_apart(rank, name, recipe):
    case = MODELS[name]
    doing(f"{name}, {recipe}")
    ddp = train_ddp(case, recipe)
    assert not disagreements(case, recipe, train_by_hand(case, recipe), ddp)
    if not case.batch_norm:
        joined = train_plain(case, recipe, of_world=dist.get_world_size())
        assert_close_states(joined.state, ddp.state, 1e-5, "joined batch")
    return ddp.state


@each_recipe
@pytest.mark.parametrize("name", MODELS)
def test_plain_torch_on_the_joined_batch_and_ddp_and_by_hand_are_the_same_training(ranks, name, recipe):
    states = ranks(3, references_apart, name, recipe)
    parameters = dict(MODELS[name].make(0).named_parameters())
    for rank, state in enumerate(states[1:], start=1):
        assert_bitwise(
            {key: state[key] for key in parameters}, {key: states[0][key] for key in parameters}, f"rank {rank}"
        )


@each_recipe
@pytest.mark.parametrize("name", MODELS)
def test_by_hand_in_fp32_on_one_rank_is_plain_torch(name, recipe):
    assert_bitwise(train_by_hand(MODELS[name], recipe).state, train_plain(MODELS[name], recipe).state, str(recipe))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_decays_matrices_only_and_depends_on_its_schedule(optimizer):
    case, recipe = MODELS["mlp"], Recipe(optimizer=optimizer)
    trained = train_plain(case, recipe).state
    scheduled = train_plain(case, replace(recipe, lr_factors=(1.0, 0.5, 0.25))).state
    assert all(not torch.equal(trained[name], scheduled[name]) for name in trained)
    assert_close_states(train_plain(case, recipe, dtype=torch.float64).state, trained, 1e-5, "fp64")


# -- the harness sees mistakes --


@functools.cache  # in each rank: every mistake is compared with one reference
def reference_of(name, recipe):
    return train_by_hand(MODELS[name], recipe)


def rounded(rank, name, recipe):
    trained = train_by_hand(MODELS[name], recipe, reduce_dtype=torch.bfloat16)
    return disagreements(MODELS[name], recipe, trained, reference_of(name, recipe))


def doubled(rank, name, recipe):
    trained = train_by_hand(MODELS[name], recipe, grad_factor=2.0)
    return disagreements(MODELS[name], recipe, trained, reference_of(name, recipe))


def with_passes_missing(rank, name, recipe):
    trained = train_by_hand(MODELS[name], replace(recipe, accumulate=1))
    trained.losses = reference_of(name, recipe).losses
    return disagreements(MODELS[name], recipe, trained, reference_of(name, recipe))


each_precision = pytest.mark.parametrize("precision", ["fp32", "bf16"])
each_pass = pytest.mark.parametrize(("accumulate", "max_norm"), [(1, 0.3), (3, None)], ids=["clipped", "three passes"])


@each_pass
@pytest.mark.parametrize("name", MODELS)
def test_limits_pass_gradients_rounded_to_bf16(ranks, name, accumulate, max_norm):
    agree(ranks(2, rounded, name, Recipe(precision="bf16", accumulate=accumulate, max_norm=max_norm)))


@each_pass
@each_precision
@pytest.mark.parametrize("name", MODELS)
def test_limits_fail_a_gradient_of_twice_the_size(ranks, name, precision, accumulate, max_norm):
    found = ranks(2, doubled, name, Recipe(precision=precision, accumulate=accumulate, max_norm=max_norm))[0]
    kind = "a gradient norm" if max_norm else "the way trained"
    assert any(text.startswith(kind) for text in found), found


@each_precision
@pytest.mark.parametrize("name", MODELS)
def test_limits_fail_a_step_with_passes_missing(ranks, name, precision):
    found = ranks(2, with_passes_missing, name, Recipe(precision=precision, accumulate=3))[0]
    assert any(text.startswith("the way trained") for text in found), found


# -- the mixture of experts does what it is for --


def experts_without_gradient(rank, steps):
    case, world_size = MODELS["experts"], dist.get_world_size()
    recipe = Recipe(steps=steps, accumulate=3)
    used = set()
    model = case.make(0)
    for index in range(steps * 3):
        case.loss(model, case.batch(index, rank, world_size, torch.float32)).backward()
        grads = [[any(p.grad is not None for p in e.parameters()) for e in block.experts] for block in model.blocks]
        assert all(row == grads[0] for row in grads)
        now = {number for number, has in enumerate(grads[0]) if has}
        assert now == set(topics(index, rank)), "routing follows the data"
        used |= now
        model.zero_grad()
    return used, [train(case, recipe).state for train in (train_ddp, train_by_hand)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_expert_without_tokens_on_every_rank_is_untouched_and_used_ones_differ_by_rank(ranks, world_size):
    answers = ranks(world_size, experts_without_gradient, REST_LENGTH // 3)
    assert set().union(*(used for used, _ in answers)) == set(range(1, EXPERTS))
    start = MODELS["experts"].make(0).state_dict()
    for states in (states for _, states in answers):
        for state in states:
            for name in start:
                untouched = torch.equal(state[name], start[name])
                assert untouched == (".experts.0." in name), name
    if world_size > 1:
        assert any(len({topics(index, rank) for rank in range(world_size)}) > 1 for index in range(10))


def margin(logits):
    return logits.topk(2).values.diff(dim=-1).abs().min().item()


def test_routing_has_a_margin_that_bf16_cannot_bridge():
    case = MODELS["experts"]
    trained = train_plain(case, Recipe(optimizer="adamw", accumulate=3)).state
    for state in (case.make(0).state_dict(), trained):
        model, margins = case.make(0), []
        model.load_state_dict(state)
        for block in model.blocks:
            block.gate.register_forward_hook(lambda _, inputs, logits, into=margins: into.append(margin(logits)))
        for index in range(30):
            case.loss(model, case.batch(index, 0, 1, torch.float32))
        assert min(margins) > 0.2, min(margins)


# -- ranks --


def where(rank, text):
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return rank, dist.get_world_size(), int(total), os.environ["RANK"], os.environ["WORLD_SIZE"], text, os.getpid()


def fails_on(rank, bad):
    doing(f"work of {rank}")
    if rank == bad:
        raise ValueError("the rank's own words")
    dist.barrier()


def dies_on(rank, bad):
    if rank == bad:
        os._exit(7)
    dist.barrier()


def sleeps_on(rank, bad):
    doing("counting sheep")
    if rank == bad:
        time.sleep(60)


def leaves_the_group(rank):
    dist.destroy_process_group()


def launched(rank):
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.tensor([1])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], torch.get_num_threads()


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


def test_pool_runs_functions_in_rank_order_on_processes_that_stay(pool):
    first = pool.run(where, "a")
    assert [answer[:6] for answer in first] == [(0, 2, 1, "0", "2", "a"), (1, 2, 1, "1", "2", "a")]
    assert pool.run(where, "b", world_size=1)[0][:6] == (0, 1, 0, "0", "1", "b")
    pool.run(leaves_the_group)
    assert [answer[6] for answer in pool.run(where, "c")] == [answer[6] for answer in first]


def test_failing_rank_is_named_with_its_traceback_and_the_pool_goes_on(pool):
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed while doing 'work of 1'") as caught:
        pool.run(fails_on, 1)
    assert "ValueError: the rank's own words" in str(caught.value)
    assert len(pool.run(where, "after")) == 2


def test_dead_rank_is_named_with_its_exit_code_and_the_pool_goes_on(pool):
    with pytest.raises(AssertionError, match=r"rank 0 of 2 failed.*:\nprocess died with exit code 7"):
        pool.run(dies_on, 0)
    assert len(pool.run(where, "after")) == 2


def test_hanging_rank_is_named_with_its_stack_and_the_pool_goes_on(pool):
    pool.run(where, "warm")
    with pytest.raises(AssertionError, match=r"rank 1 of 2 still running after 1 s") as caught:
        pool.run(sleeps_on, 1, timeout=1)
    assert "in sleeps_on" in str(caught.value)
    assert "counting sheep" in str(caught.value)
    assert "rank 0 of 2 was" not in str(caught.value)
    assert len(pool.run(where, "after")) == 2


def test_fresh_ranks_have_a_launchers_environment_and_no_group():
    assert run_ranks(launched, 2) == [(2, "0", "2", 1), (2, "1", "2", 1)]
