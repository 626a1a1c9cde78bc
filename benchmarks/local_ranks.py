"""Gloo ranks of one host, a process each, for benchmarks that compare them in one run."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(work: Callable[..., None], size: int, *arguments: Any) -> None:
    """Call `work(rank, size, *arguments)` on every rank of a process group, with one thread each."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mp.spawn(_be_rank, (work, size, port, arguments), nprocs=size)


def _be_rank(rank: int, work: Callable[..., None], size: int, port: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    work(rank, size, *arguments)
    dist.destroy_process_group()
