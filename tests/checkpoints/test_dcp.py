"""Checkpoints of torch.distributed.checkpoint: programs that use FSDP2 read ours, and we read theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerostd
from support.compare import assert_bitwise
from support.side_by_side import data, seeded
from zerostd import CheckpointError, MisuseError
from zerostd.sharding.boxes import boxes_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0]))
        self.inlet = nn.Linear(7, 9)
        self.blocks = nn.ModuleList(Block(9) for _ in range(3))
        self.outlet = nn.Linear(9, 5)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.inlet(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    split = len(list(model.parameters())) // 2
    parameters = list(model.parameters())
    return torch.optim.AdamW([{"params": parameters[:split]}, {"params": parameters[split:], "lr": 0.02}], lr=0.01)


def steps(model: nn.Module, optimizer: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        torch.manual_seed(step)
        loss = model(torch.randn(6, 7)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def sharded(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_with_fsdp2(path: str, mesh: DeviceMesh | None = None) -> list[float]:
    model = sharded(seeded(Net), mesh)
    optimizer = adamw(model)
    steps(model, optimizer, 0, 3)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=path)
    return steps(model, optimizer, 3, 3)


def load_with_fsdp2(path: str, mesh: DeviceMesh | None = None) -> list[float]:
    torch.manual_seed(99)
    model = sharded(Net(), mesh)
    optimizer = adamw(model)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optim": of_optimizer}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return steps(model, optimizer, 3, 3)


def prepared(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    model = Net()
    return zerostd.prepare(model, adamw(model), **options)


def both_ways(rank: int, folder: str, disk: str) -> dict[str, Any]:
    """FSDP2 to ours at stages 0 and 3, all tiers; ours to FSDP2; each goes on with the same losses."""
    theirs = save_with_fsdp2(f"{folder}/theirs")
    results: dict[str, Any] = {"fsdp2": theirs}
    host = zerostd.Placement(optimizer_states="host", gradients="host", parameters="host")
    disks = zerostd.Placement(optimizer_states="disk")
    budget = zerostd.Budget(disk_path=disk)
    for name, options in {
        "0": {"stage": 0},
        "3": {"stage": 3, "placement": host},
        "disk": {"placement": disks},
    }.items():
        model, optimizer = prepared(**options, budget=budget)
        assert zerostd.load_dcp(f"{folder}/theirs", model, optimizer) is None
        assert int(model.count) == 3
        results[name] = steps(model, optimizer, 3, 3)
        zerostd.release(model)
    model, optimizer = prepared(stage=3, placement=host)
    zerostd.load_dcp(f"{folder}/theirs", model, optimizer)
    zerostd.save_dcp(f"{folder}/ours", model, optimizer, extra={"epoch": rank})
    saving = zerostd.save_dcp(f"{folder}/later", model, optimizer, wait=False)
    results["after"] = steps(model, optimizer, 3, 3)  # while it is written
    saving.wait()
    assert zerostd.load_dcp(f"{folder}/ours", model, optimizer) == {"epoch": 0}
    results["again"] = steps(model, optimizer, 3, 3)
    zerostd.release(model)
    results["ours in fsdp2"] = load_with_fsdp2(f"{folder}/ours")
    results["later in fsdp2"] = load_with_fsdp2(f"{folder}/later")
    return results


def test_fsdp2_programs_read_ours_and_we_read_theirs(ranks: Any, tmp_path: Path) -> None:
    for results in ranks(2, both_ways, str(tmp_path), str(tmp_path)):
        for name, losses in results.items():
            assert losses == pytest.approx(results["fsdp2"], rel=1e-5), name
        assert results["again"] == results["after"]


def replicas_both_ways(rank: int, folder: str) -> dict[str, Any]:
    """FSDP2 on a mesh of two dimensions to ours on the same mesh, and ours to FSDP2 with and without one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results: dict[str, Any] = {"fsdp2": save_with_fsdp2(f"{folder}/theirs", mesh)}
    model, optimizer = prepared(stage=3, mesh=mesh)
    zerostd.load_dcp(f"{folder}/theirs", model, optimizer)
    zerostd.save_dcp(f"{folder}/ours", model, optimizer)
    results["replicas"] = steps(model, optimizer, 3, 3)
    zerostd.release(model)
    results["flat in fsdp2"] = load_with_fsdp2(f"{folder}/ours")
    results["replicas in fsdp2"] = load_with_fsdp2(f"{folder}/ours", mesh)
    return results


def test_replicas_of_fsdp2_programs_read_ours_and_we_read_theirs(ranks: Any, tmp_path: Path) -> None:
    for results in ranks(4, replicas_both_ways, str(tmp_path)):
        for name, losses in results.items():
            assert losses == pytest.approx(results["fsdp2"], rel=1e-5), name


def test_another_number_of_ranks_and_a_url(tmp_path: Path) -> None:
    model, optimizer = prepared(precision="bf16", placement=zerostd.Placement(optimizer_states="host"))
    steps(model, optimizer, 0, 3)
    zerostd.save_dcp("memory://bucket/step-3", model, optimizer, extra={"rng": torch.arange(3)}).wait()
    after = steps(model, optimizer, 3, 3)
    zerostd.release(model)
    model, optimizer = prepared(precision="bf16")
    extra = zerostd.load_dcp("memory://bucket/step-3", model, optimizer)
    assert extra["rng"].tolist() == [0, 1, 2]
    assert steps(model, optimizer, 3, 3) == after


def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model, optimizer = prepared()
    steps(model, optimizer, 0, 1)
    zerostd.save_dcp(tmp_path / "whole", model, optimizer)
    zerostd.save_dcp(tmp_path / "model", model)
    other = nn.Linear(3, 3)
    other, _ = zerostd.prepare(other)
    before = zerostd.full_state_dict(other)
    with pytest.raises(CheckpointError, match=r"parameter 'weight' is not in the checkpoint"):
        zerostd.load_dcp(tmp_path / "whole", other)
    assert_bitwise(zerostd.full_state_dict(other), before)
    with pytest.raises(CheckpointError, match="it has no optimizer"):
        zerostd.load_dcp(tmp_path / "model", model, optimizer)
    with pytest.raises(CheckpointError, match=r"nothing-here is not a torch\.distributed\.checkpoint"):
        zerostd.load_dcp(tmp_path / "nothing-here", model, optimizer)
    zerostd.load_dcp(tmp_path / "whole", model)
    model(data(6, 7)).sum().backward()
    with pytest.raises(MisuseError, match="an incomplete step"):
        zerostd.save_dcp(tmp_path / "middle", model, optimizer)


def failing_and_beside_others(rank: int, folder: str) -> list[str]:
    """What only rank 0 cannot save is an error on both; a thread's messages do not mix with the user's."""
    model, optimizer = prepared(stage=1)
    steps(model, optimizer, 0, 1)
    errors = []
    try:
        zerostd.save_dcp(f"{folder}/bad", model, optimizer, extra=object() if rank == 0 else None)
    except CheckpointError as error:
        errors.append(str(error))
    saving = zerostd.save_dcp(f"{folder}/good", model, optimizer, wait=False)
    for number in range(50):
        total = torch.tensor([float(rank + number)])
        dist.all_reduce(total)
        assert total.item() == 1 + 2 * number
    later = zerostd.save_dcp(f"{folder}/later", model, optimizer, wait=False)
    assert saving.is_done()  # one at a time
    later.wait()
    try:
        zerostd.save_dcp(f"{folder}/good", model, optimizer)
    except CheckpointError as error:
        errors.append(str(error))
    zerostd.load_dcp(f"{folder}/good", model, optimizer)
    return errors


def test_failures_are_raised_on_all_ranks_and_messages_do_not_mix(ranks: Any, tmp_path: Path) -> None:
    for refused, exists in ranks(2, failing_and_beside_others, str(tmp_path)):
        assert refused.startswith("rank 0: extra is a object") and refused.endswith("nothing was saved")
        assert "already exists" in exists


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 1, 5), (4, 1, 3)], ids=str)
def test_boxes_cover_an_interval_once(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).view(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            covered = []
            for box in boxes_of(shape, start, stop):
                part = numbers
                for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    part = part.narrow(dim, offset, size)
                covered += part.reshape(-1).tolist()
            assert covered == list(range(start, stop))


def with_average(rank: int, folder: str) -> list[bool]:
    """An average goes on from a checkpoint as if nothing had happened, also at another stage."""
    kept = []
    states = []
    for stage in (3, 1):
        model, optimizer = prepared(stage=stage)
        average = zerostd.averaged(model, 0.5)
        if stage == 3:
            steps(model, optimizer, 0, 3)
            zerostd.save_dcp(f"{folder}/averaged", model, optimizer)
        else:
            zerostd.load_dcp(f"{folder}/averaged", model, optimizer)
        states.append(zerostd.full_state_dict(average))
        steps(model, optimizer, 3, 2)
        states.append(zerostd.full_state_dict(average))
        kept.append(average.num_averaged)
        zerostd.release(model)
    pairs = [(states[0], states[2]), (states[1], states[3])]
    return [kept[0] == kept[1], *(torch.equal(a[name], b[name]) for a, b in pairs for name in a)]


def test_averages_go_on_from_a_checkpoint(ranks: Any, tmp_path: Path) -> None:
    for answers in ranks(2, with_average, str(tmp_path)):
        assert all(answers)
