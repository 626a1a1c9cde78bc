"""Small real models with their data, each a `Case`.

`case.make(seed)` builds the model, `case.batch(index, rank, world_size, dtype)` draws the data of one micro-batch of
one rank (the same tensors for the same arguments, in any process), `case.loss(model, batch)` is the mean loss over it
and `case.join(batches)` is the batch one process would see instead of several ranks. Ranks get equally many samples, so
the mean of the ranks' losses is the loss of the joined batch.

No parameter here has a gradient that is zero but for rounding (no bias in front of a batch-norm, none on attention
keys): Adam divides by the gradient's own size, so such a parameter would follow the noise and no two correct
implementations would agree on it. Nor is any a single number, which may pass zero and so make any relative error large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, its data and the groups that a test asks for."""

    name: str
    make: Callable[[int], nn.Module]
    batch: Callable[[int, int, int, torch.dtype], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    join: Callable[[Sequence[Batch]], Batch]
    groups: tuple[str, ...]  # globs of module names, so that even a small model has several groups
    some_unused: bool = False  # some parameters get no gradient in some backward passes
    batch_norm: bool = False  # the joined batch is normalised together, so it differs from the ranks' batches


def on_device(case: Case, device: str) -> Case:
    """The same model and data, drawn on the CPU and moved to a device."""

    def make(seed: int) -> nn.Module:
        return case.make(seed).to(device)

    def batch(index: int, rank: int, world_size: int, dtype: torch.dtype) -> Batch:
        return tuple(tensor.to(device) for tensor in case.batch(index, rank, world_size, dtype))

    return replace(case, make=make, batch=batch)


def _generator(index: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * index + 7919 * rank + 17)


def _seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return make


def _join(batches: Sequence[Batch]) -> Batch:
    return tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True))


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


# -- multilayer perceptron --


class MLP(nn.Module):
    def __init__(self, features: int = 24, width: int = 48, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.inlet = nn.Linear(features, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.outlet = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.inlet(x))
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.outlet(x)


def _mlp_batch(index: int, rank: int, world_size: int, dtype: torch.dtype) -> Batch:
    generator = _generator(index, rank)
    return torch.randn(16, 24, generator=generator).to(dtype), torch.randint(10, (16,), generator=generator)


# -- convolutions with batch-norm --


class ConvBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(x)))


class CNN(nn.Module):
    def __init__(self, channels: int = 12, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ConvBlock(3, channels, 1), ConvBlock(channels, 2 * channels, 2))
        self.outlet = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(self.blocks(x).mean(dim=(2, 3)))


def _cnn_batch(index: int, rank: int, world_size: int, dtype: torch.dtype) -> Batch:
    generator = _generator(index, rank)
    return torch.randn(8, 3, 8, 8, generator=generator).to(dtype), torch.randint(10, (8,), generator=generator)


# -- transformer with a tied head --


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Decoder whose head is its token embedding: one parameter under two names."""

    def __init__(self, vocabulary: int = 48, length: int = 12, width: int = 32, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.2)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _gpt_batch(index: int, rank: int, world_size: int, dtype: torch.dtype) -> Batch:
    return (torch.randint(48, (4, 13), generator=_generator(index, rank)),)


def _gpt_loss(model: nn.Module, batch: Batch) -> Tensor:
    (tokens,) = batch
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# -- graph network --

NODES = 20  # per rank


class MessageRound(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width))
        self.update = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = self.message(torch.cat((nodes[source], nodes[target]), dim=-1))
        received = 0.3 * torch.zeros_like(nodes).index_add_(0, target, messages)
        return self.norm(nodes + F.gelu(self.update(torch.cat((nodes, received), dim=-1))))


class GraphNetwork(nn.Module):
    def __init__(self, features: int = 8, width: int = 32, rounds: int = 2) -> None:
        super().__init__()
        self.inlet = nn.Linear(features, width)
        self.rounds = nn.ModuleList(MessageRound(width) for _ in range(rounds))
        self.outlet = nn.Linear(width, 1, bias=False)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        nodes = self.inlet(nodes)
        for one_round in self.rounds:
            nodes = one_round(nodes, edges)
        return self.outlet(nodes).squeeze(-1)


def _graph_batch(index: int, rank: int, world_size: int, dtype: torch.dtype) -> Batch:
    generator = _generator(index, rank)
    nodes = torch.randn(NODES, 8, generator=generator)
    edges = torch.randint(NODES, (2, 48 + 8 * rank), generator=generator)  # ranks have unequal work, equal means
    return nodes.to(dtype), edges, nodes.square().sum(-1).sub(8).div(2).to(dtype)


def _graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    nodes, edges, targets = batch
    return F.mse_loss(model(nodes, edges), targets)


def _graph_join(batches: Sequence[Batch]) -> Batch:
    nodes, edges, targets = zip(*batches, strict=True)
    shifted = [edge + NODES * rank for rank, edge in enumerate(edges)]
    return torch.cat(nodes), torch.cat(shifted, dim=1), torch.cat(targets)


# -- mixture of experts --

EXPERTS = 4
REST_LENGTH = 6  # micro-batches during which one expert rests on every rank; a multiple of the accumulations in use


class ExpertBlock(nn.Module):
    """Routes each token to one expert; an expert without tokens is not called and gets no gradient.

    The gate starts out reading the token's topic (its first entries) with a clear margin, so which experts are used is
    a property of the data and no rounding, not even of bf16, sends a token elsewhere.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(EXPERTS)
        )
        with torch.no_grad():
            self.gate.weight.mul_(0.1)
            self.gate.weight[:, :EXPERTS] += torch.eye(EXPERTS)
            for expert in self.experts:
                expert[2].weight.mul_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(dim=-1).max(dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = (choice == number).nonzero(as_tuple=True)
            if len(rows):
                y = y.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return x + y


class MixtureOfExperts(nn.Module):
    def __init__(self, width: int = 24, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ExpertBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.outlet = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.outlet(self.norm(x))


def topics(index: int, rank: int) -> tuple[int, ...]:
    """The experts that rank's micro-batch needs: differ by rank, and one rests everywhere for `REST_LENGTH` of them."""
    resting = (index // REST_LENGTH) % EXPERTS
    awake = [topic for topic in range(EXPERTS) if topic != resting]
    first = awake[(rank + index) % len(awake)]
    return (first,) if (rank + index) % 2 else (first, awake[(rank + index + 1) % len(awake)])


def _experts_batch(index: int, rank: int, world_size: int, dtype: torch.dtype) -> Batch:
    generator = _generator(index, rank)
    x = 0.5 * torch.randn(16, 24, generator=generator)
    chosen = torch.tensor(topics(index, rank))
    x[:, :EXPERTS] += 3.0 * F.one_hot(chosen[torch.arange(16) % len(chosen)], EXPERTS)
    return x.to(dtype), torch.randint(10, (16,), generator=generator)


MODELS: dict[str, Case] = {
    case.name: case
    for case in (
        Case("mlp", _seeded(MLP), _mlp_batch, _classify, _join, ("layers.*",)),
        Case("cnn", _seeded(CNN), _cnn_batch, _classify, _join, ("blocks.*",), batch_norm=True),
        Case("gpt", _seeded(GPT), _gpt_batch, _gpt_loss, _join, ("blocks.*",)),
        Case("graph", _seeded(GraphNetwork), _graph_batch, _graph_loss, _graph_join, ("rounds.*",)),
        Case("experts", _seeded(MixtureOfExperts), _experts_batch, _classify, _join, ("blocks.*",), some_unused=True),
    )
}
