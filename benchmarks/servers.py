"""A worker and a parameter server on two "nodes": network namespaces of one machine, with a slow wire between them.

    sudo python benchmarks/servers.py --write servers-cpu

The model computes by sleeping, forward and backward, as an accelerator leaves the CPU alone while it computes. Its
parameters, gradients and updates are real, in bf16 with AdamW. A step should take as long as its computing or as its
bytes on the wire, whichever is longer. Bytes are counted by the kernel at the wire. The rate of the wire is that of
plain sends between the same two processes, right before: fast wires are limited by the CPU. Needs Linux, root, `ip` and
`tc`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpt import RESULTS, machine
from nodes import nodes, sent_bytes
from torch import nn

import zerostd

WIDTH, DEPTH = 1024, 16
RATES = {500: "1mb", 1000: "2mb", 5000: "10mb"}  # MB/s, with the bytes that may pass at once
COMPUTES = (0.0, 0.6)  # seconds of a step: a third in forward
STEPS = 8
NUM_SKIPPED = 2
SENT = 64 << 20  # bytes, to find the rate


class Sleep(torch.autograd.Function):
    """Takes time in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * Sleep.apply(self.layer(x), self.seconds)


def wire_rate() -> float:
    """Bytes/s of plain sends from the worker to the server, and back; the slower of the two."""
    rates = []
    for source in (0, 1):
        memory = torch.zeros(SENT, dtype=torch.uint8)
        for _ in range(2):
            dist.barrier()
            begun = time.perf_counter()
            if dist.get_rank() == source:
                dist.send(memory, 1 - source)
            else:
                dist.recv(memory, source)
            dist.barrier()
            last = SENT / (time.perf_counter() - begun)
        rates.append(last)
    return min(rates)


def train(compute_s: float, *, servers: int | None = 1) -> dict[str, float]:
    """Steps of the worker; the server's process does not return from prepare."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(compute_s / 3 / DEPTH) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"precision": "bf16", "accumulate": 1, "groups": ["*"], "servers": servers}
    model, optimizer = zerostd.prepare(model, optimizer, **options)
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))
    starts = []
    for step in range(STEPS + 1):
        if step == NUM_SKIPPED:
            sent = sent_bytes()
        starts.append(time.perf_counter())
        loss = model(x).square().mean()
        if step < STEPS:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    numel = sum(parameter.numel() for parameter in model.parameters())
    pushed = (sent_bytes() - sent) / (STEPS - NUM_SKIPPED) / numel
    times = [after - before for before, after in itertools.pairwise(starts)][NUM_SKIPPED:]
    received = zerostd.memory(model).sent["reduce"] / STEPS / numel
    zerostd.release(model)
    return {"step_s": median(times), "bytes_at_wire": pushed, "bytes_pushed": received, "numel": numel}


def computing(compute_s: float) -> float:
    """Seconds of forward and backward by themselves."""
    model = nn.Sequential(*(Block(compute_s / 3 / DEPTH) for _ in range(DEPTH))).bfloat16()
    x = torch.randn(1, WIDTH).bfloat16()
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        model(x).square().mean().backward()
        times.append(time.perf_counter() - begun)
    return min(times)


def work(compute_s: float, out: str) -> None:
    """One process: rank 0 is the worker, rank 1 the server."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rate = wire_rate()
    own_s = computing(compute_s) if dist.get_rank() == 0 else 0.0
    row = train(compute_s)
    Path(out).write_text(json.dumps(row | {"rate": rate, "compute_s": own_s}))


def run_pair(rate: int, compute_s: float) -> dict[str, float]:
    """Start both processes, each in its namespace."""
    with tempfile.TemporaryDirectory() as folder, nodes(8 * rate, RATES[rate]) as names:
        out = Path(folder) / "row.json"
        ranks = []
        for rank, name in enumerate(names):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
                "NODE": str(rank),
            }
            environment |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29512", "GLOO_SOCKET_IFNAME": f"wire{rank}"}
            words = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                __file__,
                "--compute",
                str(compute_s),
                "--out",
                str(out),
            ]
            ranks.append(subprocess.Popen(words, env=environment))
        for process in ranks:
            if process.wait() != 0:
                raise SystemExit(f"a rank ended with {process.returncode}")
        row: dict[str, float] = json.loads(out.read_text())
    return row | {"nominal": rate}


def table(rows: list[dict[str, float]]) -> str:
    """The results as a page."""
    lines = [
        "# A parameter server on another node",
        "",
        "One worker and one server, gloo, in two network namespaces;",
        f"{rows[0]['numel'] / 1e6:.1f} M parameters, bf16, AdamW. Computing is a sleep, as an accelerator leaves the",
        "CPU alone. The wire is limited by tbf; its rate is that of plain sends between both processes right before.",
        "A step should take max(computing, bytes both ways / rate).",
        "",
        f"- machine: {machine()}",
        "- command: `python benchmarks/servers.py`",
        f"- date: {date.today()}",
        "",
        "| wire, nominal MB/s | measured | computing s | bytes both ways / rate s | step s | over the longer | "
        "bytes a parameter pushed | at the wire |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        on_wire = 2 * row["bytes_pushed"] * row["numel"] / row["rate"]
        longer = max(row["compute_s"], on_wire)
        lines.append(
            f"| {row['nominal']} | {row['rate'] / 1e6:.0f} | {row['compute_s']:.3f} | {on_wire:.3f} | "
            f"{row['step_s']:.3f} | {row['step_s'] / longer:.3f} | {row['bytes_pushed']:.3f} | "
            f"{row['bytes_at_wire']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="NAME", help="write benchmarks/results/NAME.md")
    parser.add_argument("--compute", type=float, help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out is not None:
        work(arguments.compute, arguments.out)
        return
    rows = [run_pair(rate, compute_s) for rate in RATES for compute_s in COMPUTES]
    print(table(rows))
    if arguments.write:
        (RESULTS / f"{arguments.write}.md").write_text(table(rows))


if __name__ == "__main__":
    main()
