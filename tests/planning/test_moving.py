"""Groups move to other homes between steps: same numbers, the bytes of the new plan, nothing left of the old one."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from planning.test_obeying import DEPTH, WIDTH, make, train
from support.agreement import agree
from support.compare import assert_bitwise
from support.processes import doing
from zerostd import Budget, MisuseError, Plan
from zerostd.parameters.state_shard import SplitTensor
from zerostd.policy import Homes, Route, Stage, Tier
from zerostd.preparing.accounting import predict
from zerostd.preparing.homes import plan_flats
from zerostd.preparing.options import rules_for
from zerostd.replanning import moving
from zerostd.replanning.moving import HomeMove, move

DEVICE = Homes()
HOST = Homes(states=((Tier.HOST, Route.CPU, 1.0),))
GRADIENTS = Homes(gradients=Tier.HOST, states=((Tier.HOST, Route.CPU, 1.0),))
DISK = Homes(states=((Tier.DISK, Route.CPU, 1.0),))
ALL = Homes(states=((Tier.DEVICE, Route.RESIDENT, 0.3), (Tier.HOST, Route.CPU, 0.4), (Tier.DISK, Route.CPU, 0.3)))
FRONT = {str(index): DEVICE if index < DEPTH // 2 else HOST for index in range(DEPTH)}
PLANS = {
    "device": {"*": DEVICE},
    "host": {"*": HOST},
    "gradients": {"*": GRADIENTS},
    "disk": {"*": DISK},
    "gradients on disk": {"*": Homes(gradients=Tier.DISK, states=((Tier.DISK, Route.CPU, 1.0),))},
    "all tiers": {"*": ALL},
    "front": {**FRONT, "*": DEVICE},
}
RULES = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-4),
}


def prepared(plan: str, path: str, rule: str = "adamw", **options: Any) -> tuple[nn.Module, Any]:
    model = make()
    size = options.pop("world_size", 1)
    given = Plan(PLANS[plan], world_size=size, stage=options.pop("stage", Stage.PARAMETERS))
    return zerostd.prepare(
        model, RULES[rule](model), plan=given, budget=Budget(disk_path=path), groups=["*"], **options
    )


def predicted(model: nn.Module) -> dict[tuple[str, str], int]:
    """Bytes off the device by the account, of the plan that is obeyed now."""
    runtime = model.__dict__["_zerostd"]
    rules = rules_for(runtime.settings, runtime.world, runtime.blueprints)
    counted = predict(plan_flats(runtime.blueprints, rules), rules)
    return {(tier.value, kind.value): size for tier, kinds in counted.items() for kind, size in kinds.items()}


def wrong_bytes(model: nn.Module) -> list[str]:
    now, wanted = zerostd.memory(model).now, predicted(model)
    keys = [(tier, kind) for tier in now for kind in now[tier] if (tier, kind) != ("device", "buffers")]
    return [
        f"{tier} {kind}: {now[tier][kind]} held, {wanted.get((tier, kind), 0)} by account"
        for tier, kind in {*keys, *wanted} - {("device", "buffers")}
        if abs(now.get(tier, {}).get(kind, 0) - wanted.get((tier, kind), 0)) > 0.02 * wanted.get((tier, kind), 0) + 64
    ]


WAY = ("host", "all tiers", "gradients", "gradients on disk", "disk", "front", "device", "disk")


@pytest.mark.parametrize("accumulate", [None, 1], ids=["", "early"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_goes_on_bit_by_bit(precision: str, accumulate: int | None, tmp_path: Path) -> None:
    options = {"precision": precision, "accumulate": accumulate}
    model, optimizer = prepared("device", str(tmp_path), **options)
    other, plain = prepared("device", str(tmp_path), **options)
    assert_bitwise(train(model, optimizer, 2), train(other, plain, 2), "before")
    for name in WAY:
        assert move(model.__dict__["_zerostd"], Plan(PLANS[name]))
        assert_bitwise(train(model, optimizer, 2), train(other, plain, 2), name)
        assert not wrong_bytes(model), name + "\n".join(wrong_bytes(model))
    mine, theirs = optimizer.state_dict()["state"], plain.state_dict()["state"]
    for number, states in theirs.items():
        found = {key: torch.as_tensor(value) for key, value in mine[number].items()}
        assert_bitwise(found, {key: torch.as_tensor(value) for key, value in states.items()})


@pytest.mark.parametrize("rule", RULES)
def test_every_optimizer_moves_and_back(rule: str, tmp_path: Path) -> None:
    model, optimizer = prepared("device", str(tmp_path), rule, precision="bf16", accumulate=1, max_grad_norm=0.5)
    other, plain = prepared("device", str(tmp_path), rule, precision="bf16", accumulate=1, max_grad_norm=0.5)
    for name in ("all tiers", "host", "device", "disk", "front"):
        move(model.__dict__["_zerostd"], Plan(PLANS[name]))
        assert_bitwise(train(model, optimizer, 2), train(other, plain, 2), name)
        assert not wrong_bytes(model), "\n".join(wrong_bytes(model))


def test_before_the_first_step(tmp_path: Path) -> None:
    model, optimizer = prepared("device", str(tmp_path), precision="bf16")
    move(model.__dict__["_zerostd"], Plan(PLANS["host"]))
    other, plain = prepared("device", str(tmp_path), precision="bf16")
    assert_bitwise(train(model, optimizer), train(other, plain))


def test_what_is_as_it_should_be_stays(tmp_path: Path) -> None:
    model, optimizer = prepared("front", str(tmp_path), precision="bf16")
    train(model, optimizer)
    assert move(model.__dict__["_zerostd"], Plan(PLANS["front"])) == []
    moved = move(model.__dict__["_zerostd"], Plan(PLANS["host"]))
    assert moved == [str(index) for index in range(DEPTH // 2)]
    train(model, optimizer)


def test_a_second_copy_of_the_states_comes_and_goes(tmp_path: Path) -> None:
    options = {"precision": "bf16", "accumulate": 1, "max_grad_norm": 1e6}
    model, optimizer = prepared("host", str(tmp_path), **options)
    other, plain = prepared("host", str(tmp_path), **options)
    for speculate in (True, False):
        assert len(move(model.__dict__["_zerostd"], Plan(PLANS["host"], speculate=speculate))) == DEPTH
        assert_bitwise(train(model, optimizer, 4), train(other, plain, 4))
        assert not wrong_bytes(model), "\n".join(wrong_bytes(model))


def test_not_with_gradients_and_not_parameters(tmp_path: Path) -> None:
    model, optimizer = prepared("host", str(tmp_path), precision="bf16")
    runtime = model.__dict__["_zerostd"]
    model(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(MisuseError, match=r"zero_grad\(\)"):
        move(runtime, Plan({"*": GRADIENTS}))
    optimizer.zero_grad()
    with pytest.raises(MisuseError, match="only states and gradients can move"):
        move(runtime, Plan({"*": Homes(parameters=Tier.HOST)}))
    train(model, optimizer)
    assert not wrong_bytes(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_move_beside_gradients_that_stay(tmp_path: Path, precision: str) -> None:
    """The step takes them."""
    states = []
    for moves in (False, True):
        model, optimizer = prepared("device", str(tmp_path), precision=precision)
        for number in range(3):
            model(torch.full((2, WIDTH), 1.0 + number)).square().mean().backward()
            if moves and number < 2:
                assert len(move(model.__dict__["_zerostd"], Plan(PLANS[("host", "device")[number]]))) == DEPTH
            optimizer.step()
            optimizer.zero_grad()
        assert not wrong_bytes(model), "\n".join(wrong_bytes(model))
        states.append(zerostd.full_state_dict(model))
    assert_bitwise(*states)


def test_a_few_groups_move_before_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as were asked for, in memory that another thread took; others' updates go on."""
    model, optimizer = prepared("device", str(tmp_path), precision="bf16", accumulate=1)
    other, plain = prepared("device", str(tmp_path), precision="bf16", accumulate=1)
    train(model, optimizer, 2)
    train(other, plain, 2)
    runtime = model.__dict__["_zerostd"]
    allocator = runtime.resources.allocator
    allocate = allocator.allocate_bytes
    takers = list[int]()

    def allocating(*arguments: Any) -> Any:
        takers.append(threading.get_ident())
        return allocate(*arguments)

    monkeypatch.setattr(allocator, "allocate_bytes", allocating)
    change = HomeMove(runtime, Plan(PLANS["host"]))
    size = max(entry.num_bytes for entry in change._left)
    change.most_bytes = 2 * size
    change.take_ahead()
    moved = list[int]()
    while not change.is_done:
        before = sum(zerostd.memory(model).now.get("device", {}).values())
        moved.append(change.advance())
        assert sum(zerostd.memory(model).now.get("device", {}).values()) <= before
        assert_bitwise(train(model, optimizer, 1), train(other, plain, 1), f"after {sum(moved)} bytes")
    change.keep_pace()
    assert change.most_bytes == math.inf  # nobody said how long moving may take
    assert len(moved) >= DEPTH // 2 and 0 < min(moved) <= max(moved) <= 2 * size
    assert takers and threading.get_ident() not in takers
    assert not wrong_bytes(model), "\n".join(wrong_bytes(model))


def test_steps_speculate_while_groups_move_and_after_a_plan_that_did_not(tmp_path: Path) -> None:
    """Which steps clipped is known from before, so no step waits for the whole update."""
    model, optimizer = prepared("host", str(tmp_path), precision="bf16", accumulate=1, max_grad_norm=1e6)
    runtime = model.__dict__["_zerostd"]
    move(runtime, Plan(PLANS["host"], speculate=True))
    train(model, optimizer, 4)
    updates = optimizer.backward_updates
    committed = [updates.num_committed]
    change = HomeMove(runtime, Plan(PLANS["front"], speculate=True))
    change.most_bytes = 0  # one group at a time
    while not change.is_done:
        change.advance()
        train(model, optimizer, 1)
        committed.append(updates.num_committed)
    change.finish()
    assert len(committed) == 1 + DEPTH // 2
    assert committed == list(range(committed[0], committed[0] + len(committed)))
    for name in ("host", "device"):  # without an updater for the host too
        move(runtime, Plan(PLANS[name]))
        train(model, optimizer, 2)
        assert optimizer.backward_updates is None
    move(runtime, Plan(PLANS["host"], speculate=True))
    train(model, optimizer, 1)
    assert optimizer.backward_updates.num_committed == committed[-1] + 1


def test_halves_of_masters_move_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters are not joined on the way: on the host that takes longer than the copy."""
    model, optimizer = prepared("device", str(tmp_path), precision="bf16", accumulate=1)
    other, plain = prepared("device", str(tmp_path), precision="bf16", accumulate=1)
    train(model, optimizer, 2)
    train(other, plain, 2)
    with monkeypatch.context() as patched:
        patched.setattr(SplitTensor, "read", lambda *_: pytest.fail("a master was joined"))
        for name in ("host", "all tiers", "device", "host"):
            move(model.__dict__["_zerostd"], Plan(PLANS[name]))
    assert_bitwise(train(model, optimizer, 1), train(other, plain, 1))


def test_moves_keep_to_the_seconds_of_a_step(tmp_path: Path) -> None:
    """By the rate at which the last groups moved, whatever was expected."""
    model, optimizer = prepared("device", str(tmp_path), precision="bf16", accumulate=1)
    train(model, optimizer, 2)
    seconds = 1e-9
    change = HomeMove(model.__dict__["_zerostd"], Plan(PLANS["host"]), seconds)
    before = change.most_bytes
    num_bytes = change.advance()
    change.keep_pace()
    assert num_bytes > 0 and 0 < change.most_bytes < before  # no memory moves 5 bytes in a nanosecond
    change.move_all()
    change.finish()
    train(model, optimizer, 1)
    assert not wrong_bytes(model), "\n".join(wrong_bytes(model))


@pytest.mark.parametrize("gradients", ["all", "by turns"])
def test_no_step_of_a_move_holds_more_than_both_plans(
    gradients: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that leave the device leave before others come, and before states do."""
    move_one = moving.move_flat

    def moves(flat: Any, plan: Any, *others: Any) -> Any:
        assert plan.gradients is flat.gradient.tier  # what the CPU updates has a copy of it, or none
        return move_one(flat, plan, *others)

    monkeypatch.setattr(moving, "move_flat", moves)
    on_device = ((Tier.DEVICE, Route.RESIDENT, 0.6), (Tier.HOST, Route.CPU, 0.4))
    less, more = Homes(states=((Tier.HOST, Route.CPU, 1.0),)), Homes(gradients=Tier.HOST, states=on_device)
    half = [str(index) for index in range(DEPTH // 2)]
    plans = {"all": ({"*": less}, {"*": more}, {"*": less})}
    turns = {**dict.fromkeys(half, GRADIENTS), "*": HOST}, {**dict.fromkeys(half, HOST), "*": GRADIENTS}
    plans["by turns"] = (*turns, turns[0])
    model, optimizer = prepared("device", str(tmp_path), precision="bf16", accumulate=1)
    other, plain = prepared("device", str(tmp_path), precision="bf16", accumulate=1)
    runtime = model.__dict__["_zerostd"]
    bounds = list[int]()
    for homes in plans[gradients]:
        change = HomeMove(runtime, Plan(homes))
        change.most_bytes = 0  # one group at a time
        bounds.append(sum(size for (tier, _), size in predicted(model).items() if tier == "device"))
        runtime.ledger.most[Tier.DEVICE] = 0
        while not change.is_done:
            change.advance()
            assert_bitwise(train(model, optimizer, 1), train(other, plain, 1))
        change.finish()
        assert_bitwise(train(model, optimizer, 1), train(other, plain, 1))
        assert len(bounds) < 2 or runtime.ledger.most[Tier.DEVICE] <= max(bounds[-2:]) + 64
        assert not wrong_bytes(model), "\n".join(wrong_bytes(model))


def test_a_group_that_finds_no_room_in_backward_moves_before_the_next_forward(tmp_path: Path) -> None:
    """Its states are on the device before and after, so for a moment twice."""
    model, optimizer = prepared("all tiers", str(tmp_path), precision="bf16", accumulate=1)
    train(model, optimizer, 1)
    most = Homes(states=((Tier.DEVICE, Route.RESIDENT, 0.8), (Tier.HOST, Route.CPU, 0.2)))
    change = HomeMove(model.__dict__["_zerostd"], Plan({"*": most}))
    change.most_bytes = 0
    change.take_ahead()
    twice = change._next[0].num_twice
    assert twice > 0
    left = len(change._left)
    assert change.advance(room=twice - 1) == 0 and change.is_late and len(change._left) == left
    train(model, optimizer, 1)
    change.keep_pace()
    assert not change.is_late and len(change._left) == left - 1
    assert change.advance(room=twice) > 0 and not change.is_late
    change.move_all()
    change.finish()
    train(model, optimizer, 1)
    assert not wrong_bytes(model), "\n".join(wrong_bytes(model))


def test_nothing_waits_for_memory_that_is_being_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared("device", str(tmp_path), precision="bf16", accumulate=1)
    train(model, optimizer, 1)
    may_take = threading.Event()
    allocator = model.__dict__["_zerostd"].resources.allocator
    allocate = allocator.allocate_bytes

    def allocating(*arguments: Any) -> Any:
        assert may_take.wait(60)
        return allocate(*arguments)

    monkeypatch.setattr(allocator, "allocate_bytes", allocating)
    change = HomeMove(model.__dict__["_zerostd"], Plan(PLANS["host"]))
    change.take_ahead()
    assert change.advance(waits=False) == 0 and not change.is_done
    train(model, optimizer, 1)
    may_take.set()
    change.move_all()
    change.finish()
    train(model, optimizer, 1)
    assert not wrong_bytes(model), "\n".join(wrong_bytes(model))


def on_ranks(rank: int, folder: str) -> list[str]:
    failures = []
    for stage in (Stage.OPTIMIZER_STATES, Stage.GRADIENTS, Stage.PARAMETERS):
        doing(f"stage {stage}")
        options: dict[str, Any] = {"precision": "bf16", "accumulate": 1, "world_size": 2, "stage": stage}
        model, optimizer = prepared("device", folder, **options)
        other, plain = prepared("device", folder, **options)
        for name in ("host", "all tiers", "device"):
            move(model.__dict__["_zerostd"], Plan(PLANS[name], world_size=2, stage=stage))
            state, expected = train(model, optimizer, 2, rank), train(other, plain, 2, rank)
            failures += [
                f"stage {stage}, {name}: {key} differs"
                for key in expected
                if not torch.equal(state[key], expected[key])
            ]
            failures += [f"stage {stage}, {name}: {text}" for text in wrong_bytes(model)]
        zerostd.release(model)
        zerostd.release(other)
    return failures


def test_on_two_ranks(ranks: Any, tmp_path: Path) -> None:
    agree(ranks(2, on_ranks, str(tmp_path)))


def test_a_group_that_takes_more_when_recomputed_is_recomputed_after_states_have_moved() -> None:
    """It holds nearly all activations: while it is recomputed they are all there, and its inputs beside them."""
    torch.manual_seed(0)
    wide = 4 * WIDTH
    layers = [layer for _ in range(4) for layer in (nn.Linear(wide, wide), nn.GELU())]
    model: nn.Module = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, wide)), nn.Sequential(*layers))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = Plan(PLANS["device"], activations={"0": "recompute", "1": "keep"})
    model, optimizer = zerostd.prepare(model, optimizer, plan=before, groups=["*"])
    runtime = model.__dict__["_zerostd"]
    activations = runtime.backward.activations
    activations.counter.is_on = True
    train(model, optimizer, 1)
    kept = activations.counted().total
    change = HomeMove(runtime, Plan(PLANS["host"], activations={"0": "recompute", "1": "recompute"}))
    assert activations.counted().total == kept
    change.advance()
    assert change.is_done and activations.counted().total == kept
    change.finish()
    assert activations.counted().total > kept
    train(model, optimizer, 1)
