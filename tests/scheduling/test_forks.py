"""Forked children of a process that has a prepared model: they can use torch, and never wait for threads that they do
not have."""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from support import warm
from zerostd import Placement
from zerostd.errors import MisuseError

LIMIT_S = 60.0
PLACEMENTS = {
    "device": Placement(),
    "host": Placement(optimizer_states="host", gradients="host"),
    "disk": Placement(optimizer_states="disk", gradients="host"),
    "parameters on host": Placement(parameters="host", optimizer_states="host"),
    "parameters on disk": Placement(parameters="disk", optimizer_states="disk", gradients="host"),
}
placements = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def make(placement: Placement) -> tuple[nn.Module, Any]:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    return zerostd.prepare(model, torch.optim.AdamW(model.parameters()), placement=placement, groups=["*"])


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(3, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def in_child(function: Callable[[], None]) -> None:
    """Run a function in a forked child, and fail if it raises or does not end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    limit = time.monotonic() + LIMIT_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)


@placements
def test_a_child_is_refused_the_model_at_once(placement: Placement) -> None:
    model, optimizer = make(placement)
    train(model, optimizer)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(torch.randn(3, 64)),
        "step": optimizer.step,
        "full_state_dict": lambda: zerostd.full_state_dict(model),
        "release": lambda: zerostd.release(model),
    }

    def use() -> None:
        for name, call in calls.items():
            with pytest.raises(MisuseError, match="forked child"):
                call()
                print(f"{name} was not refused")

    in_child(use)
    train(model, optimizer)
    zerostd.release(model)


@placements
def test_a_child_that_drops_the_model_ends_and_leaves_the_parent_its_files(placement: Placement) -> None:
    holder = list(make(placement))
    train(*holder)

    def drop() -> None:
        holder.clear()
        gc.collect()
        assert torch.ones(4, 4).mm(torch.ones(4, 4)).sum() == 64

    in_child(drop)
    train(*holder)
    expected = zerostd.full_state_dict(holder[0])
    assert all(torch.isfinite(value).all() for value in expected.values())


SCRIPT = """
import os, sys
import torch
from torch import nn
import zerostd
from zerostd import Placement
torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
placement = Placement(parameters="disk", optimizer_states="disk", gradients="host", activations="host")
model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), placement=placement, groups=["*"])
for _ in range(3):
    model(torch.randn(3, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    child = os.fork()
    if child == 0:
        sys.exit(7)  # with everything that is done at exit
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("done")
"""


def test_children_end_by_exit(tmp_path: Path) -> None:
    ended = warm.run(SCRIPT, folder=tmp_path)
    assert ended.returncode == 0 and ended.stdout == "done\n", ended.stderr


def test_workers_of_a_loader_feed_a_model_on_disk() -> None:
    model, optimizer = make(PLACEMENTS["parameters on disk"])
    data = torch.utils.data.TensorDataset(torch.randn(8, 64))
    for _ in range(2):
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.isfinite(value).all() for value in zerostd.full_state_dict(model).values())
