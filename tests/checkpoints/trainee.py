"""A training that is killed: what each rank does in one life, and what it tells whoever watches.

It goes on from the newest checkpoint, saves every few steps and keeps two. Before and after loading, saving and every
step it gives a sign; the killer's clock starts at one of them.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it when the first is made: here it is done for all processes
import torch.distributed as dist

import zerostd
from checkpoints.runs import Job, Run
from zerostd.checkpointing.storage.reading import Checkpoint

SAVE_EVERY, KEEP = 2, 2
LIMIT_S = 20.0


@dataclass(frozen=True)
class Life:
    """One start of all ranks."""

    job: Job
    world_size: int
    folder: str  # with `saved`, `disk` and whatever is left at the end
    number: int
    steps: int  # when it ends by itself
    waits: bool  # for each save


def live(rank: int, life: Life, watcher: Connection) -> None:
    """What a process does."""
    torch.set_num_threads(1)
    log = os.open(f"{life.folder}/log-{life.number}-{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"ZEROSTD_TIMEOUT_S": str(LIMIT_S), "LOCAL_WORLD_SIZE": str(life.world_size)}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{life.folder}/store-{life.number}",
            rank=rank,
            world_size=life.world_size,
            timeout=timedelta(seconds=LIMIT_S),
        )
        _train(rank, life, watcher)
        dist.barrier()  # so that nobody takes the connections down while others still use them
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _train(rank: int, life: Life, watcher: Connection) -> None:
    def sign(what: str) -> None:
        watcher.send((what, time.monotonic(), strays(life.folder) if rank == 0 and what in ("loaded", "saved") else []))

    saved = Path(life.folder, "saved")
    run = Run(life.job, f"{life.folder}/disk", rank=rank)
    newest, saving = zerostd.latest(saved), None
    if newest is not None:
        sign("load")
        run.load(newest)
        sign("loaded")
    while run.step < life.steps:
        sign("train")
        run.train(1)
        if saving is not None and saving.is_finished:
            sign("saved")
            saving = None
        if run.step % SAVE_EVERY == 0:
            sign("save")
            path = saved / f"step-{run.step}"
            saving = zerostd.save(path, run.model, run.optimizer, run.extra(), keep=KEEP, wait=life.waits)
    if saving is not None:
        saving.wait()
        sign("saved")
    torch.save((run.tensors(), run.facts()), f"{life.folder}/result-{rank}")
    sign("done")


def strays(folder: str | Path) -> list[str]:
    """What is no checkpoint."""
    return [path.name for path in Path(folder, "saved").iterdir() if ".incomplete-" in path.name]


def check_whole(folder: Path) -> None:
    """Raise CheckpointError unless every number in it is as written."""
    with closing(Checkpoint(folder)) as checkpoint:
        checkpoint.verify([(one, one.whole) for one in checkpoint.manifest.tensors], lambda num_bytes: None)


# -- killed at every call of the system --

CALLS = ("open", "mkdir", "pwrite", "fsync", "rename", "unlink", "rmdir")


def die_everywhere(folder: str, watcher: Connection) -> None:
    """In a process of its own: a save that removes an older one, killed before each of its calls of the system, but of
    many writes in a row before every fourth. Tells at which, and what was wrong after them."""
    torch.set_num_threads(1)
    try:
        watcher.send(_die_everywhere(Path(folder)))
    except BaseException:
        watcher.send(([], [traceback.format_exc()]))


def _die_everywhere(folder: Path) -> tuple[list[str], list[str]]:
    run = Run(Job("sgd"), folder)
    run.train(1)
    saved, number = folder / "saved", 0
    calls: list[str] = []
    wrong: list[str] = []
    while True:
        for old in ("a", "b"):
            if not (saved / old).exists():
                run.save(saved / old)
        run.train(1)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _save_and_die(folder, saved / "c", number, writer)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        with open(reader) as text:
            said = text.read()
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0 and said == "", said
            return calls, wrong
        calls.append(said)
        wrong += [f"killed before {said}, call {number}: {text}" for text in _wrong_after(saved, run)]
        number += 4 if "pwrite" in said else 1


def _save_and_die(folder: Path, path: Path, number: int, writer: int) -> None:
    """The call with this number, from 0, kills the process before it does anything. A forked child cannot use a model
    of its parent's, so it trains one of its own."""
    left, write = number, os.write

    def deadly(name: str) -> Any:
        true = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                write(writer, name.encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return true(*arguments, **options)

        return call

    try:
        run = Run(Job("sgd"), folder)
        run.train(1)
        for name in CALLS:
            setattr(os, name, deadly(name))
        run.save(path, keep=2)
    except BaseException:
        write(writer, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)


def _wrong_after(saved: Path, run: Run) -> list[str]:
    """After a death: what is there is whole, the newest is there, and the next save leaves nothing else."""
    wrong = []
    for path in saved.iterdir():
        if ".incomplete-" in path.name:
            os.utime(path, (1, 1))  # as if a restart had taken as long as one takes
            continue
        try:
            check_whole(path)
        except zerostd.CheckpointError as error:
            wrong.append(str(error))
    names = sorted(path.name for path in saved.iterdir() if ".incomplete-" not in path.name)
    newest = zerostd.latest(saved)
    if names not in (["a", "b"], ["a", "b", "c"], ["b", "c"]) or newest != str(saved / names[-1]):
        wrong.append(f"{names} are there, the newest is {newest}")
    run.load(saved / "b")
    run.save(saved / "d", keep=1)
    left = [path.name for path in saved.iterdir()]
    (saved / "d").rename(saved / "a")
    return wrong if left == ["d"] else [*wrong, f"{left} are left after the next save"]
