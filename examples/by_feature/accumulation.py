"""Two backward passes make a step.

python examples/by_feature/accumulation.py
"""

import argparse

import torch
import torch.nn.functional as F
from gpt import GPT, batches

import zerostd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = zerostd.prepare(model, optimizer, accumulate=2)
    for step, (tokens, targets) in enumerate(batches(options.steps)):
        for half, wanted in zip(tokens.chunk(2), targets.chunk(2), strict=True):
            loss = F.cross_entropy(model(half).flatten(0, 1), wanted.flatten())
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
