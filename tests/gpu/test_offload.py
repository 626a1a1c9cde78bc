"""States, gradients and parameters off a CUDA device: the same numbers as on it, the ledger's bytes, no waiting.

The helpers take the device, so that the same loops can be tried on a processor.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zerostd
from support.compare import assert_bitwise, assert_close_states, worst_error
from support.memory import pss
from zerostd import Budget, Placement
from zerostd.optimizers import cpu_updater, streamed_updater
from zerostd.policy import Kind, Tier
from zerostd.tiers.debug import DEBUG

pytestmark = pytest.mark.gpu

MIB = 2**20
DEVICE = "cuda"
WIDTH = 256

STREAMED = Placement(optimizer_states="host", cpu_share=0.0)
ON_CPU = Placement(optimizer_states="host", cpu_share=1.0)
BOTH = Placement(optimizer_states="host", cpu_share=0.5)
ALL_HOST = Placement(parameters="host", gradients="host", optimizer_states="host", cpu_share=0.5)
ON_DISK = Placement(optimizer_states="disk", cpu_share=1.0)
ALL_DISK = Placement(parameters="disk", gradients="host", optimizer_states="disk")
THIRDS = Placement(optimizer_states={"device": 0.3, "host": 0.4, "disk": 0.3}, cpu_share=0.5)
PLACEMENTS = {
    "streamed": STREAMED,
    "cpu": ON_CPU,
    "both": BOTH,
    "all on host": ALL_HOST,
    "all on host, streamed": Placement(parameters="host", gradients="host", optimizer_states="host", cpu_share=0.0),
    "disk": ON_DISK,
    "disk, streamed": Placement(optimizer_states="disk", cpu_share=0.0),
    "all on disk": ALL_DISK,
    "thirds": THIRDS,
}
BY_THE_DEVICE = ("streamed", "all on host, streamed", "disk, streamed")  # torch's own kernels on the device: same bits
BY_THE_PROCESSOR = tuple(name for name in PLACEMENTS if name not in BY_THE_DEVICE)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Product(nn.Module):
    """The gradient of its weight is a random tensor, whatever the weight is."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight, self.generator = nn.Parameter(torch.randn(700, 1000)), generator

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(self.weight.shape, device=self.weight.device, generator=self.generator)
        return x + (self.weight * noise).sum()


class Rooted(nn.Module):
    """Its norm belongs to no block: the gradient comes early in backward, the update at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
        self.cycles = 0  # how long the device rests before the last gradient of backward

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.cycles:
            x.register_hook(lambda gradient: torch.cuda._sleep(self.cycles))
        return self.head(self.norm(self.blocks(x + 1)))  # the first block's input has no hook but ours


def make(width: int = WIDTH, depth: int = 4, device: str = DEVICE) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 10)).to(device)


def batch(number: int, device: str = DEVICE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(32, WIDTH, generator=generator), torch.randint(0, 10, (32,), generator=generator)
    return x.to(device), y.to(device)


def prepared(
    placement: Placement, path: Any = None, *, device: str = DEVICE, fused: bool | None = None, **options: Any
) -> tuple[nn.Module, Any]:
    model = make(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    budget = Budget(disk_path=None if path is None else str(path))
    return zerostd.prepare(model, optimizer, placement=placement, budget=budget, groups=["*"], **options)


def train(model: nn.Module, optimizer: Any, steps: int, device: str = DEVICE) -> None:
    for step in range(steps):
        x, y = batch(step, device)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def after(placement: Placement, path: Any = None, *, steps: int = 10, device: str = DEVICE, **options: Any) -> Any:
    """The parameters, from their masters, after training under a placement."""
    model, optimizer = prepared(placement, path, device=device, **options)
    train(model, optimizer, steps, device)
    state = zerostd.full_state_dict(model)
    zerostd.release(model)
    return state


@pytest.fixture(autouse=True)
def short_tiles(monkeypatch):
    """A block has 525 thousand elements: several tiles on every route."""
    monkeypatch.setattr(streamed_updater, "TILE_NUMEL", 1 << 17)
    monkeypatch.setattr(cpu_updater, "TILE_NUMEL", 1 << 17)
    monkeypatch.setattr(cpu_updater, "DISK_TILE_NUMEL", 1 << 17)


@contextlib.contextmanager
def debug(mode: str) -> Iterator[None]:
    DEBUG.add(mode)
    try:
        yield
    finally:
        DEBUG.discard(mode)


# -- the same numbers --


@pytest.mark.parametrize("fused", [None, True], ids=["default", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BY_THE_DEVICE)
def test_updated_by_the_device_is_bitwise_resident(name, precision, fused, tmp_path):
    expected = after(Placement(), precision=precision, fused=fused)
    assert_bitwise(after(PLACEMENTS[name], tmp_path, precision=precision, fused=fused), expected)


@pytest.mark.parametrize("fused", [False, True], ids=["default", "fused"])
@pytest.mark.parametrize("name", BY_THE_PROCESSOR)
def test_updated_by_the_processor_is_within_a_millionth(name, fused, tmp_path):
    """The arithmetic alone: gradients are given, so a difference in the last bit is not trained on. fp32; the two
    differ in how they contract products and sums. The processor's formula is that of torch's default: from the fused
    one it is as far away as that is, which is just above a millionth after ten steps."""
    expected = after_given_gradients(Placement(), tmp_path, fused=fused)
    limit = 1e-6
    if fused:
        limit += worst_error(after_given_gradients(Placement(), tmp_path, fused=False), expected).error
    assert limit < 3e-6
    assert_close_states(after_given_gradients(PLACEMENTS[name], tmp_path, fused=fused), expected, limit)


def after_given_gradients(placement: Placement, path: Any, *, fused: bool) -> Any:
    """The parameters after ten steps with the same random gradients."""
    torch.manual_seed(0)
    generator = torch.Generator(DEVICE).manual_seed(1)
    model = nn.Sequential(*(Product(generator) for _ in range(4))).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    budget = Budget(disk_path=str(path))
    model, optimizer = zerostd.prepare(model, optimizer, placement=placement, budget=budget, groups=["*"])
    for _ in range(10):
        model(torch.zeros((), device=DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = zerostd.full_state_dict(model)
    zerostd.release(model)
    return state


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BY_THE_PROCESSOR)
def test_training_by_the_processor_is_as_close_as_torch_is_to_itself(name, precision, tmp_path):
    """Rounding is trained on: AdamW divides small gradients by their own size, and a master may round to either side of
    a bf16 number. torch's two ways of computing it on the device, fused and not, are as far apart."""
    expected = after(Placement(), precision=precision, fused=False)
    noise = worst_error(after(Placement(), precision=precision, fused=True), expected).error
    assert noise > 0
    assert_close_states(after(PLACEMENTS[name], tmp_path, precision=precision, fused=False), expected, 3 * noise)


@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_overlap_and_reuse_change_nothing(name, clip, tmp_path):
    """One thing after another, all at once, and all at once with memory poisoned when it is done with."""
    options = {"accumulate": 1, "max_grad_norm": clip, "precision": "bf16", "steps": 6}
    with debug("serial"):
        expected = after(PLACEMENTS[name], tmp_path, **options)
    assert_bitwise(after(PLACEMENTS[name], tmp_path, **options), expected, "overlapped")
    with debug("poison"):
        assert_bitwise(after(PLACEMENTS[name], tmp_path, **options), expected, "poisoned")


@pytest.mark.parametrize("cpu_share", [0.0, 0.5, 1.0])
def test_speculation_is_bitwise_the_same(cpu_share):
    """The norm bites in some steps and not in others, so some tries are kept and some done again."""
    steps = 16
    norms = typical_norms(steps)
    options = {"accumulate": 1, "max_grad_norm": sorted(norms)[3 * steps // 4], "precision": "bf16", "steps": steps}
    expected = after(Placement(optimizer_states="host", cpu_share=cpu_share), **options)
    del options["steps"]
    model, optimizer = prepared(Placement(optimizer_states="host", cpu_share=cpu_share, speculate=True), **options)
    train(model, optimizer, steps)
    assert optimizer.backward_updates.num_speculated >= optimizer.backward_updates.num_committed > 0
    assert_bitwise(zerostd.full_state_dict(model), expected)


def typical_norms(steps: int, device: str = DEVICE) -> list[float]:
    """Gradient norms of the first steps, hardly clipped."""
    model, optimizer = prepared(BOTH, device=device, max_grad_norm=1e9, precision="bf16")
    norms = []
    for step in range(steps):
        train_one(model, optimizer, step, device)
        norms.append(optimizer.grad_norm.item())
    return norms


def train_one(model: nn.Module, optimizer: Any, step: int, device: str = DEVICE) -> None:
    x, y = batch(step, device)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


# -- no waiting --


@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("name", ["streamed", "cpu", "both", "all on host"])
def test_the_loop_never_waits_for_the_device(name, clip):
    """torch's own synchronising calls raise, in every thread. Events, which our threads wait for, are not among them:
    what the loop waits for is another thread's work and never the device."""
    model, optimizer = prepared(PLACEMENTS[name], precision="bf16", accumulate=1, max_grad_norm=clip)
    train(model, optimizer, 3)
    optimizer.synchronize()
    x, y = batch(0)
    gc.collect()  # memory of earlier tests would be taken from the driver meanwhile
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    optimizer.synchronize()


@pytest.mark.parametrize("name", ["streamed", "cpu", "both"])
def test_groups_are_updated_while_the_device_is_still_in_backward(name):
    """Nothing that comes at the end of backward holds up what could be done before."""
    model = Rooted().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = {"placement": PLACEMENTS[name], "precision": "bf16", "accumulate": 1, "groups": ["blocks.*", "tokens"]}
    model, optimizer = zerostd.prepare(model, optimizer, **options)
    tokens = torch.randint(0, 64, (8, 32), device=DEVICE)
    for _ in range(4):
        optimizer.synchronize()
        torch.cuda.synchronize()
        model(tokens).square().mean().backward()
        optimizer.step()
        end = torch.cuda.Event()
        end.record()
        blocks = [group for group in model.__dict__["_zerostd"].groups if group.name.startswith("blocks")]
        updates = [update for group in blocks for update in group.updates]
        if model.cycles:
            deadline = time.monotonic() + 0.4
            while not all(update.is_done() and update.event.has_arrived() for update in updates):
                assert time.monotonic() < deadline, "updates of blocks wait for the end of backward"
                time.sleep(1e-3)
            assert len(updates) >= len(blocks) == 4 and not end.query()
        optimizer.zero_grad()
        model.cycles = 2_000_000_000  # about a second


# -- bytes --


def large(placement: Placement, **options: Any) -> tuple[nn.Module, Any, Tensor]:
    """100 million parameters; their input."""
    model = make(1024, 12)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    prepared = zerostd.prepare(model, optimizer, placement=placement, precision="bf16", groups=["*"], **options)
    return *prepared, torch.randn(8, 1024, device=DEVICE)


def step_large(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()


@pytest.mark.parametrize("name", ["streamed", "cpu", "both", "all on host"])
def test_allocator_grows_by_what_the_ledger_says(name):
    gc.collect()
    torch.cuda.synchronize()
    before, held = torch.cuda.memory_allocated(), pss()
    model, optimizer, x = large(PLACEMENTS[name])
    for _ in range(2):
        step_large(model, optimizer, x)
    torch.cuda.synchronize()
    grown, memory = torch.cuda.memory_allocated() - before, zerostd.memory(model)
    booked = sum(memory.now["device"].values())
    assert abs(grown - booked) < 0.02 * booked + 9 * MIB, str(memory)  # cuBLAS keeps a workspace of about 8 MiB
    numel = sum(p.numel() for p in model.parameters())
    ledger = model.__dict__["_zerostd"].ledger
    on_device = 0 if name == "all on host" else 4 * numel
    assert on_device <= memory.total() <= on_device + 0.001 * numel + MIB
    assert ledger.now[Tier.DEVICE, Kind.OPTIMIZER_STATES] == 0
    width = {"streamed": 10, "cpu": 12, "both": 11, "all on host": 10}[name]  # the CPU needs a weight of its own
    assert abs(ledger.now[Tier.HOST, Kind.OPTIMIZER_STATES] - width * numel) < MIB
    assert pss() - held > 0.98 * sum(memory.now["host"].values()) - 64 * MIB
    zerostd.release(model)
    assert not any(size for (tier, _), size in ledger.now.items() if tier is Tier.HOST)


def test_released_groups_hold_no_memory():
    model, optimizer, x = large(ALL_HOST)
    flats = [flat for group in model.__dict__["_zerostd"].groups for flat in group.flats]
    for num_kept in (0, 2):  # that forward ends and backward begins with, at most, once their order is known
        loss = model(x).square().mean()
        assert sum(flat.full.untyped_storage().nbytes() > 0 for flat in flats) <= num_kept
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not any(flat.full.untyped_storage().nbytes() for flat in flats)
    largest = max(flat.full.nbytes for flat in flats)
    memory = zerostd.memory(model)
    gathered = (memory.peak["device"]["buffers"] - memory.now["device"]["buffers"]) / largest
    assert 1 <= gathered <= 3, f"{gathered:.1f} groups were gathered at once\n{memory}"


def test_host_memory_is_pinned():
    model, optimizer = prepared(ALL_HOST, precision="bf16")
    train(model, optimizer, 1)
    for group in model.__dict__["_zerostd"].groups:
        for flat in group.flats:
            columns = [*flat.state_shards[0].tensors.values(), flat.rest]
            assert len(columns) == 5 and all(column.tensor.is_pinned() for column in columns)
            assert flat.gradient.current.is_pinned()
    column = flat.rest.tensor
    zerostd.release(model)
    assert not column.is_pinned()


@pytest.mark.parametrize("name", ["both", "all on host", "disk"])
def test_no_growth_over_200_steps(name, tmp_path):
    model, optimizer = prepared(PLACEMENTS[name], tmp_path, precision="bf16", accumulate=1)
    train(model, optimizer, 20)
    optimizer.synchronize()
    gc.collect()
    torch.cuda.synchronize()
    on_device, in_process = torch.cuda.memory_allocated(), pss()
    book = dict(model.__dict__["_zerostd"].ledger.now)
    train(model, optimizer, 200)
    optimizer.synchronize()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= on_device
    assert pss() - in_process < 4 * MIB
    assert dict(model.__dict__["_zerostd"].ledger.now) == book


# -- not enough of it --


def test_out_of_memory_in_the_first_step_changes_nothing():
    """The states of 100 million parameters do not fit: an error with the table, and the step can be taken later."""
    gc.collect()
    torch.cuda.empty_cache()
    model, optimizer, x = large(Placement())
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    masters = [shard.read_master().clone() for flat in optimizer.updater.spans for shard in flat.state_shards]
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            optimizer.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    text = str(caught.value)
    assert all(word in text for word in ("zerostd held", "device", "parameters", "gradients", "MiB", "Placement"))
    now = [shard.read_master() for flat in optimizer.updater.spans for shard in flat.state_shards]
    assert all(torch.equal(a, b) for a, b in zip(masters, now, strict=True))
    assert not optimizer.inner.state
    optimizer.step()
    assert optimizer.inner.state
    changed = [shard.read_master() for flat in optimizer.updater.spans for shard in flat.state_shards]
    assert not any(torch.equal(a, b) for a, b in zip(masters, changed, strict=True))
    optimizer.zero_grad()
    step_large(model, optimizer, x)
