"""Gradients of 16-bit parameters that are reduced in fp32 on request: exactly so, over all wires."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerostd
from support.agreement import agree
from support.side_by_side import data, seeded

WIDTH = 24
FP32 = zerostd.Precision("mine", compute=torch.bfloat16, reduce=torch.float32)
BF16 = zerostd.Precision("mine", compute=torch.bfloat16, reduce=torch.bfloat16)
HOST = {"parameters": "host", "gradients": "host", "optimizer_states": "host"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH + 7)
        self.layers = nn.ModuleList(nn.Linear(WIDTH + 7, WIDTH + 7) for _ in range(3))
        self.outlet = nn.Linear(WIDTH + 7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.outlet(x)


def batch(rank: int) -> Tensor:
    return data(5, WIDTH, rank=rank)


def gradients_of(rank: int) -> dict[str, Tensor]:
    """The gradients of one rank in bf16, by plain torch."""
    model = seeded(Net).bfloat16()
    model(batch(rank).bfloat16()).float().square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def one_step(rank: int, precision: zerostd.Precision, **options: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return what SGD with a rate of 1 makes of the masters in one step, and the bytes that the step sends."""
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = zerostd.prepare(model, optimizer, precision=precision, groups=["layers.*"], **options)
    model(batch(rank)).square().mean().backward()
    optimizer.step()
    sent = dict(zerostd.memory(model).sent)
    values = zerostd.full_state_dict(model)
    zerostd.release(model)
    return values, sent


def expected(num_ranks: int, replicas: int = 1) -> dict[str, Tensor]:
    """The masters after a step with the mean in fp32, in the order of ranks: inside each replica first."""
    everyone = [gradients_of(rank) for rank in range(num_ranks)]
    size = num_ranks // replicas
    values = {}
    for name, start in seeded(Net).state_dict().items():
        parts = [
            torch.stack([g[name].float() for g in everyone[first : first + size]]).sum(0) / size
            for first in range(0, num_ranks, size)
        ]
        values[name] = start - torch.stack(parts).sum(0) / replicas
    return values


def reduces_in_fp32(rank: int, num_ranks: int, folder: str) -> list[str]:
    cases: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in range(4)}
    cases["host"] = {"stage": 3, "placement": HOST}
    cases["disk"] = {
        "stage": 3,
        "placement": {"gradients": "disk", "optimizer_states": "disk"},
        "budget": {"disk_path": folder},
    }
    if num_ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        cases |= {f"hybrid {stage}": {"stage": stage, "mesh": mesh} for stage in (0, 2, 3)}
        cases["secondary"] = {"stage": 3, "mesh": mesh, "placement": {"secondary_shards": True}}
    failures = []
    for name, options in cases.items():
        want = expected(num_ranks, 2 if "hybrid" in name else 1)
        values, sent = one_step(rank, FP32, **options)
        rounded, less = one_step(rank, BF16, **options)
        if not all(torch.equal(values[key], want[key]) for key in want):
            failures.append(f"rank {rank}, {name}: not the mean in fp32")
        if all(torch.allclose(rounded[key], want[key], rtol=0, atol=1e-6) for key in want):
            failures.append(f"rank {rank}, {name}: bf16 has rounded nothing, so nothing is shown")
        for entry in ("reduce", "replicas"):
            if sent.get(entry, 0) != 2 * less.get(entry, 0):
                failures.append(f"rank {rank}, {name}: sends {sent} instead of twice {less} for {entry}")
        if sent.get("gather") != less.get("gather"):
            failures.append(f"rank {rank}, {name}: gathers {sent}, in bf16 {less}")
    return failures


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_are_reduced_in_fp32(ranks: Any, num_ranks: int, tmp_path: Any) -> None:
    agree(ranks(num_ranks, reduces_in_fp32, num_ranks, str(tmp_path)))


def codes_fp32(rank: int) -> list[str]:
    """Codes have one scale for 64 numbers, whatever the dtype before: the bytes do not grow."""
    options = {"stage": 3, "placement": {"codec": {"reduce": "int8"}}, "exact": False}
    values, sent = one_step(rank, FP32, **options)
    _, less = one_step(rank, BF16, **options)
    want = expected(2)
    start = seeded(Net).state_dict()
    worst = max(float((values[key] - want[key]).abs().max() / (want[key] - start[key]).abs().max()) for key in want)
    failures = [] if 0 < worst < 0.01 else [f"rank {rank}: off by {worst}"]
    return failures if sent["reduce"] == less["reduce"] else [*failures, f"rank {rank}: {sent} and {less}"]


def test_codes_are_made_of_fp32_gradients(ranks: Any) -> None:
    agree(ranks(2, codes_fp32))


def pushes(rank: int) -> list[str]:
    """Two workers and a server: pushes have four bytes a number."""
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = zerostd.prepare(model, optimizer, precision=FP32, groups=["layers.*"], servers=1)
    model(batch(rank)).square().mean().backward()
    optimizer.step()
    values = zerostd.full_state_dict(model)
    sent = zerostd.memory(model).sent["reduce"]
    least = 4 * sum(parameter.numel() for parameter in model.parameters())
    zerostd.release(model)
    want = expected(2)
    is_exact = all(torch.equal(values[key], want[key]) for key in want)
    failures = [] if is_exact else [f"rank {rank}: not the mean in fp32"]
    return failures if least <= sent < 1.2 * least else [*failures, f"rank {rank}: pushes {sent}, not {least}"]


def served(rank: int) -> list[str]:
    try:
        return pushes(rank)
    except SystemExit:  # of a server
        return []


def test_servers_add_gradients_in_fp32(ranks: Any) -> None:
    agree(ranks(3, served))


def differs(rank: int) -> str:
    """Two policies of one name: rank 1 reduces in bf16."""
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        zerostd.prepare(model, optimizer, stage=3, precision=BF16 if rank else FP32)
    except zerostd.PrepareError as error:
        return str(error)
    return "taken"


def test_ranks_with_other_dtypes_under_one_name_are_refused(ranks: Any) -> None:
    for message in ranks(2, differs):
        assert "reduce torch.float32" in message and "reduce torch.bfloat16" in message, message
