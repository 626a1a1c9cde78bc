"""A training is killed again and again, and in the end has learned what one that lived in peace has, bit by bit.

`Story` is one training: a seed decides in what, how late and whom each kill hits. Processes are real and die by
SIGKILL; they come from a server that has imported everything already, so a life begins at once.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import zerostd
from checkpoints.runs import Job, compared, unlike
from checkpoints.trainee import KEEP, Life, check_whole, live, strays

PHASES = ("save", "load", "train")
WORLD_SIZE = 2
END_S = 120.0  # a life ends by then, also one whose other rank was killed
ENDLESS, MORE_STEPS = 10**6, 5  # steps of a life that is killed, and of one that is not
TESTS = Path(__file__).resolve().parents[1]

Sign = tuple[str, float, list[str]]


@dataclass(frozen=True)
class Kill:
    """After the victims' so-manieth sign of a phase, wait so long."""

    phase: str
    victims: tuple[int, ...]
    number: int
    delay_s: float


@dataclass
class Told:
    """What became of a life."""

    codes: list[int] = field(default_factory=list)
    signs: dict[int, list[Sign]] = field(default_factory=dict)
    killed_in: str = ""  # what the first victim was doing


def server() -> Any:
    """Processes that are there at once."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["checkpoints.trainee"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), *sys.path]))
    try:
        mp.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


class Story:
    """One training, from its first start to its end."""

    def __init__(self, folder: Path, job: Job, *, seed: int, kills: int, waits: bool) -> None:
        self.folder, self.job, self.waits = folder, job, waits
        self.random = random.Random(seed)
        self.num_kills = kills
        self.drawn: list[Kill] = []
        self.killed: list[str] = []  # what each of them hit
        self.num_stray = 0  # kills that left something to clear away
        self._num_lives = 0
        self._context = server()

    def tell(self) -> None:
        """All of it; raises AssertionError if anything is lost."""
        self._rehearse()
        folder = self._begin("war")
        while len(self.killed) < self.num_kills:
            kill = self._draw(folder)
            told = self._live(folder, ENDLESS, kill)
            self.drawn.append(kill)
            self.killed.append(told.killed_in)
            self._check_after(folder, told)
        newest = zerostd.latest(folder / "saved")
        steps = MORE_STEPS + (int(newest.rsplit("-", 1)[1]) if newest is not None else 0)
        self._check_signs(self._live(folder, steps, None))
        peace = self._begin("peace")
        self._live(peace, steps, None)
        self._compare(folder, peace)

    def _rehearse(self) -> None:
        """Two lives that end by themselves, to learn how long each phase takes."""
        folder = self._begin("rehearsal")
        told = [self._live(folder, steps, None) for steps in (MORE_STEPS, 2 * MORE_STEPS)]
        self.lasts = {phase: _lasts([one.signs[0] for one in told], phase) for phase in PHASES}

    def _begin(self, name: str) -> Path:
        folder = self.folder / name
        for inside in ("saved", "disk"):
            (folder / inside).mkdir(parents=True)
        return folder

    def _draw(self, folder: Path) -> Kill:
        """The next kill."""
        can_load = zerostd.latest(folder / "saved") is not None
        phase = self.random.choice(PHASES if can_load else [one for one in PHASES if one != "load"])
        victims = self.random.choice([(0,), (1,), (0, 1), (1, 0)])
        number = 1 if phase == "load" else self.random.randint(1, 2)
        return Kill(phase, victims, number, self.random.uniform(0, 1.2 * self.lasts[phase]))

    def _live(self, folder: Path, steps: int, kill: Kill | None) -> Told:
        """Start all ranks and wait for their end, which `kill` may bring about."""
        life = Life(self.job, WORLD_SIZE, str(folder), self._num_lives, steps, self.waits)
        self._num_lives += 1
        pipes, processes = [], []
        for rank in range(WORLD_SIZE):
            ours, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(target=live, args=(rank, life, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        told = Told()
        try:
            watch(pipes, processes, kill, told)
            for process in processes:
                process.join(END_S)
            told.codes = [process.exitcode for process in processes]
            logs = "".join(f"\n{path.name}:\n{path.read_text()}" for path in folder.glob(f"log-{life.number}-*"))
            hang = [rank for rank, code in enumerate(told.codes) if code is None]
            assert not hang, f"rank {hang} did not end in {END_S:g} s after {kill}{logs}"
            assert told.killed_in or told.codes == [0] * WORLD_SIZE, f"it failed by itself, {told.codes}, {kill}{logs}"
            assert told.killed_in or kill is None, f"{kill} did not happen"
        finally:
            for process in processes:
                if process.exitcode is None:
                    process.kill()
        return told

    def _check_after(self, folder: Path, told: Told) -> None:
        """What a kill has left."""
        self._check_signs(told)
        names = [path for path in (folder / "saved").iterdir() if ".incomplete-" not in path.name]
        for path in names:
            check_whole(path)
        was_saved = any(what == "saved" for what, _, _ in told.signs[0]) or (told.killed_in == "load")
        assert names or not was_saved, "no checkpoint is left"
        assert len(names) <= KEEP + 1, f"{len(names)} are there: the one before last is removed after the last is there"
        left = strays(folder)
        self.num_stray += bool(left)
        for name in left:
            os.utime(folder / "saved" / name, (1, 1))  # as if a restart had taken as long as one takes

    def _check_signs(self, told: Told) -> None:
        """Whoever has loaded or saved has cleared away what was left before."""
        for what, _, left in told.signs[0]:
            assert what not in ("loaded", "saved") or not left, f"{left} are there after {what}"

    def _compare(self, war: Path, peace: Path) -> None:
        for rank in range(WORLD_SIZE):
            found, expected = (torch.load(folder / f"result-{rank}", weights_only=False) for folder in (war, peace))
            wrong = compared(found[0], expected[0]) + unlike(found[1], expected[1])
            assert not wrong, f"rank {rank}, killed in {self.killed}: {wrong[:5]}"


def watch(pipes: list[Connection], processes: list[Any], kill: Kill | None, told: Told) -> None:
    """Hear signs until all pipes are closed, and kill when it is time."""
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    told.signs = {rank: [] for rank in range(len(pipes))}
    deadline, kill_at = time.monotonic() + END_S, None
    while open_pipes:
        limit = deadline if kill_at is None else kill_at
        for pipe in wait(list(open_pipes), max(0.0, limit - time.monotonic())):
            rank = open_pipes[pipe]
            try:
                told.signs[rank].append(pipe.recv())
            except (EOFError, OSError):
                del open_pipes[pipe]
        if kill is not None and kill_at is None:
            begun = [at for what, at, _ in told.signs[kill.victims[0]] if what == kill.phase]
            kill_at = begun[kill.number - 1] + kill.delay_s if len(begun) >= kill.number else None
        if kill is not None and kill_at is not None and not told.killed_in and time.monotonic() >= kill_at:
            living = [rank for rank in kill.victims if processes[rank].exitcode is None]
            for rank in living:
                os.kill(processes[rank].pid, signal.SIGKILL)
            kill_at = deadline  # once
            if living:
                _drain(pipes[living[0]], told.signs[living[0]])
                told.killed_in = _doing(told.signs[living[0]])
        if time.monotonic() > deadline:
            return


def _drain(pipe: Connection, signs: list[Sign]) -> None:
    """What a process said before it died."""
    try:
        while pipe.poll():
            signs.append(pipe.recv())
    except (EOFError, OSError):
        return


def _doing(signs: list[Sign]) -> str:
    """What a process was in the middle of at its last sign. While a save goes on behind the steps, that."""
    ends = {"loaded": "load", "saved": "save"}
    under_way: set[str] = set()
    for what, _, _ in signs:
        under_way |= {what} & set(ends.values())
        under_way -= {ends.get(what, "")}
    return min(under_way, default="train")


def _lasts(lives: list[list[Sign]], phase: str) -> float:
    """Seconds of a phase, the median."""
    found = []
    for signs in lives:
        for (what, begin, _), (_, end, _) in itertools.pairwise(signs):
            if what == phase:
                found.append(end - begin)
    return sorted(found)[len(found) // 2]
