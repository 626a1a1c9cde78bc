"""Image recognition on five nodes: data parallel against ZeRO stages 1, 2, 3, and stage 3 with state on disk.

    python examples/five_nodes.py

Five processes stand for the nodes; torchrun can start them too. They train one network on scikit-learn's digits, the
same way each time, in processes of their own. Memory is model state and buffers together: what zerostd's ledger has
counted at its peak; of data parallel parameters, gradients, states and the buckets of DDP. Beside it stands what the
process has really taken at most since before the model was made, with activations and whatever torch needs.

The exit code is 1 unless stage 3 needs at least 75 % fewer bytes on each node, at an accuracy within half a point of
data parallel's and above 92 %. Time is not part of the claim. Sharding sends more bytes, at stage 3 one and a half
times as many, so a step is as long where wires are fast, and never shorter. The table says how long it was.
"""

import argparse
import contextlib
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

BATCH_SIZE = 16  # of one node
MOMENTUM = 0.3  # of running means: there are few steps
NUM_BLOCKS = 18
NUM_TEST = 360
MOST_BYTES = 0.25  # of data parallel's, at stage 3
MOST_APART = 0.005  # accuracies
LEAST_ACCURACY = 0.92
STATES = zerostd.Placement(optimizer_states="disk")
EVERYTHING = zerostd.Placement(parameters="disk", optimizer_states="disk")
WAYS: dict[str, dict[str, Any]] = {
    "data parallel (DDP)": {},
    "zerostd, stage 1": {"stage": 1},
    "zerostd, stage 2": {"stage": 2},
    "zerostd, stage 3": {"stage": 3},
    "zerostd, stage 3, states on disk": {"stage": 3, "placement": STATES},
    "zerostd, stage 3, all on disk": {"stage": 3, "placement": EVERYTHING},
}
Data = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One way to train, as the table shows it: bytes of the node that has most."""

    way: str
    state_bytes: int  # in memory
    buffer_bytes: int
    disk_bytes: int
    resident_bytes: int  # that the process took at most, beyond what it had before the model was made
    step_ms: float
    accuracy: float

    @property
    def memory_bytes(self) -> int:
        return self.state_bytes + self.buffer_bytes


class Block(nn.Module):
    """A convolution with batch-norm, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width, momentum=MOMENTUM)
        nn.init.zeros_(self.norm.weight)  # it begins as the identity, so that few epochs are enough

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.convolution(x)))


class Net(nn.Module):
    """Two convolutions, residual blocks, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential()
        for before, after in itertools.pairwise((1, 32, width)):
            self.stem.append(nn.Conv2d(before, after, 3, padding=1, bias=False))
            self.stem.append(nn.BatchNorm2d(after, momentum=MOMENTUM))
            self.stem.append(nn.ReLU())
            self.stem.append(nn.MaxPool2d(2))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(NUM_BLOCKS)))
        self.output = nn.Linear(4 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.blocks(self.stem(x)).flatten(1))


def load_data() -> tuple[Data, Data]:
    """1437 images to train on and 360 to test with."""
    from sklearn.datasets import load_digits  # here: nodes that are spawned get the images and do without

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return (images[train], labels[train]), (images[test], labels[test])


def train(way: str, args: argparse.Namespace, data: Data, disk_path: str) -> tuple[nn.Module, list[float], list[int]]:
    """The loop is the same in all ways; returns the model, the seconds of each step, and its bytes."""
    warm_up(data)
    before = resident(is_peak=False)
    torch.manual_seed(0)
    model: nn.Module = Net(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = WAYS[way]
    if options:
        budget = zerostd.Budget(disk_path=disk_path) if "placement" in options else None
        model, optimizer = zerostd.prepare(model, optimizer, budget=budget, accumulate=1, **options)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    seconds = []
    for epoch in range(args.epochs):
        for batch in batches(epoch, len(data[1])):
            begin = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(data[0][batch]), data[1][batch]).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
    return model, seconds, [*held_bytes(model, optimizer), resident(is_peak=True) - before]


def warm_up(data: Data) -> None:
    """Train a tiny network for a step: what torch loads on its first use is nobody's model."""
    model = Net(8)
    optimizer = torch.optim.AdamW(model.parameters())
    F.cross_entropy(model(data[0][:BATCH_SIZE]), data[1][:BATCH_SIZE]).backward()
    optimizer.step()


def batches(epoch: int, count: int) -> list[torch.Tensor]:
    """This node's images in one epoch: every node has as many batches."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    mine = order[dist.get_rank() :: dist.get_world_size()]
    least = count // dist.get_world_size() // BATCH_SIZE
    return list(mine[: least * BATCH_SIZE].split(BATCH_SIZE))


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int, int]:
    """This node's bytes: model state in memory, buffers at their peak, and what is on disk."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        peak = zerostd.memory(model).peak
        in_memory = {**peak["device"], **{f"host {kind}": size for kind, size in peak.get("host", {}).items()}}
        buffers = sum(size for kind, size in in_memory.items() if kind.endswith("buffers"))
        return sum(in_memory.values()) - buffers, buffers, sum(peak.get("disk", {}).values())
    held = [tensor for p in model.parameters() for tensor in (p, p.grad)]
    held += [value for states in optimizer.state.values() for value in states.values() if value.dim()]
    buckets = model._get_ddp_logging_data()["bucket_sizes"]  # gradients are copied there to be reduced
    return sum(tensor.nbytes for tensor in held if tensor is not None), sum(map(int, buckets.split(","))), 0


def resident(*, is_peak: bool) -> int:
    """Bytes of memory that this process has now, or had at most since it asked for what it has now."""
    with contextlib.suppress(OSError):
        if not is_peak:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is the present again
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return 1024 * int(fields["VmHWM" if is_peak else "VmRSS"].split()[0])
    return 0  # no Linux


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Share of the test images named right; every node calls the model, since at stage 3 each holds a part of it."""
    model.eval()
    return (model(data[0]).argmax(dim=1) == data[1]).float().mean().item()


def measure(way: str, args: argparse.Namespace, data: tuple[Data, Data]) -> Row:
    """Train in one way, on all nodes."""
    with tempfile.TemporaryDirectory() as disk_path:
        model, seconds, held = train(way, args, data[0], disk_path)
        right = accuracy(model, data[1])
        most = torch.tensor(held)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if WAYS[way]:
            zerostd.release(model)
    return Row(way, *most.tolist(), 1e3 * statistics.median(seconds[len(seconds) // 4 :]), right)


def verdicts(rows: list[Row]) -> dict[str, bool]:
    """What is claimed, and whether it was so."""
    plain, sharded = rows[0], next(row for row in rows if row.way == "zerostd, stage 3")
    saved = 1 - sharded.memory_bytes / plain.memory_bytes
    apart = max(abs(row.accuracy - plain.accuracy) for row in rows)
    least = min(row.accuracy for row in rows)
    return {
        f"stage 3 needs {saved:.1%} fewer bytes of state and buffers a node (at least {1 - MOST_BYTES:.0%})": saved
        >= 1 - MOST_BYTES,
        f"accuracies are {100 * apart:.2f} points apart (at most {100 * MOST_APART})": apart <= MOST_APART + 1e-9,
        f"the least accuracy is {least:.1%} (above {LEAST_ACCURACY:.0%})": least > LEAST_ACCURACY,
    }


def show(rows: list[Row], num_nodes: int) -> bool:
    """The table, and what it shows; True if all of it is as claimed."""
    table = Table(title=f"scikit-learn digits, {num_nodes} nodes; MB of one node")
    for name in ("", "state", "buffers", "both", "of data parallel", "disk", "resident", "step", "accuracy"):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        sizes = row.state_bytes, row.buffer_bytes, row.memory_bytes, row.disk_bytes, row.resident_bytes
        cells = [f"{size / 1e6:.1f}" if size else "" for size in sizes]
        cells.insert(3, f"{row.memory_bytes / rows[0].memory_bytes:.1%}")
        table.add_row(row.way, *cells, f"{row.step_ms:.1f} ms", f"{row.accuracy:.1%}")
    console = Console()
    (console if console.is_terminal else Console(width=130)).print(table)
    slower = ", ".join(f"{row.step_ms / rows[0].step_ms:.2f}" for row in rows[1:])
    print(f"Steps take {slower} of data parallel's; {num_nodes} processes share {os.cpu_count()} cores and a loopback.")
    found = verdicts(rows)
    for text, is_so in found.items():
        print(("yes: " if is_so else "NO: ") + text)
    return all(found.values())


def node(rank: int, num_nodes: int, meeting: str, args: argparse.Namespace, data: tuple[Data, Data]) -> None:
    """One node's part in the ways that `args` names; the first one writes the rows down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_nodes)
    rows = [measure(way, args, data) for way in args.ways]
    if rank == 0:
        args.rows.write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


def report(rows: list[Row], num_nodes: int, path: Path | None) -> None:
    """Show the rows; exit with 1 if something is not as claimed."""
    is_so = show(rows, num_nodes)
    if path is not None:
        found = {"nodes": num_nodes, "rows": [asdict(row) for row in rows], "verdicts": verdicts(rows)}
        path.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(0 if is_so else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5, help="processes, unless a launcher says how many")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=192, help="channels of a block; 6 million parameters with 192")
    parser.add_argument("--quick", action="store_true", help="two epochs, 64 channels, and not all on disk")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows and verdicts there")
    args = parser.parse_args()
    if args.quick:
        args.epochs, args.width = 2, 64
    data = load_data()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        args.rows = Path(folder, "rows.json")
        if "RANK" in os.environ:
            args.ways = list(WAYS)
            node(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", args, data)
            if os.environ["RANK"] == "0":
                report(
                    [Row(**row) for row in json.loads(args.rows.read_text())], int(os.environ["WORLD_SIZE"]), args.json
                )
            return
        ways = list(WAYS)[:-1] if args.quick else list(WAYS)
        torch.multiprocessing.set_forkserver_preload(["torch._dynamo", "zerostd.api"])  # once, not for every node
        for number, way in enumerate(ways):  # in processes of its own: what the last one left is not counted
            args.ways = [way]
            given = (args.nodes, f"file://{folder}/meeting{number}", args, data)
            torch.multiprocessing.start_processes(node, given, nprocs=args.nodes, start_method="forkserver")
            rows += [Row(**row) for row in json.loads(args.rows.read_text())]
    report(rows, args.nodes, args.json)


if __name__ == "__main__":
    main()
