"""Saving while training goes on: what is written is the moment of the call, and training does not notice."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from support.agreement import agree
from support.compare import assert_bitwise
from zerostd import Budget, CheckpointError, Placement, Precision

WIDTH, DEPTH = 64, 4
PLACEMENTS = {
    "device": Placement(),
    "host": Placement(optimizer_states="host"),
    "disk": Placement(optimizer_states="disk"),
    "all": Placement(optimizer_states={"device": 0.3, "host": 0.4, "disk": 0.3}, parameters="host", gradients="host"),
}


def prepared(placement: str, path: str, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)) for _ in range(DEPTH)]
    model = nn.Sequential(*layers)
    chosen: dict[str, Any] = {"precision": "bf16", "accumulate": 1, "groups": ["*"], **options}
    return zerostd.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        placement=PLACEMENTS[placement],
        budget=Budget(disk_path=path),
        **chosen,
    )


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0, rank: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Gate:
    """Writes of checkpoints wait until it is opened; each takes a moment, if that is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.is_full = False
        write = os.pwrite

        def waiting(fd: int, data: Any, offset: int) -> int:
            assert self.opened.wait(60)
            if self.is_full:
                raise OSError(28, "No space left on device")
            return write(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", waiting)


def everything(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    found = dict(zerostd.full_state_dict(model))
    for number, states in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": torch.as_tensor(value) for key, value in states.items()}
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_moment_of_the_call_is_saved(placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared(placement, str(tmp_path))
    train(model, optimizer, 3)
    expected = everything(model, optimizer)
    gate = Gate(monkeypatch)
    saving = zerostd.save(tmp_path / "saved", model, optimizer, {"step": 3}, wait=False)
    forward = model(torch.ones(8, WIDTH))  # changes batch-norm and draws for dropout
    assert not saving.is_finished and not (tmp_path / "saved").exists()
    timer = threading.Timer(0.1, gate.opened.set)  # the update below must wait for it
    timer.start()
    forward.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 2, 4)
    saving.wait()
    other, another = prepared(placement, str(tmp_path))
    assert zerostd.load(tmp_path / "saved", other, another) == {"step": 3}
    assert_bitwise(everything(other, another), expected)


def test_training_does_not_notice(tmp_path: Path) -> None:
    found = []
    for saves in (False, True):
        model, optimizer = prepared("host", str(tmp_path))
        torch.manual_seed(1)
        for step in range(6):
            train(model, optimizer, 1, step)
            if saves:
                zerostd.save(tmp_path / f"step-{step}", model, optimizer, keep=2, wait=False)
        model.__dict__["_zerostd"].finish_updates()
        found.append(everything(model, optimizer))
        if saves:
            zerostd.save(tmp_path / "last", model, optimizer, keep=2)
    assert_bitwise(*found)
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == ["last", "step-5"]


def test_a_full_disk_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = prepared("host", str(tmp_path))
    train(model, optimizer, 1)
    gate = Gate(monkeypatch)
    gate.is_full = True
    gate.opened.set()
    saving = zerostd.save(tmp_path / "saved", model, optimizer, wait=False)
    train(model, optimizer, 3, 1)
    with pytest.raises(CheckpointError, match="ENOSPC"):
        saving.wait()
    assert "was not saved" in caplog.text
    assert list(tmp_path.iterdir()) == []
    gate.is_full = False
    zerostd.save(tmp_path / "saved", model, optimizer)
    assert zerostd.latest(tmp_path) == str(tmp_path / "saved")


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared("host", str(tmp_path))
    gate = Gate(monkeypatch)
    first = zerostd.save(tmp_path / "first", model, optimizer, wait=False)
    threading.Timer(0.1, gate.opened.set).start()
    zerostd.save(tmp_path / "second", model, optimizer)
    assert first.is_finished and zerostd.latest(tmp_path) == str(tmp_path / "second")


def on_ranks(rank: int, folder: str) -> list[str]:
    model, optimizer = prepared("host", folder, precision=Precision.parse("bf16"))
    train(model, optimizer, 2, 0, rank)
    saving = zerostd.save(Path(folder, "saved"), model, optimizer, {"rank": rank}, wait=False)
    expected = zerostd.full_state_dict(model)
    end, steps = time.monotonic() + 60, 0
    while not saving.is_finished and time.monotonic() < end:
        train(model, optimizer, 1, 2 + steps, rank)
        steps += 1
    if not Path(folder, "saved").exists():
        return [f"rank {rank}: {steps} steps went by, and it is not there"]
    other, another = prepared("host", folder)
    extra = zerostd.load(Path(folder, "saved"), other, another)
    found = zerostd.full_state_dict(other)
    keys = [key for key in expected if rank == 0 or "running" not in key]  # buffers are rank 0's, as in DDP
    wrong = [f"rank {rank}: {key} differs" for key in keys if not torch.equal(expected[key], found[key])]
    return wrong if extra == {"rank": 0} else [*wrong, f"rank {rank}: extra is {extra}"]


def test_steps_finish_it_on_several_ranks(ranks: Any, tmp_path: Path) -> None:
    agree(ranks(2, on_ranks, str(tmp_path)))
