"""Plans for models that nobody tuned for: does a budget hold, was the step predicted, is there better by hand?

    python benchmarks/models.py run --limit 540 --model vit_h_14 --model mixture    (rows that fit into 540 seconds)
    python benchmarks/models.py run --kind plain --kind budget --model llama        (prepare is shown no batch)
    python benchmarks/models.py run --kind plain --kind plan --kind hand --part 0.4
    python benchmarks/models.py report --write NAME
    python benchmarks/models.py run --toy --records toy.json                        (no GPU: shows that it works)

A row is a model at a part of the peak without a limit, with or without clipping; before it the model trains with all on
the device. Each row is a process of its own, which imports everything while the row before it runs, and is given up
after `--each` seconds. It is written to the records (models.json in $OUT, or here) when it is done. Rows that are in
there are not run again, so a table is made in pieces. The plan trains until its trials are over, and then LAST steps
more. By hand, twelve placements train a few steps each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map
from zoo import HELD_OUT, ZOO, call, loss_of

import zerostd
from zerostd.policy import Tier
from zerostd.preparing.proposing import PlanSearch
from zerostd.replanning.adapting import Adapter
from zerostd.replanning.trials import name_of

Record = dict[str, Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = Path(__file__).parent / "results"
PARTS = (0.6, 0.4)  # of plain torch's peak
CLIP = 1.0
GIB = 2**30
FIRST, LAST = 15, 20  # steps of the plan: at least, and after its trials; the last ones count
MOST_S = 30.0  # for the trials of a row
BY_HAND_STEPS = 6
KINDS = ("plain", "plan", "budget", "hand")  # hand: placements by hand; budget: prepare is shown no batch
OVER = "took too long"
LEAST_SECONDS = 20.0  # for a row to begin
LEAST_TOY = 64 << 20  # bytes of a budget on a CPU, which has no allocator to ask


def main() -> None:
    options = parse()
    if options.row:
        print(json.dumps(run_row(json.loads(sys.stdin.readline()), toy=options.toy)))
        return
    if options.verb == "run":
        run_rows(options)
    report(options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "report"))
    default = Path(os.environ.get("OUT", ".")) / "models.json"
    parser.add_argument("--records", type=Path, default=default, help="a JSON file that rows are added to")
    parser.add_argument("--model", action="append", default=[], choices=sorted(ZOO), help="only these")
    parser.add_argument("--kind", action="append", default=[], choices=KINDS, help="only these; plain and plan if none")
    parser.add_argument("--part", action="append", default=[], type=float, choices=PARTS, help="only these")
    parser.add_argument("--clip", action="append", default=[], choices=("yes", "no"), help="only these")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which everything ends")
    parser.add_argument("--each", type=float, default=150, help="seconds after which a row is given up")
    parser.add_argument("--toy", action="store_true", help="small models and few steps")
    parser.add_argument("--write", metavar="NAME", help="write results/models-NAME.md")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)  # one, which comes through stdin
    return parser.parse_args()


def wanted(options: argparse.Namespace) -> Iterator[Record]:
    """The rows of the table, plain torch's before those that need its peak."""
    kinds = options.kind or ["plain", "plan"]
    clips = [clip == "yes" for clip in options.clip or ("no", "yes")]
    for model in options.model or ZOO:
        yield {"model": model, "kind": "plain"}
        for part in options.part or PARTS:
            for is_clipped in clips:
                for kind in KINDS[1:]:
                    if kind in kinds:
                        yield {"model": model, "kind": kind, "part": part, "clips": is_clipped}


def run_rows(options: argparse.Namespace) -> None:
    end = time.monotonic() + options.limit
    records: list[Record] = json.loads(options.records.read_text()) if options.records.exists() else []
    with Processes(options) as processes:
        for row in wanted(options):
            if any(record["row"] == row for record in records):
                continue
            left = end - time.monotonic()
            if left < LEAST_SECONDS:
                print("the time is over; run again for the rest", file=sys.stderr)
                return
            plain = next((r for r in records if r["row"] == {"model": row["model"], "kind": "plain"}), None)
            if row["kind"] != "plain" and (plain is None or "error" in plain):
                result: Record = {"error": "plain torch did not run"}
            else:
                peak = 0 if plain is None else plain.get("peak_bytes", 0)
                result = processes.ask({**row, "plain_bytes": peak}, min(options.each, left))
            if result.get("error") == OVER and left < options.each:
                return  # the whole ended, not the row
            records.append({"row": row, **result})
            options.records.write_text(json.dumps(records, indent=1))
            took = f"{options.limit - end + time.monotonic():.0f} s:"
            print(took, row, result.get("error") or f"{result.get('step_s') or 0.0:.4g} s", file=sys.stderr, flush=True)


class Processes:
    """A process for each row. The next one is started ahead, so that it has imported everything when its turn comes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._command = [sys.executable, __file__, "run", "--row", *["--toy"] * options.toy]
        self._folder = options.records.resolve().parent / "cache"
        self._logs = options.records.with_suffix(".log")
        self._next = self._start()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end(self._next)

    def _start(self) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {"ZEROSTD_CACHE": str(self._folder), **os.environ}
        return subprocess.Popen(self._command, text=True, env=environment, start_new_session=True, **pipes)

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> str:
        """Kill a process and what it started, and return its messages."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[1]

    def ask(self, row: Record, seconds: float) -> Record:
        """Run one row."""
        for kept in self._folder.glob("plan-*"):  # every row begins without what another one has learnt
            kept.unlink()
        process = self._next
        self._next = self._start()
        try:
            output, errors = process.communicate(json.dumps(row) + "\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            errors = self._end(process)
            output = ""
        with self._logs.open("a") as log:
            log.write(f"== {row}\n{errors}\n")
        if process.returncode == -signal.SIGKILL:
            return {"error": OVER}
        if process.returncode:
            return {"error": (errors.strip().splitlines() or [f"ended with {process.returncode}"])[-1][:300]}
        result: Record = json.loads(output.strip().splitlines()[-1])
        return result


def run_row(row: Record, *, toy: bool) -> Record:
    if row["kind"] == "plain":
        return plain(*make(row["model"], toy=toy), 3 if toy else 12)
    budget = max(int(row["part"] * row["plain_bytes"]), LEAST_TOY if DEVICE == "cpu" else 0)
    clip = CLIP if row["clips"] else None
    if row["kind"] in ("plan", "budget"):
        return planned(*make(row["model"], toy=toy), budget, clip, shows_batch=row["kind"] == "plan", toy=toy)
    return by_hand(row, budget, clip, toy=toy)


def make(name: str, *, toy: bool) -> tuple[torch.nn.Module, Any]:
    """Return a model and its batch on the device, in bf16, the same each time."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model, batch = ZOO[name](toy)
    batch = tree_map(lambda leaf: _to_device(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
    return model.to(DEVICE, torch.bfloat16), batch


def _to_device(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.to(DEVICE, torch.bfloat16) if leaf.is_floating_point() else leaf.to(DEVICE)


def train(model: torch.nn.Module, optimizer: Any, batch: Any, steps: int) -> tuple[list[float], list[int]]:
    """Return the seconds of each step, from end to end, and the most bytes of the device up to its end. The loop is at
    most a step ahead of the device."""
    is_cuda = DEVICE == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    ends = [_now()]
    peaks = []
    for _ in range(steps):
        loss_of(call(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(_now())
        if is_cuda:
            ends[-2].synchronize()
            peaks.append(torch.cuda.max_memory_allocated())  # the meter of a plan resets it between steps
    if is_cuda:
        torch.cuda.synchronize()
        seconds = [begun.elapsed_time(ended) / 1e3 for begun, ended in pairwise(ends)]
        return seconds, peaks
    return [ended - begun for begun, ended in pairwise(ends)], [0] * steps


def _now() -> Any:
    if DEVICE == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def plain(model: torch.nn.Module, batch: Any, steps: int) -> Record:
    """All on the device, masters in fp32, no limit."""
    size = sum(parameter.numel() for parameter in model.parameters())
    everything = zerostd.Placement()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=DEVICE == "cuda")
    _, prepared = zerostd.prepare(model, optimizer, placement=everything, precision="bf16", accumulate=1)
    seconds, peaks = train(model, prepared, batch, steps)
    return {"step_s": statistics.median(seconds[steps // 2 :]), "peak_bytes": max(peaks), "size": size}


def planned(
    model: torch.nn.Module, batch: Any, budget: int, clip: float | None, *, shows_batch: bool, toy: bool
) -> Record:
    """Train with the planner's placement; without a batch it is made when the first pass was seen."""
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("zerostd").setLevel(logging.INFO)  # each decision, for the log beside the records
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=DEVICE == "cuda")
    options: Record = {"precision": "bf16", "accumulate": 1, "max_grad_norm": clip}
    limits = zerostd.Budget(device=budget)
    plan = None
    begun = time.perf_counter()
    if shows_batch:
        plan = zerostd.plan(model, optimizer, batch=batch, budget=limits, **options)
    planned_s = time.perf_counter() - begun
    _, prepared = zerostd.prepare(model, optimizer, plan=plan, budget=limits, **options)
    prepared_s = time.perf_counter() - begun - planned_s
    runtime = model.__dict__["_zerostd"]
    adapter = next((each for each in runtime.observers if isinstance(each, Adapter)), None)
    seconds, peaks = train(model, prepared, batch, 4 if toy else FIRST)
    end = time.perf_counter() + MOST_S
    while adapter is not None and adapter.is_busy and time.perf_counter() < end:
        more, more_peaks = train(model, prepared, batch, 1 if toy else 5)
        seconds += more
        peaks += more_peaks
    last, last_peaks = train(model, prepared, batch, 4 if toy else LAST)
    norm = getattr(prepared, "grad_norm", None)
    obeyed = runtime.settings.plan
    return {
        "budget_bytes": budget,
        "planned_s": planned_s,
        "prepared_s": prepared_s,
        "predicted_s": None if plan is None else plan.predicted.step_s,
        "predicted_bytes": None if plan is None else plan.predicted.total(Tier.DEVICE),
        "first_plan": None if plan is None else [name_of(plan), plan.explain()],
        "peak_bytes": max(*peaks, *last_peaks),
        "last_peak_bytes": max(last_peaks),
        "peaks": [round(each / GIB, 3) for each in [*peaks, *last_peaks]],  # GiB
        "step_s": statistics.median(last),
        "slowest_s": max([*seconds[2:], *last]),
        "seconds": [round(each, 4) for each in [*seconds, *last]],
        "is_settled": adapter is None or not adapter.is_busy,
        "plan": name_of(obeyed),
        "planned": {kind.value: size for kind, size in obeyed.predicted.bytes.get(Tier.DEVICE, {}).items()},
        "held": zerostd.memory(model).now.get("device", {}),
        "account": {kind.value: size for kind, size in _account(runtime).items()},
        "clips": clip is not None and norm is not None and norm.item() > clip,  # the last step
        "trials": [[trial.name, trial.predicted_s, trial.measured_s] for trial in obeyed.trials],
        "revisions": [] if adapter is None else [[each.step, each.reason] for each in adapter.revisions],
        "notes": list(obeyed.notes),
    }


def _account(runtime: Any) -> dict[Any, int]:
    """Return the bytes of the device that the model takes, by the code that allocates them."""
    search = PlanSearch(runtime.settings, runtime.blueprints, runtime.world)
    return search.account(runtime.settings.plan).get(Tier.DEVICE, {})


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
        model, batch = make(row["model"], toy=toy)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=DEVICE == "cuda")
        try:
            _, prepared = zerostd.prepare(
                model, optimizer, placement=zerostd.Placement(**placement), precision="bf16", accumulate=1,
                max_grad_norm=clip,
            )  # fmt: skip
            seconds, peaks = train(model, prepared, batch, 3 if toy else BY_HAND_STEPS)
            tried.append([placement, statistics.median(seconds[2:]), max(peaks)])
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

    def at(**row: Any) -> Record:
        return by_row.get(json.dumps(row, sort_keys=True), {})

    yield "| model | part, clip | plain s, GiB | predicted s, GiB | measured | by hand | peak / budget | slowest |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    models = {record["row"]["model"] for record in records}
    for model in sorted(models, key=lambda name: (name in HELD_OUT, name)):
        plain_row = at(model=model, kind="plain")
        if "error" in plain_row:
            yield f"| {model} | | {plain_row['error']} | | | | | |"
        for part in PARTS:
            for clips in (False, True):
                of = {"model": model, "part": part, "clips": clips}
                for kind in ("plan", "budget"):
                    plan = at(**of, kind=kind)
                    if plan and "error" not in plain_row:
                        yield _line({**of, "kind": kind}, plain_row, plan, at(**of, kind="hand"))


def _line(of: Record, plain_row: Record, plan: Record, hand: Record) -> str:
    name = f"{of['model']} (held out)" if of["model"] in HELD_OUT else of["model"]
    words = [f"{of['part']:.0%}", *["clip"] * of["clips"], *["no batch shown"] * (of["kind"] == "budget")]
    begin = f"| {name} | {', '.join(words)} | {_cell(plain_row['step_s'], plain_row['peak_bytes'])} |"
    if "error" in plan:
        return f"{begin} {plan['error']} | | | | |"
    predicted = _cell(plan["predicted_s"], plan["predicted_bytes"])
    passed = " **passed**" if plan["peak_bytes"] > plan["budget_bytes"] else ""
    peak = f"{plan['peak_bytes'] / GIB:.2f} / {plan['budget_bytes'] / GIB:.2f}{passed}"
    return (
        f"{begin} {predicted} | {_cell(plan['step_s'])} | {_cell(hand.get('step_s'))} | {peak} | "
        f"{_cell(plan['slowest_s'])} |"
    )


def _cell(seconds: float | None, num_bytes: int | None = None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3f}" + ("" if num_bytes is None else f", {num_bytes / GIB:.2f}")


if __name__ == "__main__":
    main()
