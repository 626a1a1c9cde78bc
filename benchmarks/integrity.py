"""Checksums of what rests on disk, and checkpoints beside training: what they cost, measured in one run on the CPU.

    python benchmarks/integrity.py --disk-path /nvme --write integrity-cpu

Two models with all states on disk take steps in turn: one as it is, one whose checksums are not computed. Then a model
for each tier is saved with `wait=False`; the stall is the length of the call, and what the steps under the checkpoint
take longer than those before it.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import nn

import zerostd
from zerostd.tiers import extents

RESULTS = Path(__file__).parent / "results"
WIDTH = 1024
MIB = 2**20


def prepared(depth: int, place: str, disk_path: str) -> tuple[nn.Module, Any]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters())
    budget = zerostd.Budget(disk_path=disk_path)
    return zerostd.prepare(model, optimizer, placement=zerostd.Placement(optimizer_states=place), budget=budget)


def step_s(model: nn.Module, optimizer: Any) -> float:
    """Return the seconds of one step, its updates included."""
    begin = time.perf_counter()
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    return time.perf_counter() - begin


def no_checksums(data: torch.Tensor, page_bytes: int, out: torch.Tensor) -> None:
    out.zero_()


def compare_checksums(options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Return the seconds of steps with checksums and without, taken in turn."""
    checked = prepared(options.depth, "disk", options.disk_path)
    without = mock.patch.multiple(extents, crc32=lambda data: 0, crc32_pages=no_checksums)
    with without:
        unchecked = prepared(options.depth, "disk", options.disk_path)
        step_s(*unchecked)
    step_s(*checked)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.rounds):
        seconds[0].append(step_s(*checked))
        with without:
            seconds[1].append(step_s(*unchecked))
            seconds[1].append(step_s(*unchecked))
        seconds[0].append(step_s(*checked))
    zerostd.release(checked[0])
    with without:
        zerostd.release(unchecked[0])
    return seconds


def stall(options: argparse.Namespace, place: str, folder: str) -> tuple[float, float, float]:
    """Return the seconds of the call, what the steps under it took longer, and how long the checkpoint took."""
    model, optimizer = prepared(options.depth, place, options.disk_path)
    usual = median(step_s(model, optimizer) for _ in range(5))
    begin = time.perf_counter()
    saving = zerostd.save(f"{folder}/{place}", model, optimizer, wait=False)
    call_s = time.perf_counter() - begin
    slower_s = 0.0
    while not saving.is_finished:
        slower_s += step_s(model, optimizer) - usual
    total_s = time.perf_counter() - begin
    zerostd.release(model)
    shutil.rmtree(f"{folder}/{place}")
    return call_s, slower_s, total_s


def main(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    num_parameters = options.depth * (WIDTH * WIDTH + WIDTH)
    with_s, without_s = compare_checksums(options)
    lines = [
        "# Checksums on disk, and checkpoints beside training",
        "",
        f"{num_parameters / 1e6:.0f} M parameters, fp32, AdamW; {12 * num_parameters / MIB:.0f} MiB in all.",
        "",
        f"- machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.0f}; torch {torch.__version__}",
        "",
        "States on disk, steps in turn in one process:",
        "",
        "| | steps | median s | least s |",
        "|---|--:|--:|--:|",
        f"| with checksums | {len(with_s)} | {median(with_s):.3f} | {min(with_s):.3f} |",
        f"| without | {len(without_s)} | {median(without_s):.3f} | {min(without_s):.3f} |",
        f"| with / without | | {median(with_s) / median(without_s):.3f} | {min(with_s) / min(without_s):.3f} |",
        "",
        "`save(wait=False)`, and steps as fast as they come while it is written:",
        "",
        "| states on | the call, ms | steps longer by, ms | written after, s | of a minute |",
        "|---|--:|--:|--:|--:|",
    ]
    with tempfile.TemporaryDirectory(dir=options.disk_path, prefix="integrity-") as folder:
        for place in ("device", "host", "disk"):
            call_s, slower_s, total_s = stall(options, place, folder)
            lost = max(0.0, call_s + slower_s) / 60
            row = f"| {place} | {1e3 * call_s:.0f} | {1e3 * slower_s:.0f} | {total_s:.2f} | {100 * lost:.1f} % |"
            lines.append(row)
    print("\n".join(lines))
    if options.write:
        (RESULTS / f"{options.write}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=32, help="layers of a million parameters")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--disk-path", default=tempfile.gettempdir())
    parser.add_argument("--write", metavar="NAME", help="write results/NAME.md")
    main(parser.parse_args())
