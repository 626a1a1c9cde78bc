"""A budget is a promise from the first step on, whether or not a batch was shown: the meter never passes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from support.agreement import agree
from support.compare import assert_bitwise
from zerostd import Budget, Plan, PrepareError
from zerostd.monitoring import Ledger
from zerostd.policy import Homes, Kind, Tier, Way
from zerostd.replanning import adapting
from zerostd.replanning.adapting import EVERY, Adapter

WIDTH, DEPTH, ROWS = 64, 8, 512
LARGER = re.compile(r"Budget\((device|host|disk)=...\) larger by [^(]*\((\d+) bytes\)")


class Wide(nn.Module):
    """Keeps many times what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.gelu(self.inner(x))
        return x + self.outer(torch.tanh(y) * torch.sigmoid(y))


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is measured once for all of these tests, and no plan is remembered."""
    monkeypatch.setenv("ZEROSTD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(adapting, "remember", lambda *_: None)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No candidate is worth trying."""
    monkeypatch.setattr(adapting.Trials, "next", lambda self: None)


def prepared(budget: Budget | None, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return zerostd.prepare(model, optimizer, budget=budget, groups=["*"], accumulate=1, **options)


def adapter_of(model: nn.Module) -> Adapter:
    (adapter,) = [each for each in model.__dict__["_zerostd"].observers if isinstance(each, Adapter)]
    return adapter


@contextmanager
def only(model: nn.Module, num_bytes: int) -> Iterator[None]:
    """A device with so many bytes: what the ledger enters beyond them is out of memory, activations counted in."""
    runtime = model.__dict__["_zerostd"]
    enter = Ledger.enter

    def take(self: Ledger, kind: Kind, size: int, tier: Tier = Tier.DEVICE) -> None:
        enter(self, kind, size, tier)
        taken = self.held[Tier.DEVICE] + runtime.backward.activations.counted().total
        if self is runtime.ledger and taken > num_bytes:
            raise torch.OutOfMemoryError(f"{taken} bytes of {num_bytes}: {self.memory()}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "enter", take)
        yield


def train(model: nn.Module, optimizer: Any, steps: int, rows: int = ROWS, *, first: int = 0) -> list[int]:
    """Return the most bytes of the device in each step."""
    peaks = []
    for step in range(first, first + steps):
        adapter = adapter_of(model)
        adapter.meter.reset()
        torch.manual_seed(step)
        model(torch.randn(rows, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(adapter.meter.peak())
    return peaks


def ways(model: nn.Module) -> set[str | None]:
    plan = model.__dict__["_zerostd"].settings.plan
    return {plan.activations_of(str(index)) for index in range(DEPTH)}


@cache
def unlimited(steps: int) -> tuple[int, dict[str, Tensor]]:
    """Return the most bytes without a limit, and the parameters after so many steps."""
    model, optimizer = prepared(Budget(device="1GiB", host="1GiB"))
    peaks = train(model, optimizer, steps)
    assert ways(model) == {"keep"}
    return max(peaks), zerostd.full_state_dict(model)


@pytest.mark.parametrize("part", [0.35, pytest.param(0.5, marks=pytest.mark.full), 0.8])
def test_no_step_passes_the_budget(part: float) -> None:
    steps = 3 * EVERY
    most, expected = unlimited(steps)
    model, optimizer = prepared(Budget(device=int(part * most), host="1GiB"))
    with only(model, int(part * most)):
        peaks = train(model, optimizer, steps)
    assert max(peaks) <= int(part * most) and "recompute" in ways(model)
    assert_bitwise(zerostd.full_state_dict(model), expected)


def test_what_fits_is_kept_after_the_first_pass() -> None:
    model, optimizer = prepared(Budget(device="1GiB", host="1GiB"))
    again = {name for name, module in model.named_children() if "forward" in module.__dict__}
    assert len(again) == DEPTH and ways(model) == {"recompute"}
    train(model, optimizer, 2)
    assert not any("forward" in module.__dict__ for module in model.children()) and ways(model) == {"keep"}
    assert adapter_of(model).revisions == []


def recomputed(model: nn.Module) -> int:
    return sum("forward" in module.__dict__ for module in model.children())


def grows(rank: int, steps: int) -> list[str]:
    """Train with a batch that is ten times as large after so many steps, on the last rank."""
    budget = 60_000_000
    model, optimizer = prepared(Budget(device=budget, host="1GiB"))
    is_last = rank == model.__dict__["_zerostd"].world.size - 1
    with only(model, budget):
        peaks = train(model, optimizer, steps)
        if recomputed(model):
            return [f"rank {rank} recomputes before it has to"]
        rows = 10 * ROWS if is_last else ROWS
        peaks += train(model, optimizer, 1, rows)
        wrong = [] if bool(recomputed(model)) == is_last else [f"rank {rank} recomputes {recomputed(model)} groups"]
        peaks += train(model, optimizer, EVERY + 1, rows)
    revisions = [each for each in adapter_of(model).revisions if "10 times as large" in each.reason]
    if len(revisions) != 1 or "recompute" not in ways(model) or not recomputed(model):
        wrong.append(f"rank {rank}: {revisions}, {ways(model)}")
    if max(peaks) > budget:
        wrong.append(f"rank {rank} took {max(peaks)} bytes of {budget}")
    zerostd.release(model)
    return wrong


def test_a_first_pass_that_does_not_fit_does_when_its_batch_was_shown() -> None:
    """Parameters are placed before the first pass and stay there, so a batch that is known helps, as the error says."""
    budget = Budget(device=4_270_000, host="1GiB")
    model, optimizer = prepared(budget)
    with pytest.raises(torch.OutOfMemoryError, match=r"prepare\(plan=zerostd\.plan\(model, optimizer, batch=batch"):
        train(model, optimizer, 2)
    model, optimizer = planned(budget)
    assert max(train(model, optimizer, 3)) <= budget.device


@pytest.mark.usefixtures("settled")
def test_a_batch_that_grows_tenfold_in_step_50_is_made_room_for() -> None:
    assert grows(0, 50) == []


def settled_and_grows(rank: int, folder: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROSTD_CACHE", folder)
        patch.setattr(adapting, "remember", lambda *_: None)
        patch.setattr(adapting.Trials, "next", lambda self: None)
        return grows(rank, 5)


def test_a_batch_that_grows_on_one_of_two_ranks_is_made_room_for(ranks: Any, tmp_path: Path) -> None:
    """It recomputes at once by itself, and the next check makes a plan of it for both."""
    agree(ranks(2, settled_and_grows, str(tmp_path)))


def test_a_batch_that_nothing_can_hold_is_refused_with_numbers() -> None:
    model, optimizer = prepared(Budget(device=12_000_000, host="1GiB"))
    peaks = train(model, optimizer, EVERY + 2)
    before = zerostd.full_state_dict(model)
    with pytest.raises(torch.OutOfMemoryError, match=r"10 times as large.* MiB.*12000000"):
        train(model, optimizer, 1, rows=10 * ROWS)
    assert_bitwise(zerostd.full_state_dict(model), before)
    peaks += train(model, optimizer, 2)  # and training goes on with what fits
    assert max(peaks) <= 12_000_000


@pytest.mark.usefixtures("settled")
def test_a_plan_that_passes_the_budget_is_revised() -> None:
    """It was made for a smaller batch: the first step shows it, and no step after that passes the budget."""
    most, expected = unlimited(3 * EVERY)
    budget = Budget(device=int(0.6 * most), host="1GiB")
    limits = {Tier.DEVICE: int(0.6 * most), Tier.HOST: 2**30}
    plan = Plan({"*": Homes()}, limits=limits, activations={str(index): "keep" for index in range(DEPTH)})
    model, optimizer = prepared(budget, plan=plan)
    first = train(model, optimizer, 2)
    rest = train(model, optimizer, 3 * EVERY - 2, first=2)
    assert first[0] > int(0.6 * most) >= max(rest)
    (revision,) = adapter_of(model).revisions
    assert revision.step == 1 and "more than its budget" in revision.reason
    assert_bitwise(zerostd.full_state_dict(model), expected)


def planned(budget: Budget, rows: int = ROWS) -> tuple[nn.Module, Any]:
    """Prepare a model with a plan that was made for a batch of `rows` rows."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    options: dict[str, Any] = {"budget": budget, "groups": ["*"], "accumulate": 1}
    plan = zerostd.plan(model, optimizer, batch=torch.randn(rows, WIDTH), **options)
    return zerostd.prepare(model, optimizer, plan=plan, **options)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("rows", [ROWS, ROWS // 2])
def test_the_first_pass_of_a_plan_recomputes_until_it_is_known_to_fit(rows: int) -> None:
    """A loss outside of the model takes memory that no plan knows. Here the batch is larger than the one shown."""
    most, expected = unlimited(3 * EVERY)
    budget = Budget(device=int(0.75 * most), host="1GiB")
    model, optimizer = planned(budget, rows)
    plan = model.__dict__["_zerostd"].settings.plan
    assert "keep" in ways(model)
    peaks = train(model, optimizer, 3 * EVERY)
    assert max(peaks) <= int(0.75 * most) and peaks[0] < 0.6 * most
    reasons = [revision.reason for revision in adapter_of(model).revisions]
    assert reasons == ([] if rows == ROWS else ["the first pass was measured"])
    assert (model.__dict__["_zerostd"].settings.plan.activations == plan.activations) is (rows == ROWS)
    assert_bitwise(zerostd.full_state_dict(model), expected)
    zerostd.release(model)


def test_a_planned_run_is_refused_if_its_first_pass_shows_that_nothing_fits() -> None:
    most, _ = unlimited(3 * EVERY)
    budget = Budget(device=int(0.3 * most), host="1GiB")
    model, optimizer = planned(budget, ROWS // 2)
    train(model, optimizer, 1, rows=4 * ROWS)
    before = zerostd.full_state_dict(model)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match=rf"like the first one: .* would take .* MiB.*{budget.device}"):
            train(model, optimizer, 1, rows=4 * ROWS, first=1)
    assert_bitwise(zerostd.full_state_dict(model), before)
    zerostd.release(model)


def test_a_plan_far_from_its_limit_recomputes_nothing() -> None:
    most, _ = unlimited(3 * EVERY)
    model, _ = planned(Budget(device=2 * most, host="1GiB"))
    assert not adapter_of(model)._room.is_careful
    assert all(way is Way.DEVICE for way in model.__dict__["_zerostd"].backward.activations._ways.values())
    zerostd.release(model)


def test_a_first_step_that_no_plan_can_hold_is_the_last_one() -> None:
    """The plan was made for a smaller batch. A loss outside of the model, which no plan knows, is no different."""
    most, _ = unlimited(3 * EVERY)
    budget = Budget(device=int(0.2 * most), host="1GiB")
    limits = {Tier.DEVICE: int(0.2 * most), Tier.HOST: 2**30}
    plan = Plan({"*": Homes()}, limits=limits, activations={str(index): "keep" for index in range(DEPTH)})
    model, optimizer = prepared(budget, plan=plan)
    assert max(train(model, optimizer, 1, rows=4 * ROWS)) > int(0.2 * most)
    before = zerostd.full_state_dict(model)
    for _ in range(2):
        with pytest.raises(
            torch.OutOfMemoryError, match=rf"does not fit: the device held .*would take .* MiB.*{budget.device}"
        ):
            train(model, optimizer, 1, rows=4 * ROWS, first=1)
    assert_bitwise(zerostd.full_state_dict(model), before)
    zerostd.release(model)


def test_a_device_that_runs_out_in_forward_says_what_is_held() -> None:
    class Full(Wide):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("not a byte left")

    model, _ = zerostd.prepare(nn.Sequential(Wide(), Full()), groups=["*"])
    with pytest.raises(torch.OutOfMemoryError, match="not a byte left") as caught:
        model(torch.randn(2, WIDTH))
    (note,) = caught.value.__notes__
    assert "parameters 258.50 KiB" in note and "Budget(device=...)" in note


class Fails(Wide):
    """A forward that fails the first time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        if type(self).calls == 1:
            raise RuntimeError("not today")
        return super().forward(x)


def test_a_model_whose_first_pass_fails_can_be_used() -> None:
    Fails.calls = 0
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(DEPTH - 1)), Fails())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, prepared_optimizer = zerostd.prepare(
        model, optimizer, budget=Budget(device="1GiB", host="1GiB"), groups=["*"], accumulate=1
    )
    with pytest.raises(RuntimeError, match="not today"):
        model(torch.randn(ROWS, WIDTH))
    train(model, prepared_optimizer, 4)
    _, expected = unlimited(4)
    assert_bitwise(zerostd.full_state_dict(model), expected)


@pytest.mark.parametrize(
    "device", [300_000, *(pytest.param(size, marks=pytest.mark.full) for size in (700_000, 1_100_000))]
)
def test_the_smallest_budget_that_is_named_then_works(device: int) -> None:
    """Below what any form needs."""
    with pytest.raises(PrepareError) as caught:
        prepared(Budget(device=device, host=1_000_000))
    options = str(caught.value).split("What would fit: ")[1].split("; or ")
    named = [{tier: int(size) for tier, size in LARGER.findall(option)} for option in options]
    named = [sizes for sizes in named if sizes]
    assert named
    for sizes in named:
        budget = Budget(device=device + sizes.get("device", 0), host=1_000_000 + sizes.get("host", 0))
        model, _ = prepared(budget)
        zerostd.release(model)


# -- optimizers that are made after prepare --


def late(budget: Budget | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(DEPTH)))
    model, nothing = zerostd.prepare(model, budget=budget, groups=["*"], accumulate=1)
    assert nothing is None
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def test_states_of_a_late_optimizer_are_placed_before_its_first_step() -> None:
    """Parameters and gradients take 2.1 MB, two moments as much again, and recomputed activations 3.6 MB."""
    _, expected = unlimited(4)
    budget = 7_000_000
    model, optimizer = late(Budget(device=budget, host="1GiB"))
    runtime = model.__dict__["_zerostd"]
    peaks = []
    for step in range(4):
        torch.manual_seed(step)
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(runtime.ledger.most[Tier.DEVICE] + runtime.backward.activations.counted().total)
        assert zerostd.memory(model).now["host"]["optimizer_states"] > 0
    assert max(peaks) <= budget
    assert_bitwise(zerostd.full_state_dict(model), expected)


def test_states_of_a_late_optimizer_that_fit_nowhere_are_refused_before_its_first_step() -> None:
    model, optimizer = late(Budget(device=7_000_000, host=100_000))
    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    before = zerostd.full_state_dict(model)
    with pytest.raises(PrepareError, match=r"AdamW, made after prepare.*What would fit: Budget\("):
        optimizer.step()
    assert_bitwise(zerostd.full_state_dict(model), before)
    assert "optimizer_states" not in zerostd.memory(model).peak["device"]
