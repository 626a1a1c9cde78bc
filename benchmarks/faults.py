"""Faults on purpose: one rank is killed, stopped, cut off or led astray, and every rank must end as documented.

    python benchmarks/faults.py --number 1000                         # of ranks
    python benchmarks/faults.py --seed 1000 --number 200              # of drives, connections and hooks
    python benchmarks/faults.py --seed 17 --number 1                  # one fault again, with what every rank said
    python benchmarks/faults.py --device cuda --number 100 --beside 8 # nccl ranks that share one GPU

The code is that of the tests (tests/faults). A seed decides kind, place, step, rank, stage, tier and number of ranks.
FAULTS_LIMIT_S, an environment variable, gives collectives more seconds on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from gpt import RESULTS, machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from faults import io_shim
from faults.drawing import FIRST_OF_MACHINES, draw
from faults.program import LIMITS_S
from faults.running import Outcome, run
from faults.table import rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1000, help="of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--beside", type=int, default=2, help="faults at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no fault after so many")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks: gloo, or nccl")
    parser.add_argument("--kind", help="only faults of this kind, of those that the seeds draw")
    parser.add_argument("--write", metavar="NAME", help="write results/NAME.md")
    options = parser.parse_args()
    if options.seed + options.number > FIRST_OF_MACHINES and "LD_PRELOAD" not in os.environ:
        preloaded = os.environ | {"LD_PRELOAD": str(io_shim.library())}  # must be there before Python starts
        os.execve(sys.executable, [sys.executable, *sys.argv], preloaded)
    begun = time.monotonic()
    outcomes = []

    def run_seed(seed: int) -> Outcome | None:
        return run(draw(seed, options.device)) if time.monotonic() < begun + 60 * options.minutes else None

    seeds = range(options.seed, options.seed + options.number)
    chosen = [seed for seed in seeds if options.kind in (None, draw(seed).kind)]
    with ThreadPoolExecutor(options.beside) as threads:
        for outcome in threads.map(run_seed, chosen):
            if outcome is not None:
                outcomes.append(outcome)
                show(outcome, is_long=options.number == 1)
    text = report(outcomes, options.device, time.monotonic() - begun)
    print(text, end="")
    if options.write:
        (RESULTS / f"{options.write}.md").write_text(text)
    sys.exit(any(outcome.problems for outcome in outcomes))


def show(outcome: Outcome, *, is_long: bool) -> None:
    """Print an outcome that is not as documented, or any if it is the only one."""
    if outcome.problems or is_long:
        print(f"{outcome.fault} {outcome.seconds:.1f} s: {'; '.join(outcome.problems)}", flush=True)
    if is_long:
        for rank, end in enumerate(outcome.ends):
            print(f"  rank {rank}: exit code {end.code} {end.error} {end.text}", flush=True)


def report(outcomes: list[Outcome], device: str, seconds: float) -> str:
    """Return the page."""
    longest = max(outcome.seconds for outcome in outcomes)
    lines = [
        f"# Faults on {'gloo' if device == 'cpu' else 'nccl'} ranks",
        "",
        f"{date.today()}, {machine()}. `python benchmarks/faults.py {' '.join(sys.argv[1:])}`, {len(outcomes)} faults, "
        f"{seconds / 60:.0f} minutes; the longest run took {longest:.1f} s, with a limit of {LIMITS_S[device]:g} s for "
        "a collective.",
        "",
        "Stages 0 to 3, optimizer states on the device, the host or disk, 2 to 4 ranks. *Detected*: every other rank "
        "raised, or the fault did no harm. *Recovered*: all ranks finished with the values of a run without the fault. "
        "*Ended cleanly*: an exception and exit code 1, or 0. *Named*: of the runs in which ranks raised, those in "
        "which each of them named the rank that the fault happened to. A connection has two ends: the rank at whose "
        "end it broke has to be named, or the network. *No other*: where ranks wait in different calls or differ in "
        "options, a message of a third rank names two.",
        "",
        *rows(outcomes),
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
