"""Many small parameters: how long prepare takes, and a step against plain torch's. Results: results/granularity-cpu.md.

    python benchmarks/granularity.py                   # 2,002, 20,002 and 200,002 parameters, of the last prepare only
    python benchmarks/granularity.py --write cpu       # writes results/granularity-cpu.md

A model is N blocks of Linear(64) and LayerNorm, on one thread. Steps of plain torch and of ours take turns, and times
are those of the processor, so that others who use the machine disturb both alike; the median of the ratios counts.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import zerostd

WIDTH = 64
SAMPLES = 32
SIZES = (500, 5_000, 50_000)  # blocks
LARGEST_TO_TRAIN = 5_000
RESULTS = Path(__file__).parent / "results"


class Model(nn.Module):
    """Residual blocks and a head: four parameters a block, and two."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(num_blocks)
        )
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def step_s(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Return the processor's seconds of one step."""
    begin = time.process_time()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    return time.process_time() - begin


def measure(num_blocks: int, steps: int) -> str:
    """Return a row of the table."""
    model = Model(num_blocks)
    inner = torch.optim.AdamW(model.parameters())
    begin = time.process_time()
    model, optimizer = zerostd.prepare(model, inner, stage=0)
    prepare_s = time.process_time() - begin
    row = f"| {4 * num_blocks + 2:,} | {prepare_s:.2f} |"
    if num_blocks > LARGEST_TO_TRAIN:
        return row + " - | - | - |"
    plain = Model(num_blocks)
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    x = torch.randn(SAMPLES, WIDTH)
    pairs = [(step_s(plain, plain_optimizer, x), step_s(model, optimizer, x)) for _ in range(steps + 1)][1:]
    theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(own / other for other, own in pairs)
    return row + f" {theirs:.3f} | {ours:.3f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="*", default=SIZES)
    parser.add_argument("--write", metavar="NAME", help="write results/granularity-NAME.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Many small parameters",
        "",
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        "fp32, one thread, a world of one, AdamW, all states on the device. Seconds of the processor.",
        f"`python benchmarks/granularity.py --steps {options.steps}`",
        "",
        "| parameters | prepare | plain step | our step | ratio |",
        "|--:|--:|--:|--:|--:|",
    ]
    for num_blocks in options.blocks:
        lines.append(measure(num_blocks, options.steps))
        print(lines[-1], flush=True)
    if options.write:
        (RESULTS / f"granularity-{options.write}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
