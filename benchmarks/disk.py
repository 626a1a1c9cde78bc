"""States on disk: the step against what the disk itself allows, measured in the same run.

    python benchmarks/disk.py --size 1.3b --micro 8 --disk-path /nvme --write

First the disk alone: one file is read while another is written, 8 MiB blocks, O_DIRECT, several threads. A step has to
read and write 12 bytes for each parameter, so those two numbers give its floor. Then the training job of offload.py
with all optimizer states on that disk.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

from gpt import RESULTS, machine

from offload import Job, System, start

BLOCK = 8 << 20
BYTES_PER_PARAMETER = 12  # fp32 master and two moments


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.disk_path, prefix="disk-") as folder:
        rates = [measure(folder, options.gib << 30) for _ in range(options.rounds)]
    best = max(rates)
    job = Job(options.size, options.micro, options.seq, 1, 0.0, False, options.steps, options.warm)
    with tempfile.TemporaryDirectory(dir=options.disk_path, prefix="disk-") as folder:
        found = start(job, System("zerostd", states="disk"), folder, options.limit)
    if "error" in found:
        raise SystemExit(found["error"])
    floor = BYTES_PER_PARAMETER * found["size"] / best
    by_round = ", ".join(f"{rate / 1e9:.2f}" for rate in rates)
    lines = [
        "# States on disk",
        "",
        f"GPT of {found['size'] / 1e9:.2f} B parameters, {options.micro} x {options.seq} tokens a step, bf16 weights, "
        f"fp32 masters and moments on disk, AdamW; {options.steps} steps after {options.warm} to warm up.",
        "",
        f"- machine: {machine()}",
        f"- date: {date.today()}",
        f"- the disk alone, reading and writing at once, GB/s each way by round: {by_round}",
        f"- floor of a step, {BYTES_PER_PARAMETER} bytes a parameter each way at the best of them: {floor:.2f} s",
        f"- step: {found['step_s']:.2f} s, {floor / found['step_s']:.3f} of what the disk allows; host memory at most "
        f"{found['host_bytes'] / 2**30:.1f} GiB",
        f"- losses: {', '.join(f'{loss:.4f}' for loss in found['losses'])}",
    ]
    print("\n".join(lines))
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "disk.md").write_text("\n".join(lines) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.3b")
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--gib", type=int, default=4, help="size of each file of the measurement")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of the disk alone")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which the training run is ended")
    parser.add_argument("--disk-path", default=tempfile.gettempdir())
    parser.add_argument("--write", action="store_true", help="write results/disk.md")
    return parser.parse_args()


def measure(folder: str, num_bytes: int, num_threads: int = 4) -> float:
    """Bytes a second, each way, of reading one file while another is written."""
    files = [os.open(Path(folder, name), os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600) for name in "ab"]
    for file in files:
        os.posix_fallocate(file, 0, num_bytes)
        move(file, num_bytes, num_threads, is_write=True)
    begin = time.perf_counter()
    both = [
        threading.Thread(target=move, args=(f, num_bytes, num_threads), kwargs={"is_write": f is files[1]})
        for f in files
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    elapsed = time.perf_counter() - begin
    for file in files:
        os.close(file)
    return num_bytes / elapsed


def move(file: int, num_bytes: int, num_threads: int, *, is_write: bool) -> None:
    """Read or write a whole file, each thread every so many blocks of it."""

    def some(first: int) -> None:
        memory = mmap.mmap(-1, BLOCK)
        for offset in range(first * BLOCK, num_bytes, num_threads * BLOCK):
            (os.pwritev if is_write else os.preadv)(file, [memory], offset)

    threads = [threading.Thread(target=some, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
