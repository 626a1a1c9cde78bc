"""Training that goes on, whatever happens to the ranks: a checkpoint every few steps, and the newest one at the start.

    python -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint localhost:29400 examples/elastic.py

Start it twice, on two machines or in two shells, and kill one: the other goes on alone from the newest checkpoint.
The same samples are trained on in the same order by any number of ranks, so the loss goes on where it was.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import zerostd

BATCH_SIZE = 96  # over all ranks


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--folder", default="checkpoints", help="a directory, or a URL such as s3://mine/run-7")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of a step, to have time to kill something")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zerostd.prepare(model, optimizer, stage=3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    step = 0
    newest = zerostd.latest(options.folder)
    if newest is not None:
        extra = zerostd.load(newest, model, optimizer)
        step = extra["step"]
        scheduler.load_state_dict(extra["scheduler"])
    if rank == 0:
        print(f"step {step}: {size} rank(s), from {newest or 'the beginning'}", flush=True)

    while step < options.steps:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:BATCH_SIZE]
        mine = order[rank::size]
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        if step % options.every == 0 or step == options.steps:
            extra = {"step": step, "scheduler": scheduler.state_dict()}
            zerostd.save(f"{options.folder}/step-{step:06d}", model, optimizer, extra, keep=2)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.4f}, saved", flush=True)
        time.sleep(options.pause)

    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    if rank == 0:
        print(f"accuracy {100 * accuracy:.1f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
