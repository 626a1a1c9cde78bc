"""ZEROSTD_DEBUG=checksums: bytes in host memory that change between updates are an error; what users write is not."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from support.side_by_side import data, seeded
from zerostd import Placement
from zerostd.errors import StorageError
from zerostd.tiers.debug import DEBUG, Seals

ROUTES = {
    "cpu": {"placement": Placement(optimizer_states="host", cpu_share=1.0)},
    "streamed": {"placement": Placement(optimizer_states="host", cpu_share=0.0)},
    "all on the host": {"placement": Placement(parameters="host", optimizer_states="host", gradients="host")},
    "split masters": {"placement": Placement(optimizer_states="host"), "precision": "bf16"},
    "speculative": {"placement": Placement(optimizer_states="host"), "max_grad_norm": 0.05, "accumulate": 1},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RULES = [torch.optim.AdamW, torch.optim.RAdam]  # by a native kernel, and by a clone


@pytest.fixture(autouse=True)
def sealed() -> Iterator[None]:
    DEBUG.add("checksums")
    yield
    DEBUG.discard("checksums")


def prepared(route: str, rule: Any, device: str) -> tuple[Any, Any]:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))).to(device)
    return zerostd.prepare(model, rule(model.parameters(), lr=0.01), groups=["0", "2"], **ROUTES[route])


def step(model: Any, optimizer: Any, number: int) -> float:
    device = next(model.parameters()).device
    loss = model(data(3, 8, number=number).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    return loss.item()


def shard_of(model: Any, group: int) -> Any:
    (flat,) = model.__dict__["_zerostd"].groups[group].flats
    return flat.state_shards[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("route", ROUTES)
def test_a_byte_that_changes_in_host_memory_is_an_error(route: str, rule: Any, device: str) -> None:
    model, optimizer = prepared(route, rule, device)
    for number in range(3):
        step(model, optimizer, number)
    tensor = shard_of(model, 1).tensors["exp_avg"].tensor
    address = tensor.data_ptr() + 17
    ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ 8, 1)  # behind torch's back
    with pytest.raises(StorageError, match=r"bytes at offset 0 of 'exp_avg' of group '0' in host memory are not those"):
        step(model, optimizer, 3)
    failed = 0
    for update in [update for group in model.__dict__["_zerostd"].groups for update in group.updates]:
        try:
            update.wait()  # that of the other group may have been done before
        except StorageError:
            failed += 1
    assert failed, "nobody else hears of it"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("route", ROUTES)
def test_what_users_write_is_no_error(route: str, rule: Any, device: str, tmp_path: Path) -> None:
    losses: list[list[float]] = []
    for is_on in (True, False):
        (DEBUG.add if is_on else DEBUG.discard)("checksums")
        model, optimizer = prepared(route, rule, device)
        seen = [step(model, optimizer, 0)]
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"].mul_(0.5)
        seen.append(step(model, optimizer, 1))
        zerostd.save(tmp_path / f"{is_on}", model, optimizer)
        with torch.no_grad():
            model[0].weight.data.add_(0.1)
        seen.append(step(model, optimizer, 2))
        with zerostd.gathered(model, write=True), torch.no_grad():
            model[2].weight.mul_(0.9)
        optimizer.load_state_dict(optimizer.state_dict())
        seen.append(step(model, optimizer, 3))
        zerostd.load(tmp_path / f"{is_on}", model, optimizer)
        seen.append(step(model, optimizer, 3))
        optimizer.param_groups[0]["params"].pop(0)  # cuts a span
        seen += [step(model, optimizer, number) for number in (4, 5)]
        zerostd.release(model)
        losses.append(seen)
    assert losses[0] == losses[1]


def test_parts_that_were_updated_otherwise_are_forgotten() -> None:
    tensor = torch.zeros(10)
    seals = Seals()
    seals.close(tensor, slice(0, 10))
    tensor.data[:5] = 1.0
    seals.close(tensor, slice(0, 5))
    seals.check(tensor, slice(0, 10), "it")
    seals.check(tensor, slice(0, 5), "it")
    tensor.data[2] = 2.0
    with pytest.raises(StorageError, match="the 20 bytes at offset 0 of it"):
        seals.check(tensor, slice(0, 5), "it")
