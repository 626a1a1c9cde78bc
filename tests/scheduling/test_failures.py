"""A pass that raises leaves nothing behind: its activations, gathered parameters and gradients are freed.

Whoever survives an out-of-memory error drops the batch and calls `optimizer.zero_grad()`, and needs the memory at once:
the garbage collector is off here, so that a cycle would show.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from zerostd import Placement
from zerostd.engine.runtime import runtime_of
from zerostd.policy import Kind, Tier
from zerostd.scheduling.saved_storage import SavedStorage

WIDTH = 256
ROWS = 512  # activations of 512 KiB, which are worth moving
DEPTH = 6
PLACEMENTS = {
    "device": Placement(),
    "host": Placement(parameters="host", gradients="host", optimizer_states="host"),
    "recompute": Placement(activations="recompute"),
    "activations on the host": Placement(activations="host"),
    "activations on disk": Placement(activations="disk"),
    "recompute and host": Placement(parameters="host", activations="recompute+host"),
}
Seen = list[weakref.ref[Any]]


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("planted in backward")


class Block(nn.Module):
    """Raises where `fails_in` says, and notes its activations and gradients in `seen`."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.fails_in = ""
        self._seen = seen
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: self._see(p.grad))

    def _see(self, tensor: Tensor) -> None:
        self._seen.append(weakref.ref(tensor.untyped_storage()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        self._see(hidden)
        hidden.register_hook(self._see)
        if self.fails_in == "forward":
            raise torch.OutOfMemoryError("planted in forward")
        if self.fails_in == "backward":
            hidden = FailsInBackward.apply(hidden)
        return torch.relu(self.outer(hidden))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """References to what passes make, copies of activations too."""
    refs: Seen = []
    of = SavedStorage.of

    def saved(tensor: Tensor) -> SavedStorage:
        storage = of(tensor)
        refs.append(weakref.ref(storage))
        return storage

    monkeypatch.setattr(SavedStorage, "of", saved)
    gc.collect()
    gc.disable()
    try:
        yield refs
    finally:
        gc.enable()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fail(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Fail in the middle of the model, and handle it as a training loop does."""
    block = model[DEPTH // 2]
    block.fails_in = where
    with pytest.raises(torch.OutOfMemoryError, match=where):
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
    block.fails_in = ""
    optimizer.zero_grad()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_a_pass_that_fails_leaves_nothing(placement: Placement, where: str, seen: Seen) -> None:
    model = nn.Sequential(*(Block(seen) for _ in range(DEPTH)))
    model, optimizer = zerostd.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), placement=placement, groups=["*"]
    )
    runtime = runtime_of(model, "test")
    train(model, optimizer)
    for _ in range(2):
        seen.clear()
        fail(model, optimizer, where)
        if placement.activations not in ("device", "recompute"):
            runtime.backward.activations.offloader.copies.worker.drain()
        assert seen and not [ref for ref in seen if ref() is not None]
        assert runtime.ledger.now[Tier.DEVICE, Kind.BUFFERS] == 0, "parameters are still gathered"
    train(model, optimizer)
