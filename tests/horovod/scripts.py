"""What Horovod's users write, and the same by hand: gradients of all ranks' batches, combined, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerostd.horovod as hvd

Rules = Callable[[Any], torch.optim.Optimizer]
STEPS = 10


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-3)  # eps of the gradients' size shows a wrong scale


def make_model(seed: int) -> nn.Module:
    """Convolutions with batch-norm, and a layer that is larger than all else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 36, 33),
            nn.ReLU(),
            nn.Linear(33, 10),
        )


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(4, 1, 6, 6, generator=generator), torch.randint(10, (4,), generator=generator)


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    images, labels = batch(number, rank)
    return F.cross_entropy(model(images), labels)


@contextmanager
def session() -> Iterator[None]:
    """hvd.init to hvd.shutdown: what a test leaves behind is nobody else's."""
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()


def by_hand(
    rules: Rules,
    batches: list[int],
    *,
    op: str = "mean",
    passes: int = 1,
    clip: float | None = None,
    scheduled: bool = False,
    seed: int = 0,
    steps: int = STEPS,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Plain torch on the batches of all ranks; `batches` is how many steps each rank has data for."""
    model = make_model(seed)
    optimizer = rules(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5) if scheduled else None
    share = 1.0 / len(batches) if op == "mean" else 1.0
    for step in range(steps):
        for rank, count in enumerate(batches):
            for number in range(passes if step < count else 0):
                (loss_of(model, step * passes + number, rank) * share).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return model, optimizer


@torch.no_grad()
def distance(model: nn.Module, reference: nn.Module) -> float:
    """The largest relative error of any parameter, normwise."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)
