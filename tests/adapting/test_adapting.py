"""Training goes on while memory is taken away or a tier becomes slower: the plan changes once, the numbers do not.

Seconds of a machine that others use decide nothing here: where faster plans are not what a test is about, none is worth
moving to, and a slow disk is slower than anything else can be.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from planning.machines import LAPTOP
from support.agreement import agree
from support.compare import assert_bitwise
from zerostd import Budget, Plan
from zerostd.planning import Prediction
from zerostd.planning.solution import ObservedStep
from zerostd.policy import Homes, Kind, Route, Tier
from zerostd.replanning import adapting
from zerostd.replanning.adapting import EVERY, NUM_FIRST, NUM_WATCHED, Adapter, RankReport, Revision

WIDTH, DEPTH = 128, 24
MIB = 2**20
LAYER = 12 * (WIDTH * WIDTH + WIDTH)  # bytes of masters and two moments
LIMITS = {Tier.DEVICE: 1700 << 10, Tier.HOST: 64 * MIB, Tier.DISK: 64 * MIB}
FEW = 6  # layers: a slow disk is asked for each
HOST = Homes(states=((Tier.HOST, Route.CPU, 1.0),))
DISK = Homes(states=((Tier.DISK, Route.CPU, 1.0),))
FIRST_LOOK = NUM_FIRST + NUM_WATCHED


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once for all of these tests."""
    monkeypatch.setenv("ZEROSTD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is so much faster that it is worth moving to."""
    monkeypatch.setattr(adapting, "GAIN", 1.0)


def prepared(plan: Plan, path: str, depth: int = DEPTH, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return zerostd.prepare(
        model, optimizer, plan=plan, budget=Budget(disk_path=path), groups=["*"], precision="bf16", **options
    )


def train(model: nn.Module, optimizer: Any, steps: int, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        output = model(torch.randn(8, WIDTH, generator=generator))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adapter_of(model: nn.Module) -> Adapter:
    adapter = next((one for one in model.__dict__["_zerostd"].observers if isinstance(one, Adapter)), None)
    assert isinstance(adapter, Adapter)
    return adapter


def for_room(model: nn.Module) -> list[Revision]:
    return [one for one in adapter_of(model).revisions if "memory was taken by others" in one.reason]


def held(model: nn.Module, tier: str) -> int:
    return zerostd.memory(model).now.get(tier, {}).get("optimizer_states", 0)


def same_numbers(model: nn.Module, path: str, *stretches: int, **options: Any) -> None:
    """As if nothing had happened."""
    other, plain = prepared(Plan({"*": HOST}), path, **options)
    for steps in stretches:
        train(other, plain, steps)
    assert_bitwise(zerostd.full_state_dict(model), zerostd.full_state_dict(other))


class Memory:
    """A host with so many bytes for everybody, of which a model holds some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: nn.Module, total: int) -> None:
        self.model, self.total = model, total
        monkeypatch.setattr(adapting, "free_bytes", self.free_bytes)

    def free_bytes(self, device: torch.device, disk_path: str | None) -> dict[str, int]:
        mine = sum(zerostd.memory(self.model).now.get("host", {}).values())
        return {"device": 0, "host": max(0, self.total - mine), "disk": 0}


@pytest.mark.usefixtures("unhurried")
def test_memory_that_others_take_is_given_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = prepared(Plan({"*": HOST}, limits=LIMITS), str(tmp_path))
    memory = Memory(monkeypatch, model, 64 * MIB)
    train(model, optimizer, 2 * EVERY)
    assert adapter_of(model).revisions == [] and held(model, "disk") == 0
    before = sum(zerostd.memory(model).now["host"].values())
    memory.total = before  # others took all that was free
    with caplog.at_level(logging.INFO, "zerostd"):
        train(model, optimizer, 6 * EVERY)
    (revision,) = for_room(model)
    assert adapter_of(model).revisions == [revision] and revision.step % EVERY == 0
    assert held(model, "disk") > LAYER
    assert sum(zerostd.memory(model).now["host"].values()) <= 0.9 * before
    assert "revised after step" in caplog.text and "of the host" in caplog.text
    same_numbers(model, str(tmp_path), 2 * EVERY, 6 * EVERY)


@pytest.mark.usefixtures("unhurried")
def test_a_search_for_speed_does_not_put_off_the_look_at_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were slow for a while, with no better plan to be found, and then others take memory."""
    model, optimizer = prepared(Plan({"*": HOST}, limits=LIMITS), str(tmp_path))
    memory, adapter = Memory(monkeypatch, model, 64 * MIB), adapter_of(model)
    train(model, optimizer, 2 * EVERY - 1)
    for _ in range(6):
        adapter._revise("steps take longer", adapter._collect(RankReport(adapter._room(), seen=adapter._seen)))
    assert adapter.revisions == [] and adapter._next["speed"] > 9 * EVERY
    memory.total = sum(zerostd.memory(model).now["host"].values())
    train(model, optimizer, EVERY + 2)
    assert len(for_room(model)) == 1


def slow(move: Callable[..., int], seconds: float) -> Callable[..., int]:
    def moves(*arguments: Any) -> int:
        time.sleep(seconds)
        return move(*arguments)

    return moves


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every request takes 20 ms, and a step does dozens of them."""
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, slow(getattr(os, name), 0.02))


def test_a_disk_that_becomes_slow_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {**LIMITS, Tier.DEVICE: MIB // 2}
    model, optimizer = prepared(Plan({"*": DISK}, limits=limits), str(tmp_path), FEW, accumulate=1)
    with monkeypatch.context() as patch:
        patch.setattr(adapting, "GAIN", 1.0)  # whatever the disk does
        train(model, optimizer, EVERY)
    assert adapter_of(model).revisions == [] and adapter_of(model)._seen is not None
    assert held(model, "disk") >= FEW * LAYER and held(model, "host") == 0
    slow_disk(monkeypatch)
    train(model, optimizer, 3 * EVERY)
    (revision,) = adapter_of(model).revisions
    assert "steps take" in revision.reason and len(revision.moved) == FEW
    assert held(model, "disk") == 0 and held(model, "host") + held(model, "device") >= FEW * LAYER
    same_numbers(model, str(tmp_path), EVERY, 3 * EVERY, depth=FEW, accumulate=1)


@pytest.mark.parametrize(("disk_s", "is_left"), [(0.02, False), (0.3, True)])
def test_a_disk_is_left_when_it_makes_steps_longer(tmp_path: Path, disk_s: float, is_left: bool) -> None:
    """One that is hidden behind backward is not."""
    limits = {**LIMITS, Tier.DEVICE: MIB // 2}
    model, _ = prepared(Plan({"*": DISK}, limits=limits), str(tmp_path), FEW, accumulate=1)
    seen = ObservedStep(max(0.1, disk_s), 0.06, 0.04, busy={"cpu": 0.001, "disk": disk_s})
    proposed = adapter_of(model)._propose("steps were seen", {Tier.HOST: limits[Tier.HOST]}, seen, LAPTOP)
    assert bool(proposed) == is_left
    if is_left:
        assert not Plan.from_json(proposed).predicted.total(Tier.DISK)


def test_a_plan_that_was_wrong_is_mended_after_the_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_disk(monkeypatch)
    model, optimizer = prepared(Plan({"*": DISK}, limits=LIMITS), str(tmp_path), FEW)
    train(model, optimizer, 3 * EVERY)
    (revision,) = adapter_of(model).revisions
    assert (revision.step, revision.reason) == (FIRST_LOOK, "after the first steps")
    assert held(model, "disk") == 0
    assert "Revised after step" in model.__dict__["_zerostd"].settings.plan.explain()


def test_activations_that_a_plan_counted_on_stay_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor nobody sees them."""
    slow_disk(monkeypatch)
    counted = {Tier.DEVICE: {Kind.ACTIVATIONS: 1 * MIB}}
    plan = Plan({"*": DISK}, limits=LIMITS, predicted=Prediction(bytes=counted))
    model, optimizer = prepared(plan, str(tmp_path), FEW)
    train(model, optimizer, FIRST_LOOK + 2)
    (revision,) = adapter_of(model).revisions
    assert revision.plan.predicted.bytes[Tier.DEVICE][Kind.ACTIVATIONS] == 1 * MIB
    assert revision.plan.predicted.total(Tier.DEVICE) <= LIMITS[Tier.DEVICE]


def test_a_frozen_plan_stays_and_so_does_one_without_limits(tmp_path: Path) -> None:
    for plan in (Plan({"*": DISK}, limits=LIMITS, adaptive=False), Plan({"*": DISK})):
        model, optimizer = prepared(plan, str(tmp_path))
        train(model, optimizer, FIRST_LOOK + 1)
        assert not any(isinstance(one, Adapter) for one in model.__dict__["_zerostd"].observers)
        assert held(model, "disk") >= DEPTH * LAYER


def test_gradients_that_are_kept_put_a_change_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared(Plan({"*": HOST}, limits=LIMITS), str(tmp_path))
    Memory(monkeypatch, model, sum(zerostd.memory(model).now["host"].values()) + 1)
    for step in range(4 * EVERY):
        model(torch.ones(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step >= 2 * EVERY)
    (revision,) = for_room(model)
    assert revision.step > 2 * EVERY


def test_what_else_the_loop_does_is_seen(tmp_path: Path) -> None:
    model, optimizer = prepared(Plan({"*": HOST}, limits=LIMITS), str(tmp_path))
    for _ in range(FIRST_LOOK + 1):
        train(model, optimizer, 1)
        with torch.no_grad():
            time.sleep(0.2)
            model(torch.ones(64, WIDTH))
    seen = adapter_of(model)._seen
    assert seen is not None and seen.num_passes == 1
    assert seen.step_s >= seen.forward_s >= 0.2 > seen.backward_s
    assert seen.busy["cpu"] > 0


def on_ranks(rank: int, folder: str) -> list[str]:
    plan = replace(Plan({"*": HOST}, limits=LIMITS), world_size=2)
    model, optimizer = prepared(plan, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapting, "GAIN", 1.0)
        memory = Memory(patch, model, 64 * MIB)
        train(model, optimizer, EVERY, rank)
        before = sum(zerostd.memory(model).now["host"].values())
        if rank == 1:  # one rank finds less, all move
            memory.total = before
        train(model, optimizer, 3 * EVERY, rank)
    revisions = for_room(model)
    wrong = [] if len(revisions) == 1 else [f"rank {rank}: {revisions}"]
    if sum(zerostd.memory(model).now["host"].values()) > 0.9 * before:
        wrong.append(f"rank {rank} gave nothing back: {zerostd.memory(model)}")
    mine = model.__dict__["_zerostd"].settings.plan
    if (
        zerostd.full_state_dict(model)
        and mine.notes[-1] != f"Revised after step {revisions[0].step}: {revisions[0].reason}."
    ):
        wrong.append(f"rank {rank}: {mine.notes}")
    zerostd.release(model)
    return wrong


def test_all_ranks_change_together(ranks: Any, tmp_path: Path) -> None:
    agree(ranks(2, on_ranks, str(tmp_path)))
