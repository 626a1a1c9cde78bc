"""Plans for models that nobody tuned for: does a budget hold, is there a better placement by hand, was it predicted?

    python benchmarks/models.py run --records models.json --limit 240      (as many rows as fit into so many seconds)
    python benchmarks/models.py run --records models.json --model llama --model t5
    python benchmarks/models.py report --records models.json --write NAME
    python benchmarks/models.py run --records toy.json --toy               (no GPU: shows that it works)

A row is a model at a part of the peak without a limit, with or without clipping; before it the model trains with all on
the device. Each row is a process of its own, written to the records at once. Rows that are in there are not run again,
so a table is made in pieces. The plan trains past its trials; then twelve placements by hand train a few steps each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map
from zoo import HELD_OUT, ZOO, loss_of

import zerostd
from zerostd.policy import Tier

Record = dict[str, Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = Path(__file__).parent / "results"
PARTS = (0.6, 0.4)  # of plain torch's peak
CLIP = 1.0
GIB = 2**30
STEPS, STEADY = 60, 40  # of the plan; those after STEADY count
BY_HAND_STEPS = 6
LEAST_TOY = 64 << 20  # bytes of a budget on a CPU, which has no allocator to ask


def main() -> None:
    options = parse()
    if options.row:
        print(json.dumps(run_row(json.loads(options.row), toy=options.toy)))
    elif options.verb == "run":
        run_rows(options)
    else:
        report(options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "report"))
    parser.add_argument("--records", type=Path, required=True, help="a JSON file that rows are added to")
    parser.add_argument("--model", action="append", default=[], choices=sorted(ZOO), help="only these")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no other row begins")
    parser.add_argument("--each", type=float, default=300, help="seconds after which a row is given up")
    parser.add_argument("--toy", action="store_true", help="small models and few steps")
    parser.add_argument("--write", metavar="NAME", help="write results/models-NAME.md")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser.parse_args()


def wanted(models: list[str]) -> Iterator[Record]:
    """The rows of the table, plain torch's before those that need its peak."""
    for model in models or ZOO:
        yield {"model": model, "kind": "plain"}
        for part in PARTS:
            for clips in (False, True):
                yield {"model": model, "kind": "plan", "part": part, "clips": clips}
                yield {"model": model, "kind": "by hand", "part": part, "clips": clips}


def run_rows(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    records: list[Record] = json.loads(options.records.read_text()) if options.records.exists() else []
    for row in wanted(options.model):
        if any(record["row"] == row for record in records):
            continue
        if time.monotonic() - begun > options.limit:
            print("the time is over; run again for the rest", file=sys.stderr)
            return
        plain = next((r for r in records if r["row"] == {"model": row["model"], "kind": "plain"}), None)
        if row["kind"] != "plain" and (plain is None or "error" in plain):
            result: Record = {"error": "plain torch did not run"}
        else:
            peak = 0 if plain is None else plain.get("peak_bytes", 0)
            result = ask({**row, "plain_bytes": peak}, options)
        records.append({"row": row, **result})
        options.records.write_text(json.dumps(records, indent=1))
        print(row, result.get("error") or f"{result.get('step_s', 0.0):.4g} s", file=sys.stderr)


def ask(row: Record, options: argparse.Namespace) -> Record:
    """Run one row in a process of its own."""
    command = [sys.executable, __file__, "run", "--records", str(options.records), "--row", json.dumps(row)]
    try:
        done = subprocess.run(
            command + ["--toy"] * options.toy, capture_output=True, text=True, timeout=options.each, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {options.each:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    found: Record = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def run_row(row: Record, *, toy: bool) -> Record:
    torch.manual_seed(0)
    model, batch = ZOO[row["model"]](toy)
    model = model.to(DEVICE, torch.bfloat16)
    batch = tree_map(lambda leaf: _to_device(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
    steps = 8 if toy else STEPS
    if row["kind"] == "plain":
        return plain(model, batch, 3 if toy else 12)
    budget = max(int(row["part"] * row["plain_bytes"]), LEAST_TOY if DEVICE == "cpu" else 0)
    clip = CLIP if row["clips"] else None
    if row["kind"] == "plan":
        return planned(model, batch, budget, clip, steps)
    return by_hand(row, budget, clip, toy=toy)


def _to_device(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.to(DEVICE, torch.bfloat16) if leaf.is_floating_point() else leaf.to(DEVICE)


def call(model: torch.nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def train(model: torch.nn.Module, optimizer: Any, batch: Any, steps: int) -> tuple[list[float], int]:
    """Return the seconds of each step, and the most bytes of the device."""
    seconds = []
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        begun = time.perf_counter()
        loss_of(call(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds, torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def plain(model: torch.nn.Module, batch: Any, steps: int) -> Record:
    """All on the device, masters in fp32, no limit."""
    size = sum(parameter.numel() for parameter in model.parameters())
    everything = zerostd.Placement()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=DEVICE == "cuda")
    _, prepared = zerostd.prepare(model, optimizer, placement=everything, precision="bf16", accumulate=1)
    seconds, peak = train(model, prepared, batch, steps)
    return {"step_s": statistics.median(seconds[steps // 2 :]), "peak_bytes": peak, "size": size}


def planned(model: torch.nn.Module, batch: Any, budget: int, clip: float | None, steps: int) -> Record:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=DEVICE == "cuda")
    options: Record = {"precision": "bf16", "accumulate": 1, "max_grad_norm": clip}
    limits = zerostd.Budget(device=budget)
    begun = time.perf_counter()
    plan = zerostd.plan(model, optimizer, batch=batch, budget=limits, **options)
    planned_s = time.perf_counter() - begun
    _, prepared = zerostd.prepare(model, optimizer, plan=plan, budget=limits, **options)
    seconds, peak = train(model, prepared, batch, steps)
    obeyed = model.__dict__["_zerostd"].settings.plan
    return {
        "budget_bytes": budget,
        "planned_s": planned_s,
        "predicted_s": plan.predicted.step_s,
        "predicted_bytes": plan.predicted.total(Tier.DEVICE),
        "peak_bytes": peak,
        "step_s": statistics.median(seconds[min(STEADY, steps // 2) :]),
        "slowest_s": max(seconds[2:]),
        "seconds": seconds,
        "trials": [[trial.name, trial.predicted_s, trial.measured_s] for trial in obeyed.trials],
    }


def placements() -> Iterator[dict[str, Any]]:
    """Twelve placements as somebody would write them."""
    for on_host in (0.0, 0.5, 1.0):
        states = {"device": 1.0 - on_host, "host": on_host} if 0 < on_host < 1 else "host" if on_host else "device"
        for activations in ("device", "recompute"):
            for gradients in ("device", "host"):
                yield {"optimizer_states": states, "activations": activations, "gradients": gradients}


def by_hand(row: Record, budget: int, clip: float | None, *, toy: bool) -> Record:
    """Train with each placement, and take the fastest that stays inside the budget."""
    tried = []
    for placement in placements():
        torch.manual_seed(0)
        model, batch = ZOO[row["model"]](toy)
        model = model.to(DEVICE, torch.bfloat16)
        batch = tree_map(lambda leaf: _to_device(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=DEVICE == "cuda")
        try:
            _, prepared = zerostd.prepare(
                model, optimizer, placement=zerostd.Placement(**placement), precision="bf16", accumulate=1,
                max_grad_norm=clip,
            )  # fmt: skip
            seconds, peak = train(model, prepared, batch, 3 if toy else BY_HAND_STEPS)
            tried.append([placement, statistics.median(seconds[2:]), peak])
            zerostd.release(model)
        except (zerostd.PrepareError, torch.OutOfMemoryError) as error:
            tried.append([placement, None, str(error).splitlines()[0]])
        del model, optimizer
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    fitting = [seconds for _, seconds, peak in tried if seconds is not None and peak <= budget]
    return {"step_s": min(fitting, default=None), "tried": tried, "budget_bytes": budget}


# -- the table --


def report(options: argparse.Namespace) -> None:
    records = json.loads(options.records.read_text())
    text = "\n".join(lines(records)) + "\n"
    if options.write:
        (RESULTS / f"models-{options.write}.md").write_text(text)
    print(text, end="")


def lines(records: list[Record]) -> Iterator[str]:
    by_row = {json.dumps(record["row"], sort_keys=True): record for record in records}
    yield "| model | part, clip | plain | predicted | measured | by hand | peak / budget | slowest step |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for model in sorted({record["row"]["model"] for record in records}, key=lambda name: (name in HELD_OUT, name)):
        plain_row = by_row.get(json.dumps({"kind": "plain", "model": model}, sort_keys=True), {})
        for part in PARTS:
            for clips in (False, True):
                of = {"model": model, "part": part, "clips": clips}
                plan = by_row.get(json.dumps({**of, "kind": "plan"}, sort_keys=True), {})
                hand = by_row.get(json.dumps({**of, "kind": "by hand"}, sort_keys=True), {})
                if plan or plain_row.get("error"):
                    yield _line(model, of, plain_row, plan, hand)


def _line(model: str, of: Record, plain_row: Record, plan: Record, hand: Record) -> str:
    name = f"{model} (held out)" if model in HELD_OUT else model
    what = f"{of['part']:.0%}{', clip' if of['clips'] else ''}"
    error = plain_row.get("error") or plan.get("error")
    if error:
        return f"| {name} | {what} | {error} | | | | | |"
    bytes_ = f"{plan['peak_bytes'] / GIB:.2f} / {plan['budget_bytes'] / GIB:.2f} GiB"
    cells = [plain_row.get("step_s"), plan.get("predicted_s"), plan.get("step_s"), hand.get("step_s")]
    numbers = " | ".join("-" if value is None else f"{value:.3f}" for value in cells)
    return f"| {name} | {what} | {numbers} | {bytes_} | {plan['slowest_s']:.3f} |"


if __name__ == "__main__":
    main()
