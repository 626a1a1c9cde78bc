"""A checkpoint every ten steps; started again, it goes on from the newest.

python examples/by_feature/checkpoint.py
"""

import argparse

import torch
import torch.nn.functional as F
from gpt import GPT, batches

import zerostd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", default="checkpoints")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = zerostd.prepare(model, optimizer)
    newest = zerostd.latest(options.folder)
    done = zerostd.load(newest, model, optimizer) if newest is not None else 0
    for step, (tokens, targets) in enumerate(batches(options.steps)):
        if step < done:
            continue
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")
        if (step + 1) % 10 == 0:
            zerostd.save(f"{options.folder}/step-{step + 1}", model, optimizer, step + 1, keep=2)


if __name__ == "__main__":
    main()
