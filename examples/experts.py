"""Train a small language model with a mixture of experts: each token goes to two of 32.

    python examples/experts.py [--quick]
    torchrun --nproc-per-node 2 examples/experts.py [--quick]

The text is made: sentences in several languages, each with words of its own, and every rank reads other languages. So
some experts get no token on some ranks, and no gradient there. A block travels with its experts as one group, which all
ranks gather alike.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerostd

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LANGUAGES, WORDS, LENGTH = 8, 16, 24
NUM_EXPERTS, CHOSEN, WIDTH, DEPTH, BATCH = 32, 2, 48, 2, 4


class Experts(nn.Module):
    """Each token goes to the experts that the router prefers for it; those without a token are not called."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(NUM_EXPERTS)
        )
        self.used = 0  # experts that had tokens in the last forward

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        result, self.used = torch.zeros_like(tokens), 0
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                result = result.index_add(0, rows, expert(tokens[rows]) * weights[rows, places, None])
                self.used += 1
        return result.view_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.experts = Experts()

    def forward(self, x):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, attn_mask=later, need_weights=False)[0]
        return x + self.experts(self.norms[1](x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(LANGUAGES * WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, LANGUAGES * WORDS)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sentences(step):
    """In each language word n is followed by word 3 n + 1 or 5 n + 2. A rank reads every WORLD_SIZE-th language."""
    generator = torch.Generator().manual_seed(1_000 * step + RANK)
    mine = torch.arange(LANGUAGES)[RANK::WORLD_SIZE]
    language = mine[torch.randint(len(mine), (BATCH,), generator=generator)]
    words = [torch.randint(WORDS, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        other = torch.rand(BATCH, generator=generator) < 0.2
        words.append(torch.where(other, 5 * words[-1] + 2, 3 * words[-1] + 1) % WORDS)
    return torch.stack(words, 1) + WORDS * language[:, None]


def main(steps):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = zerostd.prepare(model, optimizer, stage=3, groups=["blocks.*"], max_grad_norm=1.0)

    losses, fewest = [], NUM_EXPERTS
    for step in range(steps):
        text = sentences(step)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        fewest = min(fewest, *(block.experts.used for block in model.blocks))

    held = sum(zerostd.memory(model).now["device"][kind] for kind in ("parameters", "gradients", "optimizer_states"))
    if RANK == 0:
        print(f"{sum(one.numel() for one in model.parameters()):,} parameters, {WORLD_SIZE} rank(s)")
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {steps} steps")
        print(f"in one step only {fewest} of {NUM_EXPERTS} experts of a block had tokens of this rank")
        print(f"model state on one rank {held:,} bytes")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    main(20 if parser.parse_args().quick else 150)
