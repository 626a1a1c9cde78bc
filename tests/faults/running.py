"""One fault, from start to outcome: real ranks, forked from one process that has torch loaded."""

from __future__ import annotations

import functools
import json
import multiprocessing as mp
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from faults.drawing import RECOVERED, Fault, Job
from faults.program import LATE_S, LIMITS_S, live
from support.processes import environment

# A rank that runs longer hangs: far above the limit of a collective, for a busy machine. Ranks on a device take long to
# start, and share it with those of other faults.
HANGS_AFTER_S = {"cpu": 15 * LIMITS_S["cpu"], "cuda": 60.0 + 3 * LIMITS_S["cuda"]}
ENDS_S = 30.0  # after a kill
ROUNDING = {"cpu": 0.0, "cuda": 1e-5}  # of losses, relative: nccl may sum in another order
# What a rank raises by itself whose own drive or checkpoint failed.
OWN_ERRORS = {"drive cannot be read": "StorageError", "file cut": "StorageError", "file overwritten": "StorageError"}
TESTS = Path(__file__).resolve().parents[1]

RANKS: set[Any] = set()  # processes that run now: whoever has no time left ends them
LOCKS: defaultdict[Job, threading.Lock] = defaultdict(threading.Lock)  # of what jobs compute without a fault


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    code: int | None  # exit code; None: it did not end by itself
    error: str  # name of the exception
    text: str
    losses: list[float]


@dataclass(frozen=True)
class Outcome:
    """What came of one fault."""

    fault: Fault
    ends: list[End]
    seconds: float
    problems: list[str]  # nothing here: as documented
    is_detected: bool  # every other rank raised, or the fault could do no harm
    is_named: bool | None  # the guilty rank, by every other rank; None: nothing had to be said
    is_alone: bool = False  # and nobody blamed any other rank


def run(fault: Fault) -> Outcome:
    """Let a fault happen, and judge what came of it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        ends = _run_ranks(fault, fault.job, folder)
    return judge(fault, ends, time.monotonic() - begun)


def judge(fault: Fault, ends: list[End], seconds: float) -> Outcome:
    """Compare what happened with what is documented."""
    others = {rank: end for rank, end in enumerate(ends) if rank != fault.rank}
    problems = []
    right = reference(fault.job)
    for rank, end in others.items():
        if end.code is None:
            problems.append(f"rank {rank} hangs")
        elif end.code < 0:
            problems.append(f"rank {rank} was ended by {signal.Signals(-end.code).name}")
        elif end.code == 1 and end.error not in ("CommunicationError", "CheckpointError"):
            problems.append(f"rank {rank} raised {end.error}: {end.text[:300]}")
    guilty = ends[fault.rank]
    if guilty.code == -signal.SIGABRT and fault.kind != "memory limit":
        problems.append(f"rank {fault.rank} was ended by SIGABRT")
    finished = [rank for rank, end in enumerate(ends) if end.code == 0 and end.losses]
    left = {fault.rank} if fault.kind == "rank leaves the loop" else set()  # it has seen a part of the run only
    wrong = [rank for rank in finished if not _is_right(ends[rank], right[rank], fault.job) and rank not in left]
    problems += [f"rank {rank} finished with wrong values" for rank in wrong]
    if fault.kind in RECOVERED:
        problems += [f"rank {rank} did not finish: {end.text[:300]}" for rank, end in enumerate(ends) if end.code]
        return Outcome(fault, ends, seconds, problems, True, None)
    raised = {rank: end for rank, end in others.items() if end.code == 1}
    is_detected = len(raised) == len(others) or not wrong
    if fault.kind == "checkpoint damaged":  # no rank is guilty, but a file is
        files = [rank for rank, end in enumerate(ends) if f"rank-{fault.rank:05d}-of-" not in end.text]
        problems += [f"rank {rank} names no file: {ends[rank].text[:300]}" for rank in files]
        return Outcome(fault, ends, seconds, problems, is_detected, None)
    own = OWN_ERRORS.get(fault.kind)
    is_quoted = guilty.error == "CheckpointError" and f"{own}: " in guilty.text  # in zerostd.load, on all ranks
    if own is not None and not (guilty.code == 1 and (guilty.error == own or is_quoted)):
        problems.append(f"rank {fault.rank} raised {guilty.error} and not {own}: {guilty.text[:300]}")
    unnamed = [rank for rank, end in raised.items() if not _names(end.text, fault)]
    problems += [f"rank {rank} names others: {raised[rank].text[:700]}" for rank in unnamed]
    is_alone = all(_blamed(end.text) <= {rank, fault.rank} for rank, end in raised.items())
    return Outcome(fault, ends, seconds, problems, is_detected, not unnamed if raised else None, is_alone)


def _blamed(text: str) -> set[int]:
    """Return the ranks that a message speaks of; a rank whose verdict is quoted is not blamed."""
    return {int(number) for number in re.findall(r"rank (\d+)(?! failed first)", text)}


def _is_right(end: End, right: list[float], job: Job) -> bool:
    pairs = zip(end.losses, right, strict=False)
    close = all(abs(ours - theirs) <= ROUNDING[job.device] * abs(theirs) for ours, theirs in pairs)
    return close and len(end.losses) == len(right)


def _names(text: str, fault: Fault) -> bool:
    """Whether a message of another rank names the guilty one. A connection has two ends: of one that broke, the rank at
    whose end it did, or the network."""
    if fault.kind == "connection reset" and "the network between them has failed" in text:
        return True
    return f"rank {fault.rank} " in text or f"on rank {fault.rank}" in text or f"rank {fault.rank}:" in text


def reference(job: Job) -> list[list[float]]:
    """Return what the ranks of a job compute without a fault. Faults at the same time ask for it once."""
    with LOCKS[job]:
        return _compute(job)


@functools.cache
def _compute(job: Job) -> list[list[float]]:
    for _ in range(3):  # a busy machine may be above the limit by itself
        with tempfile.TemporaryDirectory(prefix="fault-") as folder:
            ends = _run_ranks(None, job, folder)
        if all(end.code == 0 for end in ends):
            break
    assert all(end.code == 0 for end in ends), [end.text for end in ends]
    return [end.losses for end in ends]


def _run_ranks(fault: Fault | None, job: Job, folder: str) -> list[End]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "zerostd", "faults.program"])
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    variables |= {"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {}
    with environment(**variables):
        ranks = [context.Process(target=live, args=(rank, fault, job, folder)) for rank in range(job.world_size)]
        for process in ranks:
            process.start()
            RANKS.add(process)
    deadline = time.monotonic() + HANGS_AFTER_S[job.device]
    waiting = {process.sentinel: rank for rank, process in enumerate(ranks)}
    stopped_at: float | None = None
    while waiting and time.monotonic() < deadline:
        for sentinel in wait(list(waiting), timeout=0.05):
            del waiting[sentinel]
        if fault is not None and "SIGSTOP" in fault.kind and fault.rank in waiting.values():
            guilty = ranks[fault.rank]
            if stopped_at is None and _is_stopped(guilty.pid):
                stopped_at = time.monotonic()
            is_alone = len(waiting) == 1
            is_enough = "SIGCONT" in fault.kind and stopped_at and time.monotonic() > stopped_at + LATE_S
            if stopped_at is not None and (is_enough or is_alone):
                os.kill(guilty.pid, signal.SIGCONT if is_enough else signal.SIGKILL)
                stopped_at = None
    hanging = set(waiting.values())
    for process in (process for rank, process in enumerate(ranks) if rank not in hanging):
        process.join(ENDS_S)  # another thread that starts processes may be reading its exit code just now
    codes = [None if rank in hanging else process.exitcode for rank, process in enumerate(ranks)]
    for process in ranks:
        process.kill()
        process.join(ENDS_S)  # a driver may hold it for a while
        RANKS.discard(process)
    return [_end(code, Path(folder, f"outcome-{rank}")) for rank, code in enumerate(codes)]


def _is_stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _end(code: int | None, file: Path) -> End:
    said = json.loads(file.read_text()) if file.exists() and file.read_text() else {}
    return End(code, said.get("error", ""), said.get("text", ""), said.get("losses", []))
