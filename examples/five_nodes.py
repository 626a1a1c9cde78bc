"""Image recognition on five nodes: data parallel against ZeRO stages 1, 2, 3, and stage 3 with states on disk.

    python examples/five_nodes.py

Five processes stand for the nodes; torchrun can start them too. They train one network on scikit-learn's digits, the
same way each time. The exit code is 1 unless stage 3 needs at least 75 % fewer bytes of model state on each node, at an
accuracy within half a point of data parallel's and above 92 %.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import zerostd

BATCH_SIZE = 32  # of one node
NUM_TEST = 360
MOST_BYTES = 0.25  # of data parallel's, at stage 3
MOST_APART = 0.005  # accuracies
LEAST_ACCURACY = 0.92
DISK = zerostd.Placement(optimizer_states="disk")
WAYS: dict[str, dict[str, Any]] = {
    "data parallel (DDP)": {},
    "zerostd, stage 1": {"stage": 1},
    "zerostd, stage 2": {"stage": 2},
    "zerostd, stage 3": {"stage": 3},
    "zerostd, stage 3, states on disk": {"stage": 3, "placement": DISK},
}
Data = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One way to train, as the table shows it."""

    way: str
    memory_bytes: int  # of model state in a node's memory, on the node that has most
    disk_bytes: int
    step_ms: float
    accuracy: float


class Net(nn.Module):
    """Three convolutions with batch-norm, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (1, 16, 32, 64)
        self.features = nn.Sequential()
        for before, after in itertools.pairwise(sizes):
            self.features.append(nn.Conv2d(before, after, 3, padding=1, bias=False))
            self.features.append(nn.BatchNorm2d(after))
            self.features.append(nn.ReLU())
        self.features.append(nn.MaxPool2d(2))
        self.hidden = nn.Linear(64 * 4 * 4, 256)
        self.output = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(F.relu(self.hidden(self.features(x).flatten(1))))


def load_data() -> tuple[Data, Data]:
    """1437 images to train on and 360 to test with."""
    from sklearn.datasets import load_digits  # here: nodes that are spawned get the images and do without

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return (images[train], labels[train]), (images[test], labels[test])


def train(way: str, epochs: int, data: Data, disk_path: str) -> tuple[nn.Module, list[float], tuple[int, int]]:
    """The loop is the same in all ways; returns the model, the seconds of each step, and bytes of memory and disk."""
    torch.manual_seed(0)
    model: nn.Module = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = WAYS[way]
    if options:
        budget = zerostd.Budget(disk_path=disk_path) if "placement" in options else None
        model, optimizer = zerostd.prepare(model, optimizer, budget=budget, accumulate=1, **options)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    seconds = []
    for epoch in range(epochs):
        for batch in batches(epoch, len(data[1])):
            begin = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(data[0][batch]), data[1][batch]).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
    return model, seconds, state_bytes(model, optimizer, is_plain=not options)


def batches(epoch: int, count: int) -> list[torch.Tensor]:
    """This node's images in one epoch: every node has as many batches."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    mine = order[dist.get_rank() :: dist.get_world_size()]
    least = count // dist.get_world_size() // BATCH_SIZE
    return list(mine[: least * BATCH_SIZE].split(BATCH_SIZE))


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_plain: bool) -> tuple[int, int]:
    """Parameters, gradients and optimizer states of this node: in memory, and on disk."""
    if not is_plain:
        memory = zerostd.memory(model)
        return memory.total("device") + memory.total("host"), memory.total("disk")
    held = [tensor for p in model.parameters() for tensor in (p, p.grad)]
    held += [value for states in optimizer.state.values() for value in states.values() if value.dim()]
    return sum(tensor.nbytes for tensor in held if tensor is not None), 0


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Share of the test images named right; every node calls the model, since at stage 3 each holds a part of it."""
    model.eval()
    return (model(data[0]).argmax(dim=1) == data[1]).float().mean().item()


def experiment(epochs: int, data: tuple[Data, Data]) -> list[Row]:
    """Every way in turn, on all nodes."""
    rows = []
    for way in WAYS:
        with tempfile.TemporaryDirectory() as disk_path:
            model, seconds, held = train(way, epochs, data[0], disk_path)
            right = accuracy(model, data[1])
            most = torch.tensor(held)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            step_ms = 1e3 * statistics.median(seconds[len(seconds) // 4 :])
            rows.append(Row(way, int(most[0]), int(most[1]), step_ms, right))
            if WAYS[way]:
                zerostd.release(model)
    return rows


def verdicts(rows: list[Row]) -> dict[str, bool]:
    """What is claimed, and whether it was so."""
    plain, sharded = rows[0], next(row for row in rows if row.way == "zerostd, stage 3")
    saved = 1 - sharded.memory_bytes / plain.memory_bytes
    apart = max(abs(row.accuracy - plain.accuracy) for row in rows)
    least = min(row.accuracy for row in rows)
    return {
        f"stage 3 needs {saved:.1%} fewer bytes of model state a node (at least {1 - MOST_BYTES:.0%})": saved
        >= 1 - MOST_BYTES,
        f"accuracies are {100 * apart:.2f} points apart (at most {100 * MOST_APART})": apart <= MOST_APART + 1e-9,
        f"the least accuracy is {least:.1%} (above {LEAST_ACCURACY:.0%})": least > LEAST_ACCURACY,
    }


def show(rows: list[Row], num_nodes: int) -> bool:
    """The table, and what it shows; True if all of it is as claimed."""
    table = Table(title=f"scikit-learn digits, {num_nodes} nodes; model state on one node")
    for name in ("", "memory", "of data parallel", "disk", "step", "accuracy"):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        share = f"{row.memory_bytes / rows[0].memory_bytes:.1%}"
        sizes = f"{row.memory_bytes:,}", share, f"{row.disk_bytes:,}" if row.disk_bytes else ""
        table.add_row(row.way, *sizes, f"{row.step_ms:.1f} ms", f"{row.accuracy:.1%}")
    console = Console()
    (console if console.is_terminal else Console(width=110)).print(table)
    found = verdicts(rows)
    for text, is_so in found.items():
        print(("yes: " if is_so else "NO: ") + text)
    return all(found.values())


def node(rank: int, num_nodes: int, meeting: str, args: argparse.Namespace, data: tuple[Data, Data]) -> None:
    """One node's part; the first one speaks, and exits with 1 if something is not as claimed."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_nodes)
    rows = experiment(args.epochs, data)
    is_so = True
    if rank == 0:
        is_so = show(rows, num_nodes)
        if args.json is not None:
            found = {"nodes": num_nodes, "rows": [asdict(row) for row in rows], "verdicts": verdicts(rows)}
            args.json.write_text(json.dumps(found, indent=2) + "\n")
    dist.destroy_process_group()
    if not is_so:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5, help="processes, unless a launcher says how many")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="three epochs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows and verdicts there")
    args = parser.parse_args()
    args.epochs = 3 if args.quick else args.epochs
    if "RANK" in os.environ:
        node(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", args, load_data())
        return
    with tempfile.TemporaryDirectory() as folder:
        given = (args.nodes, f"file://{folder}/meeting", args, load_data())
        try:  # a fork server: torch is imported once for all
            torch.multiprocessing.start_processes(node, given, nprocs=args.nodes, start_method="forkserver")
        except torch.multiprocessing.ProcessExitedException as error:  # it has said why
            sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
