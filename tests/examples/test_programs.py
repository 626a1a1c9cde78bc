"""The three short programs that zerostd is for, as people write them: each trains on two ranks as plain torch does with
both batches."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
import zerostd.horovod as hvd
from support.compare import assert_bitwise, relative_error
from support.side_by_side import seeded

NUM_RANKS = 2
STEPS = 3
LOOP = """
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PROGRAMS = {
    "apply_to_device": """
        from zerostd import apply_to_device
        model = SimpleModel().to(device)
        model = apply_to_device(model, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    """,
    "prepare": """
        import zerostd
        model = SimpleModel()
        model, optimizer = zerostd.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-4), stage=3, precision="bf16"
        )
    """,
    "horovod": """
        import zerostd.horovod as hvd
        hvd.init()
        model = SimpleModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """,
}
RULES: dict[str, Any] = {
    "apply_to_device": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "prepare": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "horovod": lambda parameters: torch.optim.SGD(parameters, lr=0.01 * NUM_RANKS),
}


class SimpleModel(nn.Sequential):
    """Two convolutions and two linear layers, for the images of MNIST."""

    def __init__(self) -> None:
        convolutions = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        super().__init__(*convolutions, nn.Linear(1152, 16), nn.ReLU(), nn.Linear(16, 10))


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(4, 1, 28, 28, generator=generator), torch.randint(10, (4,), generator=generator))
        for _ in range(STEPS)
    ]


def run(rank: int, name: str) -> tuple[dict[str, torch.Tensor], float]:
    """Run a program with the user's loop below it; return the weights that it ends with, and its last loss."""
    user = {
        "torch": torch,
        "device": torch.device("cpu"),
        "SimpleModel": lambda: seeded(SimpleModel),
        "loader": batches(rank),
        "criterion": nn.CrossEntropyLoss(),
    }
    exec(textwrap.dedent(PROGRAMS[name]) + LOOP, user)
    model: Any = user["model"]
    weights = dict(model.state_dict()) if name == "horovod" else zerostd.full_state_dict(model)
    if name == "horovod":
        weights = {key: value.clone() for key, value in weights.items()}
        hvd.shutdown()
    else:
        zerostd.release(model)
    return weights, user["loss"].item()


def plain(name: str) -> tuple[dict[str, torch.Tensor], float]:
    model = seeded(SimpleModel)
    optimizer = RULES[name](model.parameters())
    for pairs in zip(*(batches(rank) for rank in range(NUM_RANKS)), strict=True):
        images = torch.cat([x for x, _ in pairs])
        loss = nn.functional.cross_entropy(model(images), torch.cat([y for _, y in pairs]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), loss.item()


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_trains_as_plain_torch_does(ranks: Any, name: str) -> None:
    expected, loss = plain(name)
    found = ranks(NUM_RANKS, run, name)
    rounding = 0.01 if name == "prepare" else 1e-5  # it computes in bf16
    assert sum(mine for _, mine in found) / NUM_RANKS == pytest.approx(loss, rel=rounding)
    for weights, _ in found:
        assert weights.keys() == expected.keys()
        assert_bitwise(weights, found[0][0])
        for key, value in expected.items():  # in three steps of AdamW a number moves by 3e-4, by bf16 either way
            off = (weights[key] - value).abs()
            assert off.max() < 7e-4 and (name == "prepare" or relative_error(weights[key], value) < 1e-5), key
            assert off.mean() < 1e-4, key
