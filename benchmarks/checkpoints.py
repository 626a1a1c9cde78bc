"""Saving, loading and merging a checkpoint against `cp` of the same bytes, their memory, and a long fuzz of manifests.

    python benchmarks/checkpoints.py --gb 2 --merge-gb 4.3 --rounds 3
    python benchmarks/checkpoints.py --gb 0 --merge-gb 0 --fuzz 10000

One process, fp32 and AdamW: 12 bytes a parameter; what is merged has no states, so that all of it is copied. All ways
take turns in rounds of rotating order, and the files that are read are in the page cache (warm) or were dropped from
it before (cold). The fuzz is that of the tests (tests/checkpoints/fuzz.py), with more examples, and has a file of its
own for the result.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpt import RESULTS, machine
from torch import nn

import zerostd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from checkpoints import fuzz

WIDTH, MERGE_WIDTH = 1024, 4096
PLACEMENTS = {
    "in memory": zerostd.Placement(),
    "states on disk": zerostd.Placement(optimizer_states="disk"),
}
SHARES = {"any_text": 0.3, "any_value": 0.2, "changed_manifests": 0.26, "changed_headers": 0.12, "changed_bytes": 0.12}
HEADER = """# Checkpoints against cp

One process, fp32. "in memory" and "states on disk": AdamW, {gb:g} GB of parameters and states. "to be merged":
{merge_gb:g} GB of parameters. {rounds} rounds of rotating order. "save", "merge" and "cp, fsync" end when the bytes are
on the disk; "load" ends when they are where training needs them, checked twice; "cp" ends when they are in the page
cache. Bytes to be read are in the page cache (warm) or not (cold). Before each, they are copied and the copy is
removed, so that all find memory that the (virtual) machine has at hand. Ratios: the time of cp to that of zerostd, both
fastest; above 1 is faster than cp, the goal is 0.7 of "cp, fsync". Memory: the most that was resident above what was
before.

- machine: {machine}
- command: `python benchmarks/checkpoints.py --gb {gb:g} --merge-gb {merge_gb:g} --rounds {rounds}`
- date: {date}

| model | way | fastest s | median s | GB/s | / cp, fsync | / cp | memory MB |
|---|---|--:|--:|--:|--:|--:|--:|"""
FUZZ_HEADER = """# Manifests and headers that nobody wrote

Whatever a manifest or a header says, only CheckpointError may come out of it, in time, without a large allocation and
with the model as it was. "loaded": what was changed did no harm, such as another learning rate.

- machine: {machine}
- command: `python benchmarks/checkpoints.py --gb 0 --merge-gb 0 --fuzz {fuzz}`
- date: {date}

| fuzz | examples | seconds | loaded |
|---|--:|--:|--:|"""
Ways = dict[str, tuple[Callable[[], None], bool]]  # what to do, and whether the files are dropped from memory before


class Bench:
    """One prepared model and the files of its checkpoint."""

    def __init__(self, gb: float, placement: zerostd.Placement, folder: Path) -> None:
        self.folder = folder
        depth = max(1, round(gb * 1e9 / 12 / WIDTH / (WIDTH + 1)))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
        self.numel = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        budget = zerostd.Budget(disk_path=str(folder))
        options: dict[str, Any] = {"placement": placement, "budget": budget, "groups": ["*"]}
        self.model, self.optimizer = zerostd.prepare(model, optimizer, **options)
        self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        zerostd.save(folder / "saved", self.model, self.optimizer)
        self.size = sum(path.stat().st_size for path in (folder / "saved").iterdir())

    def ways(self) -> Ways:
        """Everything that takes turns."""
        return {"save": (self.save, False), "load, warm": (self.load, False), "load, cold": (self.load, True)}

    def close(self) -> None:
        zerostd.release(self.model)

    def save(self) -> None:
        zerostd.save(self.folder / "new", self.model, self.optimizer)

    def load(self) -> None:
        zerostd.load(self.folder / "saved", self.model, self.optimizer)

    def copy(self) -> None:
        subprocess.run(["cp", "-r", self.folder / "saved", self.folder / "new"], check=True)

    def copy_and_sync(self) -> None:
        self.copy()
        for path in (*(self.folder / "new").iterdir(), self.folder / "new", self.folder):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)

    def timed(self, way: Callable[[], None], is_cold: bool) -> tuple[float, int]:
        """Seconds, and bytes of memory at most."""
        self.copy()  # and removed: a virtual machine gives memory back, and whoever comes next would wait for it
        shutil.rmtree(self.folder / "new")
        for path in (self.folder / "saved").iterdir():
            with open(path, "rb") as file:
                if is_cold:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while not is_cold and file.read(1 << 22):
                    pass
        os.sync()  # what was removed before is given back to the disk when something is synced: not on our time
        before = _reset_peak()
        begin = time.perf_counter()
        way()
        seconds = time.perf_counter() - begin
        more = _resident("VmHWM") - before
        shutil.rmtree(self.folder / "new", ignore_errors=True)
        return seconds, more


class MergeBench(Bench):
    """A checkpoint of parameters alone; the model is gone when it is merged."""

    def __init__(self, gb: float, folder: Path) -> None:
        self.folder = folder
        depth = max(1, round(gb * 1e9 / 4 / MERGE_WIDTH / (MERGE_WIDTH + 1)))
        model = nn.Sequential(*(nn.Linear(MERGE_WIDTH, MERGE_WIDTH) for _ in range(depth)))
        model, _ = zerostd.prepare(model, groups=["*"])
        zerostd.save(folder / "saved", model)
        zerostd.release(model)
        self.size = sum(path.stat().st_size for path in (folder / "saved").iterdir())

    def ways(self) -> Ways:
        return {"merge, warm": (self.merge, False), "merge, cold": (self.merge, True)}

    def close(self) -> None:
        return None

    def merge(self) -> None:
        zerostd.merge(self.folder / "saved", self.folder / "new")


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def measure(name: str, make: Callable[[Path], Bench], rounds: int, path: str | None) -> list[str]:
    """Lines of the table for one model."""
    with tempfile.TemporaryDirectory(dir=path, prefix="checkpoints-") as folder:
        bench = make(Path(folder))
        ways = bench.ways()
        for where in ("warm", "cold"):
            ways[f"cp, fsync, {where}"] = (bench.copy_and_sync, where == "cold")
            ways[f"cp, {where}"] = (bench.copy, where == "cold")
        found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
        for round_ in range(rounds + 1):
            for way in [*ways][round_ % len(ways) :] + [*ways][: round_ % len(ways)]:
                taken = bench.timed(*ways[way])
                if round_ > 0:
                    found[way].append(taken)
        bench.close()
    lines = []
    for way, taken_by in found.items():
        seconds, where = [taken for taken, _ in taken_by], way.split(", ")[-1].replace("save", "warm")
        synced, copied = (min(found[f"{peer}, {where}"])[0] / min(seconds) for peer in ("cp, fsync", "cp"))
        is_ours = not way.startswith("cp")
        ratios = f"{synced:.2f} | {copied:.2f}" if is_ours else " | "
        memory = f"{max(more for _, more in taken_by) / 1e6:.0f}" if is_ours else ""
        lines.append(
            f"| {name} | {way} | {min(seconds):.2f} | {median(seconds):.2f} | {bench.size / min(seconds) / 1e9:.2f} | "
            f"{ratios} | {memory} |"
        )
        print(lines[-1], flush=True)
    return lines


def fuzzed(examples: int) -> list[str]:
    """Lines about the fuzz; raises if it finds anything."""
    lines: list[str] = []
    torch.set_num_threads(1)
    logging.getLogger("zerostd").setLevel(logging.CRITICAL)  # what latest skips
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        target = fuzz.Target(Path(folder))
        for name, share in SHARES.items():
            check, count, before = getattr(fuzz, name), round(share * examples), target.num_loaded
            begin = time.perf_counter()
            if name.startswith("any"):
                check(count)
            else:
                check(fuzz.fresh(target), count)
            words = f"{name.replace('_', ' ')}: {check.__doc__.splitlines()[0].rstrip('.').lower()}"
            loaded = target.num_loaded - before if not name.startswith("any") else ""
            lines.append(f"| {words} | {count} | {time.perf_counter() - begin:.0f} | {loaded} |")
            print(lines[-1], flush=True)
    lines += ["", "All others ended in a CheckpointError, with the model as it was and without a large allocation."]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint to save and load; 0: none")
    parser.add_argument("--merge-gb", type=float, default=4.3, help="size of the one to merge; 0: none")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way, after one to warm up")
    parser.add_argument("--fuzz", type=int, default=0, help="examples, of all kinds together")
    parser.add_argument("--path", help="directory for the checkpoints; the system's for temporary files if not said")
    parser.add_argument("--write", action="store_true", help="write results/checkpoints-cpu.md, results/fuzz.md")
    options = parser.parse_args()
    makers: dict[str, Callable[[Path], Bench]] = {}
    if options.gb:
        makers |= {name: partial(Bench, options.gb, placement) for name, placement in PLACEMENTS.items()}
    if options.merge_gb:
        makers["to be merged"] = partial(MergeBench, options.merge_gb)
    tables: dict[str, tuple[str, list[str]]] = {}
    if makers:
        found = [measure(name, make, options.rounds, options.path) for name, make in makers.items()]
        tables["checkpoints-cpu.md"] = (HEADER, [line for lines in found for line in lines])
    if options.fuzz:
        tables["fuzz.md"] = (FUZZ_HEADER, fuzzed(options.fuzz))
    for name, (header, lines) in tables.items():
        text = header.format(**vars(options), machine=machine(), date=date.today()) + "\n" + "\n".join(lines) + "\n"
        print(text, end="")
        if options.write:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / name).write_text(text)


if __name__ == "__main__":
    main()
