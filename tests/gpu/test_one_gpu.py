"""A world of one on a CUDA device: the same numbers as plain torch, no host synchronisation, the ledger's bytes."""

from __future__ import annotations

import copy
import gc
import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zerostd

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make(width: int = 256, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 10)).cuda()


def batches(steps: int, width: int = 256) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator(device="cuda").manual_seed(1)
    return [
        (
            torch.randn(64, width, device="cuda", generator=generator),
            torch.randint(0, 10, (64,), device="cuda", generator=generator),
        )
        for _ in range(steps)
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10) -> list[float]:
    losses = []
    for x, y in batches(steps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=["default", "fused", "foreach"])
def test_fp32_is_bitwise_plain_torch(options):
    plain, ours = make(), make()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, **options))
    train(*zerostd.prepare(ours, torch.optim.AdamW(ours.parameters(), lr=1e-3, **options), stage=3))
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_bf16_with_masters_is_the_handwritten_loop():
    plain, ours = make().bfloat16(), make()
    masters = [nn.Parameter(p.detach().clone()) for p in make().parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    expected = []
    for x, y in batches(10):
        loss = F.cross_entropy(plain(x.bfloat16()).float(), y)
        loss.backward()
        for master, p in zip(masters, plain.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 0.5)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, plain.parameters(), strict=True):
                p.copy_(master)
        expected.append(loss.item())
    adamw = torch.optim.AdamW(ours.parameters(), lr=1e-3, fused=True)
    losses = train(*zerostd.prepare(ours, adamw, precision="bf16", max_grad_norm=0.5))
    assert losses == pytest.approx(expected, rel=1e-2)
    state = zerostd.full_state_dict(ours)
    for (name, _), master in zip(plain.named_parameters(), masters, strict=True):
        off = (state[name] - master.detach().cpu()).norm() / master.detach().cpu().norm()
        assert off < 5e-3, f"{name} is off by {off:.1e}"


def test_step_never_waits_for_the_device():
    model = make()
    model, optimizer = zerostd.prepare(
        model, torch.optim.AdamW(model.parameters(), fused=True), precision="bf16", accumulate=1, max_grad_norm=1.0
    )
    train(model, optimizer, 2)
    x, y = batches(1)[0]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fp16_trains_and_recovers_from_overflow():
    model = make()
    model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision="fp16")
    optimizer.loss_scale.value = 2.0**40
    x, y = batches(1)[0]
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert 20 <= optimizer.loss_scale.num_skipped < 40
    assert losses[-1] < 0.1 * losses[0]


def test_allocator_grows_by_what_the_ledger_says():
    gc.collect()  # models of earlier tests would go while we measure
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = make(1024, 4)
    model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), precision="bf16")
    x, y = torch.randn(8, 1024, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    booked = sum(zerostd.memory(model).now["device"].values())
    assert abs(grown - booked) < 0.02 * booked + 9 * 2**20  # cuBLAS keeps a workspace of about 8 MiB


def test_compiled_blocks_train_as_eager_ones():
    eager, compiled = make(), make()
    for index, block in enumerate(compiled[:-1]):
        compiled[index] = torch.compile(block)
    first = train(*zerostd.prepare(eager, torch.optim.SGD(eager.parameters(), lr=0.1)), 5)
    second = train(*zerostd.prepare(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1)), 5)
    assert second == pytest.approx(first, rel=1e-4)


@pytest.fixture
def nccl_group():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    yield device
    dist.destroy_process_group()


def test_sync_batch_norm_trains(nccl_group):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)).cuda()
    ours = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    ours, optimizer = zerostd.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(32, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        for model, opt in ((plain, reference), (ours, optimizer)):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    for (name, a), b in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n} {m}")
