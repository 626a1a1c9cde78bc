"""Ranks that share one CUDA device: each pretends to be on a host of its own, so NCCL connects them over sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.processes import RankPool

MOST_RANKS = 4


@pytest.fixture(scope="session")
def cuda_rank_pool() -> Iterator[RankPool]:
    with RankPool(MOST_RANKS, device="cuda") as pool:
        yield pool


@pytest.fixture(scope="session")
def cuda_ranks(cuda_rank_pool: RankPool) -> Callable[..., list[Any]]:
    """`cuda_ranks(world_size, fn, *args, timeout=120)`, as `ranks` for the CPU."""

    def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        return cuda_rank_pool.run(fn, *args, world_size=world_size, timeout=timeout)

    return run
