"""Train a small convolutional network on scikit-learn's digits: data parallel, then ZeRO stages 1 to 3, side by side.

    python -m torch.distributed.run --nproc-per-node 2 examples/digits.py

Without a launcher (`python examples/digits.py`) it is a world of one, and there is nothing to shard.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zerostd

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE = 64  # over all ranks
NUM_TEST = 360
KINDS = ("parameters", "gradients", "optimizer_states")


class Net(nn.Module):
    """Two convolutions with batch-norm, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.output = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x).flatten(1)
        return self.output(F.relu(self.hidden(x)))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to train on and 360 to test with, the same split on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(stage: int, epochs: int, train_set: TensorDataset) -> nn.Module:
    """An ordinary training loop; `prepare` is all that zerostd adds to it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = zerostd.prepare(model, optimizer, stage=stage)

    sampler = DistributedSampler(train_set, num_replicas=WORLD_SIZE, rank=RANK)
    loader = DataLoader(train_set, batch_size=BATCH_SIZE // WORLD_SIZE, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, test_set: TensorDataset) -> float:
    """Share of the test images named right. Every rank calls the model, since at stage 3 each holds a part of it."""
    images, labels = test_set.tensors
    model.eval()
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    train_set, test_set = load_data()
    rows = []
    for stage in range(4):
        start = time.perf_counter()
        model = train(stage, epochs, train_set)
        seconds = time.perf_counter() - start
        held = zerostd.memory(model).now["device"]  # bytes of this rank
        sizes = [held[kind] for kind in KINDS]
        rows.append((stage, accuracy(model, test_set), [*sizes, sum(sizes)], seconds))
        zerostd.release(model)
    if RANK == 0:
        print_table(rows)
    if dist.is_initialized():
        dist.destroy_process_group()


def print_table(rows: list[tuple[int, float, list[int], float]]) -> None:
    """All stages side by side; stage 0 is data parallel."""
    print(f"\nscikit-learn digits, {WORLD_SIZE} rank(s); model state in bytes on one rank")
    names = ("stage", "accuracy", *KINDS, "    total", "of stage 0", "seconds")
    print("  ".join(names))
    everything = rows[0][2][-1]
    for stage, right, sizes, seconds in rows:
        cells = [str(stage), f"{right:.1%}", *(f"{size:,}" for size in sizes)]
        cells += [f"{sizes[-1] / everything:.1%}", f"{seconds:.1f}"]
        print("  ".join(cell.rjust(len(name)) for cell, name in zip(cells, names, strict=True)))


if __name__ == "__main__":
    main()
