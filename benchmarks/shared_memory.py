"""Gathers, reduces and all-reduces of gloo ranks of one host: through shared memory, and through sockets.

    python benchmarks/shared_memory.py --write NAME

Both kinds of wires take turns in one run, with everything else alike; every size passes through shared memory here, so
that the table shows from which one on it pays. Milliseconds are medians, between two barriers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from local_ranks import run_ranks

from zerostd.communication import SharedWires, Wires, World, shared_wires
from zerostd.monitoring import Ledger

LARGEST = 128 << 20  # bytes
SMALLEST = 64 << 10
VERBS = {"gather": "all-gather", "reduce": "reduce-scatter", "reduce_everywhere": "all-reduce"}
RESULTS = Path(__file__).parent / "results"


def measure(rank: int, size: int, lines: list[str]) -> None:
    """Be one rank; rank 0 appends the table's rows."""
    world = World.discover(torch.device("cpu"))
    kinds: list[Wires] = [Wires(world, Ledger()), SharedWires(world, Ledger())]
    for wires in kinds:
        wires.reserve(LARGEST)
    shared_wires.SMALLEST_BYTES = 1
    whole = torch.ones(LARGEST // 2, dtype=torch.bfloat16)
    num_bytes = SMALLEST
    while num_bytes <= LARGEST:
        full = whole[: num_bytes // 2]
        shard = full.view(size, -1)[rank].clone()
        seconds: dict[tuple[str, int], list[float]] = {(verb, kind): [] for verb in VERBS for kind in range(len(kinds))}
        for _ in range(max(9, min(40, LARGEST // num_bytes))):
            for (verb, kind), times in seconds.items():
                arguments = {"gather": (full, shard), "reduce": (full, shard), "reduce_everywhere": (full,)}[verb]
                dist.barrier()
                begin = time.perf_counter()
                getattr(kinds[kind], verb)(*arguments).wait()
                dist.barrier()
                times.append(time.perf_counter() - begin)
        cells = []
        for verb in VERBS:
            plain, shared = (1e3 * statistics.median(seconds[verb, kind][1:]) for kind in range(len(kinds)))
            cells.append(f"{plain:.2f} | {shared:.2f} | {plain / shared:.2f}")
        if rank == 0:
            lines.append(f"| {size} | {num_bytes / 2**20:g} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
        num_bytes *= 4 if num_bytes < 1 << 20 else 2
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="NAME", help="write the table to results/NAME.md")
    name = parser.parse_args().write
    lines = mp.Manager().list()
    for size in (2, 4):
        run_ranks(measure, size, lines)
    head = ["ranks", "MiB", *(f"{verb} {column}" for verb in VERBS.values() for column in ("sockets", "shared", "x"))]
    table = [f"| {' | '.join(head)} |", f"|{'--:|' * len(head)}", *lines]
    load = os.getloadavg()[0]
    text = (
        "# Shared memory against sockets, gloo ranks of one host\n\n"
        f"`python benchmarks/shared_memory.py`, {os.cpu_count()} cores, load {load:.0f} at the end, bf16. Milliseconds;"
        f" x is sockets / shared. In use from {shared_wires.SMALLEST_BYTES >> 20} MiB on.\n\n" + "\n".join(table) + "\n"
    )
    if name:
        (RESULTS / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
