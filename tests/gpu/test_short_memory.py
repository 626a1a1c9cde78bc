"""A device without room for a gather: groups gathered ahead are given back, and training goes on, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from zerostd.parameters.group import GroupState

pytestmark = pytest.mark.gpu

WIDTH = 2048
GROUP_BYTES = 4 * WIDTH * WIDTH  # 16 MiB, which CUDA's allocator takes as they are


@contextlib.contextmanager
def room_for_one_group(model: nn.Module) -> Iterator[None]:
    """Leave the process as much device memory as one group takes, and three quarters of the next. Groups that are
    gathered already have theirs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    groups = model.__dict__["_zerostd"].groups
    gathered = sum(group.gives_back and group.state is not GroupState.RELEASED for group in groups)
    total = torch.cuda.get_device_properties(0).total_memory
    room = (1.75 - gathered) * GROUP_BYTES
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def train(*, is_short: bool, evaluates: bool = False) -> tuple[list[float], dict[str, int], bool]:
    """Take four steps; in the third the forward, or an evaluation before it, has room for one group at a time."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))).cuda()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    homes = zerostd.Placement(parameters="host", gradients="host", optimizer_states="host")
    model, optimizer = zerostd.prepare(model, optimizer, placement=homes, groups=["*"])
    losses = []
    for step in range(4):
        batch = torch.ones(2, WIDTH, device="cuda") * (step + 1)
        optimizer.synchronize()
        if evaluates:
            with torch.no_grad(), room_for_one_group(model) if is_short and step == 2 else contextlib.nullcontext():
                losses.append(model(batch).square().mean().item())
        with room_for_one_group(model) if is_short and step == 2 and not evaluates else contextlib.nullcontext():
            loss = model(batch).square().mean()
            losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    retries = zerostd.memory(model).retries
    gathers_ahead = model.__dict__["_zerostd"].gatherer.gathers_ahead
    zerostd.release(model)
    torch.cuda.empty_cache()
    return losses, retries, gathers_ahead


@pytest.mark.parametrize("evaluates", [False, True], ids=["forward", "evaluation"])
def test_a_gather_that_does_not_fit_gives_back_what_was_gathered_ahead(evaluates: bool) -> None:
    right, none, gathers_ahead = train(is_short=False, evaluates=evaluates)
    assert none == {} and gathers_ahead
    losses, retries, gathers_ahead = train(is_short=True, evaluates=evaluates)
    assert losses == right and not gathers_ahead
    assert retries["gathering: out of device memory"] >= 1
