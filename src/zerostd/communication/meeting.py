"""How ranks meet: the default process group, initialised here if the user has not done so."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from zerostd.errors import CommunicationError

THERE = "zerostd/there/"  # and a rank: a key of the store, which says that the rank has come to prepare


def meet(device: torch.device, limit: timedelta) -> None:
    """Make the default process group. Missing ranks are named if torchrun provides the store; otherwise the store
    exists only when all ranks are there."""
    missing: list[str] = []
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        ours = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]  # as torch does, unlisted
        try:
            store.set(f"{THERE}{rank}", "")
            dist.init_process_group(_backends(device), store=ours, rank=rank, world_size=size, timeout=limit)
        except RuntimeError:
            missing = [str(other) for other in range(size) if not store.check([f"{THERE}{other}"])]
            raise
    except RuntimeError as error:
        who = f"rank {', '.join(missing)} is missing. Start" if missing else "start"
        text = str(error).strip().splitlines()[0][:200]
        raise CommunicationError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} did not meet the others in "
            f"zerostd.prepare() at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (time limit "
            f"{limit.total_seconds():g} s): {who} all ranks, and let each call zerostd.prepare. Cause: {text}"
        ) from error


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
        return num_ranks, dist.get_default_backend_for_device(device), time.perf_counter() - begin
    finally:
        if not was_there:
            dist.destroy_process_group()


def _backends(device: torch.device) -> str:
    backend = dist.get_default_backend_for_device(device)
    return backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
