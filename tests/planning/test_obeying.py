"""prepare plans by itself, obeys plans, and takes the bytes it said it would."""

from __future__ import annotations

import itertools
import logging
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from planning.machines import H200, LAPTOP
from support.agreement import agree
from support.compare import assert_bitwise
from support.processes import doing
from support.samples import marked
from zerostd import Budget, Placement, Plan, Precision, PrepareError
from zerostd.communication import World
from zerostd.engine.settings import Settings
from zerostd.parameters.blueprints import Blueprint, find_blueprints, sizes_of
from zerostd.planning import DiskRates, GroupProfile, ModelProfile, Processor
from zerostd.planning.solution import ObservedStep
from zerostd.policy import Homes, Kind, Route, Tier
from zerostd.preparing.options import check_settings
from zerostd.preparing.proposing import PlanSearch

WIDTH, DEPTH = 256, 8
GROUP_BYTES = 2 * (WIDTH * WIDTH + WIDTH) * 4  # of parameters, in fp32
MIB = 2**20


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once for all of these tests."""
    monkeypatch.setenv("ZEROSTD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH))
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: Any, steps: int = 3, rank: int = 0) -> dict[str, torch.Tensor]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zerostd.full_state_dict(model)


def plan_of(model: nn.Module) -> Plan:
    plan = model.__dict__["_zerostd"].settings.plan
    assert isinstance(plan, Plan)
    return plan


def off_by(plan: Plan, model: nn.Module) -> list[str]:
    """Tiers whose peak is above the prediction by more than a page a column, or more than 5 % below it. Where
    parameters come from elsewhere it may be one group lower: none is brought ahead while its update is under way.
    Likewise where gradients are freed: in a chain of groups, one group is updated before the next gradient lands."""
    peak, wrong = zerostd.memory(model).peak, []
    ahead = any(homes.parameters is not Tier.DEVICE for homes in plan.homes.values()) * GROUP_BYTES
    ahead += (not plan.keep_gradients) * GROUP_BYTES * next(model.parameters()).element_size() // 4
    for tier in Tier:
        kept = plan.predicted.bytes.get(tier, {}).get(Kind.ACTIVATIONS, 0)  # of which the ledger does not know
        predicted, measured = plan.predicted.total(tier) - kept, sum(peak.get(tier.value, {}).values())
        least = 0.95 * predicted - (ahead if tier is Tier.DEVICE else 0) - 1024
        if not least <= measured <= 1.002 * predicted + 1024:
            wrong.append(f"{tier.value}: {predicted} predicted, {measured} at peak\n{plan.explain()}\n{peak}")
    return wrong


BUDGETS = {
    "all": {},
    "some on the host": {"device": "6MiB", "host": "100MiB"},
    "most on the host": {"device": "3MiB", "host": "100MiB"},
    "on disk": {"device": "6MiB", "host": "8MiB", "disk": "200MiB"},
    "most on disk": {"device": "5MiB", "host": "9MiB", "disk": "200MiB"},
}


@pytest.mark.parametrize(
    ("name", "precision", "clip"), marked([*itertools.product(BUDGETS, ("fp32", "bf16"), (None, 1.0))])
)
def test_a_budget_is_all_it_takes(name: str, precision: str, clip: float | None, tmp_path: Path) -> None:
    """Nothing else is said: the plan stays inside, takes what it said, and the numbers are those of the device."""
    budget = Budget(**BUDGETS[name], disk_path=str(tmp_path) if "disk" in BUDGETS[name] else None)
    options = {"precision": precision, "accumulate": 1, "max_grad_norm": clip, "groups": ["*"]}
    model = make()
    model, optimizer = zerostd.prepare(model, adamw(model), budget=budget, **options)
    state, plan = train_placed(model, optimizer), plan_of(model)
    assert not off_by(plan, model), off_by(plan, model)
    limits = {tier: plan.limits[tier] for tier in plan.limits}
    assert all(plan.predicted.total(tier) <= limits[tier] for tier in limits), plan.explain()
    for tier in (Tier.HOST, Tier.DISK):
        if tier.value in name:
            assert plan.predicted.total(tier) > 0
    other = make()
    other, plain = zerostd.prepare(other, adamw(other), placement=Placement(), **options)
    assert_bitwise(state, train_placed(other, plain))


def train_placed(model: nn.Module, optimizer: Any, rank: int = 0) -> dict[str, torch.Tensor]:
    """After the first pass everything is placed by what it took: peaks are those from then on."""
    train(model, optimizer, 2, rank)
    ledger = model.__dict__["_zerostd"].ledger
    ledger.peak.clear()
    ledger.peak.update(ledger.now)
    return train(model, optimizer, 2, rank)


def on_ranks(rank: int, budgets: dict[int | None, list[str]], folder: str) -> list[str]:
    failures = []
    for stage, name in [(stage, name) for stage, names in budgets.items() for name in names]:
        doing(f"stage {stage}, {name}")
        budget = Budget(**BUDGETS[name], disk_path=folder if "disk" in name else None)
        model = make()
        model, optimizer = zerostd.prepare(
            model, adamw(model), stage=stage, precision="bf16", accumulate=1, budget=budget, groups=["*"]
        )
        train_placed(model, optimizer, rank)
        plan = plan_of(model)
        failures += [f"stage {stage}, {name}, rank {rank}: {text}" for text in off_by(plan, model)]
        if stage is not None and plan.stage != stage:
            failures.append(f"stage {stage} was asked for, and {plan.stage} planned")
        zerostd.release(model)
    return failures


SOME = {None: ["all"], 0: ["all"], 1: ["on disk"], 2: ["some on the host"], 3: ["on disk"]}
REST = {1: ["all", "some on the host"], 2: ["all", "on disk"], 3: ["all", "some on the host"]}


@pytest.mark.parametrize("budgets", [SOME, pytest.param(REST, marks=pytest.mark.full)], ids=["some", "rest"])
def test_predicted_bytes_on_ranks(ranks: Any, budgets: dict[int | None, list[str]], tmp_path: Path) -> None:
    agree(ranks(2, on_ranks, budgets, str(tmp_path)))


def plans_on_ranks(rank: int) -> list[str]:
    """One rank has less: all obey what fits there."""
    model = make()
    device = "5MiB" if rank == 1 else "500MiB"
    model, optimizer = zerostd.prepare(
        model, adamw(model), precision="bf16", accumulate=1, budget=Budget(device=device, host="200MiB"), groups=["*"]
    )
    train(model, optimizer, rank=rank)
    plan = plan_of(model)
    return [plan.to_json(), str(plan.limits[Tier.DEVICE])]


def test_all_ranks_obey_one_plan(ranks: Any) -> None:
    (first, least), (second, _) = ranks(2, plans_on_ranks)
    assert first == second and int(least) == 5 * MIB
    assert Plan.from_json(first).predicted.total(Tier.HOST) > 0


def test_a_plan_is_made_before_and_obeyed(tmp_path: Path) -> None:
    model = make()
    optimizer = adamw(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"precision": "bf16", "accumulate": 1, "groups": ["*"]}
    plan = zerostd.plan(model, optimizer, budget=Budget(device="5MiB", host="100MiB"), **options)
    assert_bitwise(model.state_dict(), before)
    plan.save(tmp_path / "plan.json")
    model, optimizer = zerostd.prepare(model, optimizer, plan=tmp_path / "plan.json", **options)
    train(model, optimizer)
    assert plan_of(model) == plan
    for group in model.__dict__["_zerostd"].groups:
        if not group.flats:
            continue
        homes = plan.homes_of(group.name)
        for flat in group.flats:
            assert flat.rest.tier is homes.parameters
            assert [(s.tier, s.route) for s in flat.state_shards] == [(t, r) for t, r, _ in homes.states]
    assert not off_by(plan, model)


def test_a_plan_by_hand_is_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        '{"homes": {"0": {}, "*": {"parameters": "host", "gradients": "host", "states": [["host", "cpu", 1.0]]}}}'
    )
    model = make()
    model, optimizer = zerostd.prepare(model, adamw(model), plan=path, precision="bf16", groups=["*"])
    expected = make()
    expected, plain = zerostd.prepare(expected, adamw(expected), placement=Placement(), precision="bf16", groups=["*"])
    assert_bitwise(train(model, optimizer), train(expected, plain))
    tiers = {group.name: group.flats[0].rest.tier for group in model.__dict__["_zerostd"].groups if group.flats}
    assert tiers == {"0": Tier.DEVICE, **{str(index): Tier.HOST for index in range(1, DEPTH)}}


def test_the_plan_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    with caplog.at_level(logging.INFO, logger="zerostd"):
        zerostd.prepare(model, adamw(model), budget=Budget(device="6MiB", host="100MiB"), groups=["*"])
    told = [record.message for record in caplog.records if record.name == "zerostd"]
    table, line = told  # the whole plan, and one line that says what was decided
    assert all("device" in text and "host" in text for text in told) and "\n" in table and "\n" not in line


def test_without_an_optimizer_only_parameters_move() -> None:
    """In fp16: a bf16 parameter is the upper half of its master on the device, so nothing is saved by moving it."""
    model = make()
    model, optimizer = zerostd.prepare(
        model, precision="fp16", budget=Budget(device="8MiB", host="100MiB"), groups=["*"]
    )
    assert optimizer is None
    plan = plan_of(model)
    states = {homes.states for homes in plan.homes.values()}
    assert states == {((Tier.DEVICE, Route.RESIDENT, 1.0),)}
    assert plan.predicted.bytes[Tier.HOST].get(Kind.OPTIMIZER_STATES, 0) == 0
    assert plan.predicted.bytes[Tier.HOST][Kind.PARAMETERS] > 0


def test_what_does_not_fit_is_refused_with_the_bytes_missing() -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PrepareError, match=r"no placement fits .* missing. What would fit: Budget\(") as caught:
        zerostd.prepare(model, adamw(model), budget=Budget(device="1MiB", host="1MiB"), groups=["*"])
    assert "of the device" in str(caught.value) and "Budget(disk=..., disk_path=...)" in str(caught.value)
    assert_bitwise(model.state_dict(), before)


@pytest.mark.parametrize("size", ["24 parsecs", "-5GiB", "GiB"])
def test_a_size_that_is_none(size: str) -> None:
    with pytest.raises(PrepareError, match="is not a size"):
        Budget(device=size)


def test_planning_for_another_machine_and_world() -> None:
    with torch.device("meta"):
        model = make()
    batch = torch.empty(16, WIDTH, device="meta")
    plan = zerostd.plan(model, adamw(model), machine=LAPTOP, world_size=64, batch=batch, stage=2, groups=["*"])
    assert plan.world_size == 64 and plan.stage == 2 and plan.predicted.step_s is not None
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert plan.predicted.bytes[Tier.DEVICE][Kind.PARAMETERS] == pytest.approx(4 * numel, rel=0.05)
    assert plan.predicted.bytes[Tier.DEVICE][Kind.OPTIMIZER_STATES] == pytest.approx(8 * numel / 64, rel=0.05)
    assert plan.predicted.bytes[Tier.DEVICE][Kind.ACTIVATIONS] > 0
    with pytest.raises(PrepareError, match="world_size=0"):
        zerostd.plan(model, adamw(model), machine=LAPTOP, world_size=0)


def test_homes_that_make_no_sense() -> None:
    for states in (
        ((Tier.HOST, Route.RESIDENT, 1.0),),
        ((Tier.DEVICE, Route.CPU, 1.0),),
        ((Tier.HOST, Route.CPU, 0.5),),
    ):
        with pytest.raises(PrepareError, match="of a plan"):
            Homes(states=states)
    for tier in (Tier.HOST, Tier.DISK):
        with pytest.raises(PrepareError, match="give their share to the route cpu"):
            Homes(Tier.DISK, states=((tier, Route.STREAMED, 1.0),))


# -- another machine's device --

GIB = 2**30


def for_a_device(
    width: int = 2048, depth: int = 16, clip: float | None = None
) -> tuple[Settings, list[Blueprint], World]:
    """67 million parameters for an accelerator that need not be here: 928 MiB with their states."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))).to(torch.bfloat16)
    options = Settings(precision=Precision.parse("bf16"), accumulate=1, max_grad_norm=clip, globs=["*"])
    settings = check_settings(options, model, adamw(model))
    found = find_blueprints(model, adamw(model), settings.precision, ["*"])
    return settings, found, World.pretend(torch.device("cuda"), 1, 1)


def test_activations_count_in_the_plan_that_is_obeyed() -> None:
    """All is on the device, which ran out: with its activations the plan does not fit, and the other one does."""
    settings, found, world = for_a_device()
    limits: dict[Tier, int] = {Tier.DEVICE: 60 * GIB, Tier.HOST: 60 * GIB}
    plan = PlanSearch(settings, found, world).all_on_device(limits)
    assert plan is not None and plan.predicted.total(Tier.DEVICE) == pytest.approx(928 * MIB, rel=0.01)
    limits[Tier.DEVICE] = 1178 * MIB
    seen = ObservedStep(0.005, 0.0017, 0.0033, activation_bytes=440 * MIB)
    search = PlanSearch(settings.obeying(plan, sizes_of(found)), found, world)
    now, (best, *_) = search.revise(limits, H200, seen, speculates=False)
    assert now.predicted.total(Tier.DEVICE) == pytest.approx(1368 * MIB, rel=0.01)
    assert best.predicted.total(Tier.DEVICE) <= limits[Tier.DEVICE] < now.predicted.total(Tier.DEVICE)
    assert best.predicted.bytes[Tier.DEVICE][Kind.ACTIVATIONS] == 440 * MIB


def test_gradients_that_had_yet_to_land_hide_activations() -> None:
    """The device holds most when backward begins. A plan with gradients on the host saves nothing of that moment."""
    settings, found, world = for_a_device()
    limits: dict[Tier, int] = {Tier.DEVICE: 60 * GIB, Tier.HOST: 60 * GIB}
    plan = PlanSearch(settings, found, world).all_on_device(limits)
    assert plan is not None
    limits[Tier.DEVICE] = 720 * MIB
    search = PlanSearch(settings.obeying(plan, sizes_of(found)), found, world)
    gradients = plan.predicted.bytes[Tier.DEVICE][Kind.GRADIENTS]
    buffers = plan.predicted.bytes[Tier.DEVICE].get(Kind.BUFFERS, 0)
    for late_bytes in (0, 100 * MIB, gradients):
        seen = ObservedStep(0.005, 0.0017, 0.0033, activation_bytes=300 * MIB, late_bytes=late_bytes)
        now, others = search.revise(limits, H200, seen, speculates=False)
        assert now.predicted.bytes[Tier.DEVICE][Kind.ACTIVATIONS] == 300 * MIB
        assert others
        for other in others:
            held = other.predicted.bytes[Tier.DEVICE]
            fewer = gradients + buffers - held.get(Kind.GRADIENTS, 0) - held.get(Kind.BUFFERS, 0)
            assert held[Kind.ACTIVATIONS] == 300 * MIB + min(late_bytes, max(0, fewer))
            assert sum(held.values()) <= limits[Tier.DEVICE]


WIDE = 7168


def wide(found: Sequence[Blueprint]) -> ModelProfile:
    """Layers of that width, as they were measured."""
    groups = tuple(
        GroupProfile(
            one.name, WIDE * (WIDE + 1), forward_flops=1e11, kept_bytes=6.7e7, boundary_bytes=4.2e6, peak_bytes=1.3e8
        )
        for one in found
        if one.members
    )
    return ModelProfile("wide", groups, samples=8, forward_s=0.038, backward_s=0.083)


def test_a_plan_that_speculates_says_what_clipped_steps_take() -> None:
    settings, found, world = for_a_device(WIDE, 24, clip=1.0)
    limits = {Tier.DEVICE: 14 * GIB, Tier.HOST: 64 * GIB}
    plan = PlanSearch(settings, found, world).propose(limits, wide(found), H200)
    late = PlanSearch(replace(settings, accumulate=None), found, world).propose(limits, wide(found), H200)
    assert plan.speculate and not late.speculate
    clipped_s, without_s = plan.predicted.clipped_s or 0.0, late.predicted.step_s or 0.0
    assert clipped_s > without_s > 1.1 * (plan.predicted.step_s or 0.0)
    assert f"A clipped step takes {clipped_s:.3g} s." in plan.explain()
    (said,) = (
        float(text) for note in plan.notes for text in re.findall(r"Without speculation every step takes (\S+) s", note)
    )
    assert said == pytest.approx(without_s, rel=0.01)
    assert late.predicted.clipped_s is None and "speculative" not in late.explain()


@pytest.mark.parametrize("sizes", [(8, 9, 10, 64), pytest.param((6, 8, 9, 10, 12, 64), marks=pytest.mark.full)])
def test_more_of_the_host_makes_no_plan_slower(sizes: tuple[int, ...]) -> None:
    """The first answer needs buffers that it did not count; to place its states again is not all that can be done."""
    settings, found, world = for_a_device(WIDE, 24)
    profile = wide(found)

    def seconds(host: int) -> float:
        limits: dict[Tier, int] = {Tier.DEVICE: 20 * GIB, Tier.HOST: host * GIB}
        return PlanSearch(settings, found, world).propose(limits, profile, H200).predicted.step_s or 0.0

    taken = [seconds(host) for host in sizes]
    assert all(other <= one * 1.04 for one, other in itertools.pairwise(taken)), taken


@pytest.mark.parametrize("num_drawn", [12, pytest.param(60, marks=pytest.mark.full)])
def test_a_tight_host_is_met_whatever_the_rates_are(num_drawn: int, tmp_path: Path) -> None:
    """What leaves the host for the disk needs buffers on the host: the more leaves, the larger they are."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(24)))
    limits = {Tier.DEVICE: 1700 << 10, Tier.HOST: 64 * MIB, Tier.DISK: 64 * MIB}
    plan = Plan({"*": Homes(states=((Tier.HOST, Route.CPU, 1.0),))}, limits=limits)
    budget = Budget(disk_path=str(tmp_path))
    options = Settings(precision=Precision.parse("bf16"), plan=plan, budget=budget, globs=["*"])
    settings = check_settings(options, model, adamw(model))
    found = find_blueprints(model, adamw(model), settings.precision, ["*"])
    obeying, world = settings.obeying(plan, sizes_of(found)), World.pretend(torch.device("cpu"), 1, 1)
    limits[Tier.HOST] = 4405 << 10  # of 4.8 MiB that it takes
    draw = random.Random(0)

    def between(low: float, high: float) -> float:
        return low * (high / low) ** draw.random()

    for _ in range(num_drawn):
        disk = DiskRates(str(tmp_path), between(2e8, 4e9), between(2e8, 4e9), between(1e8, 2e9))
        cores = Processor(2, {1: between(1, 4), 2: between(0.6, 3)}, between(5e9, 3e10))
        machine = replace(LAPTOP, resident_ns=between(0.5, 3), processor=cores, disk=disk)
        seen = ObservedStep(
            between(0.002, 0.05), between(5e-4, 0.01), between(0.001, 0.02), busy={"cpu": between(5e-4, 0.02)}
        )
        _, (best, *_) = PlanSearch(obeying, found, world).revise(limits, machine, seen, speculates=False)
        assert best.predicted.total(Tier.HOST) <= limits[Tier.HOST]
