"""Many worlds side by side, and the page about a trillion parameters that is made of them."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import zerostd
from planning.machines import LAPTOP
from zerostd.engine.settings import Settings
from zerostd.errors import PrepareError
from zerostd.measuring import load_profile
from zerostd.optimizers import passing
from zerostd.planning import MachineProfile, simulation
from zerostd.planning.described import from_numbers
from zerostd.policy import Budget, Precision, Stage, Tier
from zerostd.preparing.budgets import FOR_LIBRARIES
from zerostd.preparing.scaling import plan_numbers, scaling, sent_bytes, state_bytes
from zerostd.sharding.layout import ALIGNMENT

ROOT = Path(__file__).parents[2]
AGAIN = frozenset({"recompute"})


@pytest.fixture(scope="module")
def machine() -> MachineProfile:
    return load_profile(ROOT / "benchmarks" / "clusters" / "1024x8.json")


def test_page_is_what_the_planner_says() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "scale.py"))
    assert (ROOT / "docs" / "scale.md").read_text() == script["page"](), "run: python benchmarks/scale.py"
    few, many = script["superlinear"]()  # the same rows, from the page
    assert (few.world_size, many.world_size) == (64, 400) and many.samples > few.samples
    assert many.tflops > 1.5 * few.tflops  # a device does more where more of them share the state
    assert many.samples_per_s > 1.5 * 400 / 64 * few.samples_per_s


# -- closed forms --


@pytest.mark.parametrize("size", [1, 2, 64])
def test_state_and_bytes_sent_by_stage(size: int) -> None:
    model, n = from_numbers("64M"), 64_000_000
    held = [14 * n, 4 * n + 10 * n / size, 2 * n + 12 * n / size, 14 * n / size]  # 2 of a master are the parameter
    padding = 14 * ALIGNMENT * size * len(model.groups)
    for stage, num_bytes in zip(Stage, held, strict=True):
        assert num_bytes <= state_bytes(model, stage, size) <= num_bytes + padding
    part = (size - 1) / size
    for passes in (1, 4):
        sent = [4 * n * passes, 2 * n + 2 * n * passes, 2 * n + 2 * n * passes, 6 * n * passes]
        assert [sent_bytes(model, stage, size, passes) for stage in Stage] == pytest.approx(
            [part * one for one in sent]
        )


def test_replicas_send_slices_of_gradients_to_each_other() -> None:
    model, n = from_numbers("64M"), 64_000_000
    for stage, inside in ((Stage.GRADIENTS, 4 * n), (Stage.PARAMETERS, 6 * n)):
        across = 2 * (2 * n / 8) * 3 / 4
        assert sent_bytes(model, stage, 8, 1, 4) == pytest.approx(inside * 7 / 8 + across)


# -- wires inside and between nodes --

MESH = "prepare(mesh=init_device_mesh('cuda', (8, 8)))"


def test_model_state_is_shared_where_the_wire_is_faster(machine: MachineProfile) -> None:
    """Eight ranks of a node share a replica, and only slices of gradients go from node to node."""
    model = from_numbers("1.5B", samples=4)
    settings = Settings(stage=Stage.GRADIENTS, accumulate=1)
    plan = plan_numbers(model, machine, settings, 64)
    assert plan.world_size == 8 and any(MESH in note for note in plan.notes)
    inside, network = machine.wires
    size = 2 * model.numel
    per_group = 2 * inside.latency + network.latency
    seconds = 2 * size * 7 / 8 / inside.bandwidth + 2 * (size / 8) * 7 / 8 / network.bandwidth
    assert plan.predicted.busy["wire"] == pytest.approx(seconds + len(model.groups) * per_group, rel=1e-6)
    flat = plan_numbers(model, replace(machine, wires=(network,)), settings, 64)
    assert flat.world_size == 64 and (flat.predicted.step_s or 0) > 1.01 * (plan.predicted.step_s or 0)
    (row,) = scaling(model, machine, [64], settings)
    assert row.sent == sent_bytes(model, Stage.GRADIENTS, 8, 1, 8)


def test_model_state_is_shared_by_all_where_replicas_do_not_fit_or_gain_nothing(machine: MachineProfile) -> None:
    large = from_numbers("100B", samples=1)
    settings = Settings(stage=Stage.PARAMETERS, accumulate=1, budget=Budget(host=0))
    assert plan_numbers(large, machine, settings, 64).world_size == 64
    inside, network = machine.wires
    alike = replace(machine, wires=(inside, replace(network, bandwidth=inside.bandwidth)))
    small = from_numbers("1.5B", samples=4)
    assert plan_numbers(small, alike, replace(settings, stage=Stage.GRADIENTS), 64).world_size == 64
    with pytest.raises(PrepareError, match=r"on 64 ranks,"):
        plan_numbers(from_numbers("1T", samples=1), machine, settings, 64)


def test_numbers_that_others_have_too_are_the_same() -> None:
    assert simulation.MOST_HELD == passing.MOST_HELD


# -- limits --


def test_ranks_of_a_node_share_its_memory_and_not_the_device(machine: MachineProfile) -> None:
    model = from_numbers("64M", samples=1)
    alone, eight = (plan_numbers(model, machine, Settings(), size).limits for size in (1, 64))
    assert alone == {Tier.DEVICE: 72 * 10**9, Tier.HOST: 18 * 10**11}
    assert eight == {Tier.DEVICE: 72 * 10**9, Tier.HOST: 18 * 10**11 // 8}
    untried = replace(model, samples=None)
    assert plan_numbers(untried, machine, Settings()).limits[Tier.DEVICE] == 432 * 10**8
    own = plan_numbers(untried, machine, Settings(budget=Budget(device="10GB", host="80GB")), 64).limits
    assert own == {Tier.DEVICE: 10 * 10**9 - FOR_LIBRARIES, Tier.HOST: 10 * 10**9}


def test_a_tier_that_is_not_described_is_not_used(machine: MachineProfile) -> None:
    model = from_numbers("1M")
    for free, tier in (({"device": 10**9}, Tier.HOST), ({**machine.free, "disk": 10**12}, Tier.DISK)):
        assert tier not in plan_numbers(model, replace(machine, free=free), Settings()).limits


def test_ranks_of_a_node_share_a_cpu_that_is_their_device() -> None:
    model = from_numbers("64M", samples=1, sequence=128)
    laptop = replace(LAPTOP, ranks_per_node=2)
    alone, both = (plan_numbers(model, laptop, Settings(), size).predicted.compute_s for size in (1, 2))
    assert alone is not None and both is not None and 1.5 * alone < both < 2.01 * alone


# -- plans --


class Block(nn.Module):
    """As many parameters as a block of a GPT in numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.more = nn.Parameter(torch.empty(4 * width * width + 8 * width))


class Tower(nn.Module):
    """An embedding in the root, and blocks."""

    def __init__(self, width: int, depth: int, rows: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(rows, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("budget", [Budget(host=0), Budget(device="400MB"), Budget(device="230MB")])
def test_numbers_take_what_a_module_of_their_sizes_takes(machine: MachineProfile, size: int, budget: Budget) -> None:
    width, depth, rows = 512, 8, 4000
    with torch.device("meta"):
        module = Tower(width, depth, rows)
    numel = sum(parameter.numel() for parameter in module.parameters())
    model = from_numbers(numel, hidden=width, layers=depth)
    assert model.groups[1].trained == sum(parameter.numel() for parameter in module.blocks[0].parameters())
    settings = Settings(stage=Stage.PARAMETERS, accumulate=1, precision=Precision.parse("bf16"), budget=budget)
    optimizer = torch.optim.AdamW(module.parameters())
    options = {"world_size": size, "stage": 3, "accumulate": 1, "budget": budget, "precision": "bf16"}
    exact = zerostd.plan(module, optimizer, machine=machine, **options)
    plan = plan_numbers(model, machine, settings, size)
    for tier in (Tier.DEVICE, Tier.HOST):
        assert plan.predicted.total(tier) == pytest.approx(exact.predicted.total(tier), rel=0.01), tier


def test_what_must_be_on_the_device_and_is_too_much_is_refused_with_its_bytes(machine: MachineProfile) -> None:
    with pytest.raises(PrepareError, match=r"at stage 2 on 64 ranks, each with .* at least .* TiB .* of the device"):
        plan_numbers(from_numbers("1T", samples=1), machine, Settings(stage=Stage.GRADIENTS), 64)


# -- scaling --


def test_rows_of_a_model_that_grows_with_its_cluster(machine: MachineProfile) -> None:
    model = from_numbers("13B", samples=1)
    rows = scaling(model, machine, (252, 8, 60), Settings(accumulate=1), ways=AGAIN)  # not whole nodes: no replicas
    assert [row.world_size for row in rows] == [8, 60, 252]
    for row in rows:
        assert row.stage is not None and not row.refused
        assert sum(row.state.values()) == state_bytes(model, row.stage, row.world_size)
        assert row.sent == sent_bytes(model, row.stage, row.world_size)
        assert row.samples_per_s == pytest.approx(row.world_size / row.step_s)
        assert 0 < row.compute_s <= row.step_s * 1.001
    assert rows[0].efficiency == 1.0
    assert rows[1].efficiency < 0.9  # the first world is inside a node, where wires are fast
    assert rows[2].efficiency == pytest.approx(rows[1].efficiency, rel=0.05)


def test_step_of_a_given_size_has_fewer_passes_on_more_ranks(machine: MachineProfile) -> None:
    model = from_numbers("350M", samples=2, sequence=256)
    rows = scaling(model, machine, (8, 16, 64), Settings(), ways=AGAIN, samples_per_step=32)
    assert [row.passes for row in rows] == [2, 1, 0]
    update_s = model.trained / 8 * machine.resident_ns * 1e-9  # on the device: eight ranks share a replica
    assert rows[0].compute_s - update_s == pytest.approx(2 * (rows[1].compute_s - update_s))
    assert [row.samples_per_s * row.step_s for row in rows[:2]] == pytest.approx([32, 32])
    assert rows[2].stage is None and rows[2].refused == "a step of 32 samples is too small for 64 ranks"


def test_samples_of_a_pass_are_searched(machine: MachineProfile) -> None:
    model = from_numbers("1.3B", sequence=256)
    settings = Settings(stage=Stage.PARAMETERS, accumulate=1)
    (row,) = scaling(model, machine, (16,), settings, ways=AGAIN)
    for samples in (row.samples // 2, row.samples * 2):
        (other,) = scaling(replace(model, samples=samples), machine, (16,), settings, ways=AGAIN)
        assert other.samples_per_s <= row.samples_per_s
    flops = 3 * sum(group.forward_flops for group in model.groups)
    assert row.tflops == pytest.approx(flops * row.samples_per_s / 16 / 1e12)
    (given,) = scaling(model, machine, (16,), Settings(), ways=AGAIN, samples_per_step=64)
    assert given.samples * given.passes == 4


def test_worlds_that_are_too_small_are_told_of(machine: MachineProfile) -> None:
    model = from_numbers("30B", samples=1)
    first, second = scaling(model, replace(machine, free={"device": 80 * 10**9}), (2, 32), Settings(), ways=AGAIN)
    assert first.stage is None and "is missing" in first.refused and first.efficiency == 0.0
    assert second.stage is not None and second.efficiency == 1.0
