"""Groups that keep their activations make room for those of others on their way: as many bytes, and the same bits."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerostd
from zerostd import Placement
from zerostd.compat import has_saved_tensor_hooks
from zerostd.engine.runtime import runtime_of
from zerostd.policy import Tier
from zerostd.scheduling import activations
from zerostd.scheduling.activations import Activations
from zerostd.scheduling.offloading import ActivationOffloader

WIDTH, ROWS = 64, 1024
INPUT = ROWS * WIDTH * 4  # bytes, just worth moving
ALIKE = (2,) * 8
UNLIKE = (2, 6, 2, 4, 1, 8, 2, 3)
FIRST = {"[0-3]": "host"}


class Wide(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, times * WIDTH), nn.Linear(times * WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.inner(x))
        if self.fails:
            raise ValueError("broken")
        return x + self.outer(y)


def left_by(times: int) -> int:
    """Bytes: its input, and what goes in and comes out of the middle."""
    return (1 + 2 * times) * INPUT


class Chain(nn.Sequential):
    def __init__(self, times: Sequence[int]) -> None:
        super().__init__(*(Wide(one) for one in times))
        self.rounds = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = super().forward(x)
        return x


def made(times: Sequence[int] = ALIKE) -> Chain:
    torch.manual_seed(0)
    return Chain(times)


def prepared(activations: Any, times: Sequence[int] = ALIKE) -> tuple[Chain, torch.optim.Optimizer]:
    model = made(times)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    _, optimizer = zerostd.prepare(model, optimizer, placement=Placement(activations=activations), groups=["*"])
    return model, optimizer


def activations_of(model: nn.Module) -> Activations:
    return runtime_of(model, "test").hooks.activations


def offloader_of(model: nn.Module) -> ActivationOffloader:
    return activations_of(model).offloader


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


Loop = Callable[[Chain, torch.optim.Optimizer], None]


def assert_as_plain(model: Chain, optimizer: torch.optim.Optimizer, loop: Loop, times: Sequence[int] = ALIKE) -> None:
    """After the same loop with plain torch."""
    other = made(times)
    other.rounds = model.rounds
    loop(model, optimizer)
    loop(other, torch.optim.AdamW(other.parameters(), 1e-3))
    state = zerostd.full_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in other.state_dict().items())
    offloader_of(model).copies.worker.drain()
    assert offloader_of(model).copies.pools[Tier.HOST].used == 0 and not has_saved_tensor_hooks()


def leaving(offloader: ActivationOffloader) -> list[str]:
    """Names of those on their way out whose bytes are on the device."""
    groups = [ref() for ref in offloader._leaving]
    return [group.name for group in groups if group is not None and group.is_here]


def bytes_back(offloader: ActivationOffloader) -> int:
    return sum(storage.num_bytes for group in offloader._wanted for storage in group.storages)


# -- forward --


def test_what_leaves_may_stay_until_others_need_the_room() -> None:
    model, optimizer = prepared(FIRST)
    offloader, seen = offloader_of(model), list[int]()
    for block in model:
        block.register_forward_hook(lambda *_: seen.append(len(leaving(offloader))))
    train(model, optimizer, 1)
    assert seen == [1, 2, 2, 2, 2, 2, 2, 2]  # nothing is known yet
    assert list(activations_of(model)._left.values()) == [left_by(2)]
    for _ in range(2):
        seen.clear()
        train(model, optimizer, 1)
        assert seen == [1, 2, 3, 4, 3, 2, 1, 0]


UNEVEN = (8, 2, 2, 8, 2, 2, 8, 2)  # all of them are like one of the first four


def test_bytes_count_not_groups() -> None:
    """As much as is still going to be kept, or the activations of two groups, in the end less."""
    model, optimizer = prepared(FIRST, UNEVEN)
    offloader, seen = offloader_of(model), list[list[str]]()
    train(model, optimizer, 1)
    for block in model:
        block.register_forward_hook(lambda *_: seen.append(leaving(offloader)))
    train(model, optimizer, 1)
    to_come = sum(left_by(times) for times in UNEVEN[4:])
    for index, here in enumerate(seen):
        to_come -= left_by(UNEVEN[index]) if index >= 4 else 0
        there = sum(left_by(UNEVEN[int(name)]) for name in here)
        few = 2 if index < 6 else 1 if index == 6 else 0
        assert there <= to_come or len(here) <= few
        assert here == [str(one) for one in range(4)][min(index, 3) + 1 - len(here) :][: len(here)]
        first = min(index, 3) - len(here)  # the last one that was let go of: it had to
        if first >= 0 and index < 7:
            assert there + left_by(UNEVEN[first]) > to_come
    assert seen[2] == ["0", "1", "2"] and seen[3] == ["1", "2", "3"] and seen[-1] == []


def test_groups_like_none_that_sends_make_no_room() -> None:
    """Nobody knows what they keep, so there are two groups at most, and none when the last of them has run."""
    model, optimizer = prepared(FIRST, (2, 2, 2, 2, 3, 3, 3, 3))
    offloader, seen = offloader_of(model), list[int]()
    train(model, optimizer, 1)
    for block in model:
        block.register_forward_hook(lambda *_: seen.append(len(leaving(offloader))))
    train(model, optimizer, 1)
    assert seen == [1, 2, 2, 2, 2, 1, 1, 0]
    assert sum(offloader._staying) == 0 and len(offloader._staying) == 4


def test_groups_alike_with_shorter_outputs_are_not_alike() -> None:
    class Halving(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self):
                x = block(x[: len(x) // 2] if index == 6 else x)
            return x

    model = made()
    model.__class__ = Halving
    _, optimizer = zerostd.prepare(
        model, torch.optim.AdamW(model.parameters(), 1e-3), placement=Placement(activations=FIRST), groups=["*"]
    )
    train(model, optimizer, 2)
    assert sum(offloader_of(model)._staying) == 2 * left_by(2)
    assert len(offloader_of(model)._staying) == 4


def test_other_lengths_are_counted_as_they_are() -> None:
    model, optimizer = prepared(FIRST)
    offloader = offloader_of(model)
    for rows in (ROWS, 2 * ROWS, ROWS):
        model(torch.ones(rows, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert sum(offloader._staying) == 4 * left_by(2) * rows // ROWS
        assert leaving(offloader) == []


@pytest.mark.parametrize("ways", [{"[0-3]": "host", "[4-7]": "recompute"}, {"[0-3]": "host", "[45]": "recompute"}])
def test_recomputed_groups_count_with_their_inputs(ways: dict[str, str]) -> None:
    model, optimizer = prepared(ways)
    train(model, optimizer, 1)
    recomputed = sum(way == "recompute" for way in activations_of(model)._ways.values())
    assert sum(offloader_of(model)._staying) == recomputed * INPUT + (4 - recomputed) * left_by(2)
    loss = loss_of(model, 1)
    assert leaving(offloader_of(model)) == []
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model, optimizer = prepared(ways)
    assert_as_plain(model, optimizer, train)


def test_a_pass_without_gradients_teaches_nothing() -> None:
    model, optimizer = prepared(FIRST)
    with torch.no_grad():
        loss_of(model, 0)
    assert not activations_of(model)._left
    train(model, optimizer, 1)
    known = offloader_of(model)._staying
    assert sum(known) == 4 * left_by(2)
    with torch.no_grad():
        loss_of(model, 0)
    loss_of(model, 0).backward()
    assert offloader_of(model)._staying_before is known


def test_groups_that_keep_theirs_run_without_hooks() -> None:
    """torch.func.grad and others refuse to work inside of hooks on saved tensors."""

    def tilted(block: Wide, args: tuple[Tensor], output: Tensor) -> Tensor:
        return output + torch.func.grad(lambda x: (x**3).sum())(args[0].detach())

    def loop(model: Chain, optimizer: torch.optim.Optimizer) -> None:
        for block in list(model)[4:]:
            block.inner.register_forward_hook(lambda *_: packed.append(has_saved_tensor_hooks()))
            block.register_forward_hook(tilted)
        train(model, optimizer)

    packed = list[bool]()
    model, optimizer = prepared(FIRST)
    assert_as_plain(model, optimizer, loop)
    assert packed and not any(packed)


def test_lengths_that_vary_for_ever_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MOST_KINDS", 3)
    model, optimizer = prepared(FIRST)
    for more in range(8):
        model(torch.ones(ROWS + more, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert sum(offloader_of(model)._staying) > 4 * left_by(2) * 0.99
        assert len(activations_of(model)._left) <= 3


# -- backward --


def watch_backward(model: Chain, seen: dict[str, list[str]], room: dict[str, tuple[int, int]]) -> None:
    """Notes by block, as its backward begins, what was brought back and how much, and how much was free."""
    offloader = offloader_of(model)

    def note(name: str, grad: Tensor) -> None:
        seen[name] = [group.name for group in offloader._wanted]
        room[name] = (bytes_back(offloader), offloader._freed)

    def hook(name: str, block: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(functools.partial(note, name))

    for name, block in model.named_children():
        block.register_forward_hook(functools.partial(hook, name))


def test_activations_come_back_into_what_backward_has_freed() -> None:
    model, optimizer = prepared(FIRST)
    seen, room = dict[str, list[str]](), dict[str, tuple[int, int]]()
    watch_backward(model, seen, room)
    train(model, optimizer, 1)
    assert [seen[name] for name in "7654"] == [[], [], [], ["1"]]  # the last two have not left
    for _ in range(2):
        train(model, optimizer, 1)
        assert [seen[name] for name in "7654"] == [[], ["3"], ["3", "2"], ["3", "2", "1"]]
        assert [seen[name] for name in "3210"] == [["3", "2", "1"], ["3", "2", "1"], ["2", "1", "0"], ["1", "0"]]
        assert all(there <= free for there, free in room.values())
        assert offloader_of(model)._wanted == [] and offloader_of(model)._freed == 0


@pytest.mark.parametrize("ways", [FIRST, {"[0135]": "host"}, {"[0-6]": "host"}, {"[24]": "host", "3": "disk"}])
def test_never_more_than_is_free_and_two_groups(ways: dict[str, str]) -> None:
    model, optimizer = prepared(ways, UNLIKE)
    seen, room = dict[str, list[str]](), dict[str, tuple[int, int]]()
    watch_backward(model, seen, room)
    two = 2 * left_by(max(UNLIKE))
    for _ in range(3):
        train(model, optimizer, 1)
        assert len(room) == 8 and all(there <= free + two for there, free in room.values())


def test_each_group_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = list[str]()
    bring = ActivationOffloader._bring
    monkeypatch.setattr(
        ActivationOffloader, "_bring", lambda self, group: (brought.append(group.name), bring(self, group))
    )
    for times in (ALIKE, UNLIKE):
        model, optimizer = prepared(FIRST, times)
        train(model, optimizer, 1)
        brought.clear()
        train(model, optimizer, 2)
        assert brought == ["3", "2", "1", "0"] * 2


def test_what_was_brought_and_not_wanted_is_let_go_of() -> None:
    model, optimizer = prepared(FIRST)
    train(model, optimizer, 1)
    middle = list[Tensor]()
    handle = model[4].register_forward_hook(lambda block, args, output: middle.append(output))
    loss = loss_of(model, 0)
    handle.remove()
    (asked,) = torch.autograd.grad(loss, middle, retain_graph=True)  # comes to none that was sent
    offloader = offloader_of(model)
    assert offloader._wanted == [] and offloader._freed == 0 and leaving(offloader) == []
    loss.backward()
    assert asked.abs().sum() > 0 and offloader._wanted == []
    optimizer.step()
    optimizer.zero_grad()


# -- the same bits --


WAYS: dict[str, Any] = {
    "first": FIRST,
    "shares": {"device": 0.5, "host": 0.5},
    "disk": {"[0-2]": "disk", "3": "host"},
    "between": {"[0235]": "host"},
    "recomputed": {"[01]": "host", "[23]": "recompute+host", "[45]": "recompute"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("times", [ALIKE, UNLIKE], ids=["alike", "unlike"])
def test_training(way: str, times: tuple[int, ...]) -> None:
    model, optimizer = prepared(WAYS[way], times)
    assert_as_plain(model, optimizer, functools.partial(train, steps=4), times)


@pytest.mark.parametrize("way", ["first", "between", "disk"])
def test_groups_that_run_twice(way: str) -> None:
    model, optimizer = prepared(WAYS[way], UNLIKE)
    model.rounds = 2
    assert_as_plain(model, optimizer, train, UNLIKE)
    if way == "first":
        assert len(offloader_of(model)._staying) == 8
        assert sum(offloader_of(model)._staying) == 2 * left_by(2)  # one of them is like one that sends


@pytest.mark.parametrize("way", ["first", "between", "disk"])
def test_two_forwards_before_their_backwards(way: str) -> None:
    def loop(model: Chain, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            first = loss_of(model, step)
            with torch.no_grad():
                loss_of(model, 7)
            second = loss_of(model, step + 10)
            (first * 2).backward() if step % 2 else second.backward(retain_graph=True)
            with torch.no_grad():
                loss_of(model, 8)
            second.backward() if step % 2 else (second + first).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = prepared(WAYS[way])
    assert_as_plain(model, optimizer, loop)


@pytest.mark.parametrize("broken", [2, 5])
def test_a_forward_that_fails_teaches_nothing_and_leaves_nothing(broken: int) -> None:
    model, optimizer = prepared(FIRST)
    model[broken].fails = True
    with pytest.raises(ValueError, match="broken"):
        loss_of(model, 0)
    assert not has_saved_tensor_hooks()
    assert len(offloader_of(model)._staying) == max(0, broken - 4)
    model[broken].fails = False
    gc.collect()
    assert_as_plain(model, optimizer, train)
    assert sum(offloader_of(model)._staying) == 4 * left_by(2)


def test_groups_inside_checkpointing_count_nothing() -> None:
    class Checkpointing(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self):
                x = checkpoint(block, x, use_reentrant=False) if index >= 6 else block(x)
            return x

    model, other = made(), made()
    model.__class__ = other.__class__ = Checkpointing
    _, optimizer = zerostd.prepare(
        model, torch.optim.AdamW(model.parameters(), 1e-3), placement=Placement(activations=FIRST), groups=["*"]
    )
    assert_as_plain(model, optimizer, train)
    assert sum(offloader_of(model)._staying) == 2 * left_by(2)


def test_a_graph_that_is_dropped_is_freed() -> None:
    model, optimizer = prepared(FIRST)
    train(model, optimizer, 2)
    loss = loss_of(model, 0)
    pool = offloader_of(model).copies.pools[Tier.HOST]
    assert pool.used > 0
    del loss
    gc.collect()
    offloader_of(model).copies.worker.drain()
    assert pool.used == 0
