"""A trial of whether ranks can meet: a process group and one collective. Called by `zerostd doctor`."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def try_group(device: torch.device, timeout_s: float) -> tuple[int, str, float]:
    """Return how many ranks met, over what backend, and the seconds of a small collective.

    A process group that was made for it is closed again.

    Raises:
        RuntimeError: They did not meet in time; the cause is torch's.
    """
    was_there = dist.is_initialized()
    if not was_there:
        _make_group(device, timedelta(seconds=timeout_s))
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


def _make_group(device: torch.device, limit: timedelta) -> None:
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend, timeout=limit)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]  # torch does not list it among its exports
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1, timeout=limit)
