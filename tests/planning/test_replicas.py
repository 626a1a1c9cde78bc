"""Plans that share the model state inside nodes: chosen where the wire there is faster, and followed by prepare."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerostd
from planning.machines import LAPTOP
from support.agreement import agree
from support.compare import worst_error
from support.processes import environment
from support.side_by_side import LIMIT, adamw, data, seeded
from zerostd import PrepareError
from zerostd.communication import peers
from zerostd.measuring import TrialSizes, load_or_measure
from zerostd.planning import MachineProfile, Plan
from zerostd.planning.profiles import Wire

WIDTH = 64
INSIDE = Wire("node", 2, 20e9, 1e-6)
BETWEEN = Wire("world", 4, 1e7, 1e-4)
TWO_NODES = replace(LAPTOP, wires=(INSIDE, BETWEEN), ranks_per_node=2)
TINY = TrialSizes(parameters=1 << 14, cpu_side=64, wire=1 << 16, turns=1, seconds=0.01)


class Net(nn.Module):
    """With some more bytes than a small group on four ranks, so that groups depend on the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(9)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def planned(machine: MachineProfile, **options: Any) -> Plan:
    model = seeded(Net)
    return zerostd.plan(model, adamw(model), world_size=4, machine=machine, batch=data(4, WIDTH), **options)


def test_the_model_state_is_shared_inside_nodes_where_the_wire_is_faster() -> None:
    plan = planned(TWO_NODES)
    assert (plan.world_size, plan.num_replicas) == (2, 2)
    assert f"Stage {plan.stage.value} on 2 ranks for each of 2 replicas." in plan.explain()
    assert "prepare(mesh=init_device_mesh('cpu', (2, 2)))" in plan.explain()
    assert Plan.from_json(plan.to_json()).num_replicas == 2
    flat = planned(replace(TWO_NODES, wires=(replace(BETWEEN, ranks=4),)))
    assert (flat.world_size, flat.num_replicas) == (4, 1)
    assert flat.predicted.step_s > 1.01 * plan.predicted.step_s


def test_all_ranks_share_it_where_wires_are_alike_or_a_node_is_too_small() -> None:
    alike = replace(TWO_NODES, wires=(replace(INSIDE, bandwidth=BETWEEN.bandwidth), BETWEEN))
    assert planned(alike).num_replicas == 1
    state = 16 * sum(p.numel() for p in seeded(Net).parameters())
    room = {"device": int(0.62 * state), "host": 0}  # half of the state is too much beside buffers
    assert planned(TWO_NODES, budget=room, stage=3).num_replicas == 1


def test_plans_without_replicas_are_read_as_before() -> None:
    text = planned(TWO_NODES).to_json().replace('  "num_replicas": 2,\n', "")
    assert Plan.from_json(text).num_replicas == 1


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(data(3, WIDTH, number=step, rank=rank)).square().mean()


def follows(rank: int, mesh: str) -> list[str]:
    """prepare shares the model state as the plan says, and trains as plain torch."""
    plan = planned(TWO_NODES)
    model = seeded(Net)
    options = {} if mesh == "none" else {"mesh": init_device_mesh("cpu", (2, 2))}
    model, optimizer = zerostd.prepare(model, adamw(model), plan=plan, **options)
    assert [group.name for group in model.__dict__["_zerostd"].groups] == list(plan.homes)
    whole = seeded(Net)
    plain = adamw(whole)
    for step in range(3):
        loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.stack([loss(whole, step, other) for other in range(4)]).mean().backward()
        plain.step()
        plain.zero_grad()
    sent = zerostd.memory(model).sent
    worst = worst_error(zerostd.full_state_dict(model), whole.state_dict())
    zerostd.release(model)
    failures = [] if worst.error <= LIMIT else [f"rank {rank}: {worst}"]
    return failures if sent["replicas"] > 0 else [*failures, f"rank {rank}: nothing went between replicas: {sent}"]


@pytest.mark.parametrize("mesh", ["none", "the same"])
def test_prepare_follows_a_plan_with_replicas(ranks: Any, mesh: str) -> None:
    agree(ranks(4, follows, mesh))


def refused(rank: int) -> list[str]:
    """Another number of ranks, or another mesh; nothing is changed, and the model can be prepared afterwards."""
    plan = planned(TWO_NODES)
    size = dist.get_world_size()
    cases: dict[str, dict[str, Any]] = {}
    if size == 4:
        cases["4 rank(s) share this model"] = {"mesh": init_device_mesh("cpu", (4,))}
        cases["4 replicas on 1 rank(s) each"] = {"mesh": init_device_mesh("cpu", (4, 1))}
    elif size == 3:
        cases["2 replicas, but 3 rank(s) train"] = {}
    else:
        cases["2 replicas on 1 rank(s) each"] = {}
    failures = []
    for message, options in cases.items():
        model = seeded(Net)
        optimizer = adamw(model)
        with pytest.raises(PrepareError) as raised:
            zerostd.prepare(model, optimizer, plan=plan, **options)
        if message not in str(raised.value):
            failures.append(f"rank {rank}: {message!r} is not in {raised.value}")
        model, _ = zerostd.prepare(model, optimizer, stage=3)
        zerostd.release(model)
    return failures


@pytest.mark.parametrize("size", [2, 3, 4])
def test_plans_of_another_world_are_refused(ranks: Any, size: int) -> None:
    agree(ranks(size, refused))


def measures(rank: int, folder: str, num_hosts: int) -> tuple[list[Wire], list[Wire], Plan]:
    """Measure wires on hosts that are pretended; read the profile again, and plan with it."""
    host = f"host {rank * num_hosts // dist.get_world_size()}"
    with environment(ZEROSTD_CACHE=folder), mock.patch.object(peers, "host_name", lambda: host):
        first = load_or_measure("cpu", sizes=TINY)
        again = load_or_measure("cpu", sizes=TINY)
        assert first.measured == again.measured
        model = seeded(Net)
        optimizer = adamw(model)
        if rank == 1:  # where others get less of the processor, and free memory is not the same
            time.sleep(0.5)
        plan = zerostd.plan(model, optimizer, batch=data(4, WIDTH))
        model, optimizer = zerostd.prepare(model, optimizer, plan=plan)
        zerostd.release(model)
    return list(first.wires), list(again.wires), plan


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_wires_are_measured_inside_hosts_and_between_them(ranks: Any, tmp_path: Path, num_hosts: int) -> None:
    results = ranks(4, measures, str(tmp_path), num_hosts)
    for wires, again, plan in results:
        assert [wire.ranks for wire in wires] == ([2, 4] if num_hosts == 2 else [4])
        assert wires == again == results[0][0]  # kept, and the same on all ranks
        assert plan.world_size * plan.num_replicas == 4
        assert plan.to_json() == results[0][2].to_json()


def says(rank: int, num_hosts: int, options: dict[str, Any]) -> str:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("zerostd")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    host = f"host {rank * num_hosts // dist.get_world_size()}"
    try:
        if options.pop("is_hybrid", False):
            options["mesh"] = init_device_mesh("cpu", (2, 2))
        with mock.patch.object(peers, "host_name", lambda: host):
            model = seeded(Net)
            model, _ = zerostd.prepare(model, adamw(model), **options)
        zerostd.release(model)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("num_hosts", "options", "is_said"),
    [
        (2, {"stage": 3}, True),
        (2, {}, True),
        (1, {"stage": 3}, False),
        (4, {"stage": 3}, False),
        (2, {"stage": 0}, False),
        (2, {"stage": 3, "is_hybrid": True}, False),
    ],
)
def test_prepare_says_which_mesh_keeps_gathers_inside_hosts(
    ranks: Any, num_hosts: int, options: dict[str, Any], is_said: bool
) -> None:
    first, *others = ranks(4, says, num_hosts, options)
    assert ("with mesh=init_device_mesh('cpu', (2, 2)) only slices of gradients" in first) is is_said, first
    assert not any("init_device_mesh" in text for text in others)
