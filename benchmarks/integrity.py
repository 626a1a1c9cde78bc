"""Checksums of what rests on disk, and checkpoints beside training: what they cost, measured in one run.

    python benchmarks/integrity.py --disk-path /nvme --write integrity-cpu
    python benchmarks/integrity.py --disk-path /nvme --device cuda --depth 256 --write integrity-h200

First the checksums alone, then the disk tier alone, with checksums and without in turn. Then two models with all states
on disk take steps in turn: one as it is, one whose checksums are not computed. Each round has two steps of either, in
the order with, without, without, with; the result is the median over rounds of the ratio of the two sums. Then a model
for each tier is saved with `wait=False`; the stall is the length of the call, and what the steps under the checkpoint
take longer than those before it. `--seconds` leaves out what would begin later.

`--limit-mb 400` lets Linux hold the drive to 400 MB/s in each direction (a control group of blkio; root only), so that
the drive bounds the steps of a machine with a fast drive and few cores: 400 MB/s beside two cores are what 3.2 GB/s are
beside sixteen.

    python benchmarks/integrity.py --limit-mb 400 --rounds 20 --steps-only     # what checksums cost a step, 3 minutes
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpt import RESULTS, machine
from torch import nn

import zerostd
from zerostd.kernels import crc32_pages
from zerostd.monitoring.ledger import Ledger
from zerostd.policy import Kind
from zerostd.tiers import extents
from zerostd.tiers.disk import Disk
from zerostd.tiers.host import PAGE, aligned
from zerostd.tiers.scratch_files import supports_direct

WIDTH = 1024
MIB = 2**20
PIECE_BYTES = 64 * MIB  # that the disk tier is asked for at a time
NUM_PIECES = 16


def prepared(options: argparse.Namespace, place: str) -> tuple[nn.Module, Any]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(options.depth))).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters())
    budget = zerostd.Budget(disk_path=options.disk_path)
    return zerostd.prepare(model, optimizer, placement=zerostd.Placement(optimizer_states=place), budget=budget)


class Step(NamedTuple):
    """What one step took, its updates included."""

    wall: float  # seconds
    processor: float  # seconds of processor time, of all threads


def take_step(model: nn.Module, optimizer: Any) -> Step:
    begin = time.perf_counter()
    busy = time.process_time()
    model(torch.ones(4, WIDTH, device=next(model.parameters()).device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    return Step(time.perf_counter() - begin, time.process_time() - busy)


def no_checksums(data: torch.Tensor, page_bytes: int, out: torch.Tensor) -> None:
    out.zero_()


def without_checksums() -> Any:
    """Return a context in which nothing is summed, and everything has the same checksum."""
    return mock.patch.multiple(extents, crc32=lambda data: 0, crc32_pages=no_checksums)


def checksum_rate() -> float:
    """Return how many bytes one thread sums in a second of processor time, in memory that no cache holds."""
    memory = aligned(4 * PIECE_BYTES).fill_(7)
    out = torch.empty(len(memory) // PAGE, dtype=torch.int32)
    rates = []
    for _ in range(5):
        begin = time.process_time()
        crc32_pages(memory, PAGE, out)
        rates.append(len(memory) / (time.process_time() - begin))
    return median(rates)


class Rates(NamedTuple):
    """What one way over the disk tier took."""

    wall: float  # bytes a second
    processor: float  # seconds of processor time for a GB


def disk_rates(path: str, num_requests: int, rounds: int) -> dict[str, list[Rates]]:
    """Return the rates of writing and reading a GiB through the disk tier, with checksums and without, in turn."""
    memory = aligned(PIECE_BYTES).random_(0, 255)
    rates: dict[str, list[Rates]] = {}
    disks = {True: Disk(path, Ledger(), num_requests=num_requests)}
    with without_checksums():
        disks[False] = Disk(path, Ledger(), num_requests=num_requests)
        pieces = {False: [disks[False].allocate(PIECE_BYTES, Kind.BUFFERS) for _ in range(NUM_PIECES)]}
    pieces[True] = [disks[True].allocate(PIECE_BYTES, Kind.BUFFERS) for _ in range(NUM_PIECES)]
    targets = [aligned(PIECE_BYTES).zero_() for _ in range(4)]
    for number in range(2 * rounds):
        is_checked = number % 4 in (0, 3)
        with contextlib.nullcontext() if is_checked else without_checksums():
            for verb in ("write", "read"):
                begin, busy = time.perf_counter(), time.process_time()
                disk = disks[is_checked]
                moves = []
                for index, piece in enumerate(pieces[is_checked]):
                    if verb == "write":
                        moves.append(disk.write(piece, 0, memory))
                    else:
                        if index >= len(targets):
                            moves[index - len(targets)].wait()
                        moves.append(disk.read(piece, 0, targets[index % len(targets)]))
                for move in moves:
                    move.wait()
                seconds = time.perf_counter() - begin
                moved = NUM_PIECES * PIECE_BYTES
                used = 1e9 * (time.process_time() - busy) / moved
                rates.setdefault(f"{verb}, {'with' if is_checked else 'without'}", []).append(
                    Rates(moved / seconds, used)
                )
    for disk in disks.values():
        disk.close()
    return rates


def disk_rows(options: argparse.Namespace) -> list[str]:
    """Return the table of the disk tier alone."""
    lines = ["| requests | | GB/s with | GB/s without | without / with | processor s/GB with | without |"]
    lines.append("|--:|---|--:|--:|--:|--:|--:|")
    for num_requests in (4, 8):
        rates = disk_rates(options.disk_path, num_requests, options.rounds)
        for verb in ("write", "read"):
            checked, plain = (rates[f"{verb}, {how}"] for how in ("with", "without"))
            walls = [median(rate.wall for rate in way) for way in (checked, plain)]
            processor = [median(rate.processor for rate in way) for way in (checked, plain)]
            lines.append(
                f"| {num_requests} | {verb} | {walls[0] / 1e9:.2f} | {walls[1] / 1e9:.2f} | "
                f"{walls[1] / walls[0]:.3f} | {processor[0]:.3f} | {processor[1]:.3f} |"
            )
    return lines


def compare_checksums(options: argparse.Namespace) -> tuple[list[Step], list[Step]]:
    """Return steps with checksums and without, two of either in each round."""
    checked = prepared(options, "disk")
    without = without_checksums()
    with without:
        unchecked = prepared(options, "disk")
        take_step(*unchecked)
    take_step(*checked)
    steps: tuple[list[Step], list[Step]] = ([], [])
    for _ in range(options.rounds):
        steps[0].append(take_step(*checked))
        with without:
            steps[1].append(take_step(*unchecked))
            steps[1].append(take_step(*unchecked))
        steps[0].append(take_step(*checked))
    zerostd.release(checked[0])
    with without:
        zerostd.release(unchecked[0])
    return steps


def step_rows(steps: tuple[list[Step], list[Step]], drive_s: float) -> list[str]:
    """Return the table of steps with checksums and without. `drive_s` is what the drive needs for the states at the
    rate that it is held to."""
    lines = ["| | steps | median s | least s | processor s |", "|---|--:|--:|--:|--:|"]
    for name, way in zip(("with checksums", "without"), steps, strict=True):
        walls = [step.wall for step in way]
        busy = median(step.processor for step in way)
        lines.append(f"| {name} | {len(way)} | {median(walls):.3f} | {min(walls):.3f} | {busy:.3f} |")
    rounds = [[sum(step.wall for step in way[i : i + 2]) for way in steps] for i in range(0, len(steps[0]), 2)]
    low, middle, high = quantiles((with_s / without_s for with_s, without_s in rounds), n=4)
    text = f"With / without, by rounds: {middle:.3f} in the median; half of the {len(rounds)} rounds are between "
    text += f"{low:.3f} and {high:.3f}."
    if drive_s:
        text += f" The drive alone needs {drive_s:.3f} s to read the states once, and to write them meanwhile."
    return [*lines, "", text]


def stall(options: argparse.Namespace, place: str, folder: str) -> tuple[float, float, float]:
    """Return the seconds of the call, what the steps under it took longer, and how long the checkpoint took."""
    model, optimizer = prepared(options, place)
    usual = median(take_step(model, optimizer).wall for _ in range(5))
    begin = time.perf_counter()
    saving = zerostd.save(f"{folder}/{place}", model, optimizer, wait=False)
    call_s = time.perf_counter() - begin
    slower_s = 0.0
    while not saving.is_finished:
        slower_s += take_step(model, optimizer).wall - usual
    total_s = time.perf_counter() - begin
    zerostd.release(model)
    shutil.rmtree(f"{folder}/{place}")
    return call_s, slower_s, total_s


def hold_drive(path: str, rate_mb: int) -> None:
    """Limit what this process reads from the drive of `path` and writes to it, for the rest of its life."""
    group = Path("/sys/fs/cgroup/blkio/zerostd-integrity")
    group.mkdir(exist_ok=True)
    device = os.stat(path).st_dev
    for verb in ("read", "write"):
        rate = f"{os.major(device)}:{os.minor(device)} {rate_mb * 1_000_000}"
        Path(group, f"blkio.throttle.{verb}_bps_device").write_text(rate)
    Path(group, "cgroup.procs").write_text(str(os.getpid()))


def main(options: argparse.Namespace) -> None:
    if options.limit_mb is not None:
        hold_drive(options.disk_path, options.limit_mb)
    torch.manual_seed(0)
    begin = time.monotonic()
    num_parameters = options.depth * (WIDTH * WIDTH + WIDTH)
    direct = "past the page cache" if supports_direct(options.disk_path) else "through the page cache"
    lines = [
        "# Checksums on disk, and checkpoints beside training",
        "",
        f"{date.today()}, {machine()}; load average {os.getloadavg()[0]:.0f}. `python benchmarks/integrity.py "
        f"{' '.join(sys.argv[1:])}`. Files {direct}.",
        "",
        f"One thread sums {checksum_rate() / 1e9:.1f} GB in a second of processor time.",
        "",
    ]
    if not options.steps_only:
        lines += ["The disk tier alone, a GiB each way, in turn (medians):", "", *disk_rows(options), ""]
    lines += [
        f"{num_parameters / 1e6:.0f} M parameters, fp32, AdamW; {12 * num_parameters / MIB:.0f} MiB in all. States on "
        "disk, steps in turn in one process:",
        "",
    ]
    write(lines, options)
    drive_s = 12 * num_parameters / (1e6 * options.limit_mb) if options.limit_mb else 0.0
    lines += step_rows(compare_checksums(options), drive_s)
    if options.steps_only:
        write(lines, options)
        print("\n".join(lines))
        return
    lines += [
        "",
        "`save(wait=False)`, and steps as fast as they come while it is written:",
        "",
        "| states on | the call, ms | steps longer by, ms | written after, s | of a minute |",
        "|---|--:|--:|--:|--:|",
    ]
    with tempfile.TemporaryDirectory(dir=options.disk_path, prefix="integrity-") as folder:
        for place in ("device", "host", "disk"):
            if time.monotonic() > begin + options.seconds:
                break
            call_s, slower_s, total_s = stall(options, place, folder)
            lost = max(0.0, call_s + slower_s) / 60
            row = f"| {place} | {1e3 * call_s:.0f} | {1e3 * slower_s:.0f} | {total_s:.2f} | {100 * lost:.1f} % |"
            lines.append(row)
            write(lines, options)
    print("\n".join(lines))


def write(lines: list[str], options: argparse.Namespace) -> None:
    """Write what is known so far."""
    for folder in (RESULTS, *map(Path, filter(None, [os.environ.get("OUT")]))) if options.write else ():
        Path(folder, f"{options.write}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=32, help="layers of a million parameters")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--disk-path", default=tempfile.gettempdir())
    parser.add_argument("--limit-mb", type=int, help="hold the drive to so many MB/s each way")
    parser.add_argument("--steps-only", action="store_true", help="compare steps with checksums and without")
    parser.add_argument("--write", metavar="NAME", help="write results/NAME.md, and to $OUT if set")
    main(parser.parse_args())
