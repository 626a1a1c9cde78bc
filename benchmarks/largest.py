"""The largest models that one device and its host hold, by the plan's own choice: bytes, seconds, and their floor.

    python benchmarks/largest.py --job 20b --job 40b:int8 --device 136GiB --host 108GiB --write NAME
    python benchmarks/largest.py --job 20b --job 40b:int8 --paper h200-1              (plans only, for that machine)
    python benchmarks/largest.py --job tiny --device 200MiB --host 1GiB --seq 64      (no GPU: shows that it works)

A job is a size of offload.py, and `:int8` where the plan may keep moments as codes. The plan is made for a model on the
meta device, whose operations are counted; the model is built under `zerostd.empty_init()`. One pass makes a step, and
nothing is clipped. Each job is a process of its own. The floor of a step is its arithmetic at the rate of a matrix
product of 8192 x 8192, with recomputing as planned, or the bytes of states over the link at its rate, if that is more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpt import GPT, RESULTS, Shape, draw, machine
from peers import ADAMW

import zerostd
from offload import DEVICE, SIZES, VOCABULARY, HostPeak, synchronize
from zerostd.cli.machines import find_machine
from zerostd.measuring import load_or_measure
from zerostd.policy import Kind, Route, Tier

GIB = 2**30
RESULT = "RESULT "


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--job", action="append", default=[], help="a size, and :int8 for codes; 20b and 40b:int8 if none"
    )
    parser.add_argument("--device", default="136GiB")
    parser.add_argument("--host", default="108GiB")
    parser.add_argument("--micro", type=int, default=8, help="sequences in a step")
    parser.add_argument("--seq", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--warm", type=int, default=2, help="steps before them")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which a job is ended")
    parser.add_argument("--paper", metavar="MACHINE", help="only print the plans, for a machine that need not be here")
    parser.add_argument("--write", metavar="NAME", help="write results/largest-NAME.md, and to $OUT if set")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def shape_of(size: str, seq: int) -> Shape:
    return Shape(*SIZES[size], vocabulary=VOCABULARY, length=seq)


def plan_of(job: str, options: argparse.Namespace) -> zerostd.Plan:
    """Plan for a model without memory."""
    size, _, codec = job.partition(":")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = GPT(shape_of(size, options.seq))
        batch = tuple(torch.zeros(options.micro, options.seq, dtype=torch.long) for _ in range(2))
    torch.set_default_dtype(torch.float32)
    return zerostd.plan(
        model,
        torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
        budget=zerostd.Budget(device=options.device, host=options.host),
        batch=batch,
        machine=find_machine(options.paper, None)[0] if options.paper else None,
        precision="bf16",
        accumulate=1,
        exact=codec != "int8",
    )


def run(job: str, options: argparse.Namespace) -> dict[str, Any]:
    """Plan, prepare and train."""
    size, _, codec = job.partition(":")
    host = HostPeak(daemon=True)
    host.start()
    rates = load_or_measure(torch.device(DEVICE))
    begin = time.perf_counter()
    plan = replace(plan_of(job, options), adaptive=False)  # measured as it is, in few steps
    planned = time.perf_counter()
    print(plan.explain(), file=sys.stderr, flush=True)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with zerostd.empty_init():
        model = GPT(shape_of(size, options.seq))
    torch.set_default_dtype(torch.float32)
    numel = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    model, optimizer = zerostd.prepare(
        model, optimizer, plan=plan, precision="bf16", accumulate=1, exact=codec != "int8"
    )
    synchronize()
    prepared = time.perf_counter()
    print(f"planned in {planned - begin:.1f} s, prepared in {prepared - planned:.1f} s", file=sys.stderr, flush=True)
    data = torch.Generator(DEVICE).manual_seed(1)
    losses, times = [], []
    for step in range(options.warm + options.steps):
        before = time.perf_counter()
        loss = model(*draw(data, options.micro, options.seq))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - before)
        print(f"step {step}: {times[-1]:.3f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    before = time.perf_counter()
    optimizer.synchronize()
    tail_s = time.perf_counter() - before
    host.look()
    memory = zerostd.memory(model)
    return {
        "size": numel,
        "planned_s": planned - begin,
        "prepare_s": prepared - planned,
        "predicted_s": plan.predicted.step_s,
        "step_s": (sum(times[options.warm :]) + tail_s) / options.steps,
        "median_s": median(times[options.warm :]),
        "times": times,
        "losses": losses,
        "predicted_bytes": {tier.value: plan.predicted.total(tier) for tier in Tier},
        "device_bytes": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0,
        "host_bytes": host.peak_bytes,
        "ledger": {tier: sum(kinds.values()) for tier, kinds in memory.peak.items()},
        "floor_s": floor_s(plan, numel, rates, options),
        "plan": plan.explain(),
    }


def floor_s(plan: zerostd.Plan, numel: int, rates: Any, options: argparse.Namespace) -> float:
    """Return the seconds that the arithmetic takes at the measured rate, or the states over the link, if more."""
    again = sum(way.startswith("recompute") for way in plan.activations.values()) / max(1, len(plan.activations))
    flops = (6 + 2 * again) * numel * options.micro * options.seq
    compute_s = flops / max(rates.matrix.values())
    if rates.link is None:
        return compute_s
    states = plan.predicted.bytes.get(Tier.HOST, {}).get(Kind.OPTIMIZER_STATES, 0)
    streamed = sum(
        share for homes in plan.homes.values() for _, route, share in homes.states if route is Route.STREAMED
    )
    off = sum(share for homes in plan.homes.values() for tier, _, share in homes.states if tier is not Tier.DEVICE)
    return max(compute_s, 2 * states * (streamed / off if off else 0.0) / rates.link.both)


def report(records: list[dict[str, Any]]) -> list[str]:
    lines = [
        "# The largest models of one device and its host",
        "",
        f"- machine: {machine()}",
        f"- command: `python benchmarks/largest.py {' '.join(sys.argv[1:])}`",
        f"- date: {date.today()}",
        "",
        "| job | parameters | prepare, s | step, s | predicted | over the floor | tokens/s | device GiB, planned "
        "| host GiB, planned | first and last loss |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for each in records:
        if "error" in each:
            lines.append(f"| {each['job']} | {each['error']} |")
            continue
        planned = {tier: size / GIB for tier, size in each["predicted_bytes"].items()}
        row = (
            each["job"],
            f"{each['size'] / 1e9:.2f} B",
            f"{each['prepare_s']:.0f}",
            f"{each['step_s']:.2f}",
            f"{each['predicted_s']:.2f}",
            f"{each['step_s'] / each['floor_s']:.2f}",
            f"{each['tokens'] / each['step_s']:,.0f}",
            f"{each['device_bytes'] / GIB:.1f}, {planned['device']:.1f}",
            f"{each['host_bytes'] / GIB:.1f}, {planned['host']:.1f}",
            f"{each['losses'][0]:.3f}, {each['losses'][-1]:.3f}",
        )
        lines.append(f"| {' | '.join(row)} |")
    for each in records:
        if "plan" in each:
            lines += ["", f"## {each['job']}", "", "```", each["plan"], "```"]
    return lines


def main() -> None:
    options = parse()
    jobs = options.job or ["20b", "40b:int8"]
    if options.run:
        print(RESULT + json.dumps(run(options.run, options)), flush=True)
        os._exit(0)  # unregistering a hundred GiB takes longer than the steps
    if options.paper:
        for job in jobs:
            print(f"{job}\n{plan_of(job, options).explain()}\n")
        return
    records: list[dict[str, Any]] = []
    for job in jobs:
        command = [sys.executable, *sys.argv, "--run", job]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.limit)
            found = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
            record = json.loads(found[-1].removeprefix(RESULT)) if found else {"error": f"exit {done.returncode}"}
        except subprocess.TimeoutExpired:
            record = {"error": f"ended after {options.limit:g} s"}
        records.append({"job": job, "tokens": options.micro * options.seq, **record})
        for folder in [Path(os.environ["OUT"])] if "OUT" in os.environ else []:
            (folder / "largest.json").write_text(json.dumps(records))
        if options.write:
            for folder in [RESULTS, *map(Path, filter(None, [os.environ.get("OUT")]))]:
                (folder / f"largest-{options.write}.md").write_text("\n".join(report(records)) + "\n")
    print("\n".join(report(records)))


if __name__ == "__main__":
    main()
