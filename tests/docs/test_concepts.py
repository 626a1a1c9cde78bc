"""The worked example on the planner's page: every number in it, computed again by the planner."""

from __future__ import annotations

import re

import pytest

from docs.pages import ROOT
from zerostd.planning import GroupProfile, Link, MachineProfile, ModelProfile, PlanRequest, Processor
from zerostd.planning.linear import LinearSolution
from zerostd.planning.program import GIGA, ScheduleProgram, quickest
from zerostd.policy import Kind, Tier

GB = 10**9
PAGE = (ROOT / "docs" / "concepts" / "planner.md").read_text()
ROW = re.compile(
    r"^\| (\d+) GB \| (\d) of 3 groups \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) s \| ([0-9.]+) ms \|$", re.MULTILINE
)


def solved(device_gb: int, *, clips: bool) -> tuple[ScheduleProgram, LinearSolution]:
    """The example in words, as the planner takes it."""
    machine = MachineProfile(
        name="by hand",
        device="by hand",
        matrix={"bfloat16": 1e14},
        resident_ns=0.01,
        free={},
        processor=Processor(16, {1: 0.25}, 300e9),
        link=Link(50e9, 50e9, 100e9),
    )
    groups = tuple(GroupProfile(f"g{index}", GB) for index in range(3))
    model = ModelProfile("three groups", groups, forward_s=0.06, backward_s=0.12)
    limits = {Tier.DEVICE: device_gb * GB, Tier.HOST: 100 * GB}
    kinds = frozenset({Kind.OPTIMIZER_STATES})
    task = PlanRequest(model, machine, limits, waits_for_norm=clips, can_place=kinds)
    return quickest(task)


@pytest.mark.parametrize("row", ROW.findall(PAGE), ids=lambda row: f"{row[0]} GB")
def test_rows_of_the_example_are_the_programs(row: tuple[str, ...]) -> None:
    device, resident, cpu, streamed, step, price = map(float, row)
    program, outcome = solved(int(device), clips=True)
    shares = program.shares(outcome)
    assert sum(share.resident for share in shares) == pytest.approx(resident, abs=1e-6)
    assert sum(share.cpu for share in shares) == pytest.approx(cpu, abs=6e-4)
    assert sum(share.streamed for share in shares) == pytest.approx(streamed, abs=6e-4)
    assert outcome.objective == pytest.approx(step, abs=6e-4)
    assert outcome.prices[Tier.DEVICE.value] / GIGA * GB * 1e3 == pytest.approx(price, abs=0.06)


def test_sentences_of_the_example_are_true() -> None:
    assert len(ROW.findall(PAGE)) == 3
    program, outcome = solved(24, clips=True)
    assert outcome.values[program.end] == pytest.approx([0.12, 0.08, 0.04])
    assert outcome.values[program.begin][-1] == pytest.approx(0.12 + 0.267, abs=6e-4)
    memory_s = sum((outcome.values[columns] * factors).sum() for columns, factors in program.totals["memory"])
    assert memory_s == pytest.approx(0.188, abs=6e-4)
    early = solved(24, clips=False)[1].objective
    assert early == pytest.approx(0.327, abs=6e-4) and "takes 0.327 s" in PAGE
