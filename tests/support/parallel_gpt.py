"""A small GPT that `parallelize` makes tensor parallel and sequence parallel, as torch's tutorials do it.

Rows of the embedding and of the head do not divide by two, so that splits have unlike sizes. Norms are replicated, and
their gradients come as partial sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY = 51
WIDTH = 24
HEAD = 6  # numbers of one head
LENGTH = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)  # as many heads as are here
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 4)
        self.down = nn.Linear(2 * WIDTH + 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ParallelGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: ParallelGPT, mesh: DeviceMesh) -> ParallelGPT:
    """Spread the model over a mesh of one dimension, in place."""
    rows = Shard(1)  # of activations, by position
    outer = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }
    inner = {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),)),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=rows),
        "norm2": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows),
    }
    parallelize_module(model, mesh, outer)
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    return model


def batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)


def loss(model: nn.Module, number: int, rank: int) -> Tensor:
    """The mean over one batch of what is to come next, of a data-parallel rank."""
    tokens = batch(number, rank)
    logits = model(tokens)
    targets = tokens.roll(-1, dims=1)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
