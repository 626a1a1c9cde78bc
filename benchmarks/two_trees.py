"""Two versions of the sources by turns on one machine: rows of results/one-gpu.md and results/offload-1.3b.md.

    git archive COMMIT | tar -x -C build/before        (and build its native library there)
    python benchmarks/two_trees.py build/before .      (4 minutes on an H200)

Each run is a process of its own in its own tree. Trees take turns, and the first of a round changes: a machine that
gets slower disturbs both alike. Medians of steps, then of runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

MARK = "RESULT "  # what one_gpu.py prints in front of its JSON
ROWS = {
    "all on the device, clip 1": None,  # one_gpu.py
    "states on the host": "{size} micro={micro} seq={seq} states=host",
    "states on the host, clip 1": "{size} micro={micro} seq={seq} states=host clip=1",
}


def step_s(tree: Path, job: str | None, options: argparse.Namespace) -> float:
    """Return the median step of one run, in seconds."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    steps = ["--steps", str(options.steps), "--warm", "3"]
    if job is None:
        sizes = ["--size", options.size, "--micro", str(options.micro), "--seq", str(options.seq)]
        command = [sys.executable, "benchmarks/one_gpu.py", *sizes, *steps, "--run", "zerostd"]
        done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return median(json.loads(done.stdout.splitlines()[-1].removeprefix(MARK))["times"])
    with tempfile.TemporaryDirectory() as folder:
        words = job.format(size=options.size, micro=options.micro, seq=options.seq)
        command = [sys.executable, "benchmarks/offload.py", "--systems", "zerostd", "--job", words, *steps]
        subprocess.run(command, cwd=tree, env=environment | {"OUT": folder}, stdout=subprocess.DEVNULL, check=True)
        record = json.loads(Path(folder, "offload.jsonl").read_text().splitlines()[-1])
    return median(record["times"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--size", default="1.3b")
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    trees = [options.before.resolve(), options.after.resolve()]
    lines = ["| row | before, s | after, s | after / before | runs before | runs after |", "|---|--:|--:|--:|---|---|"]
    for row, job in ROWS.items():
        times: dict[Path, list[float]] = {tree: [] for tree in trees}
        for number in range(options.rounds):
            for tree in trees[:: -1 if number % 2 else 1]:
                times[tree].append(step_s(tree, job, options))
                print(f"{row}, {tree.name}: {times[tree][-1]:.4f} s", file=sys.stderr, flush=True)
        first, second = (median(times[tree]) for tree in trees)
        runs = " | ".join(", ".join(f"{value:.4f}" for value in times[tree]) for tree in trees)
        lines.append(f"| {row} | {first:.4f} | {second:.4f} | {second / first:.4f} | {runs} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
