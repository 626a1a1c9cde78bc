"""A Horovod script as its users have it, on scikit-learn's digits; one import is changed.

    python -m torch.distributed.run --nproc-per-node 2 examples/horovod_digits.py

Without a launcher (`python examples/horovod_digits.py`) it is a world of one.
"""

import argparse
import os
import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zerostd
import zerostd.horovod as hvd  # was: import horovod.torch as hvd

NUM_TEST = 360


class Net(nn.Module):
    """Two convolutions, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.output(F.relu(self.hidden(x)))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to train on and 360 to test with, the same split on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def metric_average(value: float, name: str) -> float:
    """The mean of a number over all ranks."""
    return hvd.allreduce(torch.tensor([value]), name=name).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.02, help="for one rank; multiplied by their number")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half the bytes")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42 + hvd.rank())  # other weights on every rank, until they are broadcast
    torch.set_num_threads(1)

    train_set, test_set = load_data()
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(1, args.epochs // 2), gamma=0.5)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
        mean_loss = metric_average(loss.item(), "loss")  # a collective: every rank calls it
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean_loss:.4f}")

    model.eval()
    images, labels = test_set.tensors
    mine = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        right = (model(images[mine]).argmax(dim=1) == labels[mine]).float().mean().item()
    accuracy = metric_average(right, "accuracy")
    states = zerostd.memory(optimizer.container).now["device"][
        "optimizer_states"
    ]  # what zerostd adds: states are sharded
    if hvd.rank() == 0:
        path = os.path.join(tempfile.mkdtemp(), "digits.pt")
        torch.save(model.state_dict(), path)
        print(f"accuracy {accuracy:.1%} on {hvd.size()} rank(s); {states:,} bytes of optimizer states on rank 0")
        print(f"saved {path}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
