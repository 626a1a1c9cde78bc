"""Bytes that stay, and the place that took them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

import zerostd
from zerostd import Placement
from zerostd.monitoring import Ledger
from zerostd.policy import Kind, Tier

HERE = __file__


def searched() -> Ledger:
    ledger = Ledger()
    ledger.leaks.start(1)
    return ledger


def step(ledger: Ledger, number: int, *, keeps: bool = False) -> list[tuple[str, int, str]]:
    """One step of two groups, of which the second may keep its buffer; what is told after it."""
    for group in ("a", "b"):
        ledger.work_on(group)
        ledger.enter(Kind.BUFFERS, 64)
    for group in ("a", "b"):
        ledger.work_on(group)
        if not (keeps and group == "b"):
            ledger.leave(Kind.BUFFERS, 64)
    return [(leak.group, leak.step, leak.where) for leak in ledger.leaks.after(number)]


def test_what_is_given_back_is_no_leak() -> None:
    ledger = searched()
    assert all(step(ledger, number) == [] for number in range(1, 20))


def test_one_that_stays_is_named_once_with_its_group_and_place() -> None:
    ledger = searched()
    told = [step(ledger, number, keeps=number == 9) for number in range(1, 14)]
    found = [(number, one) for number, ones in enumerate(told, start=1) for one in ones]
    ((number, (group, taken, where)),) = found
    assert (number, group, taken) == (10, "b", 9)
    assert HERE.rsplit("/", 1)[-1] in where


def test_the_first_steps_may_take_what_stays() -> None:
    ledger = searched()
    assert [step(ledger, number, keeps=number < 4) for number in range(1, 9)] == [[]] * 8


def test_another_plan_may_too() -> None:
    ledger = searched()
    for number in range(1, 9):
        assert step(ledger, number, keeps=number == 8) == []
    ledger.leaks.start(9)
    assert step(ledger, 9, keeps=True) == [] and step(ledger, 10) == []


def test_tiers_and_sizes_are_told_apart() -> None:
    ledger = searched()
    for number in range(1, 9):
        ledger.enter(Kind.BUFFERS, 10, Tier.HOST)
        ledger.enter(Kind.BUFFERS, 11, Tier.HOST)
        ledger.enter(Kind.BUFFERS, 10)
        ledger.leave(Kind.BUFFERS, 10)
        ledger.leave(Kind.BUFFERS, 11, Tier.HOST)
        leaks = ledger.leaks.after(number)
        assert [(leak.tier, leak.num_bytes) for leak in leaks] == ([(Tier.HOST, 10)] if number > 4 else [])


def test_a_pool_that_grows_is_no_leak(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    placement = Placement(activations="host")
    _, optimizer = zerostd.prepare(model, torch.optim.SGD(model.parameters(), 0.1), placement=placement, groups=["*"])
    with zerostd.record(model, tmp_path / "run"):
        for step in range(8):
            model(torch.randn(2048 * (step + 1), 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    lines = [json.loads(line) for line in (tmp_path / "run" / "rank-0.jsonl").read_text().splitlines()]
    memory = [line["bytes"]["host"]["activations"] for line in lines if line["kind"] == "memory"]
    assert memory[-1] > memory[5] > memory[3]
    assert not [line for line in lines if line["kind"] == "leak"]
    events = [line for line in lines if line["kind"] == "event" and line["name"] == "transfer"]
    assert {event["lane"] for event in events} == {"up", "down"}
    assert {line["cause"] for line in lines if line["kind"] == "event" and line["name"] == "wait"} >= {"activations"}
