"""What each rank runs: a training with every collective call, and the fault in its place."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerostd
from faults.drawing import STEPS, Fault, Job
from zerostd.communication import shared_wires
from zerostd.policy import Kind

LIMIT = "FAULTS_LIMIT_S"  # environment variable: another limit of a collective, for a busy machine
# Of a collective; communicators of nccl take seconds to be made.
LIMITS_S = {device: float(os.environ.get(LIMIT, seconds)) for device, seconds in (("cpu", 2.5), ("cuda", 10.0))}
PR_SET_PDEATHSIG = 1  # of Linux
SWAP = "swap"  # the disk tier's directory
FROZEN = {"equal models", "packed parameters"}  # features of a model with frozen parameters
LATE_S = 0.5  # of a rank that is late, well inside the limit
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")  # that can strike inside any call


# Kind: what the shim does, its number (an errno, or milliseconds), and to how many calls (0: all).
SHIM_RULES = {
    "slow connection": ("delay", 2, 0),
    "slow drive": ("delay", 10, 0),
    "EIO once or twice": ("fail", errno.EIO, 2),
    "byte changed on its way": ("flip", 0, 1),
    "drive is full": ("fail", errno.ENOSPC, 0),
    "drive cannot be written": ("fail", errno.EIO, 0),
    "drive cannot be read": ("fail", errno.EIO, 0),
}


class Broken(Exception):
    """An exception of the user's own code."""


class Net(nn.Module):
    """Buffers, a group for each block, and places where a fault can strike."""

    def __init__(self, *, is_frozen: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.outlet = nn.Linear(16, 4)
        self.strikes: dict[str, Strike] = {}
        self.blocks[0].requires_grad_(not is_frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.inlet(x))
        x = torch.tanh(self.blocks[0](x))
        self._strike("forward")
        if x.requires_grad:
            x.register_hook(lambda grad: self._strike("backward"))
        return self.outlet(torch.tanh(self.blocks[1](x)))

    def _strike(self, phase: str) -> None:
        if phase in self.strikes:
            self.strikes[phase].strike()


class Strike:
    """Does the fault, once, if this is the rank, the step and the place."""

    def __init__(self, fault: Fault, rank: int, ranks: set[int], folder: str) -> None:
        self.fault = fault
        self.folder = folder
        self.is_mine = rank in ranks
        self.step = 0
        self.is_done = False

    def strike(self, *_: object) -> None:
        if not self.is_mine or self.is_done or self.step != self.fault.step:
            return
        self.is_done = True
        self._do()

    @contextlib.contextmanager
    def inside(self, call: str) -> Iterator[None]:
        """Strike while a call is running, after a random time."""
        if self.is_mine and not self.is_done and self.fault.phase == call:
            self.is_done = True
            timer = threading.Timer(self.fault.delay_s, self._do)
            timer.daemon = True
            timer.start()
        yield

    def _do(self) -> None:
        kind = self.fault.kind
        if kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, kind.split()[0]))
        elif kind.startswith("exception"):
            raise Broken("broken on purpose")
        elif kind == "delay":
            time.sleep(LATE_S)
        elif kind == "connection reset":
            _reset_connections()
        elif kind == "memory limit":
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
            torch.zeros(1 << 28)
        elif kind in SHIM_RULES:
            self._set_shim(*SHIM_RULES[kind])

    def _set_shim(self, action: str, number: int, count: int) -> None:
        """Let the drive or the connections of this process go wrong, from a random call on."""
        verb = {"reading": "read", "writing": "write"}.get(self.fault.phase, "send")
        under = "socket:" if verb == "send" else f"{self.folder}/{SWAP}"
        first = 1 + int(self.fault.delay_s * 200)
        rule = f"under={under},verb={verb},action={action},errno={number},first={first},count={count}"
        ctypes.CDLL(None).io_shim_set(rule.encode())


def _reset_connections() -> None:
    """Shut down every TCP connection between this process and others, as a broken network does."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family == socket.AF_INET and connection.getpeername():
                        connection.shutdown(socket.SHUT_RDWR)


def live(rank: int, fault: Fault | None, job: Job, folder: str) -> None:
    """Be one rank, from its start to its end, as a script would; what happened is in a file afterwards."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with whoever has started this
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if fault is not None and fault.seed % 2:  # else no flat of so small a model would pass through shared memory
        shared_wires.SMALLEST_BYTES = 1
    limit_s = LIMITS_S[job.device]
    os.environ |= {"ZEROSTD_TIMEOUT_S": str(limit_s), "LOCAL_WORLD_SIZE": str(job.world_size), "LOCAL_RANK": "0"}
    os.environ |= {"NCCL_HOSTID": f"pretended-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "MASTER_ADDR": "127.0.0.1"}
    log = os.open(f"{folder}/log-{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    outcome: dict[str, Any] = {"error": "", "text": "", "losses": []}
    code = 0
    try:
        if job.device == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(
            "gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.FileStore(f"{folder}/store", job.world_size),
            rank=rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=60),
        )
        outcome["losses"] = Training(rank, fault, job, folder).run()
    except BaseException as error:
        traceback.print_exc()
        outcome |= {"error": type(error).__name__, "text": str(error)}
        sys.last_value = error  # as Python does before it ends by an exception
        code = 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    Path(f"{folder}/outcome-{rank}").write_text(json.dumps(outcome))
    atexit._run_exitfuncs()  # the rest of Python's own way out
    os._exit(code)


class Training:
    """One rank's program."""

    def __init__(self, rank: int, fault: Fault | None, job: Job, folder: str) -> None:
        self.rank = rank
        self.fault = fault
        self.job = job
        self.folder = folder
        self.step = 0
        self.is_for_all = fault is not None and fault.kind.endswith("all ranks, caught")
        self.strike: Strike | None = None
        if fault is not None:
            self.strike = Strike(fault, rank, {*range(job.world_size)} if self.is_for_all else {fault.rank}, folder)
        self.model: Any = Net(is_frozen=job.feature in FROZEN).to(job.device)
        self.optimizer: Any = None
        self.average: Any = None
        self.other: Any = None  # a second model

    def run(self) -> list[float]:
        if self.strike is not None and self.fault is not None:
            self.model.strikes = {self.fault.phase: self.strike}
        with self.during("prepare"):
            self.model, self.optimizer = prepare(self.model, self.job, self.folder)
            self.begin_feature()
        self.add_hooks()
        losses: list[float] = []
        for self.step in range(STEPS):
            if self.strike is not None:
                self.strike.step = self.step
            if self.does("rank leaves the loop", "loader"):
                return losses
            losses.append(self.take_step())
            if self.step == 1:
                losses.append(self.look())
            if self.step == 2:
                with self.during("load"):
                    zerostd.load(f"{self.folder}/saved", self.model, self.optimizer)
        with self.during("release"):
            zerostd.release(self.model)
        return [*losses, float(self.model.inlet.weight.detach().double().sum())]

    def begin_feature(self) -> None:
        if self.job.feature == "an average":
            self.average = zerostd.averaged(self.model, 0.5)
        if self.job.feature == "equal models":
            self.other, _ = prepare(Net(is_frozen=True).to(self.job.device), self.job, self.folder)
            zerostd.deduplicate(self.model, self.other)

    def look_at_feature(self) -> float:
        """Use the feature between two steps; return a number that depends on it."""
        if self.average is not None:
            with self.average.applied():
                return float(zerostd.full_state_dict(self.model)["inlet.weight"].double().sum())
        if self.other is not None:
            with zerostd.gathered(self.other), torch.no_grad():
                return float(self.other.outlet.weight.double().sum())
        if self.job.feature == "sleep":
            zerostd.sleep(self.model)
            zerostd.wake(self.model)
        return 0.0

    def add_hooks(self) -> None:
        """Let the fault happen in a hook of the user's, if it says so."""
        if self.strike is None or self.fault is None or "hook" not in self.fault.phase:
            return
        block = self.model.blocks[0]
        register: dict[str, Any] = {
            "forward pre-hook": block.register_forward_pre_hook,
            "forward hook": block.register_forward_hook,
            "backward pre-hook": block.register_full_backward_pre_hook,
            "backward hook": block.register_full_backward_hook,
            "parameter hook": block.weight.register_post_accumulate_grad_hook,
            "step pre-hook": self.optimizer.register_step_pre_hook,
            "step post-hook": self.optimizer.register_step_post_hook,
        }
        register[self.fault.phase](self.strike.strike)

    def look(self) -> float:
        """Make the calls around training."""
        with self.during("save"):
            is_beside = self.job.feature == "saves beside training"
            saving = zerostd.save(f"{self.folder}/saved", self.model, self.optimizer, wait=not is_beside)
        feature = self.look_at_feature()
        saving.wait()
        if self.fault is not None and self.fault.kind == "checkpoint damaged" and self.rank == self.fault.rank:
            damage(sorted(Path(self.folder, "saved").glob("rank-*"))[self.rank], self.fault.phase)
        with self.during("full_state_dict"):
            zerostd.full_state_dict(self.model)
        with self.during("gathered"), zerostd.gathered(self.model):
            return feature + float(self.model.outlet.weight.detach().sum())

    def take_step(self) -> float:
        """Take one step; an exception that all ranks have is caught, and the step is taken again."""
        while True:
            try:
                return self._take_step()
            except Broken:
                if not self.is_for_all:
                    raise
                self.optimizer.zero_grad()

    def _take_step(self) -> float:
        self.at("loader")
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * self.step + self.rank))
        batch = batch.to(self.job.device)
        self.stray()
        group = self.optimizer.param_groups[0]
        if self.does("other option", "lr before the forward"):
            group["lr"] = 0.5
        if self.does("other option", "betas"):
            group["betas"] = (0.8, 0.999)
        loss = self.model(batch).square().mean()
        self.at("loss")
        value = float(loss)
        if self.does("rank skips", "backward"):
            return value
        loss.backward()
        self.at("clip")
        if self.job.feature != "freed gradients":
            self.optimizer.clip_grad_norm_(0.5 if self.does("other option", "clip norm") else 1.0)
        if self.does("call by one rank alone", "clip"):
            self.optimizer.clip_grad_norm_(1.0)
        if self.does("other option", "lr before the step"):
            group["lr"] = 0.5
        if self.does("gradients dropped", "step"):
            self.optimizer.zero_grad()
        self.at("step")
        if not self.does("rank skips", "step"):
            self.optimizer.step()
        if self.does("rank steps twice", "step"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return value

    def stray(self) -> None:
        """Make a call that the other ranks do not make, or make in another way."""
        if self.does("call by one rank alone", "prepare"):
            prepare(Net().to(self.job.device), Job(0, "device", 0), self.folder)
        if self.does("call by one rank alone", "forward"):
            self.model(torch.ones(4, 8, device=self.job.device))
        if self.does("call by one rank alone", "load") and Path(f"{self.folder}/saved").exists():
            zerostd.load(f"{self.folder}/saved", self.model, self.optimizer)
        if self.does("call by one rank alone", "release"):
            zerostd.release(self.model)
        if self.does("call by one rank alone", "full_state_dict"):
            zerostd.full_state_dict(self.model)
        if self.does("call by one rank alone", "save"):
            zerostd.save(f"{self.folder}/alone", self.model, self.optimizer)
        if self.does("call by one rank alone", "gathered"):
            with zerostd.gathered(self.model, write=True):
                pass
        if self.fault is not None and self.fault.kind == "other values loaded" and self.step == self.fault.step:
            values = torch.ones if self.rank == self.fault.rank else torch.zeros
            state = {name: values(tensor.shape) for name, tensor in Net().state_dict().items()}
            self.model.load_state_dict(state)

    def does(self, kind: str, phase: str) -> bool:
        """Whether this rank does something else than the others now."""
        if self.fault is None:
            return False
        now = (self.fault.kind, self.fault.phase, self.fault.rank, self.fault.step)
        return now == (kind, phase, self.rank, self.step)

    def at(self, phase: str) -> None:
        if self.strike is None or self.fault is None:
            return
        if self.fault.kind in ("file cut", "file overwritten"):
            if phase == self.fault.phase and self.does(self.fault.kind, phase):
                damage_extent(self.model, self.fault)
        elif phase == self.fault.phase or (phase == "loader" and self.fault.phase in ("reading", "writing")):
            self.strike.strike()

    def during(self, call: str) -> contextlib.AbstractContextManager[None]:
        if self.strike is None or self.fault is None or self.fault.kind not in SIGNALS:
            return contextlib.nullcontext()
        return self.strike.inside(call)


def damage(file: Path, how: str) -> None:
    """Delete a file, cut it, or change a byte in its last part."""
    if how == "deleted":
        file.unlink()
    elif how == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        with file.open("r+b") as opened:
            opened.seek(-3, os.SEEK_END)
            byte = opened.read(1)[0]
            opened.seek(-3, os.SEEK_END)
            opened.write(bytes([byte ^ 16]))


def damage_extent(model: nn.Module, fault: Fault) -> None:
    """Cut a scratch file of this rank, or change a byte of it, when nothing is under way."""
    runtime = model.__dict__["_zerostd"]
    runtime.optimizer.synchronize()
    everything = runtime.resources.allocator.disk._extents
    # A gradient is written before it is read again, and much of the place of a packed extent is a hole.
    read_next = [e for e in everything if e.kind is not Kind.GRADIENTS and not e.item_bytes]
    extents = sorted(read_next, key=lambda extent: (extent.file, extent.start))
    extent = extents[int(fault.delay_s * 1e6) % len(extents)]
    file = f"/proc/self/fd/{extent.scratch_file.fd}"
    if fault.kind == "file cut":
        os.truncate(file, extent.start)
        return
    with open(file, "r+b") as opened:
        opened.seek(extent.start + extent.num_bytes // 2)
        byte = opened.read(1)[0]
        opened.seek(extent.start + extent.num_bytes // 2)
        opened.write(bytes([byte ^ 16]))
        opened.flush()
        os.fsync(opened.fileno())


def prepare(model: nn.Module, job: Job, folder: str) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    os.makedirs(f"{folder}/{SWAP}", exist_ok=True)  # a drive of its own: checkpoints are elsewhere
    share = 0.5 if job.feature == "saves beside training" else None
    budget = zerostd.Budget(disk_path=f"{folder}/{SWAP}", background=share)
    options: dict[str, Any] = {"stage": job.stage, "budget": budget, "groups": ["blocks.*", "outlet"]}
    if job.feature == "freed gradients":
        options["accumulate"] = 1
    if job.feature == "secondary shards":
        options["mesh"] = init_device_mesh(job.device, (2, job.world_size // 2))
    return zerostd.prepare(
        model, optimizer, placement=placement_of(job), exact=job.feature != "coded moments", **options
    )


def placement_of(job: Job) -> zerostd.Placement:
    kept: dict[str, Any] = {"optimizer_states": job.tier}
    if job.stage == 3 and job.tier != "device":
        kept |= {"parameters": job.tier, "gradients": "host"}
    kept |= {
        "coded moments": {"codec": {"optimizer_states": "int8"}},
        "equal models": {"parameters": "host" if job.tier == "device" else job.tier},
        "freed gradients": {"gradients": "device", "keep_gradients": False},
        "gradients on disk": {"gradients": "disk"},
        "packed parameters": {"parameters": "disk", "codec": {"parameters": "lossless"}},
        "secondary shards": {"secondary_shards": True},
    }.get(job.feature, {})
    return zerostd.Placement(**kept)
