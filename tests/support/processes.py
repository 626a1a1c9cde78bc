"""Real ranks for the tests: processes that run a function together.

`RankPool` keeps its processes alive between calls, because importing torch costs seconds; they share a gloo process
group that is made anew when the number of ranks changes. `run_ranks` starts fresh processes for one function, with
torchrun's environment and no process group, as a launcher would. Both hand back what the ranks returned, in rank
order. A rank that raises, dies or does not finish becomes an `AssertionError` that names it, with its traceback or,
where it hangs, with the stacks of its threads; the processes are then ended and the next call starts new ones.

The function must be importable by name (top level of a module). `doing(text)` inside it says what it is busy with.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support.warm import PRELOADED

PROGRESS = "RANK_PROGRESS_FILE"
GRACE_S = 3.0  # the other ranks get this long after the first failure, so that all causes are heard
COLLECTIVE_LIMIT_S = 90.0
TESTS = Path(__file__).resolve().parents[1]


class Call(NamedTuple):
    """One function call, as it goes to one rank."""

    path: list[str]  # sys.path, so that the function's module is found
    environment: dict[str, str]
    group: tuple[int, str] | None  # port of its store and name of the process group to be in; None: in no group
    function: bytes  # pickled (function, arguments), opened once the path is set
    device: str


class Answer(NamedTuple):
    """What one rank sends back."""

    failure: str | None  # traceback
    result: bytes  # as torch.save writes it
    in_group: bool  # False if the function took the process group down


class Worker(NamedTuple):
    """One process, seen from the parent."""

    process: Any
    connection: Connection
    stacks: Path
    progress: Path


def doing(text: str) -> None:
    """Say what this rank is busy with: failures and timeouts quote it."""
    if PROGRESS in os.environ:
        Path(os.environ[PROGRESS]).write_text(text)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """`fn(rank, *args)` on fresh processes with torchrun's environment and no process group."""
    with RankPool(world_size, grouped=False) as pool:
        return pool.run(fn, *args, timeout=timeout)


NO_MESH = "Gloo connectFullMesh failed"


class RankPool:
    """Processes that stay; `run` calls a function on all of them or on the first few."""

    world_size: int
    grouped: bool  # the ranks are in a process group when the function starts
    device: str  # "cpu"; or "cuda", where all ranks share one device and each pretends to be on a host of its own

    def __init__(self, world_size: int, *, grouped: bool = True, device: str = "cpu") -> None:
        self.world_size = world_size
        self.grouped = grouped
        self.device = device
        self._workers: list[Worker] = []
        self._folder: Path | None = None
        self._group: tuple[int, str] | None = None  # ranks and name of the group that the workers are in
        self._store: dist.TCPStore | None = None  # where they meet; its port is taken before it is known to anybody
        self._num_groups = 0

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float = 120.0,
        grace: float = GRACE_S,
    ) -> list[Any]:
        """`fn(rank, *args)` on each rank; its results by rank, or an AssertionError that names the failing ranks. Ranks
        that did not find each other, which is gloo's doing before the function has begun, try once more. After the
        first failure the others have `grace` seconds."""
        limits = (timeout, grace)
        try:
            return self._run(fn, *args, world_size=world_size or self.world_size, limits=limits)
        except AssertionError as error:
            if NO_MESH not in str(error):
                raise
        return self._run(fn, *args, world_size=world_size or self.world_size, limits=limits)

    def _run(self, fn: Callable[..., Any], *args: Any, world_size: int, limits: tuple[float, float]) -> list[Any]:
        workers = self._start(world_size)
        everyone = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        group = self._group_of(world_size)
        function = pickle.dumps((fn, args))
        path = [*sys.path, str(TESTS.parent)]
        done = False
        try:
            for rank, worker in enumerate(workers):
                worker.progress.unlink(missing_ok=True)
                mine = everyone | {"RANK": str(rank), "LOCAL_RANK": str(rank), PROGRESS: str(worker.progress)}
                if self.device != "cpu":
                    mine |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
                worker.connection.send(Call(path, mine, group, function, self.device))
            answers = _collect(workers, *limits)
            done = True
        finally:
            if not done:
                self.close()
        if not all(answer.in_group for answer in answers):
            self._group = None
        return [torch.load(io.BytesIO(answer.result), weights_only=False) for answer in answers]

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._workers.clear()
        self._group = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, world_size: int) -> list[Worker]:
        if not all(worker.process.is_alive() for worker in self._workers):
            self.close()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        context = mp.get_context("forkserver")  # one process loads torch, the ranks are copies of it
        context.set_forkserver_preload(list(PRELOADED))
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if self.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        with environment(**variables):
            for number in range(len(self._workers), world_size):
                ours, theirs = context.Pipe()
                stacks, progress = self._folder / f"stacks_{number}", self._folder / f"progress_{number}"
                process = context.Process(target=_serve, args=(theirs, str(stacks)), name=f"rank {number}")
                process.start()
                theirs.close()
                self._workers.append(Worker(process, ours, stacks, progress))
        return self._workers[:world_size]

    def _group_of(self, world_size: int) -> tuple[int, str] | None:
        if not self.grouped:
            return None
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if self._group is None or self._group[0] != world_size:
            self._num_groups += 1
            self._group = (world_size, f"group_{self._num_groups}")
        return self._store.port, self._group[1]


# -- the parent's side --


def _collect(workers: list[Worker], timeout: float, grace: float) -> list[Answer]:
    deadline = time.monotonic() + timeout
    answers: dict[int, Answer] = {}
    failures: list[str] = []
    while len(answers) < len(workers):
        waiting = {rank: worker for rank, worker in enumerate(workers) if rank not in answers}
        ready = wait([worker.connection for worker in waiting.values()], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank, worker in waiting.items():
            if worker.connection in ready:
                answers[rank] = _receive(worker)
                if answers[rank].failure:
                    failures.append(f"rank {rank} of {len(workers)} failed{_busy(worker)}:\n{answers[rank].failure}")
                    deadline = min(deadline, time.monotonic() + grace)
    hanging = [rank for rank in range(len(workers)) if rank not in answers]
    if hanging and not failures:
        failures.append(f"rank {', '.join(map(str, hanging))} of {len(workers)} still running after {timeout:g} s")
    for rank, stack in _stacks(workers, hanging).items():
        failures.append(f"rank {rank} of {len(workers)} was still running{_busy(workers[rank])}:\n{stack}")
    assert not failures, "\n\n".join(failures)
    return [answers[rank] for rank in range(len(workers))]


def _receive(worker: Worker) -> Answer:
    try:
        return worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join(GRACE_S)
        return Answer(f"process died with exit code {worker.process.exitcode}", b"", False)


def _busy(worker: Worker) -> str:
    return f" while doing {worker.progress.read_text()!r}" if worker.progress.exists() else ""


def _stacks(workers: list[Worker], hanging: list[int]) -> dict[int, str]:
    for rank in hanging:
        if workers[rank].stacks.exists():  # made by the process once it listens to the signal
            os.kill(workers[rank].process.pid, signal.SIGUSR1)
    if hanging:
        time.sleep(0.5)
    return {
        rank: workers[rank].stacks.read_text() if workers[rank].stacks.exists() else "not started yet"
        for rank in hanging
    }


def free_port() -> int:
    """Below those that the system hands out by itself: another process could get it before it is used here."""
    while True:
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", random.randrange(20000, 32000)))
            return int(one.getsockname()[1])


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """With these variables; afterwards all are as they were before, whoever changed them."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in {*os.environ} - {*before}:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _functions_stay() -> Iterator[None]:
    """The next test on this rank wants the package as it is, not as one test would have it."""
    before = _functions()
    yield
    after = _functions()
    changed = [name for name, function in before.items() if after[name] is not function]
    assert not changed, f"left changed for the tests that follow: {', '.join(changed)}"


def _functions() -> dict[str, Any]:
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "zerostd"}
    return {
        f"{name}.{key}": value
        for name, module in modules.items()
        for key, value in vars(module).items()
        if callable(value)
    }


# -- the rank's side --


def _serve(connection: Connection, stacks: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears the keyboard and ends us
    torch.set_num_threads(1)
    gc.freeze()  # no collection looks at what the server has imported
    group: tuple[int, str] | None = None
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                call: Call = connection.recv()
            except EOFError:
                return
            try:
                sys.path[:] = [*sys.path, *(entry for entry in call.path if entry not in sys.path)]
                with environment(**call.environment):
                    group = _enter_group(call, group)
                    fn, args = pickle.loads(call.function)
                    torch.manual_seed(0)
                    result = io.BytesIO()
                    with _functions_stay():
                        torch.save(fn(int(call.environment["RANK"]), *args), result)
                answer = Answer(None, result.getvalue(), dist.is_initialized() or group is None)
            except BaseException:
                answer = Answer(traceback.format_exc(), b"", False)
            connection.send(answer)


def _forget_meshes() -> None:
    """Clear what torch keeps of operations on DTensors: results would be over meshes whose groups are gone."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def _enter_group(call: Call, group: tuple[int, str] | None) -> tuple[int, str] | None:
    if call.group != group:
        if dist.is_initialized():
            dist.destroy_process_group()
            _forget_meshes()
        if call.group is not None:
            port, name = call.group
            backend = dist.get_default_backend_for_device(call.device)
            dist.init_process_group(
                backend if call.device == "cpu" else f"cpu:gloo,{call.device}:{backend}",
                store=dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False)),
                rank=int(call.environment["RANK"]),
                world_size=int(call.environment["WORLD_SIZE"]),
                timeout=timedelta(seconds=COLLECTIVE_LIMIT_S),
            )
    return call.group
