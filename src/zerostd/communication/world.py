"""The world: who I am, how many we are, and the channels between us.

Three cases on one path: torchrun (or anything that sets its variables) with or without an initialised process group,
and no launcher at all, which is a world of one without a process group. Each prepared model makes its own channels, so
several of them in one process never mix their messages.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from zerostd.communication.peers import Peers
from zerostd.compat import default_store
from zerostd.errors import CommunicationError, PrepareError

TIMEOUT_VARIABLE = "ZEROSTD_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0
# Torch's watchdog would end the process without a Python exception. It aborts the communicators instead, and the next
# collective raises. See [Note: aborted communicators].
WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}


@dataclass(eq=False)
class Channels:
    """Process groups of one prepared model.

    Each has messages of its own kind: their order relative to each other may differ between ranks, the order inside one
    may not. [Note: gloo ends the process] gloo calls abort() when a message is longer than the one it expects. So two
    kinds of messages share a group of gloo only if a rank that strays from its peers cannot send one where they wait
    for the other. Communicators of nccl take memory of the device, and there some of the groups are the same.
    """

    gather: dist.ProcessGroup
    regather: dist.ProcessGroup  # gathers in backward, while a rank that strays may be in a forward
    reduce: dist.ProcessGroup
    broadcast: dist.ProcessGroup
    scalars: dist.ProcessGroup  # between backward and step: ranks that go on gather for a forward before they regather
    control: dist.ProcessGroup  # gloo, on the CPU: reading its results costs no device synchronisation
    peers: Peers  # who and where the others are, beside these groups


@dataclass(frozen=True)
class World:
    """This process among the others, and the channels to them."""

    rank: int
    size: int
    local_size: int
    device: torch.device
    timeout_s: float
    channels: Channels | None  # None in a world of one

    @classmethod
    def discover(cls, device: torch.device) -> World:
        """Join the ranks the launcher started, or be a world of one."""
        timeout_s = _timeout_s()
        limit = timedelta(seconds=timeout_s)
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) != 1:
            _join(device, limit)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1, 1, device, timeout_s, None)
        rank = dist.get_rank()
        size = dist.get_world_size()
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        backend = "gloo" if device.type == "cpu" else "nccl"
        peers = Peers(default_store(), rank, size, timeout_s)
        with contextlib.ExitStack() as on_failure, _environment(WATCHDOG):
            on_failure.callback(peers.close)
            with peers.at("the making of its process groups"), peers.waiting():
                channels = _make_channels(backend, limit, peers)
            on_failure.pop_all()
        return cls(rank, size, local_size, device, timeout_s, channels)

    @classmethod
    def pretend(cls, device: torch.device, size: int | None, local_size: int | None) -> World:
        """Return a world to plan for, without channels: of `size` ranks, or as many as there are."""
        if size is None:
            size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PrepareError(f"world_size={size!r} must be a whole number of ranks, 1 or more")
        if local_size is None:
            local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return cls(0, size, min(size, local_size), device, _timeout_s(), None)

    def inside(self, group: dist.ProcessGroup) -> World:
        """Return this process among those of a process group, which stays the user's."""
        assert self.channels is not None
        channels = Channels(group, group, group, group, group, group, peers=self.channels.peers)
        size = group.size()
        return World(group.rank(), size, min(size, self.local_size), self.device, self.timeout_s, channels)

    def enter(self, call: str) -> None:
        """Note the call that this rank makes now, for errors on other ranks. Backward passes and steps are counted."""
        if self.channels is not None:
            self.channels.peers.enter(call)

    def at(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context for a collective; errors inside name it, and so do those of ranks that wait for this one."""
        return contextlib.nullcontext() if self.channels is None else self.channels.peers.at(what)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for calls of torch.distributed. What they raise becomes a CommunicationError that says who
        is to blame."""
        assert self.channels is not None
        return self.channels.peers.waiting(self.channels.gather, self.channels.reduce)

    def close(self) -> None:
        """Close the channels, if they are still open; the user's own process group stays. They are dropped, for the
        model may stay after its release, and gloo ends its threads with the last reference to a group."""
        if self.channels is None:
            return
        self.channels.peers.close()
        names = [name for name in vars(self.channels) if name != "peers"]
        for group in dict.fromkeys(vars(self.channels).pop(name) for name in names):
            if dist.is_initialized():
                with contextlib.suppress(ValueError):  # gone with the user's process group
                    dist.destroy_process_group(group)


def try_group(device: torch.device, timeout_s: float) -> tuple[int, str, float]:
    """Return how many ranks met, over what backend, and the seconds of a small collective, for `zerostd doctor`.

    A process group that was made for it is closed again. Raises torch's RuntimeError if they did not meet in time.
    """
    was_there = dist.is_initialized()
    limit = timedelta(seconds=timeout_s)
    if not was_there and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(_backends(device), timeout=limit)
    elif not was_there:
        alone = dist.HashStore()  # type: ignore[attr-defined]  # torch does not list it among its exports
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1, timeout=limit)
    try:
        value = torch.ones(1, device=device)
        dist.all_reduce(value)  # the first one makes the connections
        begin = time.perf_counter()
        dist.all_reduce(value)
        num_ranks = round(value.item() ** 0.5)
        return num_ranks, "gloo" if device.type == "cpu" else "nccl", time.perf_counter() - begin
    finally:
        if not was_there:
            dist.destroy_process_group()


def _make_channels(backend: str, limit: timedelta, peers: Peers) -> Channels:
    """Make the process groups of one prepared model; see [Note: gloo ends the process]."""
    control = dist.new_group(backend="gloo", timeout=limit)
    gather = dist.new_group(backend=backend, timeout=limit)
    reduce = dist.new_group(backend=backend, timeout=limit)
    if backend != "gloo":
        return Channels(gather, gather, reduce, gather, reduce, control, peers)
    regather = dist.new_group(backend=backend, timeout=limit)
    broadcast = dist.new_group(backend=backend, timeout=limit)
    return Channels(gather, regather, reduce, broadcast, regather, control, peers)


def _join(device: torch.device, limit: timedelta) -> None:
    """Make the default process group of the ranks that a launcher started."""
    try:
        dist.init_process_group(_backends(device), timeout=limit)
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0][:200]
        raise CommunicationError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} did not meet the others in "
            f"zerostd.prepare() at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (time limit "
            f"{limit.total_seconds():g} s): start all ranks, and let each call zerostd.prepare. Cause: {text}"
        ) from error


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, where the user has not."""
    names = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in names})
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def _backends(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"


def _timeout_s() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise PrepareError(f"{TIMEOUT_VARIABLE}={text!r} must be a positive number of seconds")
    return seconds


def thread_budget(local_size: int) -> int:
    """Return the threads this rank may use: the cores it is allowed, shared with the ranks beside it. Affinity and the
    cgroup's quota count, not OMP_NUM_THREADS: torchrun sets it to 1, which is wrong for an update."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores() or cores) // max(1, local_size))


def _cgroup_cores() -> int | None:
    """Return the whole cores of the cgroup's CPU quota (v2, then v1), None where there is no quota."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):
            quota, period = "".join(Path("/sys/fs/cgroup", name).read_text() for name in names).split()
            return None if quota in ("max", "-1") else max(1, int(quota) // int(period))
    return None
