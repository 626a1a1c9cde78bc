"""Train a small GPT from scratch, in plain PyTorch. The other scripts here add one thing each.

python examples/by_feature/base.py
"""

import argparse

import torch
import torch.nn.functional as F
from gpt import GPT, batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, (tokens, targets) in enumerate(batches(options.steps)):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
