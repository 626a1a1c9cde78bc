"""Functions that `zerostd plan module:function` is pointed at, good ones and bad ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Tower(nn.Module):
    """Blocks of one width."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def alone() -> nn.Module:
    return Tower()


def with_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tower()
    return model, torch.optim.AdamW(model.parameters())


def with_batch() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    model = Tower()
    return model, torch.optim.AdamW(model.parameters()), torch.ones(8, 64)


FORWARDS: list[int] = []  # of `counted`


def counted() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    model, optimizer, batch = with_batch()
    model.register_forward_pre_hook(lambda *_: FORWARDS.append(1))
    return model, optimizer, batch


def huge() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """13 B parameters: 52 GB, so only under the meta device."""
    model = Tower(20480, 31)
    return model, torch.optim.AdamW(model.parameters()), torch.ones(512, 20480)


def raises() -> nn.Module:
    raise KeyError("no such size")


def leaves() -> nn.Module:
    raise SystemExit("usage: train.py")


def number() -> Any:
    return 7


def two_numbers() -> Any:
    return Tower(), 7


NOT_A_FUNCTION = 7
