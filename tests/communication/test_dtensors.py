"""Models whose parameters are DTensors over one dimension of a mesh, sharded further over another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import zerostd
from support.agreement import agree
from support.compare import worst_error
from support.parallel_gpt import ParallelGPT, loss, parallelize
from support.side_by_side import LIMIT, adamw, seeded

GROUPS = ["blocks.*"]
CLIP = 0.5


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def prepared(mesh: DeviceMesh, **options: Any) -> tuple[nn.Module, Any]:
    model = parallelize(seeded(ParallelGPT), mesh["tp"])
    model, optimizer = zerostd.prepare(model, adamw(model), mesh=mesh["dp"], groups=GROUPS, **options)
    return model, optimizer


def step(model: nn.Module, optimizer: Any, number: int, ranks: list[int], passes: int = 1) -> float:
    """One step on the batches of some data-parallel ranks; returns the norm before clipping."""
    for micro in range(passes):
        losses = [loss(model, passes * number + micro, rank) for rank in ranks]
        (torch.stack(losses).mean() / passes).backward()
    if hasattr(optimizer, "clip_grad_norm_"):
        norm = optimizer.clip_grad_norm_(CLIP)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def reference(num_steps: int, passes: int = 1, num_ranks: int = 2) -> tuple[dict[str, Any], list[float]]:
    """The same model in one process, on all batches."""
    model = seeded(ParallelGPT)
    optimizer = adamw(model)
    norms = [step(model, optimizer, number, list(range(num_ranks)), passes) for number in range(num_steps)]
    return model.state_dict(), norms


PLACES = {
    "device": {},
    "host": {"placement": zerostd.Placement(optimizer_states="host"), "accumulate": 1, "max_grad_norm": CLIP},
    "all on the host": {
        "placement": zerostd.Placement(parameters="host", gradients="host", optimizer_states="host"),
    },
}


# Stage, place and passes. The sample has every value of each.
SAMPLE = [(0, "device", 1), (1, "host", 1), (2, "device", 2), (3, "device", 1), (3, "all on the host", 1)]
REST = [(1, "device", 1), (2, "device", 1), (3, "host", 1), (3, "device", 2)]


def trains(rank: int, cases: list[tuple[int, str, int]]) -> list[str]:
    mesh = two_by_two()
    failures = []
    references = {passes: reference(3, passes) for passes in (1, 2)}
    for stage, name, passes in cases:
        expected, norms = references[passes]
        model, optimizer = prepared(mesh, stage=stage, **PLACES[name])
        before = dict(model.named_parameters())
        seen = [step(model, optimizer, number, [mesh.get_local_rank("dp")], passes) for number in range(3)]
        worst = worst_error(zerostd.full_state_dict(model), expected)
        where = f"rank {rank}, stage {stage}, {name}, {passes} passes"
        if worst.error > LIMIT or torch.tensor(seen).sub(torch.tensor(norms)).abs().max() > 1e-5:
            failures.append(f"{where}: {worst}, norms {seen} and {norms}")
        if not all(isinstance(p, DTensor) and p is before[name] for name, p in model.named_parameters()):
            failures.append(f"{where}: parameters are not themselves")
        zerostd.release(model)
        again = {name: p.full_tensor() for name, p in model.named_parameters()}
        if worst_error(again, expected).error > LIMIT or any(type(p) is not DTensor for p in before.values()):
            failures.append(f"{where}: released")
    return failures


@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(REST, marks=pytest.mark.full)], ids=["sample", "rest"])
def test_a_tensor_parallel_gpt_trains_like_the_same_model_on_one_rank(ranks, cases):
    agree(ranks(4, trains, cases, timeout=240))


def in_bf16(rank: int) -> list[float]:
    """The way that masters go with bf16 parameters, at stages 1 and 3: they must be the same bits."""
    mesh = two_by_two()
    states = []
    for stage in (1, 3):
        model, optimizer = prepared(mesh, stage=stage, precision="bf16")
        for number in range(3):
            step(model, optimizer, number, [mesh.get_local_rank("dp")])
        assert all(p.dtype is torch.bfloat16 for p in model.parameters())
        states.append(zerostd.full_state_dict(model))
        zerostd.release(model)
        assert all(p.dtype is torch.float32 for p in model.parameters())
    expected, _ = reference(3)
    return [worst_error(states[0], states[1]).error, worst_error(states[0], expected).error]


def test_bf16_parameters_have_masters(ranks):
    for between_stages, to_fp32 in ranks(4, in_bf16):
        assert between_stages == 0.0
        assert to_fp32 < 0.06


def hybrid(rank: int) -> list[str]:
    """Replicas of shards of splits: each of the dimensions alone would give another result."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = parallelize(seeded(ParallelGPT), mesh["tp"])
    ours = mesh["replicate", "shard"]
    model, optimizer = zerostd.prepare(model, adamw(model), mesh=ours, stage=3, groups=GROUPS)
    for number in range(3):
        step(model, optimizer, number, [mesh.get_local_rank("replicate")])
    worst = worst_error(zerostd.full_state_dict(model), reference(3)[0])
    zerostd.release(model)
    return [] if worst.error <= LIMIT else [f"rank {rank}: {worst}"]


def test_replicas_and_splits_go_together(ranks):
    agree(ranks(4, hybrid))


def touches(rank: int, stage: int) -> list[str]:
    """What loops do with parameters, gradients and states: as with DTensors that are not prepared."""
    mesh = two_by_two()
    dp = mesh.get_local_rank("dp")
    plain = seeded(ParallelGPT)
    torch.stack([loss(plain, 0, other) for other in range(2)]).mean().backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    model, optimizer = prepared(mesh, stage=stage)
    loss(model, 0, dp).backward()
    failures = []

    def same(what: str, ours: Any, theirs: torch.Tensor) -> None:
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        if not torch.allclose(ours.detach(), theirs, rtol=1e-4, atol=1e-7):
            failures.append(f"rank {rank}, stage {stage}: {what} is {ours.flatten()[:3]}, not {theirs.flatten()[:3]}")

    for name in ("tokens.weight", "blocks.1.norm2.weight", "blocks.0.down.weight"):
        parameter = model.get_parameter(name)
        value = plain.get_parameter(name).detach()
        same(f"{name}.full_tensor()", parameter.full_tensor(), value)
        same(f"{name}.norm()", parameter.norm(), value.norm())
        same(f"{name}.detach()", parameter.detach(), value)
        same(f"{name}.expand_as(itself)", parameter.expand_as(parameter), value)
        if parameter.expand_as(parameter).grad_fn is None:
            failures.append(f"rank {rank}, stage {stage}: a view of {name} does not lead to its gradient")
        same(f"{name}.to_local()", parameter.to_local().norm() ** 2 * 0 + 1, torch.tensor(1.0))
        same(f"{name}.grad.clone()", parameter.grad.clone(), gradients[name])
        same(f"{name}.grad.norm()", parameter.grad.norm(), gradients[name].norm())
        same(f"{name}.grad.full_tensor()", parameter.grad.full_tensor(), gradients[name])
        same("zeros_like", torch.zeros_like(parameter.grad), torch.zeros_like(value))
        parameter.grad.mul_(2.0)
        same(f"{name}.grad, doubled", parameter.grad.clone(), 2 * gradients[name])
        parameter.grad.mul_(0.5)
        with torch.no_grad():
            parameter.mul_(0.5)
            plain.get_parameter(name).mul_(0.5)
        same(f"{name}, halved", parameter.detach(), plain.get_parameter(name).detach())
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    same("clip_grad_norm_", norm, nn.utils.clip_grad_norm_(plain.parameters(), CLIP))
    other = adamw(plain)
    optimizer.step()
    other.step()
    same("what was trained", model.head.weight.full_tensor(), plain.head.weight.detach())
    same("a state", optimizer.state[model.head.weight]["exp_avg"], other.state[plain.head.weight]["exp_avg"])
    state = plain.state_dict()
    model.load_state_dict(
        {name: distribute_tensor(v, mesh["tp"], _placements(model, name)) for name, v in state.items()}
    )
    worst = worst_error(zerostd.full_state_dict(model), state)
    zerostd.release(model)
    return failures if worst.error == 0.0 else [*failures, f"rank {rank}: load_state_dict: {worst}"]


def _placements(model: nn.Module, name: str) -> Any:
    return model.get_parameter(name).placements


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_gradients_and_states_are_dtensors_to_users(ranks, stage):
    agree(ranks(4, touches, stage))


def saves(rank: int, folder: str, how: str) -> None:
    mesh = two_by_two()
    model, optimizer = prepared(mesh, stage=3)
    for number in range(2):
        step(model, optimizer, number, [mesh.get_local_rank("dp")])
    if how == "dcp":
        zerostd.save_dcp(Path(folder) / "two", model, optimizer, extra={"at": 2})
    else:
        zerostd.save(Path(folder) / "two", model, optimizer, extra={"at": 2})
    step(model, optimizer, 2, [mesh.get_local_rank("dp")])
    state = zerostd.full_state_dict(model)
    if rank == 0:
        torch.save(state, Path(folder) / "expected.pt")
    zerostd.release(model)


def resumes(rank: int, folder: str, how: str, shape: tuple[int, int], stage: int) -> float:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = seeded(ParallelGPT, seed=7)
    if shape[1] > 1:
        model = parallelize(model, mesh["tp"])
    model, optimizer = zerostd.prepare(model, adamw(model), mesh=mesh["dp"], stage=stage, groups=GROUPS)
    load = zerostd.load_dcp if how == "dcp" else zerostd.load
    assert load(Path(folder) / "two", model, optimizer) == {"at": 2}
    dp = mesh.get_local_rank("dp")
    batches = {1: [0, 1], 2: [dp], 4: [dp // 2]}[shape[0]]  # the mean over ranks is that of two batches
    step(model, optimizer, 2, batches)
    error = worst_error(zerostd.full_state_dict(model), torch.load(Path(folder) / "expected.pt")).error
    zerostd.release(model)
    return error


@pytest.mark.parametrize("how", ["zerostd", "dcp"])
def test_a_checkpoint_resumes_on_other_meshes(ranks, tmp_path, how):
    ranks(4, saves, str(tmp_path), how)
    for number, shape in enumerate([(2, 2), (1, 4), (4, 1), (1, 2), (1, 1)]):
        size = shape[0] * shape[1]
        errors = ranks(size, resumes, str(tmp_path), how, shape, 1 + number % 3)
        assert max(errors) <= (0.0 if shape == (2, 2) else LIMIT), f"{shape}: {errors}"
    if how == "zerostd":
        (file,) = zerostd.merge(tmp_path / "two", tmp_path / "merged")
        model = {name: tuple(value.shape) for name, value in load_file(file).items()}
        assert model == {name: tuple(value.shape) for name, value in ParallelGPT().state_dict().items()}


def imports(rank: int, folder: str) -> list[str]:
    """An ordinary file loads into splits, and what they save merges into the same file."""
    mesh = two_by_two()
    path = Path(folder)
    model, _ = prepared(mesh, stage=3)
    zerostd.load(path / "model.pt", model)
    zerostd.save(path / "saved", model)
    state = zerostd.full_state_dict(model)
    zerostd.release(model)
    worst = worst_error(state, torch.load(path / "model.pt"))
    return [] if worst.error == 0.0 else [f"rank {rank}: {worst}"]


def test_ordinary_files_load_into_splits_and_come_back(ranks, tmp_path):
    expected = seeded(ParallelGPT, seed=5).state_dict()
    torch.save(expected, tmp_path / "model.pt")
    agree(ranks(4, imports, str(tmp_path)))
    (file,) = zerostd.merge(tmp_path / "saved", tmp_path / "merged")
    assert worst_error(load_file(file), expected).error == 0.0


def refused(rank: int) -> list[str]:
    mesh = two_by_two()
    other = init_device_mesh("cpu", (4,))
    failures = []

    def replace(model: nn.Module, over: DeviceMesh, placements: list[Any]) -> nn.Module:
        local = model.norm.weight.to_local() if isinstance(model.norm.weight, DTensor) else model.norm.weight
        model.norm.weight = nn.Parameter(DTensor.from_local(local.detach(), over, placements))
        return model

    def parallel() -> nn.Module:
        return parallelize(seeded(ParallelGPT), mesh["tp"])

    cases = {
        "only Shard and Replicate": (replace(parallel(), mesh["tp"], [Partial()]), mesh["dp"]),
        "over different meshes": (replace(parallel(), other, [Replicate()]), mesh["dp"]),
        "a dimension can be used once": (parallel(), mesh["tp"]),
        "mesh=mesh['dp']": (parallel(), None),
        "is in that mesh and also among the ranks": (parallel(), mesh),
    }
    for message, (model, ours) in cases.items():
        before = {name: (p, type(p)) for name, p in model.named_parameters()}
        try:
            zerostd.prepare(model, adamw(model), mesh=ours)
        except zerostd.PrepareError as error:
            if message not in str(error):
                failures.append(f"rank {rank}: {message!r} is not in {error}")
        else:
            failures.append(f"rank {rank}: {message!r} was taken")
        if before != {name: (p, type(p)) for name, p in model.named_parameters()}:
            failures.append(f"rank {rank}: {message!r} has changed the model")
    meta = parallel()
    meta.head.weight = nn.Parameter(meta.head.weight.to("meta"))
    with pytest.raises(zerostd.PrepareError, match="on the meta device"):
        zerostd.prepare(meta, adamw(meta), mesh=mesh["dp"])
    return failures


def test_dtensors_that_cannot_be_sharded_further_are_refused(ranks):
    agree(ranks(4, refused))
