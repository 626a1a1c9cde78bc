"""A parameter server: ten workers add up gradients, a server updates 1,000 parameters and hands them out.

    torchrun --nproc-per-node 11 examples/parameter_server.py
    torchrun --nproc-per-node 13 examples/parameter_server.py --servers 3

Each worker runs ten mini-batches, adds their gradients up and pushes the sum once. The server adds up what the workers
pushed (G = sum of g_t), or takes the mean, updates, and sends the new parameters back. The exit code is 1 unless the
parameters are those of one process that sees all hundred mini-batches.
"""

import argparse
import os
import sys

import torch
from torch import nn

import zerostd

NUM_WORKERS = 10
NUM_BATCHES = 10  # of a worker in one step
STEPS = 5
LIMIT = 1e-5  # relative: sums are taken in another order


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(99, 10)  # 1,000 parameters


def make_optimizer(model: nn.Module, reduce: str) -> torch.optim.Optimizer:
    """The sum of a hundred gradients takes a hundredth of the rate."""
    return torch.optim.SGD(model.parameters(), lr=0.1 if reduce == "mean" else 0.001, momentum=0.9)


def loss_of(model: nn.Module, step: int, worker: int, batch: int) -> torch.Tensor:
    """One mini-batch of one worker."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * worker + batch)
    x = torch.randn(8, 99, generator=generator)
    return (model(x) - x[:, :10]).square().mean()


def alone(reduce: str) -> nn.Module:
    """One process that sees all mini-batches."""
    model = make_model()
    optimizer = make_optimizer(model, reduce)
    for step in range(STEPS):
        pairs = [(worker, batch) for worker in range(NUM_WORKERS) for batch in range(NUM_BATCHES)]
        share = 1 / len(pairs) if reduce == "mean" else 1.0
        for worker, batch in pairs:
            (share * loss_of(model, step, worker, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(servers: int, reduce: str) -> None:
    """One rank's part. On a server, prepare does not return."""
    model = make_model()
    optimizer = make_optimizer(model, reduce)
    model, optimizer = zerostd.prepare(model, optimizer, servers=servers, accumulate=NUM_BATCHES, reduce=reduce)
    rank = int(os.environ["RANK"])
    share = 1 / NUM_BATCHES if reduce == "mean" else 1.0  # the mean of a worker's own passes is the loop's business
    for step in range(STEPS):
        for batch in range(NUM_BATCHES):
            (share * loss_of(model, step, rank, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = zerostd.full_state_dict(model)
    pushed = zerostd.memory(model).sent["reduce"] / STEPS
    if rank:
        return
    expected = alone(reduce).state_dict()
    apart = max(((state[key] - expected[key]).abs().max() / expected[key].abs().max()).item() for key in expected)
    is_same = apart <= LIMIT
    print(
        f"{'yes' if is_same else 'NO'}: {NUM_WORKERS} workers and {servers} server(s), the {reduce} of gradients: ",
        end="",
    )
    print(f"parameters {apart:.1e} from one process with all mini-batches; {pushed:,.0f} bytes pushed a step")
    if not is_same:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--reduce", choices=("sum", "mean"), default="sum")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(f"start it with torchrun --nproc-per-node {NUM_WORKERS + args.servers} {sys.argv[0]}")
    torch.set_num_threads(1)
    train(args.servers, args.reduce)


if __name__ == "__main__":
    main()
