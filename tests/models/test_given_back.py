"""Threads, descriptors and shared memory are given back by release, whatever happened before."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from zerostd import Placement


class Failing(nn.Module):
    """Passes its input on, or raises where `where` says."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise KeyboardInterrupt
        if self.where == "backward":
            x.register_hook(self._fail)
        return x

    def _fail(self, grad: Tensor) -> None:
        raise ValueError("planted")


def taken() -> tuple[int, int, int]:
    """Return the threads, the descriptors and the mappings of shared memory that this process has."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), maps.count("/dev/shm")


def use(where: str) -> None:
    """Prepare a model, let a pass of it fail, and release it."""
    failing = Failing()
    layers = [nn.Linear(64, 64), failing, nn.Linear(64, 64)]
    model: Any = nn.Sequential(*layers)
    placement = Placement(parameters="disk", optimizer_states="disk", gradients="host", activations="disk")
    model, optimizer = zerostd.prepare(
        model, torch.optim.AdamW(model.parameters()), placement=placement, groups=["0", "2"]
    )
    for now in ("", where):
        failing.where = now
        with contextlib.suppress(ValueError, KeyboardInterrupt):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
    zerostd.release(model)


@pytest.mark.parametrize("where", ["", "forward", "backward"])
def test_release_gives_everything_back(where: str) -> None:
    others = set(threading.enumerate())  # of models that other tests hold

    def wait_for_threads() -> None:
        for thread in set(threading.enumerate()) - others:  # they were told to end
            if thread.name.startswith("the ") or "zerostd" in thread.name:
                thread.join(10)

    use("")  # what torch itself keeps from its first use
    wait_for_threads()
    before = taken()
    for _ in range(3):
        use(where)
    wait_for_threads()
    assert taken() == before
