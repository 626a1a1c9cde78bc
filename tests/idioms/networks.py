"""The small models that idioms train: a few thousand parameters in several groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 6
WIDTH = 8
CLASSES = 4
VOCABULARY = 12


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Network(nn.Module):
    """A stem, some blocks, a norm and a head; `encode` is everything before the head."""

    def __init__(self, depth: int = 2, features: int = FEATURES, classes: int = CLASSES) -> None:
        super().__init__()
        self.stem = nn.Linear(features, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def encode(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


class Convolutional(nn.Module):
    """Convolutions with batch-norm over a row of features."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(channels, 4, 3, padding=1, bias=False), nn.BatchNorm1d(4), nn.GELU())
            for channels in (1, 4)
        )
        self.head = nn.Linear(4 * FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


class Language(nn.Module):
    """Embedded tokens, blocks, and a head that is the embedding: one parameter under two names."""

    def __init__(self, tied: bool = True, max_norm: float | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, max_norm=max_norm)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clip(nn.Module):
    """Two towers and the temperature between them, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.image = Network()
        self.text = Network()
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        image = F.normalize(self.image(x), dim=-1)
        text = F.normalize(self.text(y), dim=-1)
        return self.logit_scale.exp() * image @ text.T


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank addition, as in LoRA."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> Network:
    """A network whose blocks are frozen but for low-rank additions."""
    network = Network()
    for block in network.blocks:
        block.up = Adapted(block.up)
        block.down = Adapted(block.down)
    return network
