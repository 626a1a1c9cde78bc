"""Whether the planner is right: what it predicts against what then happens, and its plan against other placements.

    python benchmarks/planning.py measure                                    (the machine, kept for what follows)
    python benchmarks/planning.py jobs --write NAME                          (predicted and measured, job by job)
    python benchmarks/planning.py jobs --job "1.3b micro=8 clip=1 device=24" --job "6.7b micro=16 recompute device=24"
    python benchmarks/planning.py sweep --job "1.3b micro=8 device=24" --limit 400 --write NAME
    python benchmarks/planning.py jobs --seq 64 --job "tiny micro=2 device=0.15"       (no GPU: shows that it works)

A job is a size and `option=value` words, of the options below; it takes from the command line what it does not say.
`device` and `host` are GiB that may be used there, `disk` lets the disk be used. Each job is a process of its own, and
the placements of a sweep share one as long as none of them fails (sweep.py). The GPT, its precision and its optimizer
are those of offload.py. Records go at once to $OUT/planning.jsonl or $OUT/sweep.jsonl, if OUT is set, and reports of
earlier ones are made by `jobs --from FILE` and `sweep --from FILE`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Self, TextIO

from gpt import RESULTS, machine
from pacing import paced_s
from peers import Job
from sweep import GIB, TIERS, Case, bytes_off, case_from, grid, off, paces, percent, report_sweep, told, words, worst

import zerostd
from offload import RESULT, Record, cell, command, job_options, tell
from zerostd.measuring import load_or_measure

JOBS = (
    "1.3b micro=8",
    "1.3b micro=8 device=24",
    "1.3b micro=8 clip=1 device=24",
    "1.3b micro=32 recompute device=24",
    "3.6b micro=4 clip=10 device=40",
    "3.6b micro=8 accumulate=2 device=40",
    "6.7b micro=4 clip=10 recompute device=80",
    "6.7b micro=16 recompute device=80",
    "6.7b micro=16 recompute device=24",
    "1.3b micro=8 device=24 host=8 disk",
)

MOST_FITTING = 2  # placements of a row of a sweep: where the first one cuts a group, the second may be better
PROMISING = 1.2  # of the best so far: rows whose first is slower have no second
NUM_FINALISTS, NUM_TURNS = 3, 3  # placements that are trained again beside the plan, by turns


def main() -> None:
    options = parse()
    if options.verb == "measure":
        measure(options)
    elif options.records:
        records = [json.loads(line) for path in options.records for line in Path(path).read_text().splitlines()]
        publish(options, records)
    elif options.verb == "jobs":
        run_jobs(options)
    else:
        run_sweep(options)


def case_options() -> argparse.ArgumentParser:
    """What a job may say for itself: offload.py's options of a job, without those of its systems."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for action in job_options()._actions:
        if action.dest in Job.__dataclass_fields__:
            parser._add_action(action)
    parser.add_argument("--device", type=float, metavar="GIB", help="of the device that may be used; all that is free")
    parser.add_argument("--host", type=float, metavar="GIB", help="of host memory that may be used; all that is free")
    parser.add_argument("--disk", action="store_true", help="the disk may be used")
    return parser


def parse() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("measure", help="measure the machine anew, and keep it")
    for name, steps, warm, limit in (("jobs", 10, 5, 240), ("sweep", 5, 2, 480)):
        verb = verbs.add_parser(name, parents=[case_options()], allow_abbrev=False)
        verb.set_defaults(steps=steps, warm=warm)
        verb.add_argument("--job", action="append", default=[], help='such as "1.3b micro=8 clip=1 device=24"')
        verb.add_argument("--write", metavar="NAME", help="write results/planning-NAME.md, and to $OUT if set")
        verb.add_argument("--from", dest="records", action="append", metavar="FILE", help="report these, run nothing")
        what = "a run is ended" if name == "jobs" else "no other placement is tried"
        verb.add_argument("--limit", type=float, default=limit, help=f"seconds after which {what}")
        if name == "sweep":
            verb.add_argument("--each", type=float, default=120, help="seconds after which a placement is given up")
    for verb in verbs.choices.values():
        verb.add_argument("--disk-path", default=tempfile.gettempdir(), help="folder for states on disk")
    return parser.parse_args()


def cases(options: argparse.Namespace, default: Sequence[str]) -> list[Case]:
    """The jobs of the command line."""
    found = []
    for text in options.job or default:
        size, *said = text.split()
        arguments = ["--size", size, *(part for word in said for part in f"--{word}".split("=", 1))]
        chosen = case_options().parse_args(arguments, argparse.Namespace(**vars(options)))
        job = Job(**{name: getattr(chosen, name) for name in Job.__dataclass_fields__})
        found.append(Case(job, chosen.device, chosen.host, chosen.disk))
    return found


def measure(options: argparse.Namespace) -> None:
    """Measure the machine, whatever was kept of it; $OUT/machine.json and zerostd's own folder have it afterwards."""
    begin = time.perf_counter()
    profile = load_or_measure(disk_path=options.disk_path, on_progress=lambda what, _: tell(what), again=True)
    tell(f"measured in {time.perf_counter() - begin:.1f} s")
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "machine.json").write_text(profile.to_json())
    print(profile.to_json(), end="")


def run_jobs(options: argparse.Namespace) -> None:
    """Plan each job and train by the plan."""
    records = []
    for case in cases(options, JOBS):
        tell(f"{case.label}: begins")
        with Process(case, options.disk_path) as process:
            found = process.ask({"plan": None}, options.limit)
        records.append(keep("planning.jsonl", case, found))
        tell(f"{case.label}: {outcome(found)}")
        publish(options, records, prints=False)  # after each, lest a time-out take all
    print("\n".join(report(options.verb, records)))


def run_sweep(options: argparse.Namespace) -> None:
    """Every job's plan among the placements of a grid."""
    records: list[Record] = []
    for case in cases(options, ("1.3b micro=8 device=24",)):
        sweep_one(case, options, records)
    publish(options, records)


def sweep_one(case: Case, options: argparse.Namespace, records: list[Record]) -> None:
    """The plan, all placements until the time is up, and then the best of them and the plan by turns."""
    begin, rows = time.perf_counter(), grid(bool(case.job.clip))
    best: list[Record] = []  # that fit, by time
    with Process(case, options.disk_path) as process:

        def ask(name: str, entry: Record) -> Record:
            found = {"placement": entry.get("placement"), **process.ask({**entry, "releases": True}, options.each)}
            records.append(keep("sweep.jsonl", case, {**found, "entry": name, "num_rows": len(rows)}))
            tell(f"{case.label}: {name}: {outcome(found)}")
            return found

        first = ask("plan", {"plan": None})
        if "plan" not in first:
            return
        for number, row in enumerate(rows, start=1):
            num_fitting = 0
            for placement in row:
                if num_fitting == MOST_FITTING or time.perf_counter() - begin > options.limit:
                    break
                found = ask(f"row {number} of {len(rows)}", {"placement": placement, "model": first["model"]})
                if not found.get("fits"):
                    continue
                num_fitting += 1
                best = sorted([*best, found], key=lambda one: one["median_s"])
                if found["median_s"] > PROMISING * best[0]["median_s"]:
                    break
            publish(options, records, prints=False)
        finalists = [{"placement": one["placement"], "model": first["model"]} for one in best[:NUM_FINALISTS]]
        for turn in range(1, NUM_TURNS + 1):
            ask(f"plan, turn {turn}", {"plan": first["plan"]})
            for entry in finalists:
                ask(f"turn {turn}", entry)


def outcome(found: Record) -> str:
    """What came of a run, in a line."""
    if "error" in found:
        placement = found.get("placement")
        return str(found["error"]) if placement is None else f"{words(placement)}: {found['error']}"
    parts = [words(found["placement"]), f"{found['step_s']:.4f} s"]
    parts[-1] += f" (predicted {found['predicted_s']:.4f})" if found.get("predicted_s") else ""
    for tier in TIERS:
        predicted, measured = found["predicted_bytes"][tier] / GIB, found["measured_bytes"][tier] / GIB
        parts += [f"{tier} {measured:.3f} GiB (predicted {predicted:.3f})"] if predicted or measured else []
    return ", ".join(parts) + ("" if found["fits"] else ", over the budget")


class Process:
    """Another process (sweep.py), started when first asked and again after it has ended."""

    def __init__(self, case: Case, disk_path: str) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=disk_path, prefix="planning-")
        self._given = json.dumps({"case": asdict(case), "disk_path": self._folder.name})
        self._log = open_log()
        self._log.write(f"== {case.label}\n")
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._log.close()
        self._folder.cleanup()

    def _start(self) -> subprocess.Popen[str]:
        script = os.fspath(Path(__file__).with_name("sweep.py"))
        return subprocess.Popen(
            [sys.executable, script, self._given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def _end(self) -> int:
        """End it, if it has not; its exit status."""
        if self._process is None:
            return 0
        self._process.kill()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # of what was never read
                pipe.close()
        self._process = None
        return code

    def ask(self, entry: Record, limit_s: float) -> Record:
        """The answer to one entry. What goes wrong with it is in the record's `error`."""
        self._log.flush()
        beginning = self._log.seek(0, os.SEEK_END)
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        end_s = time.perf_counter() + limit_s
        timer = threading.Timer(limit_s, process.kill)
        timer.daemon = True
        timer.start()
        found: Record = {}
        try:
            process.stdin.write(json.dumps(entry) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(RESULT):
                    found = json.loads(line.removeprefix(RESULT))
                    break
                self._log.write(line)
        except BrokenPipeError:
            pass  # it has ended, and its error is in the log
        timer.cancel()
        printed = self._printed_since(beginning)
        if not found:
            code = process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit {code}"
            how = f"ended after {limit_s:g} s" if time.perf_counter() >= end_s else how
            found = {"error": f"{how}: {printed[-1] if printed and code >= 0 else 'printed no result'}", "ends": True}
        if "error" in found and not found.get("refused") and printed:
            print("\n".join(f"    {line[:200]}" for line in printed[-12:]), file=sys.stderr, flush=True)
        if found["ends"]:
            self._end()
        return found

    def _printed_since(self, beginning: int) -> list[str]:
        """Lines of the log: they may say what went wrong."""
        self._log.flush()
        self._log.seek(beginning)
        return [line.rstrip() for line in self._log if line.strip()]


def open_log() -> TextIO:
    """What processes print beside results: $OUT/planning.log, which is kept, or a file that is not."""
    if "OUT" in os.environ:
        return open(Path(os.environ["OUT"], "planning.log"), "a+", errors="replace")
    return tempfile.TemporaryFile("a+", errors="replace")


def keep(name: str, case: Case, found: Record) -> Record:
    """A record with what belongs to it, in $OUT at once."""
    beside = {"machine": machine(), "zerostd": zerostd.__version__, "command": command(), "date": str(date.today())}
    record = {"case": asdict(case), **found, **beside}
    if "OUT" in os.environ:
        with open(Path(os.environ["OUT"], name), "a") as file:
            file.write(json.dumps(record) + "\n")
    return record


def publish(options: argparse.Namespace, records: list[Record], *, prints: bool = True) -> None:
    """Write the report, if it has a name."""
    lines = report(options.verb, records)
    if options.write is not None:
        RESULTS.mkdir(exist_ok=True)
        for folder in (RESULTS, *map(Path, filter(None, [os.environ.get("OUT")]))):
            (folder / f"planning-{options.write}.md").write_text("\n".join(lines) + "\n")
    if prints:
        print("\n".join(lines))


# reports

LEGEND = """\
A measured step is the time of all measured steps by their number, with everything finished and the device synchronized
at both ends; from step to step is the median of single ones, from start to start, which leaves out what the last one
had still to do. Device memory is the most that was allocated while training, and what is predicted of it has
activations in it; where the processor is the device it is the ledger's, without activations on either side. Host and
disk are the ledger's peaks. Errors are predicted against measured: below zero, too little was predicted. `processor` is
how fast it updates right before and after training, of what it did when the machine was measured for the plan, and what
the step was predicted to take at the mean of both stands before it."""
HEAD = [
    "| job | placement | predicted s | measured s | error % | step to step s | error % |"
    + "".join(f" {tier} GiB predicted | measured | error % |" for tier in TIERS)
    + " planned in s | predicted at that pace s | error % | processor |",
    "|---|---|" + "--:|" * 18,
]


def report(verb: str, records: list[Record]) -> list[str]:
    """Markdown."""
    title = "What was planned, and what happened" if verb == "jobs" else "The plan among other placements"
    lines = [f"# {title}", "", *LEGEND.splitlines(), ""]
    for name in ("machine", "zerostd", "command", "date"):
        quote = "`" if name == "command" else ""
        lines += [f"- {name}: {quote}{text}{quote}" for text in dict.fromkeys(record[name] for record in records)]
    body = report_jobs if verb == "jobs" else report_sweep
    return [*lines, "", *body(records)]


def report_jobs(records: list[Record]) -> list[str]:
    """One table, and the worst of it."""
    lines = list(HEAD)
    for record in records:
        label = case_from(record["case"]).label
        lines.append(f"| {label} | {cell(record['error'])} |" + " |" * 18 if "error" in record else row(label, record))
    good = [record for record in records if "error" not in record]
    if not good:
        return lines
    lasts = dict.fromkeys((record["case"]["job"]["steps"], record["case"]["job"]["warm"]) for record in good)
    said = [f"in time {worst(good, lambda one: off(one['predicted_s'], one['step_s']))}"]
    said += [f"from step to step {worst(good, lambda one: off(one['predicted_s'], one['median_s']))}"]
    said += [f"and with the processor at its pace {worst(good, lambda one: off(paced_s(one), one['median_s']))}"]
    said += [f"in bytes of the {tier} {worst(good, bytes_off(tier))}" for tier in TIERS]
    trained = " or ".join(f"{steps} steps after {warm} to warm up" for steps, warm in lasts)
    lines += ["", f"{trained}. The worst errors: {'; '.join(said)}."]
    over = [case_from(record["case"]).label for record in good if not record["fits"]]
    return [*lines, "", f"Over the device's budget: {'; '.join(over) or 'none'}."]


def row(label: str, record: Record) -> str:
    predicted = record["predicted_s"]
    cells = [label, told(record), f"{predicted:.4f}" if predicted else "-"]
    for seconds in (record["step_s"], record["median_s"]):
        cells += [f"{seconds:.4f}", percent(off(predicted, seconds))]
    for tier in TIERS:
        sizes = [record[name][tier] for name in ("predicted_bytes", "measured_bytes")]
        cells += [*(f"{size / GIB:.3f}" if size else "-" for size in sizes), percent(off(*sizes))]
    paced = paced_s(record)
    cells += [f"{record['planned_s']:.2f}", f"{paced:.4f}" if paced else "-", percent(off(paced, record["median_s"]))]
    return "| " + " | ".join([*cells, paces(record)]) + " |"


if __name__ == "__main__":
    main()
