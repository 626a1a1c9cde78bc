"""The GPT that the benchmarks train, its data, and what every report says about the machine."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT."""

    width: int
    depth: int
    heads: int
    vocabulary: int
    length: int  # tokens in a sequence


class Block(nn.Module):
    """Attention, then two linear layers, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Decoder with its loss inside: `model(tokens, targets)`. With `recompute`, blocks keep no activations; with
    `num_pieces`, the logits of only a part of the batch are there at a time."""

    def __init__(self, shape: Shape, *, recompute: bool = False, num_pieces: int = 1) -> None:
        super().__init__()
        self.recompute = recompute
        self.num_pieces = num_pieces
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends_a_branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.depth) ** 0.5 if ends_a_branch else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        pieces = zip(x.flatten(0, 1).chunk(self.num_pieces), targets.flatten().chunk(self.num_pieces), strict=True)
        if self.num_pieces == 1:
            return self._loss(*next(pieces))
        return torch.stack([checkpoint(self._loss, *piece, use_reentrant=False) for piece in pieces]).mean()

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).float(), targets)


def draw(generator: torch.Generator, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Random tokens and the ones that follow them; from few of the vocabulary, so that there is something to learn."""
    tokens = torch.randint(0, 2000, (batch, length + 1), generator=generator, device=generator.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def machine() -> str:
    """The machine and the versions, in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [f"{_processor()}, {cores} cores", f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if torch.cuda.is_available():
        found.insert(0, torch.cuda.get_device_name())
    return "; ".join(found)


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
