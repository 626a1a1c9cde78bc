"""Meshes: hybrid sharding over two dimensions, models on some of the ranks, and meshes that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerostd
from support.agreement import agree
from support.compare import worst_error
from support.side_by_side import LIMIT, Scene, adamw, data, differences, seeded

WIDTH = 24


class Net(nn.Module):
    """Blocks of uneven sizes, so that slices are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 10 + i), nn.Tanh(), nn.Linear(10 + i, WIDTH)) for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss(model: nn.Module, number: int, rank: int) -> Tensor:
    return model(data(3, WIDTH, number=number, rank=rank)).square().mean()


def twice(model: nn.Module, of: Callable[..., Tensor], step: int, rank: int, share: float) -> None:
    for micro in (0, 1):
        (of(model, 2 * step + micro, rank) * share / 2).backward()


def hybrid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def scene(mesh: Any, **options: Any) -> Scene:
    return Scene(Net, loss, groups=["layers.*"], options={"mesh": mesh, **options})


PLACES = {
    "device": {},
    "host": {"placement": zerostd.Placement(optimizer_states="host")},
    "early": {"placement": zerostd.Placement(optimizer_states="host"), "accumulate": 1},
    "everything": {"placement": zerostd.Placement(parameters="host", gradients="host", optimizer_states="host")},
    "two passes": {},
}
# Stages for each place. The sample has every stage and every place.
SAMPLE = {"device": (0, 1, 2, 3), "host": (2,), "early": (1, 3), "everything": (3,), "two passes": (3,)}
REST = {"host": (0, 1, 3), "early": (0, 2), "two passes": (0, 2)}


def trains(rank: int, stages: dict[str, tuple[int, ...]]) -> list[str]:
    mesh = hybrid()
    failures = []
    for name, of_place in stages.items():
        here = scene(mesh, **PLACES[name])
        if name == "two passes":
            here = Scene(Net, loss, groups=["layers.*"], gradients=twice, options={"mesh": mesh})
        failures += [f"{name}: {line}" for line in differences(here, rank, stages=of_place)]
    return failures


@pytest.mark.parametrize("stages", [SAMPLE, pytest.param(REST, marks=pytest.mark.full)], ids=["sample", "rest"])
def test_hybrid_sharding_trains_like_plain_torch(ranks, stages):
    agree(ranks(4, trains, stages))


def clips(rank: int) -> list[str]:
    """Clipping by the norm of all gradients, the same on all ranks and as plain torch has it."""
    mesh = hybrid()
    whole = seeded(Net)
    plain = adamw(whole)
    model = seeded(Net)
    model, optimizer = zerostd.prepare(model, adamw(model), mesh=mesh, stage=3, groups=["layers.*"])
    for step in range(3):
        torch.stack([loss(whole, step, other) for other in range(4)]).mean().backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        plain.step()
        plain.zero_grad()
        loss(model, step, rank).backward()
        norm = optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    worst = worst_error(zerostd.full_state_dict(model), whole.state_dict())
    zerostd.release(model)
    return [] if worst.error <= LIMIT else [f"rank {rank}: {worst}"]


def test_hybrid_sharding_clips_by_the_norm_of_one_replica(ranks):
    agree(ranks(4, clips))


def bytes_of_a_step(rank: int, stage: int, shape: tuple[int, int]) -> dict[str, int]:
    mesh = init_device_mesh("cpu", shape)
    model = seeded(Net)
    model, optimizer = zerostd.prepare(model, adamw(model), mesh=mesh, stage=stage, groups=["layers.*"])
    counted = []
    for step in range(4):
        loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        with zerostd.gathered(model):
            pass
        counted.append(dict(zerostd.memory(model).sent))
    groups = model.__dict__["_zerostd"].groups
    padded = sum(4 * flat.layout.numel for group in groups for flat in group.flats)
    last = {verb: counted[-1][verb] - counted[-2][verb] for verb in counted[-1]}
    zerostd.release(model)
    return {"padded": padded, **last}


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_only_slices_cross_between_replicas(ranks, stage, shape):
    """A rank sends (S-1)/S of all gradients inside its replica, and 2(R-1)/R of its slice to others."""
    num_replicas, num_shards = shape
    for counted in ranks(4, bytes_of_a_step, stage, shape):
        inside = counted["padded"] * (num_shards - 1) // num_shards
        across = 2 * counted["padded"] // num_shards * (num_replicas - 1) // num_replicas
        assert counted["replicas"] == across
        assert counted.get("reduce", 0) == inside * (2 if stage == 0 else 1)


def train_some(mesh: Any, rank: int, steps: range, path: Path | None = None) -> tuple[nn.Module, Any]:
    model = seeded(Net)
    model, optimizer = zerostd.prepare(model, adamw(model), mesh=mesh, stage=3, groups=["layers.*"])
    if path is not None:
        zerostd.load(path, model, optimizer)
    for step in steps:
        loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saves(rank: int, folder: str) -> dict[str, Any]:
    mesh = hybrid()
    path = Path(folder) / "step-2"
    model, optimizer = train_some(mesh, rank, range(2))
    zerostd.save(path, model, optimizer)
    for step in range(2, 4):
        loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = zerostd.full_state_dict(model)
    zerostd.release(model)
    results = {}
    for name, again in {"hybrid": mesh, "flat": None}.items():
        resumed, _ = train_some(again, rank, range(2, 4), path)
        results[name] = worst_error(zerostd.full_state_dict(resumed), expected).error
        zerostd.release(resumed)
    return results


def test_a_checkpoint_of_replicas_resumes_bit_for_bit_and_on_other_meshes(ranks, tmp_path):
    for errors in ranks(4, saves, str(tmp_path)):
        assert errors["hybrid"] == 0.0
        assert errors["flat"] <= LIMIT
    sizes = [file.stat().st_size for file in sorted((tmp_path / "step-2").glob("rank-*.safetensors"))]
    assert max(sizes[2:]) < min(sizes[:2]), "the second replica saves its random states only"


def writes(rank: int) -> list[str]:
    """What rank 0 writes under gathered(write=True) reaches the shards of all replicas."""
    model, _ = train_some(hybrid(), rank, range(1))
    with zerostd.gathered(model, write=True), torch.no_grad():
        model.inlet.weight.fill_(1.0 + rank)
    values = zerostd.full_state_dict(model)["inlet.weight"]
    zerostd.release(model)
    return [] if bool((values == 1.0).all()) else [f"rank {rank} has {values.flatten()[:3]}"]


def test_writes_reach_all_replicas(ranks):
    agree(ranks(4, writes))


def on_its_own_ranks(rank: int, how: str) -> list[str]:
    """Two models, each trained by two of the four ranks at the same time, as the stages of a pipeline are."""
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    mesh = rows["shard"]
    if how == "group":
        mesh = mesh.get_group()
    number = rank // 2
    model = seeded(Net, seed=number)
    budget = zerostd.Budget(device="1MiB") if how == "planned" else None
    model, optimizer = zerostd.prepare(model, adamw(model), mesh=mesh, groups=["layers.*"], budget=budget)
    for step in range(3 + number):
        loss(model, step, rank % 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = zerostd.full_state_dict(model)
    zerostd.release(model)
    whole = seeded(Net, seed=number)
    plain = adamw(whole)
    for step in range(3 + number):
        torch.stack([loss(whole, step, other) for other in range(2)]).mean().backward()
        plain.step()
        plain.zero_grad()
    worst = worst_error(trained, whole.state_dict())
    return [] if worst.error <= LIMIT else [f"rank {rank}: {worst}"]


@pytest.mark.parametrize("how", ["mesh", "group", "planned"])
def test_models_train_on_some_of_the_ranks(ranks, how):
    agree(ranks(4, on_its_own_ranks, how))


def refused(rank: int) -> list[str]:
    failures = []
    cases = {
        "must be a torch DeviceMesh or a process group": "shard",
        "3 dimensions": init_device_mesh("cpu", (1, 1, 2)),
        "they must ascend": DeviceMesh("cpu", [1, 0]),
        "is on": DeviceMesh("meta", [0, 1], _init_backend=False),
        "is not in mesh": DeviceMesh("cpu", [1 - rank], _init_backend=False),
        "but the job has 2": DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False),
        "pass the same mesh= on all ranks": init_device_mesh("cpu", (1, 2))
        if rank
        else init_device_mesh("cpu", (2, 1)),
    }
    for message, mesh in cases.items():
        model = seeded(Net)
        try:
            zerostd.prepare(model, adamw(model), mesh=mesh)
        except zerostd.PrepareError as error:
            if message not in str(error):
                failures.append(f"rank {rank}: {message!r} is not in {error}")
        else:
            failures.append(f"rank {rank}: {mesh} was taken")
        loss(model, 0, rank).backward()  # nothing was changed
    return failures


def test_meshes_that_cannot_be_used_are_refused(ranks):
    agree(ranks(2, refused))


def differs_in_a_row(rank: int) -> str:
    """Rank 3 has another learning rate than rank 2, with which it shares a model."""
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if rank == 3 else 0.1)
    try:
        zerostd.prepare(model, optimizer, mesh=rows["shard"])
    except zerostd.PrepareError as error:
        return str(error)
    zerostd.release(model)
    return ""


def test_errors_name_ranks_as_the_launcher_does(ranks):
    first, second, *others = ranks(4, differs_in_a_row)
    assert not first and not second
    for message in others:
        assert "on rank 2" in message and "on rank 3" in message
