"""Optimizer states under Horovod's names: whole ones for the user, parts on the ranks, loaded on one rank only."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import zerostd.horovod as hvd
from horovod.scripts import adamw, by_hand, distance, loss_of, make_model, session, sgd
from zerostd import CommunicationError, MisuseError

LIMIT = 1e-6
RULES = {"sgd": sgd, "adamw": adamw}


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()


def saved_by(rules: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What rank 0 finds in a checkpoint of an ordinary training, by plain torch."""
    model, optimizer = by_hand(RULES[rules], [steps, steps], steps=steps)
    optimizer.param_groups[0]["lr"] *= 0.5  # the checkpoint's lr is not the script's
    return model.state_dict(), optimizer.state_dict()


def gathered(rank: int, rules: str, stage: int) -> float:
    with session():
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(RULES[rules](model.parameters()), model.named_parameters(), stage=stage)
        train(model, optimizer, range(3))
        state = optimizer.state_dict()
        _, plain = by_hand(RULES[rules], [3, 3], steps=3)
        expected = plain.state_dict()
        assert state["param_groups"] == expected["param_groups"] and state["state"].keys() == expected["state"].keys()
        errors = [
            float((state["state"][number][key] - value).norm() / value.norm().clamp_min(1e-12))
            for number, states in expected["state"].items()
            for key, value in states.items()
        ]
        plain.load_state_dict(state)  # torch's own format
        again = copy.deepcopy(state)
        rate = again["param_groups"][0]["lr"]
        again["param_groups"][0]["lr"] = 99.0
        optimizer.load_state_dict(again)  # and back, on all ranks
        assert optimizer.param_groups[0]["lr"] == 99.0
        optimizer.param_groups[0]["lr"] = rate  # what is set afterwards counts
        train(model, optimizer, range(3, 5))
        return max(*errors, distance(model, by_hand(RULES[rules], [5, 5], steps=5)[0]) * 0.1)


@pytest.mark.parametrize(("rules", "stage"), [("sgd", 2), ("adamw", 2), ("adamw", 1), ("sgd", 0)])
def test_state_dict_is_what_plain_torch_has(ranks, rules, stage):
    assert max(ranks(2, gathered, rules, stage)) < 1e-5


def resumed(rank: int, rules: str, wrap_first: bool) -> tuple[float, float]:
    with session():
        model = make_model(seed=rank)
        optimizer = RULES[rules](model.parameters())
        if wrap_first:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        weights, states = saved_by(rules, 3)
        if hvd.rank() == 0:
            model.load_state_dict(weights)
            optimizer.load_state_dict(states)
        if not wrap_first:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(model, optimizer, range(3, 6))
        reference = make_model(0)
        plain = RULES[rules](reference.parameters())
        reference.load_state_dict(weights)
        plain.load_state_dict(states)
        for step in range(3, 6):
            for number in range(2):
                (loss_of(reference, step, number) / 2).backward()
            plain.step()
            plain.zero_grad()
        return distance(model, reference), optimizer.param_groups[0]["lr"] / plain.param_groups[0]["lr"]


@pytest.mark.parametrize("wrap_first", [True, False], ids=["load after", "load before"])
@pytest.mark.parametrize("rules", RULES)
def test_state_loaded_on_rank_0_goes_to_all(ranks, rules, wrap_first):
    for error, rate in ranks(2, resumed, rules, wrap_first):
        assert error < LIMIT and rate == 1


def resumed_plain(rank: int) -> float:
    """broadcast_optimizer_state on the torch optimizer itself, before it is wrapped."""
    with session():
        model = make_model(seed=rank)
        optimizer = adamw(model.parameters())
        weights, states = saved_by("adamw", 3)
        if rank == 0:
            model.load_state_dict(weights)
            optimizer.load_state_dict(states)
        hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        first = next(iter(optimizer.state.values()))["exp_avg"]
        return float((first - states["state"][0]["exp_avg"]).abs().max())


def test_states_of_a_plain_optimizer_are_broadcast(ranks):
    assert ranks(2, resumed_plain) == [0, 0]


def broadcast_by_older_name(rank: int) -> float:
    """Horovod's scripts may pass the torch optimizer, although it is wrapped: before the first step and later."""
    with session():
        model = make_model(0)
        plain = adamw(model.parameters())
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
        for steps in (range(2), range(2, 5)):
            hvd.broadcast_optimizer_state(plain, root_rank=1)
            assert plain.param_groups is optimizer.param_groups and plain.state is optimizer.state
            train(model, optimizer, steps)
        return distance(model, by_hand(adamw, [5, 5], steps=5)[0])


def test_broadcast_of_the_wrapped_optimizer_leaves_each_rank_its_shards(ranks):
    assert max(ranks(2, broadcast_by_older_name)) < LIMIT


def rewound(rank: int, held: str) -> float:
    """The root loads older states, of all parameters, of some or of none, and training goes on with them."""
    with session():
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), named_parameters=model.named_parameters())
        train(model, optimizer, range(2))
        older = optimizer.state_dict()
        kept = {"all": older["state"], "some": {0: older["state"][0]}, "none": {}}[held]
        older = {**older, "state": copy.deepcopy(kept)}
        train(model, optimizer, range(2, 3))
        if rank == 1:
            optimizer.load_state_dict(older)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        train(model, optimizer, range(3, 5))
        reference, plain = by_hand(adamw, [3, 3], steps=3)
        plain.load_state_dict(older)
        for step in range(3, 5):
            plain.zero_grad()
            for number in range(2):
                (loss_of(reference, step, number) / 2).backward()
            plain.step()
        return distance(model, reference)


@pytest.mark.parametrize("held", ["all", "some", "none"])
def test_states_of_the_root_replace_those_of_all(ranks, held):
    assert max(ranks(2, rewound, held)) < LIMIT


def loaded_on_one(rank: int) -> list[str]:
    with session():
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
        _, states = saved_by("sgd", 1)
        states["param_groups"][0]["lr"] = optimizer.param_groups[0]["lr"]
        messages = []
        if rank == 1:
            optimizer.load_state_dict(states)
        loss_of(model, 0, rank).backward()
        with pytest.raises(MisuseError) as error:
            optimizer.step()
        messages.append(str(error.value))
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        with pytest.raises(MisuseError) as error:
            optimizer.step()
        messages.append(str(error.value))
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.2
        return messages


def test_what_ranks_have_apart_is_told_and_can_be_mended(ranks):
    for first, second in ranks(2, loaded_on_one):
        assert "on some ranks only" in first and "broadcast_optimizer_state" in first
        assert "different options in param_groups, such as lr" in second


def saved_on_one(rank: int) -> str:
    with session(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROSTD_TIMEOUT_S", "4")
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
        train(model, optimizer, range(1))
        with pytest.raises(CommunicationError) as error:
            if hvd.rank() == 0:
                torch.save(optimizer.state_dict(), "/dev/null")
            train(model, optimizer, range(1, 2))
        return str(error.value)


def test_state_dict_on_rank_0_alone_is_told_at_once(ranks):
    """By the rank that is alone; the others are told when it does not come, or are ended with it by their launcher."""
    alone, waiting = ranks(2, saved_on_one, timeout=60)
    assert "rank 0 is at optimizer.state_dict() and rank 1 at a backward pass" in alone
    assert "if hvd.rank() == 0:" in alone
    assert "rank 1 gave up waiting" in waiting and "rank 0 made its last call" in waiting, waiting


def test_states_of_another_model_are_refused():
    with session():
        model = make_model(0)
        another = torch.nn.Linear(3, 3)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
        rate = optimizer.param_groups[0]["lr"]
        with pytest.raises(MisuseError, match=r"\[2\] parameters, but this optimizer has"):
            optimizer.load_state_dict(torch.optim.SGD(another.parameters(), lr=9.0).state_dict())
        assert optimizer.param_groups[0]["lr"] == rate


def test_states_come_along_in_a_world_of_one():
    with session():
        weights, states = saved_by("adamw", 2)
        model = make_model(0)
        model.load_state_dict(weights)
        plain = adamw(model.parameters())
        plain.load_state_dict(states)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
        state = optimizer.state_dict()
        assert state.keys() == {"state", "param_groups"}
        for number, expected in states["state"].items():
            assert all(torch.equal(state["state"][number][key], value) for key, value in expected.items())
