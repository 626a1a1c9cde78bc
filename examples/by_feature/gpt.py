"""A small GPT from scratch and its data, for the scripts beside it: letters of what Python's own help says."""

import pydoc_data.topics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, DEPTH, LENGTH, BATCH = 192, 6, 4, 32, 16


class Block(nn.Module):
    """Attention, then two linear layers, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """From letters to the letters that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.letters(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(num_steps: int, rank: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Random places of the text, other ones for each rank."""
    text = torch.frombuffer(bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8).long()
    places = torch.Generator().manual_seed(rank)
    for _ in range(num_steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=places).tolist()
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]
