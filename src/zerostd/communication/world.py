"""The world: who I am, how many we are, and the channels between us.

Three cases on one path: torchrun (or anything that sets its variables) with or without an initialised process group,
and no launcher at all, which is a world of one without a process group. Each prepared model makes its own channels, so
several of them in one process never mix their messages.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerostd.compat import default_store
from zerostd.errors import PrepareError
from zerostd.policy import MOST_RANKS

TIMEOUT_VARIABLE = "ZEROSTD_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0


@dataclass(eq=False)
class Channels:
    """Process groups of one prepared model.

    Gathers, reduces and control messages have one each: their order relative to each other may differ between ranks,
    the order inside one may not.
    """

    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup
    control: dist.ProcessGroup  # gloo, on the CPU: reading its results costs no device synchronisation
    store: Any  # the process group's own key-value store; None in a user's group


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
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) != 1:
            dist.init_process_group(_backends(device))
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1, 1, device, timeout_s, None)
        size = dist.get_world_size()
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        limit = timedelta(seconds=timeout_s)
        backend = "gloo" if device.type == "cpu" else "nccl"
        gather, reduce, control = (dist.new_group(backend=b, timeout=limit) for b in (backend, backend, "gloo"))
        channels = Channels(gather, reduce, control, default_store())
        return cls(dist.get_rank(), size, local_size, device, timeout_s, channels)

    @classmethod
    def pretend(cls, device: torch.device, size: int | None, local_size: int | None) -> World:
        """Return a world to plan for, without channels: of `size` ranks, or as many as there are."""
        if size is None:
            size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_RANKS:
            raise PrepareError(f"world_size={size!r} must be a whole number of ranks, from 1 to {MOST_RANKS:,}")
        if local_size is None:
            local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return cls(0, size, min(size, local_size), device, _timeout_s(), None)

    def inside(self, group: dist.ProcessGroup) -> World:
        """Return this process among those of a process group, which stays the user's."""
        channels = Channels(gather=group, reduce=group, control=group, store=None)
        size = group.size()
        return World(group.rank(), size, min(size, self.local_size), self.device, self.timeout_s, channels)

    def close(self) -> None:
        """Close the channels, if they are still open; the user's own process group stays. They are dropped, for the
        model may stay after its release, and gloo ends its threads with the last reference to a group."""
        for name in ("gather", "reduce", "control"):
            group = vars(self.channels).pop(name, None) if self.channels is not None else None
            if group is not None and dist.is_initialized():
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
