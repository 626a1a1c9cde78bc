"""Saving beside training: what `zerostd.save(wait=False)` costs the loop, to a directory and to an object store.

    python benchmarks/saving.py --gb 0.5 --rounds 3 --write saving-cpu

One process, fp32, AdamW: 12 bytes a parameter. Each round trains some steps, starts to save, and trains on until the
checkpoint is complete. The loop pays for the call of `save` and for steps that take longer meanwhile: because updates
wait for what is not written yet, and because threads that write share the cores. The object store is a server in a
process of its own, on this machine (tests/support/objects.py), so that its work is on these cores too.

The loop has one thread. Times are given as they are, and without the time in which that thread was ready and had no
core (the scheduler's count), which is what a loop pays that leaves its cores to others, as one on a GPU does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from gpt import RESULTS, machine
from torch import nn

import zerostd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.objects import ObjectServer

WIDTH = 1024
BATCH = 16
PLAIN_STEPS = 6  # before each save, and after it
MINUTE_S = 60.0


Times = list[float]  # seconds: by the clock, and without waiting for a core
KINDS = (0, 1)


def waited_for_core() -> float:
    """Seconds in which this thread was ready to run and did not."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9


@contextmanager
def timed() -> Iterator[Times]:
    times: Times = []
    begin = time.perf_counter()
    waited = waited_for_core()
    yield times
    seconds = time.perf_counter() - begin
    times += [seconds, seconds - (waited_for_core() - waited)]


def serve(pipe: Connection) -> None:
    """Run an object store until the other end says so."""
    with ObjectServer() as server:
        pipe.send(server.url)
        while pipe.recv() != "stop":
            server.objects.clear()
            pipe.send("cleared")


class Loop:
    """A model that trains."""

    def __init__(self, gb: float) -> None:
        depth = max(1, round(gb * 1e9 / 12 / WIDTH / (WIDTH + 1)))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
        self.num_bytes = 12 * sum(parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.model, self.optimizer = zerostd.prepare(model, optimizer, groups=["*"])

    def step(self) -> Times:
        with timed() as times:
            self.model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return times

    def round(self, target: str) -> dict[str, Times]:
        """Train, save beside it, and return what that took of the loop."""
        plain = [self.step() for _ in range(PLAIN_STEPS)]
        with timed() as whole:
            with timed() as call:
                saving = zerostd.save(target, self.model, self.optimizer, wait=False)
            beside = []
            while not saving.is_finished:
                beside.append(self.step())
        saving.wait()
        plain += [self.step() for _ in range(PLAIN_STEPS)]
        step = [median(times[kind] for times in plain) for kind in KINDS]
        longer = [sum(times[kind] for times in beside) - len(beside) * step[kind] for kind in KINDS]
        return {"step": step, "call": call, "longer": longer, "complete": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.5, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", metavar="NAME", help="write benchmarks/results/NAME.md")
    options = parser.parse_args()
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    url = mine.recv()
    torch.set_num_threads(1)
    loop = Loop(options.gb)
    loop.step()
    rows: dict[str, list[dict[str, Times]]] = {"a directory": [], "an object store": []}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rows["a directory"].append(loop.round(f"{folder}/saved"))
        rows["an object store"].append(loop.round(f"{url}/step-{number}"))
        mine.send("clear")
        mine.recv()
    mine.send("stop")
    server.join(10)
    lines = [
        "# Saving beside training",
        "",
        f"One process, fp32, AdamW, {loop.num_bytes / 1e9:.2f} GB of parameters and states. `save(wait=False)`, then",
        f"steps until the checkpoint is complete. Medians of {options.rounds} rounds, ways in turn. Longer: all steps",
        "beside it together, against as many of the median around it. Share: call and longer steps, of a minute of",
        "training that saves once; the goal is 2 %. Second number: without the time in which the loop's thread waited",
        "for a core. The store is a process on the same cores.",
        "",
        f"- machine: {machine()}",
        f"- command: `python benchmarks/saving.py --gb {options.gb:g} --rounds {options.rounds}`",
        f"- date: {date.today()}",
        "",
        "| to | step s | save() s | longer s | complete after s | share of a minute | rounds, without waiting |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for name, results in rows.items():
        shares = [[(each["call"][kind] + each["longer"][kind]) / MINUTE_S for kind in KINDS] for each in results]
        cells = [
            " / ".join(f"{median(each[key][kind] for each in results):.2f}" for kind in KINDS)
            for key in ("step", "call", "longer", "complete")
        ]
        cells.append(" / ".join(f"{median(share[kind] for share in shares):.1%}" for kind in KINDS))
        cells.append(", ".join(f"{share[1]:.1%}" for share in shares))
        lines.append(f"| {' | '.join([name, *cells])} |")
    page = "\n".join(lines) + "\n"
    print(page)
    if options.write:
        (RESULTS / f"{options.write}.md").write_text(page)


if __name__ == "__main__":
    main()
