"""Faults on purpose: one rank is killed, stopped, cut off or led astray, and every rank must end as documented.

    python benchmarks/faults.py --number 1000                         # of ranks
    python benchmarks/faults.py --seed 1000 --number 200              # of drives, connections and hooks
    python benchmarks/faults.py --seed 2000 --number 300              # of any kind, in jobs that use one more feature
    python benchmarks/faults.py --seed 17 --number 1                  # one fault again, with what every rank said
    python benchmarks/faults.py --device cuda --number 100 --beside 8 --seconds 400 --write faults-nccl

The code is that of the tests (tests/faults). A seed decides kind, place, step, rank, stage, tier and number of ranks.
Ranks on a device share one GPU. What is not as documented goes to $OUT/faults.jsonl at once, if OUT is set, with what
every rank said. With `--seconds` the run ends by then, whatever happens: faults that are under way do not count.
FAULTS_LIMIT_S, an environment variable, gives collectives more seconds on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TypeVar

from gpt import RESULTS, machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from faults import io_shim
from faults.drawing import FIRST_OF_MACHINES, draw
from faults.program import LIMITS_S
from faults.running import RANKS, Outcome, run
from faults.table import rows, rows_of_features

LAST_S = 30.0  # no fault begins so shortly before the end
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1000, help="of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--beside", type=int, default=2, help="faults at the same time")
    parser.add_argument("--seconds", type=float, default=1e6, help="at most, for all of it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks: gloo, or nccl")
    parser.add_argument("--kind", help="only faults of this kind, of those that the seeds draw")
    parser.add_argument("--write", metavar="NAME", help="write results/NAME.md, and to $OUT if set")
    options = parser.parse_args()
    if options.seed + options.number > FIRST_OF_MACHINES and "LD_PRELOAD" not in os.environ:
        preloaded = os.environ | {"LD_PRELOAD": str(io_shim.library())}  # must be there before Python starts
        os.execve(sys.executable, [sys.executable, *sys.argv], preloaded)
    begun = time.monotonic()
    end = begun + options.seconds
    seeds = range(options.seed, options.seed + options.number)
    chosen = [seed for seed in seeds if options.kind in (None, draw(seed).kind)]
    tasks = [lambda seed=seed: run(draw(seed, options.device)) for seed in chosen]
    outcomes: list[Outcome] = []
    try:
        for outcome in until(end, options.beside, tasks):
            outcomes.append(outcome)
            show(outcome, is_long=len(chosen) == 1)
    finally:
        for process in list(RANKS):
            process.kill()
        outcomes.sort(key=lambda outcome: outcome.fault.seed)
        text = (
            report(outcomes, len(chosen), options.device, time.monotonic() - begun) if outcomes else "no fault ended\n"
        )
        print(text, end="", flush=True)
        if options.write:
            for folder in (RESULTS, *map(Path, filter(None, [os.environ.get("OUT")]))):
                Path(folder, f"{options.write}.md").write_text(text)
    os._exit(not outcomes or any(outcome.problems for outcome in outcomes))  # threads that wait for ranks are left


def until(end: float, beside: int, tasks: list[Callable[[], T]]) -> Iterator[T]:
    """Yield what tasks return, as they end, so many at a time. None begins shortly before `end`, and those that have
    not ended then are left alone."""
    threads = ThreadPoolExecutor(beside)

    def begin(task: Callable[[], T]) -> list[T]:
        return [task()] if time.monotonic() < end - LAST_S else []

    futures = [threads.submit(begin, task) for task in tasks]
    try:
        for future in as_completed(futures, timeout=end - time.monotonic()):
            yield from future.result()
    except TimeoutError:
        print("the time is over", flush=True)
        threads.shutdown(wait=False, cancel_futures=True)


def show(outcome: Outcome, *, is_long: bool) -> None:
    """Print an outcome that is not as documented, or any if it is the only one."""
    if outcome.problems or is_long:
        print(f"{outcome.fault} {outcome.seconds:.1f} s: {'; '.join(outcome.problems)}", flush=True)
    if outcome.problems and "OUT" in os.environ:
        with Path(os.environ["OUT"], "faults.jsonl").open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
    if is_long:
        for rank, rank_end in enumerate(outcome.ends):
            print(f"  rank {rank}: exit code {rank_end.code} {rank_end.error} {rank_end.text}", flush=True)


def report(outcomes: list[Outcome], number: int, device: str, seconds: float) -> str:
    """Return the page."""
    longest = max((outcome.seconds for outcome in outcomes), default=0.0)
    ranks = "2 to 4 ranks" if device == "cpu" else "2 or 3 ranks, all on one device"
    left = f" {number - len(outcomes)} more had not ended, or not begun, when the time was over." * (
        number > len(outcomes)
    )
    lines = [
        f"# Faults on {'gloo' if device == 'cpu' else 'nccl'} ranks",
        "",
        f"{date.today()}, {machine()}. `python benchmarks/faults.py {' '.join(sys.argv[1:])}`, {len(outcomes)} faults, "
        f"{seconds / 60:.1f} minutes; the longest run took {longest:.1f} s, with a limit of {LIMITS_S[device]:g} s for "
        f"a collective.{left}",
        "",
        f"Stages 0 to 3, optimizer states on the device, the host or disk, {ranks}. *Detected*: every other rank "
        "raised, or the fault did no harm. *Recovered*: all ranks finished with the values of a run without the fault. "
        "*Ended cleanly*: an exception and exit code 1, or 0. *Named*: of the runs in which ranks raised, those in "
        "which each of them named the rank that the fault happened to. A connection has two ends: the rank at whose "
        "end it broke has to be named, or the network. *No other*: where ranks wait in different calls or differ in "
        "options, a message of a third rank names two.",
        "",
        *rows(outcomes),
        *rows_of_features(outcomes),
        "",
    ]
    failed = [outcome for outcome in outcomes if outcome.problems]
    if failed:
        lines += ["Not as documented:", ""]
        lines += [f"- seed {outcome.fault.seed}: {'; '.join(outcome.problems)[:400]}" for outcome in failed]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
