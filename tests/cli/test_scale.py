"""Many worlds side by side, and the page about a trillion parameters that is made of them."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import zerostd
from zerostd.errors import PrepareError
from zerostd.measuring import load_profile
from zerostd.measuring.model import profile_model
from zerostd.optimizers import passing
from zerostd.parameters import host_gradient
from zerostd.planning import MachineProfile, simulation
from zerostd.planning import cluster as clusters
from zerostd.planning.cluster import TrainingOptions, limits_of, plan_on, scaling, sent_bytes, state_bytes
from zerostd.planning.described import from_numbers
from zerostd.planning.request import FOR_LIBRARIES
from zerostd.policy import Budget, Kind, Stage, Tier
from zerostd.scheduling import gathering

ROOT = Path(__file__).parents[2]


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
    assert [state_bytes(model, stage, size) for stage in Stage] == pytest.approx(held)
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
    use = TrainingOptions(world_size=64, stage=Stage.GRADIENTS, accumulate=1)
    plan = plan_on(model, machine, use)
    assert plan.world_size == 8 and any(MESH in note for note in plan.notes)
    inside, network = machine.wires
    size = 2 * model.numel
    per_group = 2 * inside.latency + network.latency
    seconds = 2 * size * 7 / 8 / inside.bandwidth + 2 * (size / 8) * 7 / 8 / network.bandwidth
    assert plan.predicted.busy["wire"] == pytest.approx(seconds + len(model.groups) * per_group, rel=1e-6)
    flat = plan_on(model, replace(machine, wires=(network,)), use)
    assert flat.world_size == 64 and (flat.predicted.step_s or 0) > 1.01 * (plan.predicted.step_s or 0)
    (row,) = scaling(model, machine, [64], use=use)
    assert row.sent == sent_bytes(model, Stage.GRADIENTS, 8, 1, 8)


def test_model_state_is_shared_by_all_where_replicas_do_not_fit_or_gain_nothing(machine: MachineProfile) -> None:
    large = from_numbers("100B", samples=1)
    use = TrainingOptions(world_size=64, stage=Stage.PARAMETERS, accumulate=1, budget=Budget(host=0))
    assert plan_on(large, machine, use).world_size == 64
    inside, network = machine.wires
    alike = replace(machine, wires=(inside, replace(network, bandwidth=inside.bandwidth)))
    assert plan_on(from_numbers("1.5B", samples=4), alike, replace(use, stage=Stage.GRADIENTS)).world_size == 64
    with pytest.raises(PrepareError, match=r"on 64 ranks,"):
        plan_on(from_numbers("1T", samples=1), machine, use)


def test_numbers_that_others_have_too_are_the_same() -> None:
    assert clusters.NUM_GATHERED == gathering.NUM_NEIGHBOURS
    assert clusters.NUM_STAGING == host_gradient.NUM_STAGING
    assert clusters.NUM_HELD == passing.MOST_HELD + passing.MOST_ARRIVING
    assert simulation.MOST_HELD == passing.MOST_HELD


# -- limits --


def test_ranks_of_a_node_share_its_memory_and_not_the_device(machine: MachineProfile) -> None:
    alone, eight = (limits_of(machine, size, Budget()) for size in (1, 64))
    assert alone == {Tier.DEVICE: 72 * 10**9, Tier.HOST: 18 * 10**11}
    assert eight == {Tier.DEVICE: 72 * 10**9, Tier.HOST: 18 * 10**11 // 8}
    assert limits_of(machine, 1, Budget(), knows_activations=False)[Tier.DEVICE] == 432 * 10**8
    own = limits_of(machine, 64, Budget(device="10GB", host="80GB"), knows_activations=False)
    assert own == {Tier.DEVICE: 10 * 10**9 - FOR_LIBRARIES, Tier.HOST: 10 * 10**9}


def test_a_tier_that_is_not_described_is_not_used(machine: MachineProfile) -> None:
    assert Tier.HOST not in limits_of(replace(machine, free={"device": 10**9}), 1, Budget())
    assert Tier.DISK not in limits_of(replace(machine, free={**machine.free, "disk": 10**12}), 1, Budget())


# -- plans --


def test_working_memory_is_about_what_the_runtime_takes(machine: MachineProfile) -> None:
    """The closed form of a profile against the exact account of the module, everything on the device."""
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)) for _ in range(8))
        model = nn.Sequential(nn.Linear(512, 1024), *blocks, nn.Linear(1024, 512))
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.ones(4, 512, device="meta")
    options = {"precision": "bf16", "batch": batch}
    for size in (1, 4):
        use = TrainingOptions(size, Stage.PARAMETERS, accumulate=1, budget=Budget(host=0))
        told = {"world_size": size, "stage": 3, "accumulate": 1, "budget": use.budget}
        exact = zerostd.plan(model, optimizer, machine=machine, **told, **options)
        found = plan_on(profile_model(model, optimizer, **options), machine, use)
        assert set(found.homes.values()) == set(exact.homes.values())
        ours, theirs = (plan.predicted.bytes[Tier.DEVICE] for plan in (found, exact))
        for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATES):
            assert ours[kind] == pytest.approx(theirs[kind], rel=1e-3), (size, kind)
        a_group = 2 * sum(parameter.numel() for parameter in blocks[0].parameters())
        assert theirs[Kind.BUFFERS] <= 1.001 * ours[Kind.BUFFERS] <= 1.001 * (theirs[Kind.BUFFERS] + a_group), size


def test_what_must_be_on_the_device_and_is_too_much_is_refused_with_its_bytes(machine: MachineProfile) -> None:
    with pytest.raises(PrepareError, match=r"at stage 2 on 64 ranks, each with .* at least .* TiB .* of the device"):
        plan_on(from_numbers("1T", samples=1), machine, TrainingOptions(64, Stage.GRADIENTS))


# -- scaling --


def test_rows_of_a_model_that_grows_with_its_cluster(machine: MachineProfile) -> None:
    model = replace(from_numbers("13B", samples=1), recomputes=True)
    rows = scaling(model, machine, (252, 8, 60), use=TrainingOptions(accumulate=1))  # not whole nodes: no replicas
    assert [row.world_size for row in rows] == [8, 60, 252]
    for row in rows:
        assert row.stage is not None and not row.refused
        assert sum(row.state.values()) == pytest.approx(state_bytes(model, row.stage, row.world_size), rel=1e-6)
        assert row.sent == sent_bytes(model, row.stage, row.world_size)
        assert row.samples_per_s == pytest.approx(row.world_size / row.step_s)
        assert 0 < row.compute_s <= row.step_s * 1.001
    assert rows[0].efficiency == 1.0
    assert rows[1].efficiency < 0.9  # the first world is inside a node, where wires are fast
    assert rows[2].efficiency == pytest.approx(rows[1].efficiency, rel=0.05)


def test_step_of_a_given_size_has_fewer_passes_on_more_ranks(machine: MachineProfile) -> None:
    model = from_numbers("350M", samples=2, sequence=256)
    rows = scaling(model, machine, (8, 16, 64), samples_per_step=32)
    assert [row.compute_s / rows[1].compute_s for row in rows[:2]] == pytest.approx([2.0, 1.0])
    assert [row.samples_per_s * row.step_s for row in rows[:2]] == pytest.approx([32, 32])
    assert rows[2].stage is None and rows[2].refused == "a step of 32 samples is too small for 64 ranks"


def test_samples_of_a_pass_are_searched(machine: MachineProfile) -> None:
    model = replace(from_numbers("1.3B", sequence=256), recomputes=True)
    (row,) = scaling(model, machine, (16,), use=TrainingOptions(stage=Stage.PARAMETERS, accumulate=1))
    for samples in (row.samples // 2, row.samples * 2):
        (other,) = scaling(
            replace(model, samples=samples), machine, (16,), use=TrainingOptions(stage=Stage.PARAMETERS, accumulate=1)
        )
        assert other.samples_per_s <= row.samples_per_s
    flops = 3 * sum(group.forward_flops for group in model.groups)
    assert row.tflops == pytest.approx(flops * row.samples_per_s / 16 / 1e12)
    (given,) = scaling(model, machine, (16,), samples_per_step=64)
    assert given.samples * given.passes == 4


def test_worlds_that_are_too_small_are_told_of(machine: MachineProfile) -> None:
    model = replace(from_numbers("30B", samples=1), recomputes=True)
    first, second = scaling(model, replace(machine, free={"device": 80 * 10**9}), (2, 32))
    assert first.stage is None and "is missing" in first.refused and first.efficiency == 0.0
    assert second.stage is not None and second.efficiency == 1.0
