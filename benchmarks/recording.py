"""What recording costs: steps of one model in one process, recorded and not by turns.

    python benchmarks/recording.py --write h200
    python benchmarks/recording.py --size tiny --seq 64 --micro 1 --steps 20 --rounds 2   (no GPU: shows that it works)

A round is so many steps without a recording and as many with one, everything finished at both ends, in an order that
changes from round to round. The ratio of a round is that of its two times; the middle one counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpt import GPT, RESULTS, draw, machine
from peers import ADAMW, Job

import zerostd
from offload import DEVICE, System, command, make_model, synchronize, tell

WARM = 5  # steps before the first round


def main() -> None:
    options = parse()
    lines = ["# What recording costs", "", *__doc__.split("\n\n")[-1].strip().splitlines(), ""]
    lines += [f"- machine: {machine()}", f"- zerostd: {zerostd.__version__}", f"- command: `{command()}`"]
    lines += [f"- date: {date.today()}", ""]
    lines += ["| model | states | every | steps a round | s a step, off | on | on / off, the middle | by round |"]
    lines += ["|---|---|--:|--:|--:|--:|--:|---|"]
    for states in options.states.split(","):
        lines.append(measure(options, states))
        tell(lines[-1])
    if options.write:
        for folder in (RESULTS, *map(Path, filter(None, [os.environ.get("OUT")]))):
            (folder / f"recording-{options.write}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.3b")
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20, help="of each half of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=20, help="steps between those of which events are taken")
    parser.add_argument("--states", default="device,host", help="homes of the optimizer states, one after the other")
    parser.add_argument("--write", metavar="NAME", help="write results/recording-NAME.md, and to $OUT if set")
    return parser.parse_args()


def measure(options: argparse.Namespace, states: str) -> str:
    """One row."""
    job = Job(options.size, options.micro, options.seq, 1, clip=0.0, recompute=False, steps=options.steps, warm=WARM)
    model = make_model(job, System("zerostd"))
    model, optimizer = zerostd.prepare(
        model,
        torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
        stage=3,
        precision="bf16",
        accumulate=1,
        placement=zerostd.Placement(optimizer_states=states),
    )
    batch = draw(torch.Generator(DEVICE).manual_seed(1), options.micro, options.seq)
    train(model, optimizer, batch, WARM)
    found: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for is_on in (number % 2 == 1, number % 2 == 0):
                path = Path(folder, f"run-{number}")
                with zerostd.record(model, path, every=options.every) if is_on else nullcontext() as recording:
                    found[is_on].append(train(model, optimizer, batch, options.steps, recording))
    zerostd.release(model)
    ratios = [on / off for off, on in zip(found[False], found[True], strict=True)]
    each = ", ".join(f"{ratio:.4f}" for ratio in ratios)
    times = " | ".join(f"{median(found[is_on]):.4f}" for is_on in (False, True))
    told = f"{options.size}, {options.micro}x{options.seq} | {states} | {options.every} | {options.steps}"
    return f"| {told} | {times} | {median(ratios):.4f} | {each} |"


def train(model: GPT, optimizer: Any, batch: Any, steps: int, recording: Any = None) -> float:
    """Seconds a step."""
    optimizer.synchronize()
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if recording is not None:
            recording.log(loss=loss)
    optimizer.synchronize()
    synchronize()
    return (time.perf_counter() - begin) / steps


if __name__ == "__main__":
    main()
