"""One process of planning.py: trains a case by a plan or by placements, one after another, and says what each took.

    python benchmarks/sweep.py '{"case": ..., "disk_path": ...}'

An entry is a line of JSON on its input: `{"plan": null}` plans first, `{"plan": "..."}` obeys one, `{"placement": ...}`
takes Placement's options. The answer is a line with RESULT in front. What a placement would take of the device is
counted before it is tried; one that is far over the budget is refused, as prepare refuses others. After an error of any
other kind the process ends, for nobody knows what it left behind.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpt import GPT, draw
from pacing import model_from
from peers import ADAMW, Batch, Job

import zerostd
from offload import DEVICE, RESULT, HostPeak, Record, System, cell, describe, elapsed, make_model, mark, synchronize
from zerostd.communication import World
from zerostd.engine.settings import Settings
from zerostd.measuring import load_or_measure
from zerostd.measuring.identity import choose_device, device_of, free_bytes
from zerostd.measuring.model import profile_model
from zerostd.measuring.rates import HostUpdates, TrialSizes
from zerostd.monitoring import Ledger
from zerostd.optimizers.elementwise import find_states
from zerostd.parameters.blueprints import ROOT, Blueprint, find_blueprints
from zerostd.planning import PlanRequest
from zerostd.planning.demands import GroupShares, activation_bytes
from zerostd.planning.request import threads_of
from zerostd.policy import Way
from zerostd.preparing.accounting import predict
from zerostd.preparing.homes import plan_flats
from zerostd.preparing.options import rules_for
from zerostd.preparing.proposing import sizes_of
from zerostd.tiers.host import Host

GIB = 2**30
TIERS = ("device", "host", "disk")
PRECISION = "bf16"
FAR_OVER = 1.01  # of the budget: what is predicted to need more of the device is not tried
LEFT_BEHIND = 4 * GIB  # on the device, or on the host, after a placement: with more, the next has a process of its own
SHARES = (0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of what is moved, on the host
PARTS = (0.5, 0.75, 1.0)  # of the states there, that the processor updates
RECOMPUTED = (0.5, 1.0, 0.0)  # of the groups; a time limit cuts off the last, the slowest ones so far
RECOMPUTING = frozenset({"keep", "recompute"})
QUICK = TrialSizes(turns=5, seconds=0.2)
UNUSED: list[GPT] = []  # a model whose placement was refused: the next entry takes it
KEPT: list[Any] = []  # what is not taken down: it goes with the process, which is faster

Bytes = dict[str, dict[str, int]]  # by tier and kind


@dataclass(frozen=True)
class Case:
    """A job, and what it may use of each tier in GiB; None: what is free. Without `disk` none is used."""

    job: Job
    device: float | None = None
    host: float | None = None
    disk: bool = False

    @property
    def label(self) -> str:
        caps = [f"{tier} {size:g} GiB" for tier, size in (("device", self.device), ("host", self.host)) if size]
        return ", ".join([describe(self.job), *caps, *["disk"] * self.disk])

    def budget(self, disk_path: str) -> zerostd.Budget:
        device, host = (None if size is None else int(size * GIB) for size in (self.device, self.host))
        return zerostd.Budget(device=device, host=host, disk_path=disk_path if self.disk else None)

    @property
    def options(self) -> Record:
        """What plan and prepare are both told."""
        return {
            "precision": PRECISION,
            "accumulate": self.job.accumulate,
            "max_grad_norm": self.job.clip or None,
        }


def case_from(data: Record) -> Case:
    return Case(**{**data, "job": Job(**data["job"])})


def grid(clips: bool) -> list[list[Record]]:
    """Options of every placement of a sweep. Those of one row differ only in how much is off the device, least first:
    where some fit, the others move more for nothing."""
    found = []
    patterns = [(kinds, False) for kinds in (0, 1, 2)] + [(kinds, True) for kinds in (0, 1) if clips]
    for again, (kinds, speculates), part in itertools.product(RECOMPUTED, patterns, PARTS):
        row = []
        for share in SHARES:
            home = "host" if share == 1.0 else {"device": 1.0 - share, "host": share}
            homes = dict.fromkeys(("optimizer_states", "gradients", "parameters")[: kinds + 1], home)
            activations = {"device": 1.0 - again, "recompute": again}
            row.append({**homes, "activations": activations, "cpu_share": part, "speculate": speculates})
        found.append(row)
    return found


def words(placement: Record) -> str:
    """A placement in few words: what is off the device, how much of the states the processor updates."""
    said = []
    for kind in ("optimizer_states", "gradients", "parameters", "activations"):
        home = placement.get(kind, "device")
        shares = {home: 1.0} if isinstance(home, str) else home
        if any(isinstance(way, str) for way in shares.values()):  # by group
            ways = [way for name, way in shares.items() if name != ROOT]
            shares = {way: ways.count(way) / len(ways) for way in dict.fromkeys(ways)}
        off = [f"{tier} {part:.0%}" for tier, part in shares.items() if tier != "device" and part]
        said += [f"{kind.removeprefix('optimizer_')} {' '.join(off)}"] if off else []
    if said and placement.get("cpu_share") is not None:
        said.append(f"processor {placement['cpu_share']:.0%}")
    return ", ".join([*said, *["speculating"] * bool(placement.get("speculate"))]) or "all on device"


# the process


def main() -> None:
    given = json.loads(sys.argv[1])
    case, disk_path = case_from(given["case"]), given["disk_path"]
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this process is the one to go
    host = HostPeak(daemon=True)
    held = host.look()
    host.start()
    torch.optim.AdamW([torch.zeros(1)])  # the first one in a process imports torch's compiler, which takes seconds
    for line in sys.stdin:
        found = attempt(case, json.loads(line), disk_path, host)
        if not found["ends"]:
            found["left_bytes"] = left_behind(host.look() - held)
            found["ends"] = max(found["left_bytes"].values()) > LEFT_BEHIND
        print(RESULT + json.dumps(found), flush=True)
        if found["ends"]:
            break
    sys.stderr.flush()
    os._exit(0)


def attempt(case: Case, entry: Record, disk_path: str, host: HostPeak) -> Record:
    """What came of one entry. `ends`: the next one needs a process of its own."""
    try:
        found = measure(case, entry, disk_path, host)
    except zerostd.PrepareError as error:
        found = {"error": f"refused: {error}", "refused": True, "ends": False}
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}", "ends": True}
    if not found["ends"]:
        gc.collect()
        synchronize()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    return found


def left_behind(on_host: int) -> Record:
    return {"host": on_host, "device": torch.cuda.memory_allocated() if DEVICE == "cuda" else 0}


def measure(case: Case, entry: Record, disk_path: str, host: HostPeak) -> Record:
    """Build the model, plan if asked to, prepare, train, and take it down if the entry says `releases`."""
    job, budget = case.job, case.budget(disk_path)
    data = torch.Generator(DEVICE).manual_seed(1)
    batches = [[draw(data, job.micro, job.seq) for _ in range(job.accumulate)] for _ in range(job.warm + job.steps)]
    host.peak_bytes = 0
    before = host.look()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = UNUSED.pop() if UNUSED else make_model(job, System("zerostd"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    synchronize()
    found: Record = {"size": sum(parameter.numel() for parameter in model.parameters()), "ends": False}
    try:
        decided = decide(case, entry, model, optimizer, batches[0][0], budget)
    except zerostd.PrepareError:
        UNUSED.append(model)
        raise
    how = decided.pop("how")
    begin = time.perf_counter()
    _, prepared = zerostd.prepare(model, optimizer, budget=budget, **case.options, **how)
    synchronize()
    found["prepare_s"] = time.perf_counter() - begin
    if DEVICE == "cuda":
        found["prepare_device_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    found["paces"] = [pace()]
    found |= train(job, model, prepared, batches)
    found["paces"].append(pace())
    found |= peaks(zerostd.memory(model).peak, decided)
    found["fits"] = fits(case, found)
    host.look()
    found["host_growth_bytes"] = host.peak_bytes - before
    if entry.get("releases"):
        take_down(model, found)
    else:
        KEPT.append((model, prepared))
        found["ends"] = True
    return {**decided, **found}


def decide(
    case: Case, entry: Record, model: GPT, optimizer: torch.optim.Optimizer, batch: Batch, budget: zerostd.Budget
) -> Record:
    """What prepare is told (`how`), and what is predicted of it."""
    found = find_blueprints(model, optimizer, zerostd.Precision.parse(PRECISION), None)
    if "placement" in entry:
        placement = zerostd.Placement(**entry["placement"])
        counted = count(case, found, placement, model, optimizer)
        counted.setdefault("device", {})["activations"] = held_by(entry["model"], placement)
        needed = sum(counted["device"].values())
        if case.device is not None and needed > FAR_OVER * case.device * GIB:
            raise zerostd.PrepareError(f"{needed / GIB:.3f} GiB of the device are predicted, so it was not tried")
        return {"how": {"placement": placement, "stage": 3}, "placement": entry["placement"], "predicted": counted}
    made: Record = {}
    if entry["plan"] is None:
        begin = time.perf_counter()
        machine = load_or_measure(device_of(model), disk_path=budget.disk_path)
        made["machine_s"] = time.perf_counter() - begin  # long if nobody has measured it before
        begin = time.perf_counter()
        plan = zerostd.plan(model, optimizer, batch=batch, budget=budget, **case.options)
        made["planned_s"] = time.perf_counter() - begin
        known = profile_model(model, optimizer, precision=PRECISION, batch=batch, probe=True)
        made |= {
            "model": asdict(known),
            "profile": asdict(machine),
            "explain": plan.explain(),
            "compute_s": plan.predicted.compute_s,
        }
    else:
        plan = zerostd.Plan.from_json(entry["plan"])
    plan = replace(plan, adaptive=False)
    placement = plan.placement(sizes_of(found))
    return {
        **made,
        "how": {"plan": plan},
        "plan": plan.to_json(),
        "placement": asdict(placement),
        "predicted": plain(plan.predicted.bytes),
        "predicted_s": plan.predicted.step_s,
    }


def count(
    case: Case,
    found: Sequence[Blueprint],
    placement: zerostd.Placement,
    model: GPT,
    optimizer: torch.optim.Optimizer,
) -> Bytes:
    """Bytes that a placement will take, without activations."""
    settings = Settings(
        stage=zerostd.Stage.PARAMETERS,
        placement=placement,
        budget=zerostd.Budget(),
        globs=None,
        states=find_states(optimizer),
        **{**case.options, "precision": zerostd.Precision.parse(PRECISION)},
    )
    rules = rules_for(settings, World.pretend(device_of(model), 1, 1), found)
    return plain(predict(plan_flats(found, rules), rules))


def held_by(model: Record, placement: zerostd.Placement) -> int:
    """Bytes of the device that activations take, for a model as it was profiled."""
    task = PlanRequest(model_from(model), load_or_measure(), {}, activations=RECOMPUTING)
    groups = task.model.groups
    ways = placement.ways([group.name for group in groups if group.name != ROOT])
    shares = [
        GroupShares(activations_recomputed=float(ways.get(group.name) is Way.RECOMPUTE))
        if task.chooses
        else GroupShares()
        for group in groups
    ]
    return int(activation_bytes(task, shares)[0]) if task.chooses else task.model.activations()


@cache
def updates() -> HostUpdates:
    """What the processor's pace is taken from; made once, and kept."""
    device = choose_device(None)
    return HostUpdates(Host(device, Ledger(), os.cpu_count() or 1), QUICK, free_bytes(device, None)["host"])


def pace() -> float:
    """How fast the processor updates now, of what it did when it was measured for plans: a machine that others use too
    has slow minutes, and what is predicted for it is wrong in those."""
    machine = load_or_measure()
    threads = threads_of(machine, 1)
    return machine.processor.ns(threads) / updates().ns(threads, QUICK)


def plain(counted: Any) -> Bytes:
    """Bytes by tier and kind, with names for keys."""
    return {tier.value: {kind.value: size for kind, size in kinds.items()} for tier, kinds in counted.items()}


def train(job: Job, model: Any, optimizer: Any, batches: Sequence[Sequence[Batch]]) -> Record:
    """Train on all batches; times are of those after the first `warm`."""
    losses, norms, marks = [], [], []
    for index, parts in enumerate(batches):
        if index == job.warm:
            optimizer.synchronize()
            synchronize()
            begin = time.perf_counter()
        marks.append(mark())
        for batch in parts:
            loss = model(*batch)
            (loss / job.accumulate).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        norms += [] if optimizer.grad_norm is None else [optimizer.grad_norm]
    marks.append(mark())
    optimizer.synchronize()
    synchronize()
    step_s = (time.perf_counter() - begin) / job.steps
    times = elapsed(marks)[job.warm :]
    early = optimizer.backward_updates
    return {
        "step_s": step_s,
        "median_s": median(times),
        "times": times,
        "losses": [loss.item() for loss in losses],
        "norms": [norm.item() for norm in norms],
        "trials": [early.num_speculated, early.num_committed] if early is not None and early.is_speculative else None,
    }


def peaks(ledger: Bytes, decided: Record) -> Record:
    """Predicted and measured bytes of each tier. Where the processor is the device, activations are in neither."""
    predicted = {tier: dict(decided["predicted"].get(tier, {})) for tier in TIERS}
    measured = {tier: sum(ledger.get(tier, {}).values()) for tier in TIERS}
    found: Record = {"ledger": ledger, "activations": predicted["device"].get("activations", 0)}
    if DEVICE == "cuda":
        measured["device"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    else:
        predicted["device"].pop("activations", None)
    totals = {tier: sum(kinds.values()) for tier, kinds in predicted.items()}
    return {**found, "predicted_bytes": totals, "measured_bytes": measured}


def fits(case: Case, found: Record) -> bool:
    """Whether it stayed inside the device's budget; of the other tiers prepare has seen to that."""
    beside = 0 if DEVICE == "cuda" else found["activations"]
    return case.device is None or found["measured_bytes"]["device"] + beside <= case.device * GIB


def take_down(model: GPT, found: Record) -> None:
    """Undo prepare. What goes wrong with it is told, and the process ends."""
    begin = time.perf_counter()
    try:
        zerostd.release(model)
    except Exception as error:
        traceback.print_exc()
        found |= {"ends": True, "release_error": f"{type(error).__name__}: {error}"}
    found["release_s"] = time.perf_counter() - begin


# the report


def off(predicted: float | None, measured: float) -> float | None:
    """Error of a prediction as a share of what was measured; None where there is nothing to compare."""
    return predicted / measured - 1.0 if predicted and measured else None


def bytes_off(tier: str) -> Callable[[Record], float | None]:
    return lambda record: off(record["predicted_bytes"][tier], record["measured_bytes"][tier])


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.1f}"


def worst(records: Sequence[Record], error_of: Callable[[Record], float | None]) -> str:
    errors = [error for record in records if (error := error_of(record)) is not None]
    return f"{percent(max(errors, key=abs))} %" if errors else "-"


def report_sweep(records: Sequence[Record]) -> list[str]:
    """A section for each case."""
    found: dict[Case, list[Record]] = {}
    for record in records:
        found.setdefault(case_from(record["case"]), []).append(record)
    return [line for case, mine in found.items() for line in [*section(case, mine), ""]][:-1]


def section(case: Case, records: Sequence[Record]) -> list[str]:
    """The final, and all placements by their time."""
    tried = [one for one in records if not is_final(one)]
    good = sorted((one for one in tried if "error" not in one), key=lambda one: one["median_s"])
    over = sum("error" in one and not is_plan(one) for one in tried)
    rows = {one["entry"] for one in tried if not is_plan(one)}
    lines = [f"## {case.label}", "", *final([one for one in records if is_final(one) and "error" not in one])]
    lines += [f"{case.job.steps} steps after {case.job.warm} to warm up. {len(rows)} of {records[0]['num_rows']} rows"]
    lines += ["of placements were looked at, each up to the first that fits, or the second where the first was within"]
    lines += [f"a fifth of the best; {over} placements before them were refused, since they would not fit."]
    lines += [f"Worst errors in bytes: {', '.join(f'{tier} {worst(good, bytes_off(tier))}' for tier in TIERS)}.", ""]
    best = next((one["median_s"] for one in good if not is_plan(one) and one["fits"]), None)
    lines += ["| placement | step to step s | / best | step s | device GiB | host GiB | fits | processor |"]
    lines += ["|---|--:|--:|--:|--:|--:|---|--:|"]
    for one in good:
        mine = f"**{one['entry']}**: " if is_plan(one) else ""
        ratio = f"{one['median_s'] / best:.3f}" if best else "-"
        sizes = [f"{one['measured_bytes'][tier] / GIB:.3f}" for tier in ("device", "host")]
        cells = [f"{one['median_s']:.4f}", ratio, f"{one['step_s']:.4f}", *sizes, "yes" if one["fits"] else "no"]
        lines.append(f"| {mine}{told(one)} | " + " | ".join([*cells, paces(one)]) + " |")
    failed = [one for one in records if "error" in one and not one.get("refused")]
    return [*lines, *(f"| {told(one)} | {cell(one['error'])} |" + " |" * 6 for one in failed)]


def final(records: Sequence[Record]) -> list[str]:
    """The plan and the best placements by turns: of many that were measured once, the best was lucky too."""
    turns: dict[str, list[Record]] = {}
    for one in records:
        name = f"{'**the plan**: ' * is_plan(one)}{words(one['placement'])}"
        turns.setdefault(name, []).append(one)
    others = [name for name, mine in turns.items() if not is_plan(mine[0])]
    if not others or len(others) == len(turns):
        return ["There is no final: no plan, or no placement that fits, was measured."]
    seconds = {name: median(one["median_s"] for one in mine) for name, mine in turns.items()}
    best = min(seconds[name] for name in others)
    lines = ["The plan, and the best of all placements below, trained again by turns; medians over turns.", ""]
    lines += ["| placement | step to step s | / best other | by turn | step s | device GiB | fits | processor |"]
    lines += ["|---|--:|--:|---|--:|--:|---|---|"]
    for name, mine in turns.items():
        by_turn = ", ".join(f"{one['median_s']:.4f}" for one in mine)
        size = max(one["measured_bytes"]["device"] for one in mine) / GIB
        cells = [f"{seconds[name]:.4f}", f"{seconds[name] / best:.3f}", by_turn]
        cells += [f"{median(one['step_s'] for one in mine):.4f}", f"{size:.3f}"]
        cells += ["yes" if all(one["fits"] for one in mine) else "no", "; ".join(paces(one) for one in mine)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def is_final(record: Record) -> bool:
    return "turn" in str(record["entry"])


def paces(record: Record) -> str:
    """The processor's pace before and after."""
    return ", ".join(f"{one:.2f}" for one in record.get("paces", ())) or "-"


def is_plan(record: Record) -> bool:
    return str(record["entry"]).startswith("plan")


def told(record: Record) -> str:
    """The placement of a record in words, with what became of its trials."""
    if record["placement"] is None:
        return "the plan"
    trials = record.get("trials")
    return words(record["placement"]) + (f" ({trials[1]} of {trials[0]} trials kept)" if trials else "")


if __name__ == "__main__":
    main()
