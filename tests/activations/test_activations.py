"""Activations off the device: whatever is done with them, training gives the same bits."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerostd
from zerostd import Budget, MisuseError, Placement, PrepareError
from zerostd.engine.runtime import runtime_of
from zerostd.policy import Tier, Way
from zerostd.scheduling.offloading import ActivationOffloader
from zerostd.tiers import debug

WIDTH, LENGTH, SAMPLES, DEPTH, WORDS = 128, 64, 8, 4, 31
INPUT = SAMPLES * LENGTH * WIDTH * 4  # bytes of what a block takes, in fp32: just worth moving

WAYS = {
    "host": "host",
    "disk": "disk",
    "recompute": "recompute",
    "recompute+host": "recompute+host",
    "recompute+disk": "recompute+disk",
    "shares": {"device": 0.25, "recompute+host": 0.25, "host": 0.25, "disk": 0.25},
    "groups": {"blocks.0": "host", "blocks.[12]": "recompute"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, 2))
        weights = self.drop(torch.softmax(q @ k.transpose(2, 3) / 8 + mask, -1))
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.drop(self.narrow(F.gelu(self.wide(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS)
        self.checkpoints = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        length = tokens.shape[1]
        mask = torch.full((tokens.shape[0], 1, length, length), float("-inf")).triu(1)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.checkpoints else block(x, mask)
        return self.head(x)


def batches(length: int = LENGTH, rank: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5 + rank)
    while True:
        tokens = torch.randint(WORDS, (SAMPLES, length + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def made(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def prepared(activations: Any, **more: Any) -> tuple[Model, torch.optim.Optimizer]:
    model = made()
    placement = Placement(activations=activations, **more.pop("placement", {}))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    zerostd_model, prepared = zerostd.prepare(
        model, optimizer, placement=placement, groups=["blocks.*", "words", "head"], **more
    )
    assert zerostd_model is model
    return model, prepared


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, passes: int = 1) -> list[float]:
    torch.manual_seed(1)
    losses, source = [], batches()
    for _ in range(steps):
        for tokens, targets in itertools.islice(source, passes):
            loss = loss_of(model, tokens, targets)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def offloader_of(model: nn.Module) -> ActivationOffloader:
    return runtime_of(model, "test").hooks.activations.offloader


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Tensor]]:
    model = made()
    losses = train(model, torch.optim.AdamW(model.parameters(), 1e-3))
    return losses, model.state_dict()


def assert_as(plain: tuple[list[float], dict[str, Tensor]], losses: list[float], model: nn.Module) -> None:
    assert losses == plain[0]
    state = zerostd.full_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in plain[1].items())


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_bits_of_plain_torch(way: str, plain: Any) -> None:
    model, optimizer = prepared(WAYS[way])
    assert_as(plain, train(model, optimizer), model)


@pytest.mark.parametrize("way", ["host", "disk", "recompute+host"])
def test_every_way_goes_with_states_and_parameters_elsewhere(way: str, plain: Any) -> None:
    elsewhere = {"parameters": "host", "gradients": "host", "optimizer_states": {"host": 0.5, "disk": 0.5}}
    model, optimizer = prepared(way, placement=elsewhere, accumulate=1)
    assert_as(plain, train(model, optimizer), model)


@pytest.mark.parametrize("way", ["host", "disk", "recompute+host"])
def test_what_is_read_too_late_would_show(way: str, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "DEBUG", {"poison"})
    model, optimizer = prepared(way)
    assert_as(plain, train(model, optimizer), model)


def test_bytes_that_rest_on_the_host() -> None:
    model, optimizer = prepared("recompute+host")
    train(model, optimizer, 3)
    mask = SAMPLES * LENGTH * LENGTH * 4
    assert mask < INPUT  # so it is not worth moving
    kept = (DEPTH + 1) * INPUT  # and the head's input
    assert zerostd.memory(model).peak["host"]["activations"] == kept
    model, optimizer = prepared("host")
    train(model, optimizer, 3)
    all_of_them = zerostd.memory(model).peak["host"]["activations"]
    # of each block: norm's input and output, qkv, attention weights three times, mixed values, x, gelu's in and out
    assert all_of_them > DEPTH * 9 * INPUT
    assert offloader_of(model).copies.pools[Tier.HOST].used == 0


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1, 1, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by + x.transpose(0, 1) * self.by + (x.mT * self.by).mT


def test_what_lies_in_one_storage_travels_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Scale() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            first, second, third = (layer(x) for layer in self.layers)
            return first + second + third

    model = Twice()
    zerostd.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), placement=Placement(activations="host"), groups=["layers.*"]
    )
    x = torch.randn(64, 64, 64)
    model(x).sum().backward()
    assert zerostd.memory(model).peak["host"]["activations"] == x.nbytes


def test_one_storage_may_be_kept_in_two_tiers_and_asked_for_inside_its_forward() -> None:
    class Asking(Scale):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            (slope,) = torch.autograd.grad(y.square().sum(), self.by, create_graph=True)
            return y + slope.detach().mean()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(kind() for kind in (Scale, Asking, Scale, Asking))

        def forward(self, x: Tensor) -> Tensor:
            shared = x * 1.0
            return sum((layer(shared) for layer in self.layers), torch.zeros(()))

    def backward(model: nn.Module) -> None:
        torch.manual_seed(0)
        model(torch.randn(64, 64, 64)).square().mean().backward()

    def train(ways: Any) -> list[Tensor]:
        model = Mixed()
        _, optimizer = zerostd.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), placement=Placement(activations=ways), groups=["layers.*"]
        )
        for _ in range(2):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        return list(zerostd.full_state_dict(model).values())

    wanted = train("device")
    found = train({"layers.0": "host", "layers.1": "disk", "layers.2": "disk", "layers.3": "host"})
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_shares_are_taken_from_the_end() -> None:
    names = [f"blocks.{index}" for index in range(8)]
    ways = Placement(activations={"host": 0.5, "device": 0.25, "disk": 0.25}).ways(names)
    assert [way.value for way in ways.values()] == ["disk"] * 2 + ["host"] * 4 + ["device"] * 2
    ways = Placement(activations={"blocks.1": "device", "blocks.[0-3]": "recompute"}).ways(names)
    wanted = [Way.RECOMPUTE, Way.DEVICE, Way.RECOMPUTE, Way.RECOMPUTE, *[Way.DEVICE] * 4]
    assert list(ways.values()) == wanted


def test_what_left_is_gone_when_others_that_stay_have_run() -> None:
    """The first two of four blocks: when the last one has run, nothing of them is on the device, as far as a block's
    own tensors tell. How many others there are is learnt in the first pass."""
    model, optimizer = prepared({"blocks.[01]": "host"})
    seen: list[list[weakref.ref[torch.UntypedStorage]]] = [[] for _ in range(DEPTH)]

    def note(block: int, linear: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen[block].append(weakref.ref(output.untyped_storage()))

    for index, block in enumerate(model.blocks):
        block.wide.register_forward_hook(functools.partial(note, index))  # GELU saves what comes out
    train(model, optimizer, 1)
    for block in seen:
        block.clear()
    loss = loss_of(model, *next(batches()))
    assert [[one() is None for one in block] for block in seen] == [[True], [True], [False], [False]]
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("way", ["host", "disk", "recompute+host"])
def test_two_forwards_before_their_backwards(way: str) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        torch.manual_seed(1)
        source, losses = batches(), []
        for _ in range(2):
            first, second = loss_of(model, *next(source)), loss_of(model, *next(source))
            (first * 2).backward()
            second.backward(retain_graph=True)
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [first.item(), second.item()]
        return losses

    model, optimizer = prepared(way)
    losses = run(model, optimizer)
    other = made()
    assert losses == run(other, torch.optim.AdamW(other.parameters(), 1e-3))
    assert offloader_of(model).copies.pools[Tier.DISK if way == "disk" else Tier.HOST].used == 0


@pytest.mark.parametrize("way", ["host", "recompute+host"])
def test_nothing_stays_after_an_exception_or_without_a_backward(way: str, plain: Any) -> None:
    model, optimizer = prepared(way)
    pool = offloader_of(model).copies.pools[Tier.HOST]
    tokens, targets = next(batches())
    original = model.blocks[2].out.forward

    def broken(x: Tensor) -> Tensor:
        raise ValueError("broken")

    model.blocks[2].out.forward = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="broken"):
        loss_of(model, tokens, targets)
    model.blocks[2].out.forward = original  # type: ignore[method-assign]
    gc.collect()
    offloader_of(model).copies.worker.drain()
    assert pool.used == 0
    loss = loss_of(model, tokens, targets)
    assert pool.used > 0
    del loss
    gc.collect()
    offloader_of(model).copies.worker.drain()
    assert pool.used == 0
    with torch.no_grad():
        loss_of(model, tokens, targets)
    assert pool.used == 0
    assert_as(plain, train(model, optimizer), model)


def test_an_exception_in_backward_is_got_over(plain: Any) -> None:
    model, optimizer = prepared("recompute+host")

    def fail(grad: Tensor) -> None:
        raise ValueError("broken")

    tokens, targets = next(batches())
    handle = model.blocks[1].register_full_backward_hook(lambda module, inputs, outputs: fail(outputs[0]))
    with pytest.raises(ValueError, match="broken"):
        loss_of(model, tokens, targets).backward()
    handle.remove()
    optimizer.zero_grad()
    assert_as(plain, train(model, optimizer), model)


def test_a_change_in_place_is_refused_as_torch_does() -> None:
    class Changing(nn.Module):
        def __init__(self, where: str) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.where = where

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x).sigmoid()
            z = y * 2
            if self.where == "inside":
                y.add_(1.0)
            self.left = y.detach()
            return z

    x = torch.randn(SAMPLES * LENGTH, WIDTH)
    for where in ("inside", "after"):
        model = nn.Sequential(*(Changing(where) for _ in range(4)))
        zerostd.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), placement=Placement(activations="host"), groups=["*"]
        )
        output = model(x)
        if where == "after":
            model[3].left.add_(1.0)  # type: ignore[operator, union-attr]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("way", ["host", "recompute", "recompute+host"])
def test_batch_norm_counts_a_batch_once(way: str) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        parts = (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        return nn.Sequential(*(nn.Sequential(*(parts if i == 0 else map(_new, parts))) for i in range(3)))

    def _new(module: nn.Module) -> nn.Module:
        return (
            type(module)(8, 8, 3, padding=1, bias=False)
            if isinstance(module, nn.Conv2d)
            else (nn.BatchNorm2d(8) if isinstance(module, nn.BatchNorm2d) else nn.ReLU())
        )

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(16, 8, 32, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, other = make(), make()
    _, optimizer = zerostd.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), placement=Placement(activations=way), groups=["*"]
    )
    run(model, optimizer)
    run(other, torch.optim.SGD(other.parameters(), 0.1))
    state = zerostd.full_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in other.state_dict().items())


@functools.cache
def compiled(activations: str) -> tuple[list[float], dict[str, dict[str, int]]]:
    """Losses of a model with compiled blocks, and its peaks by tier and kind."""
    torch._dynamo.reset()
    model, optimizer = prepared(activations)
    for block in model.blocks:
        block.drop.p = 0.0  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    return train(model, optimizer, 2), zerostd.memory(model).peak


@pytest.mark.parametrize("way", ["host", "recompute", "recompute+host"])
def test_compiled_blocks(way: str) -> None:
    (losses, peak), (kept, _) = compiled(way), compiled("device")
    assert losses == pytest.approx(kept, rel=1e-6)
    if way != "recompute":
        assert peak["host"]["activations"] >= DEPTH * INPUT


def test_inside_checkpointing_it_is_refused() -> None:
    model, _ = prepared("host")
    model.checkpoints = True
    with pytest.raises(MisuseError, match=r"blocks\.0.*torch\.utils\.checkpoint.*recompute\+host"):
        model(next(batches())[0])


def test_bad_input() -> None:
    with pytest.raises(
        PrepareError, match=r"'hots' is not a way for activations; did you mean 'host'.*recompute\+host"
    ):
        Placement(activations="hots")
    with pytest.raises(PrepareError, match="sum to 1"):
        Placement(activations={"host": 0.5, "device": 0.4})
    with pytest.raises(PrepareError, match="'diskk' is not a way"):
        Placement(activations={"blocks.*": "diskk"})
    with pytest.raises(PrepareError, match=r"no group matches 'layers\.\*'; the groups are words, blocks\.0"):
        prepared({"layers.*": "host"})
    with pytest.raises(PrepareError, match="must be a process group"):
        prepared("host", placement={"same_activations": "model"})
    with pytest.raises(PrepareError, match="'recompute' is not a tier"):
        Placement(parameters="recompute")


def test_a_budget_that_is_too_small_for_them() -> None:
    model, _ = prepared("host", budget=Budget(host=3 * INPUT))
    with pytest.raises(PrepareError, match=r"more activations .* host budget leaves"):
        loss_of(model, *next(batches())).backward()
    model, optimizer = prepared("recompute+host", budget=Budget(host=(DEPTH + 1) * INPUT))
    train(model, optimizer, 2)


def test_release_leaves_nothing(plain: Any) -> None:
    model, optimizer = prepared("recompute+host")
    train(model, optimizer, 1)
    zerostd.release(model)
    assert all("forward" not in block.__dict__ for block in model.blocks)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_lengths_that_vary_do_not_fragment() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    zerostd.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), placement=Placement(activations="host"), groups=["*"]
    )
    pool, lengths = offloader_of(model).copies.pools[Tier.HOST], torch.Generator().manual_seed(3)
    most, grown = 0, list[int]()
    for step in range(500):
        length = int(torch.randint(1024, 6000, (), generator=lengths))
        loss = model(torch.randn(length, 64)).sum()
        most = max(most, pool.used)
        loss.backward()
        if not grown or pool.num_bytes != grown[-1]:
            grown.append(pool.num_bytes)
        assert pool.num_bytes <= 1.5 * most, f"step {step}"
    assert pool.used == 0 and len(grown) < 20
    assert zerostd.memory(model).now["host"]["activations"] == pool.num_bytes
