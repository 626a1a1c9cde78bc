"""One model trained twice, side by side: by plain torch on all the ranks' data, and by zerostd on this rank's.

A `Scene` is a model, the loss of one rank's micro-batch, and what is peculiar about the loop. The reference runs whole
on every rank: its loss is the mean of the ranks' losses, so a parameter that a rank does not use counts as zero there
and one that no rank uses has no gradient, by torch's own rules. Buffers that a forward changes follow no such rule;
compare those with DDP instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerostd
from support.compare import relative_error, worst_error

Loss = Callable[[nn.Module, int, int], Tensor]  # (model, number of the micro-batch, rank)
Rules = Callable[[nn.Module], torch.optim.Optimizer]

LIMIT = 1e-5  # fp32, several ranks: only the order of sums may differ


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Decay shows whether an unused parameter was touched; eps of the gradients' size shows a wrong scale of theirs."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    options = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(options, lr=5e-3, eps=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=0.01)


def backward_once(model: nn.Module, loss: Loss, step: int, rank: int, share: float) -> None:
    (loss(model, step, rank) * share).backward()


@dataclass(frozen=True)
class Scene:
    """What is trained, and how one step's gradients are made."""

    make: Callable[[], nn.Module]
    loss: Loss
    groups: Sequence[str] | None = None
    optimizer: Rules = adamw
    steps: int = 4
    gradients: Callable[[nn.Module, Loss, int, int, float], None] = backward_once  # (.., step, rank, share of the mean)
    options: dict[str, Any] = field(default_factory=dict)  # for prepare


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def data(*shape: int, number: int = 0, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1009 * number + 31 * rank + 5)
    return torch.randn(*shape, generator=generator)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def train_reference(scene: Scene) -> dict[str, Tensor]:
    """Plain torch in this process, on the data of all ranks."""
    model = seeded(scene.make)
    optimizer = scene.optimizer(model)
    for step in range(scene.steps):
        for rank in range(world_size()):
            scene.gradients(model, scene.loss, step, rank, 1.0 / world_size())
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train_prepared(scene: Scene, rank: int, stage: int, **options: Any) -> dict[str, Tensor]:
    """zerostd, on this rank's data."""
    model = seeded(scene.make)
    options = {"groups": scene.groups, **scene.options, **options}
    model, optimizer = zerostd.prepare(model, scene.optimizer(model), stage=stage, **options)
    for step in range(scene.steps):
        scene.gradients(model, scene.loss, step, rank, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = zerostd.full_state_dict(model)
    zerostd.release(model)
    return state


def differences(scene: Scene, rank: int, stages: Sequence[int] = (2, 3), limit: float = LIMIT) -> list[str]:
    """On every rank: the stages that train differently from plain torch, in words."""
    reference, failures = train_reference(scene), []
    start = seeded(scene.make).state_dict()
    moved = max(relative_error(start[name], reference[name]) for name in start)
    assert moved > 100 * limit, f"the reference hardly moved ({moved:.0e}), so nothing is shown"
    for stage in stages:
        try:
            worst = worst_error(train_prepared(scene, rank, stage), reference)
        except Exception as error:  # the same on all ranks, most likely: keep them alive, processes are dear
            failures.append(f"stage {stage}, rank {rank}: {type(error).__name__}: {error}")
            continue
        if not worst.error <= limit:
            failures.append(f"stage {stage}, rank {rank}: {worst.name} is off by {worst.error:.1e}, limit {limit:.0e}")
    return failures
