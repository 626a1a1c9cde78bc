"""Groups of unequal sizes at stage 3: gathered one ahead, and as far ahead as the planned buffers hold.

    python benchmarks/uneven.py --write uneven-cpu

Gloo ranks of this machine train twenty small blocks and two large ones between them. Both ways take turns of ten steps
in one process. Seconds are medians; bytes of buffers are the same, since they are those of the largest neighbours.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from local_ranks import run_ranks
from torch import Tensor, nn

import zerostd

WIDTH = 256
INNER = [128] * 10 + [2048] * 2 + [128] * 10
BATCHES = (64, 512)
ROUNDS, STEPS, WARM = 6, 10, 5
RESULTS = Path(__file__).parent / "results"


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def measure(rank: int, size: int, lines: Any) -> None:
    """Be one rank; rank 0 appends the table's rows."""
    for batch in BATCHES:
        torch.manual_seed(0)
        model = nn.Sequential(*map(Block, INNER))
        optimizer: Any = torch.optim.AdamW(model.parameters())
        placement = zerostd.Placement()
        model, optimizer = zerostd.prepare(model, optimizer, stage=3, groups=["*"], accumulate=1, placement=placement)
        gatherer = model.__dict__["_zerostd"].gatherer
        room = gatherer._room
        rows = torch.randn(batch, WIDTH)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        peaks = {}
        for number in range(2 * ROUNDS):
            by_bytes = bool(number % 2)
            gatherer._room = room if by_bytes else dict.fromkeys(room, 0)
            for step in range(WARM + STEPS):
                begin = time.perf_counter()
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step >= WARM:
                    seconds[by_bytes].append(time.perf_counter() - begin)
            peaks[by_bytes] = zerostd.memory(model).peak["device"]["buffers"]
        assert peaks[False] == peaks[True], peaks
        ahead, several = (statistics.median(seconds[kind]) for kind in (False, True))
        if rank == 0:
            lines.append(f"| {size} | {batch} | {1e3 * ahead:.1f} | {1e3 * several:.1f} | {several / ahead:.3f} |")
            print(lines[-1], flush=True)
        zerostd.release(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="NAME", help="write the table to results/NAME.md")
    name = parser.parse_args().write
    lines = mp.Manager().list()
    for size in (2, 4):
        run_ranks(measure, size, lines)
    head = "| ranks | rows of a batch | one ahead, ms | as buffers hold, ms | ratio |\n|--:|--:|--:|--:|--:|\n"
    text = (
        f"# Groups of unequal sizes, gathered ahead\n\n{date.today()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, load {os.getloadavg()[0]:.0f} at the end. `python benchmarks/uneven.py`. Twenty blocks "
        f"of 0.26 MB and two of 4.2 MB in fp32, stage 3, gloo. Bytes of buffers are the same.\n\n{head}"
    )
    if name:
        (RESULTS / f"{name}.md").write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
