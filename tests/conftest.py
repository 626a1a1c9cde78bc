"""What every test may ask for: real ranks that stay alive, and `gpu` tests skipped where there is none.

Properties are tried with the same examples each time, so that a change is judged by what it changed; `make explore`
draws others.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Threads of OpenMP wait for work without a core of their own: an update uses all cores, and so do the other ranks and
# workers of these tests. The variable is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # `from support import ...`, here and in the ranks

from support.processes import RankPool, environment

MOST_RANKS = 4
TESTS = Path(__file__).parent
LONGEST = (  # files that take most of a minute come first, so that no worker is left alone with one at the end
    *("idioms/test_idioms.py", "examples/test_more_examples.py", "adapting/test_adapting.py"),
    *("examples/test_examples.py", "examples/test_elastic.py", "models/test_any_model.py", "offload/test_memory.py"),
    *("offload/test_parity.py", "checkpoints/test_save_load.py", "checkpoints/test_kills.py", "faults/test_faults.py"),
    *("models/test_surface.py", "communication/test_shared_memory.py", "adapting/test_promise.py"),
    *("planning/test_planner.py", "planning/test_obeying.py", "checkpoints/test_ordinary.py"),
    *("serving/test_servers.py", "faults/test_checkpoint_exit.py", "parity/test_parity.py"),
)

# No deadline: how long an example takes is a matter of what else the machine does.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Same order of sums on every machine, and no quarrel with the ranks for the cores. The collector leaves out what
    is imported: it would look at half a million objects each time that a test asks for it."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def as_it_was() -> Iterator[None]:
    """Other libraries start process groups and write into the environment, and the next file would take it for a
    launcher's."""
    with environment():
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    with RankPool(MOST_RANKS) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """`ranks(world_size, fn, *args, timeout=120)`: what `fn(rank, *args)` returned on each rank.

    The ranks are in a gloo process group. They are real processes that outlive the test; one that fails is replaced.
    """

    def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        return rank_pool.run(fn, *args, world_size=world_size, timeout=timeout)

    return run
