"""An urgent read beside a background write: how long it waits, and what the write gets, at several shares.

    python benchmarks/background.py --disk-path /nvme --write background-cpu

A store on disk writes one large tensor in the background, again and again, while this thread reads a small one every
few milliseconds. `Budget(background=...)` is the share of the disk's time that the write may take meanwhile. In the
first row nothing is written; in the second the write is as urgent as the reads, which then wait for all of it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median, quantiles

import torch

import zerostd
from zerostd.measuring.identity import machine_name, versions

RESULTS = Path(__file__).parent / "results"
MIB = 2**20


class Writes:
    """One large write after the other, and the bytes that they have written."""

    def __init__(self, store: zerostd.TierStore, mib: int, priority: str) -> None:
        self._tensor = store.allocate("large", (mib, MIB), torch.uint8, tier="disk")
        self._values = torch.ones(mib, MIB, dtype=torch.uint8)
        self._priority = priority
        self._transfer = self._tensor.write(self._values, priority=priority)
        self.num_written = 0

    def go_on(self) -> None:
        """Begin the next write if the last one is done."""
        if self._transfer.is_done():
            self.num_written += self._values.nbytes
            self._transfer = self._tensor.write(self._values, priority=self._priority)


def measure(
    path: str, share: float | None, priority: str | None, mib: int, seconds: float
) -> tuple[list[float], float]:
    """Return the seconds that reads of 1 MiB took, and GB/s of what was written meanwhile."""
    with zerostd.TierStore(budget={"disk_path": path, "background": share}) as store:
        small = store.allocate("small", (MIB,), torch.uint8, tier="disk")
        small.write(torch.ones(MIB, dtype=torch.uint8)).wait()
        writes = None if priority is None else Writes(store, mib, priority)
        waits = []
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            requested = time.perf_counter()
            small.read(priority="urgent").wait()
            waits.append(time.perf_counter() - requested)
            if writes is not None:
                writes.go_on()
            time.sleep(0.005)
        took = time.perf_counter() - begun
    return waits, 0.0 if writes is None else writes.num_written / took / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="of the tensor that is written")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each row")
    parser.add_argument("--disk-path", default=tempfile.gettempdir())
    parser.add_argument("--write", metavar="NAME", help="write results/NAME.md, and to $OUT if set")
    options = parser.parse_args()
    command = f"python benchmarks/background.py --mib {options.mib} --seconds {options.seconds:g}"
    torch_version = versions(torch.device("cpu"))["torch"]
    load = os.getloadavg()[0]
    lines = [
        "# An urgent read beside a background write",
        "",
        f"Reads of 1 MiB, one every 5 ms, beside writes of {options.mib} MiB in tiles of 16 MiB; one store on disk.",
        "",
        f"- machine: {machine_name(torch.device('cpu'))}; torch {torch_version}; load average {load:.0f}",
        f"- command: `{command}`",
        f"- date: {date.today()}",
        "",
        "| the write is | `background=` | reads | a read waits, median | 95 % | longest | written |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    rows: list[tuple[str, str | None, float | None]] = [("not there", None, None), ("urgent too", "urgent", None)]
    rows += [("in the background", "background", share) for share in (None, 0.5, 0.25, 0.1)]
    for name, priority, share in rows:
        waits, rate = measure(options.disk_path, share, priority, options.mib, options.seconds)
        most = quantiles(waits, n=20)[-1] if len(waits) > 1 else waits[0]
        times = " | ".join(f"{1e3 * wait:.1f} ms" for wait in (median(waits), most, max(waits)))
        share_text = "" if priority != "background" else "none" if share is None else f"{share}"
        lines.append(f"| {name} | {share_text} | {len(waits)} | {times} | {rate:.2f} GB/s |")
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if options.write:
        (Path(os.environ.get("OUT", RESULTS)) / f"{options.write}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
