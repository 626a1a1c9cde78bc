"""A prepared model that is dropped, or whose backward fails, leaves nothing behind."""

from __future__ import annotations

import gc
import os
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostd
from support.compare import assert_bitwise
from zerostd import CommunicationError


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def open_now(most: tuple[int, int] | None = None) -> tuple[int, int]:
    """Threads and open files, when they are no more than `most`: one that has ended may be listed a moment longer."""
    deadline = time.monotonic() + 10
    while True:
        found = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        if most is None or (found[0] <= most[0] and found[1] <= most[1]) or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def opened(stage: int) -> nn.Module:
    model = make()
    model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), stage=stage, groups=["0", "2"])
    train(model, optimizer)
    return model


def open_and_drop(rank: int, times: int) -> list[tuple[int, int]]:
    """What is open after each prepared model was trained and dropped."""
    found: list[tuple[int, int]] = []
    for _ in range(times):
        model = opened(stage=3)
        seen = weakref.ref(model)
        del model
        gc.collect()
        assert seen() is None
        found.append(open_now(found[0] if found else None))
    return found


def open_and_release(rank: int, times: int) -> list[tuple[int, int]]:
    """What is open after each was trained and released; they stay, and nobody looks for cycles."""
    kept: list[nn.Module] = []
    found: list[tuple[int, int]] = []
    gc.collect()
    gc.disable()
    try:
        for number in range(times):
            model = opened(stage=1 + number % 3)
            threads, files = open_now()
            kept.append(zerostd.release(model))
            found.append(open_now(found[0] if found else None))
            assert threads > found[-1][0] and files > found[-1][1], "release gave nothing back"
    finally:
        gc.enable()
    return found


@pytest.mark.parametrize("how", [open_and_drop, open_and_release])
def test_models_that_go_or_are_released_give_back_threads_and_sockets(ranks, how):
    for found in ranks(2, how, 4):
        *before, (threads, files) = found
        assert threads <= min(one for one, _ in before), found  # fewer if something was left of earlier tests
        assert files <= min(one for _, one in before), found


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("planted")


def fail_then_go_on(rank: int, stage: int) -> dict[str, torch.Tensor]:
    model = make()
    model, optimizer = zerostd.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, groups=["0", "2"]
    )
    with pytest.raises(ArithmeticError, match="planted"):
        hidden = model[1](model[0](torch.ones(2, 16)))
        model[2](Fails.apply(hidden)).sum().backward()
    with pytest.raises(ArithmeticError, match="planted"):
        model(torch.ones(2, 16)).register_hook(planted)
        out = model(torch.ones(2, 16))
        out.register_hook(planted)
        out.sum().backward()
    optimizer.zero_grad()
    model(torch.ones(2, 16))  # the next forward finds out that the last backward never ended
    train(model, optimizer)
    return zerostd.full_state_dict(model)


def planted(grad):
    raise ArithmeticError("planted")


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_after_a_backward_that_failed(ranks, stage):
    plain = make()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for state in ranks(2, fail_then_go_on, stage):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-7)


def alive_at_the_end(rank: int, stage: int) -> int:
    """How many of autograd's own gradients are still held when the last one comes in."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    held: list[weakref.ref[torch.Tensor]] = []
    counts: list[int] = []

    def count(parameter: nn.Parameter) -> None:
        held.append(weakref.ref(parameter.grad.untyped_storage()))
        counts.append(sum(storage() is not None for storage in held))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    model, _ = zerostd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, groups=["*"])
    model(torch.ones(2, 16)).sum().backward()
    return max(counts)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_leave_autograds_memory_as_their_group_is_complete(ranks, world_size):
    for most in ranks(world_size, alive_at_the_end, 2):
        assert most <= 2


def gives_up_waiting(rank: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Rank 0 gives up waiting for a gather that rank 1 begins later: gloo writes to its memory then."""
    model = make()
    model, _ = zerostd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, groups=["0", "2"])
    gatherer = model.__dict__["_zerostd"].gatherer
    group = next(group for group in gatherer.groups if group.gives_back)
    num_bytes = 0
    if rank == 0:
        gatherer.start_gather(group)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gatherer.wires.world.channels.peers, "_has_strayed", lambda: True)
            for give_up in (gatherer.wait_gather, gatherer.release, gatherer.release):
                with pytest.raises(CommunicationError, match="different calls"):
                    give_up(group)
        num_bytes = sum(flat.full.untyped_storage().nbytes() for flat in group.flats)
    dist.barrier()
    gatherer.gather(group)
    gatherer.release(group)
    return num_bytes, zerostd.full_state_dict(model)


def test_memory_that_a_failed_gather_may_still_write_to_is_not_freed(ranks):
    (num_bytes, state), (_, other) = ranks(2, gives_up_waiting)
    assert num_bytes > 0
    assert_bitwise(state, make().state_dict())
    assert_bitwise(other, state)
