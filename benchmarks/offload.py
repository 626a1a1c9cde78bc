"""Training with states off the device: zerostd against plain torch, which keeps all on it, and against peers.

    python benchmarks/offload.py --systems plain,zerostd,deepspeed --job "1.3b clip=1 states=host" --job "3.6b micro=4"
    python benchmarks/offload.py --size tiny --micro 1 --seq 64 --states device     (no GPU: shows that it works)
    python benchmarks/offload.py --from offload.jsonl --write NAME                  (a report of earlier runs)

A job is a size and `option=value` words, of the options below; it takes from the command line what it does not say.
Jobs that differ only in systems or placement share a table, so two placements are compared by two jobs. Each run is a
process of its own, and the systems of a table take turns. All train the same GPT: bf16 weights, fp32 masters and
moments (peers.py says where a peer differs), AdamW. Records go at once to $OUT/offload.jsonl, if OUT is set.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import peers
import torch
from gpt import GPT, RESULTS, Shape, draw, machine
from peers import ADAMW, Batch, Build, Job, Trainer
from torch import Tensor, nn

import zerostd
from zerostd import policy

SIZES = {
    "tiny": (256, 4, 4),
    "0.4b": (1024, 24, 16),
    "1.3b": (2048, 24, 16),
    "3.6b": (3072, 30, 24),
    "6.7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "20b": (6144, 44, 48),
    "40b": (8192, 48, 64),
}
VOCABULARY = 32000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULT, NOTE = "RESULT ", "NOTE "  # what a run prints in front of its JSON, and of what it is about to do
BEGIN = time.perf_counter()

Record = dict[str, Any]


@dataclass(frozen=True)
class System:
    """A row of a table. The homes are zerostd's: a tier, or shares such as `device:0.3,host:0.7`."""

    name: str
    states: str = "device"
    gradients: str = "device"
    parameters: str = "device"
    activations: str = "device"
    empty_init: bool = False
    cpu_share: float | None = None
    speculate: bool = False
    record: bool = False
    whole_masters: bool = False
    free_gradients: bool = False
    codec: str = ""  # of optimizer states

    @property
    def label(self) -> str:
        if self.name != "zerostd":
            return self.name
        homes = {"states": self.states, "gradients": self.gradients, "parameters": self.parameters}
        homes["activations"] = self.activations
        moved = [f"{kind} {home.replace(',', ' ')}" for kind, home in homes.items() if home != "device"]
        if self.cpu_share is not None:
            moved.append(f"cpu share {self.cpu_share:g}")
        moved += ["speculating"] * self.speculate + ["empty_init"] * self.empty_init + ["recorded"] * self.record
        moved += ["gradients freed"] * self.free_gradients
        moved += ["whole fp32 masters"] * self.whole_masters + [f"{self.codec} moments"] * bool(self.codec)
        return f"zerostd, {', '.join(moved) or 'all on device'}"


def plain(job: Job, build: Build) -> Trainer:
    """Masters by hand, as one would write it without zerostd."""
    model = build()
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    def train_one(batches: Sequence[Batch]) -> Tensor:
        losses = []
        for batch in batches:
            loss = model(*batch)
            (loss / job.accumulate).backward()
            losses.append(loss.detach())
            for master, weight in zip(masters, weights, strict=True):
                if master.grad is None:
                    master.grad = weight.grad.float()
                else:
                    master.grad.add_(weight.grad)
                weight.grad = None
        if job.clip:
            nn.utils.clip_grad_norm_(masters, job.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_([weight.data for weight in weights], [master.data for master in masters])
        return torch.stack(losses).mean()

    return Trainer("plain torch, all on device", train_one)


def with_zerostd(job: Job, build: Build, system: System, disk_path: str) -> Trainer:
    """The same by one call."""
    if system.whole_masters:
        policy.SPLIT_DTYPE = None  # in this process, which has one run
    model = build()
    homes = {"parameters": system.parameters, "gradients": system.gradients, "optimizer_states": system.states}
    model, optimizer = zerostd.prepare(
        model,
        torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
        stage=3,
        precision="bf16",
        accumulate=job.accumulate,
        max_grad_norm=job.clip or None,
        placement=zerostd.Placement(
            **{kind: home_of(text) for kind, text in homes.items()},
            activations=activations_of(system.activations),
            cpu_share=system.cpu_share,
            speculate=system.speculate,
            keep_gradients=not system.free_gradients,
            codec={"optimizer_states": system.codec} if system.codec else {},
        ),
        exact=not system.codec,
        budget=zerostd.Budget(disk_path=disk_path)
        if any("disk" in text for text in (*homes.values(), system.activations))
        else None,
    )

    recording = zerostd.record(model, Path(disk_path, "run")).__enter__() if system.record else None

    def train_one(batches: Sequence[Batch]) -> Tensor:
        losses = []
        for batch in batches:
            loss = model(*batch)
            (loss / job.accumulate).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean()
        if recording is not None:
            recording.log(loss=mean)
        return mean

    return Trainer(system.label, train_one, getattr(optimizer, "synchronize", lambda: None))


NAMES = ("plain", "zerostd", *peers.SYSTEMS)


def home_of(text: str) -> str | dict[str, float]:
    """`host` as it is, `device:0.3,host:0.7` as shares."""
    if ":" not in text:
        return text
    return {tier: float(part) for tier, part in (word.split(":") for word in text.split(","))}


def activations_of(text: str) -> str | dict[str, Any]:
    """A way for all blocks, or shares of all groups; the root keeps its own."""
    return home_of(text) if ":" in text or text == "device" else {"blocks.*": text}


def main() -> None:
    options = parse()
    if options.run is not None:
        given = json.loads(options.run)
        run(Job(**given["job"]), System(**given["system"]), given["disk_path"])
    records: list[Record] = []
    if options.records:
        records = [json.loads(line) for path in options.records for line in Path(path).read_text().splitlines()]
        publish(records, options.write)
    else:
        for table in tables(options):
            for record in run_table(*table, options):
                records.append(record)
                keep(record)
            publish(records, options.write)  # after each table, lest a time-out take all
    print("\n".join(report(records)))


def job_options() -> argparse.ArgumentParser:
    """What a job may say for itself."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--size", choices=SIZES, default="1.3b")
    parser.add_argument("--micro", type=int, default=8, help="sequences in a backward pass")
    parser.add_argument("--seq", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes in a step")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradients; 0: any")
    parser.add_argument("--recompute", action="store_true", help="blocks keep no activations for backward")
    parser.add_argument("--pieces", type=int, default=1, help="pieces of the batch that the loss is computed in")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a run")
    parser.add_argument("--warm", type=int, default=2, help="steps before them")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each system")
    parser.add_argument("--systems", default="plain,zerostd", help=f"some of {','.join(NAMES)}")
    parser.add_argument("--states", default="host", help="home of zerostd's optimizer states: device, host, disk, or "
                        "shares such as device:0.3,host:0.7")  # fmt: skip
    parser.add_argument("--gradients", default="device", help="home of zerostd's gradients")
    parser.add_argument("--parameters", default="device", help="home of zerostd's parameters")
    parser.add_argument("--activations", default="device", help="what zerostd does with activations, such as host, "
                        "recompute+host or device:0.8,host:0.2")  # fmt: skip
    parser.add_argument("--record", action="store_true", help="zerostd writes down what happens")
    parser.add_argument("--cpu-share", type=float, help="what the processor updates of zerostd's states off the device")
    parser.add_argument("--speculate", action="store_true", help="zerostd updates before the norm is known")
    parser.add_argument("--whole-masters", action="store_true", help="zerostd keeps fp32 masters in one piece, beside "
                        "the bf16 weights, to compare with masters in two halves")  # fmt: skip
    parser.add_argument("--free-gradients", action="store_true", help="zerostd frees gradients inside backward")
    parser.add_argument("--codec", default="", help="how zerostd keeps optimizer states: int8; as they are if empty")
    parser.add_argument("--empty-init", action="store_true", help="zerostd builds its model under empty_init(); its "
                        "first values, and so its losses, are then not those of the others")  # fmt: skip
    return parser


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[job_options()]
    )
    parser.add_argument("--job", action="append", default=[], help='such as "1.3b micro=8 clip=1.0 recompute"')
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a run is ended")
    parser.add_argument("--disk-path", default=tempfile.gettempdir(), help="folder for states on disk")
    parser.add_argument("--write", metavar="NAME", help="write results/offload-NAME.md, and to $OUT if set")
    parser.add_argument("--from", dest="records", action="append", metavar="FILE", help="report these, run nothing")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one run in this process
    return parser.parse_args()


def tables(options: argparse.Namespace) -> list[tuple[Job, dict[System, int]]]:
    """Jobs with the systems that run them, and how often each."""
    found: dict[Job, dict[System, int]] = {}
    for text in options.job or [options.size]:
        size, *words = text.split()
        arguments = ["--size", size, *(part for word in words for part in f"--{word}".split("=", 1))]
        chosen = job_options().parse_args(arguments, argparse.Namespace(**vars(options)))
        job = Job(**{name: getattr(chosen, name) for name in Job.__dataclass_fields__})
        for name in chosen.systems.split(","):
            if name not in NAMES:
                raise SystemExit(f"--systems {name}: use some of {','.join(NAMES)}")
            names = (
                "states",
                "gradients",
                "parameters",
                "activations",
                "empty_init",
                "cpu_share",
                "speculate",
                "record",
                "whole_masters",
                "free_gradients",
                "codec",
            )
            homes = {name: getattr(chosen, name) for name in names}
            system = System(name, **homes) if name == "zerostd" else System(name)
            found.setdefault(job, {})[system] = chosen.rounds
    return list(found.items())


def run_table(job: Job, systems: dict[System, int], options: argparse.Namespace) -> Iterator[Record]:
    """The systems take turns, a round after the other."""
    for round_ in range(max(systems.values())):
        for system in [system for system, rounds in systems.items() if round_ < rounds]:
            with tempfile.TemporaryDirectory(dir=options.disk_path, prefix="offload-") as disk_path:
                found = start(job, system, disk_path, options.limit)
            said = found.get("error") or (
                f"{found['step_s']:.4f} s a step, device {found['device_bytes'] / 2**30:.1f} GiB, "
                f"host {found['host_bytes'] / 2**30:.1f} GiB"
            )
            tell(f"{describe(job)}: {system.label}: {said}")
            told = {"machine": machine(), "command": command(), "date": str(date.today())}
            yield {"job": asdict(job), "system": asdict(system), **found, **told}


def start(job: Job, system: System, disk_path: str, limit_s: float) -> Record:
    """One run in a process of its own. What goes wrong with it is in the record's `error`."""
    given = json.dumps({"job": asdict(job), "system": asdict(system), "disk_path": disk_path})
    environment = dict(os.environ)
    if system.name in peers.SYSTEMS:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [environment.get("PYTHONPATH"), os.fspath(peers.FOLDER)])
        )
    found: Record = {}
    with open_log() as log:
        log.write(f"== {describe(job)}: {system.label}\n")
        log.flush()
        beginning = log.tell()
        process = subprocess.Popen(
            [sys.executable, __file__, "--run", given],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        end_s = time.perf_counter() + limit_s
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(RESULT):
                found = json.loads(line.removeprefix(RESULT))
            elif line.startswith(NOTE):
                tell(f"{describe(job)}: {system.label}: {line.removeprefix(NOTE).strip()}")
            else:
                log.write(line)
        code = process.wait()
        is_late = time.perf_counter() >= end_s
        timer.cancel()
        log.flush()
        log.seek(beginning)
        printed = [line.rstrip() for line in log if line.strip()]
    if not found:
        how = f"ended after {limit_s:g} s" if is_late else signal.Signals(-code).name if code < 0 else f"exit {code}"
        found = {"error": f"{how}: {printed[-1] if printed and code >= 0 else 'printed no result'}"}
    if "error" in found:
        print("\n".join(f"    {line[:200]}" for line in printed[-12:]), file=sys.stderr, flush=True)
    return found


@contextlib.contextmanager
def open_log() -> Iterator[TextIO]:
    """Where runs print what is not a result: $OUT/offload.log, which is kept, or a file that is not."""
    if "OUT" in os.environ:
        with open(Path(os.environ["OUT"], "offload.log"), "a+", errors="replace") as log:
            yield log
    else:
        with tempfile.TemporaryFile("a+", errors="replace") as log:
            yield log


def keep(record: Record) -> None:
    if "OUT" in os.environ:
        with open(Path(os.environ["OUT"], "offload.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")


def publish(records: list[Record], name: str | None) -> None:
    """Write the report, if it has a name."""
    if name is None:
        return
    RESULTS.mkdir(exist_ok=True)
    for folder in (RESULTS, *map(Path, filter(None, [os.environ.get("OUT")]))):
        (folder / f"offload-{name}.md").write_text("\n".join(report(records)) + "\n")


def tell(text: str) -> None:
    """Progress, with the time and the seconds since the start."""
    print(f"{time.strftime('%H:%M:%S')} +{time.perf_counter() - BEGIN:5.1f} {text}", file=sys.stderr, flush=True)


# one run


class HostPeak(threading.Thread):
    """Watches how much memory of the host this process holds."""

    peak_bytes: int = 0

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(0.2)

    def look(self) -> int:
        """Bytes now."""
        status = Path("/proc/self/status").read_text()
        now = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
        self.peak_bytes = max(self.peak_bytes, now)
        return now


def run(job: Job, system: System, disk_path: str) -> None:
    """Print the result of one run, whatever becomes of it, and end this process without tidying up."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this process is the one to go
    try:
        found = measure(job, system, disk_path)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"}
    print(RESULT + json.dumps(found), flush=True)
    sys.stderr.flush()
    os._exit(0)


def measure(job: Job, system: System, disk_path: str) -> Record:
    """Build one system and train it."""
    host = HostPeak(daemon=True)
    host.start()
    data = torch.Generator(DEVICE).manual_seed(1)
    batches = [[draw(data, job.micro, job.seq) for _ in range(job.accumulate)] for _ in range(job.warm + job.steps)]
    built: Record = {}

    def build() -> GPT:
        built["host_bytes"] = host.look()
        model = make_model(job, system)
        built["size"] = sum(parameter.numel() for parameter in model.parameters())
        synchronize()
        built["s"] = time.perf_counter()
        return model

    note("starts")
    torch.optim.AdamW([torch.zeros(1)])  # the first one in a process imports torch's compiler, which takes seconds
    trainer = make_trainer(job, build, system, disk_path)
    synchronize()
    prepare_s = time.perf_counter() - built["s"]
    note(f"prepared in {prepare_s:.1f} s")
    losses, marks = [], []
    for index, batch in enumerate(batches):
        if index == job.warm:
            trainer.finish()
            synchronize()
            begin_s = time.perf_counter()
        marks.append(mark())
        losses.append(trainer.train_one(batch))
        if index == 0:
            note("first step is under way")
    marks.append(mark())
    trainer.finish()
    synchronize()
    step_s = (time.perf_counter() - begin_s) / job.steps
    host.look()
    return {
        "label": trainer.label,
        "size": built["size"],
        "prepare_s": prepare_s,
        "step_s": step_s,
        "times": elapsed(marks)[job.warm :],
        "losses": [loss.item() for loss in losses],
        "device_bytes": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0,
        "host_bytes": host.peak_bytes,
        "host_bytes_before": built["host_bytes"],
    }


def make_model(job: Job, system: System) -> GPT:
    """The GPT in bf16, on the device unless its memory is to come later."""
    torch.manual_seed(0)
    shape = Shape(*SIZES[job.size], vocabulary=VOCABULARY, length=job.seq)
    torch.set_default_dtype(torch.bfloat16)
    with zerostd.empty_init() if system.empty_init else torch.device(DEVICE):
        model = GPT(shape, recompute=job.recompute, num_pieces=job.pieces)
    torch.set_default_dtype(torch.float32)
    return model


def make_trainer(job: Job, build: Build, system: System, disk_path: str) -> Trainer:
    if system.name == "plain":
        return plain(job, build)
    if system.name == "zerostd":
        return with_zerostd(job, build, system, disk_path)
    return peers.SYSTEMS[system.name](job, build)


def note(text: str) -> None:
    print(NOTE + text, flush=True)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def mark() -> Any:
    """A moment in the device's work: nobody waits for it."""
    if DEVICE == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(marks: Sequence[Any]) -> list[float]:
    """Seconds between one mark and the next."""
    if DEVICE == "cpu":
        return [after - before for before, after in itertools.pairwise(marks)]
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]


# the report

HEAD = [
    "| system | step s | by run | median s | tokens/s | / plain | / zerostd | device GiB | host GiB | host B/param | "
    "prepare s | loss apart |",
    "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
]
LEGEND = """\
A step is the time of all measured steps by their number, from a full synchronize to a full synchronize, so what a step
leaves to the next one counts; `median s` is that of single steps, from start to start. `/ plain` and `/ zerostd` are
ratios of step times; zerostd is the first one in the table. Device memory is the most that was allocated, host memory
the most that was resident; a parameter's part is without what the process held before the model was built. Preparing
begins with a model and ends with one to train. `loss apart` is the largest difference of a step's loss to plain's."""


def report(records: list[Record]) -> list[str]:
    """Markdown."""
    found: dict[Job, dict[System, list[Record]]] = {}
    for record in records:
        rows = found.setdefault(Job(**record["job"]), {})
        rows.setdefault(System(**record["system"]), []).append(record)
    lines = ["# States off the device", "", *LEGEND.splitlines(), ""]
    for title, key in (("machine", "machine"), ("command", "command"), ("date", "date")):
        quote = "`" if key == "command" else ""
        lines += [f"- {title}: {quote}{text}{quote}" for text in dict.fromkeys(record[key] for record in records)]
    for job, rows in found.items():
        lines += ["", *section(job, rows)]
    return lines


def section(job: Job, rows: dict[System, list[Record]]) -> list[str]:
    """The table of one job."""
    good = {system: [run for run in runs if "error" not in run] for system, runs in rows.items()}
    plain = next((runs for system, runs in good.items() if system.name == "plain" and runs), None)
    ours = next((runs for system, runs in good.items() if system.name == "zerostd" and runs), None)
    sizes = [run["size"] for runs in good.values() for run in runs]
    named = f", {sizes[0] / 1e9:.2f} B parameters" if sizes else ""
    lines = [f"## {describe(job)}", "", f"GPT {job.size}{named}; {job.steps} steps after {job.warm} to warm up.", ""]
    lines += HEAD
    for system, runs in rows.items():
        lines += [row(job, good[system], plain, ours)] if good[system] else []
        lines += [f"| {system.label} | {cell(run['error'])} |" + " |" * 10 for run in runs if "error" in run]
    return lines


def row(job: Job, runs: list[Record], plain: list[Record] | None, ours: list[Record] | None) -> str:
    step_s = median(run["step_s"] for run in runs)
    apart = "-"
    if plain is not None and not runs[0]["system"]["empty_init"]:
        pairs = [zip(run["losses"], plain[0]["losses"], strict=True) for run in runs]
        apart = f"{max(abs(a - b) for pair in pairs for a, b in pair):.1e}"
    device_bytes, host_bytes = (max(run[key] for run in runs) for key in ("device_bytes", "host_bytes"))
    by_param = max((run["host_bytes"] - run["host_bytes_before"]) / run["size"] for run in runs)
    cells = [
        runs[0]["label"],
        f"{step_s:.4f}",
        ", ".join(f"{run['step_s']:.4f}" for run in runs),
        f"{median(time_s for run in runs for time_s in run['times']):.4f}",
        f"{job.micro * job.seq * job.accumulate / step_s:.0f}",
        *(f"{step_s / median(run['step_s'] for run in base):.3f}" if base else "-" for base in (plain, ours)),
        f"{device_bytes / 2**30:.2f}" if device_bytes else "-",
        f"{host_bytes / 2**30:.2f}",
        f"{by_param:.1f}",
        f"{median(run['prepare_s'] for run in runs):.1f}",
        apart,
    ]
    return "| " + " | ".join(cells) + " |"


def cell(text: str) -> str:
    """Fit for a table."""
    short = text if len(text) <= 160 else text[:157] + "..."
    return short.replace("|", "/").replace("\n", " ")


def describe(job: Job) -> str:
    """`1.3b, 4 x 8x1024, clip 1, recompute`."""
    passes = f"{job.accumulate} x " if job.accumulate > 1 else ""
    clip = f"clip {job.clip:g}" if job.clip else "no clip"
    return f"{job.size}, {passes}{job.micro}x{job.seq}, {clip}" + (", recompute" if job.recompute else "")


def command() -> str:
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


if __name__ == "__main__":
    main()
