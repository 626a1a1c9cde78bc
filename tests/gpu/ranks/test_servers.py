"""Workers on a device, servers on the CPU: the model of ranks without servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zerostd
from support.models import MODELS

pytestmark = pytest.mark.gpu

GPT = MODELS["gpt"]
STEPS = 4
State = dict[str, torch.Tensor]


def train(rank: int, num_workers: int, servers: int, precision: str) -> State:
    """Train on the device; the last ranks serve."""
    is_server = rank >= num_workers
    model = GPT.make(0).to("cpu" if is_server else "cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # AdamW would make steps of rounding errors
    options: dict[str, Any] = {"precision": precision, "accumulate": 1, "groups": ["blocks.*"]}
    options |= (
        {"servers": servers} if servers else {"stage": 1 if num_workers > 1 else 0, "placement": zerostd.Placement()}
    )
    try:
        model, optimizer = zerostd.prepare(model, optimizer, **options)
    except SystemExit as end:
        assert end.code == 0
        return {}
    for step in range(STEPS):
        batch = tuple(tensor.to("cuda") for tensor in GPT.batch(step, rank, num_workers, torch.float32))
        GPT.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.cpu() for name, value in zerostd.full_state_dict(model).items()}
    sent = zerostd.memory(model).sent.get("reduce", 0)
    numel = sum(parameter.numel() for parameter in model.parameters())
    if servers and precision == "bf16":
        assert 2.0 <= sent / STEPS / numel <= 2.2  # small flats are padded
    zerostd.release(model)
    return state


@pytest.mark.parametrize(("num_workers", "servers", "precision"), [(1, 1, "fp32"), (1, 2, "bf16"), (2, 1, "fp32")])
def test_workers_on_a_device_train_with_servers_as_without(cuda_ranks, num_workers, servers, precision):
    expected = cuda_ranks(num_workers, train, num_workers, 0, precision)[0]
    found = cuda_ranks(num_workers + servers, train, num_workers, servers, precision)
    assert not any(found[num_workers:])
    for state in found[:num_workers]:
        for name, value in expected.items():
            # nccl sums in its own order; in bf16 one unit is 2^-8.
            close = {"rtol": 1e-4, "atol": 1e-5} if precision == "fp32" else {"rtol": 2**-6, "atol": 2**-7}
            torch.testing.assert_close(state[name], value, **close)
