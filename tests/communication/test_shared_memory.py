"""Ranks of one host pass large slices through shared memory: the same bits, the same errors, nothing left behind."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerostd
from support import warm
from support.processes import environment
from support.side_by_side import data, seeded
from zerostd.communication import SharedWires, World
from zerostd.communication.shared_wires import SMALLEST_BYTES
from zerostd.monitoring import Ledger

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

Counts = list[tuple[int, int] | None]
SWITCH = "ZEROSTD_SHARED_MEMORY"
WIDTH = 1472  # squared, in fp32: more than SMALLEST_BYTES


class Tower(nn.Module):
    """Groups that pass through shared memory between groups that are too small for it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 64), nn.Linear(64, width), nn.Tanh()
        )
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x))


def wires_of(model: nn.Module) -> SharedWires:
    wires = model.__dict__["_zerostd"].wires
    assert isinstance(wires, SharedWires)
    return wires


def counts_of(wires: Any) -> Counts:
    """Return the reduces and gathers of wires with shared memory, and of those between replicas; None: without it."""
    return [
        (each._num_reduces, each._num_gathers) if each._segments else None
        for each in (wires, wires._across)
        if each is not None
    ]


def mapped() -> int:
    """Return how many segments this process maps, with or without a name."""
    return Path("/proc/self/maps").read_text().count("memfd:zerostd")


def opened() -> list[str]:
    """Return the files in memory that this process has open."""
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [name for name in (os.readlink(file) for file in files if os.path.islink(file)) if "zerostd" in name]


def train(rank: int, switch: str, stage: int, width: int = WIDTH, rows: int = 0) -> tuple[Any, Counts, dict[str, int]]:
    """Return losses and parameters of two steps, the second of two passes, what went through shared memory, and the
    bytes that were sent."""
    model = seeded(lambda: Tower(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh = init_device_mesh("cpu", (rows, dist.get_world_size() // rows)) if rows else None
    with environment(**{SWITCH: switch}):
        model, optimizer = zerostd.prepare(model, optimizer, stage=stage, groups=["layers.*", "last"], mesh=mesh)
    losses = []
    for number in range(2):
        for micro in range(1 + number):
            loss = model(data(2, 16, number=number + micro, rank=rank)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    values = zerostd.full_state_dict(model)
    counts = counts_of(wires_of(model))
    sent = dict(zerostd.memory(model).sent)
    assert not opened()
    zerostd.release(model)
    return (losses, values), counts, sent


def both_ways(rank: int, stages: tuple[int, ...]) -> list[str]:
    problems = []
    for stage in stages:
        (losses, values), counts, sent = train(rank, "1", stage)
        others, no_counts, sent_by_sockets = train(rank, "0", stage)
        if counts[0] is None or not counts[0][0] or bool(counts[0][1]) != (stage > 0):
            problems.append(f"stage {stage}: {counts} reduces and gathers")
        if no_counts != [None] or sent != sent_by_sockets:
            problems.append(f"stage {stage}: {sent} and {sent_by_sockets} bytes")
        same = all(torch.equal(values[name], others[1][name]) for name in others[1])
        if losses != others[0] or not same:
            problems.append(f"stage {stage}: other bits, {losses} and {others[0]}")
    gc.collect()
    return [*problems, "segments are mapped after release"] if mapped() else problems


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("size", "stages"),
    [(2, (0, 3)), (4, (1, 2)), pytest.param(2, (1, 2), marks=FULL), pytest.param(4, (0, 3), marks=FULL)],
)
def test_training_has_the_same_bits_and_counts_the_same_bytes(ranks: Any, size: int, stages: tuple[int, ...]) -> None:
    assert ranks(size, both_ways, stages) == [[]] * size


def hybrid(rank: int) -> tuple[bool, bool]:
    """Replicas average slices of more than SMALLEST_BYTES, through segments of their own."""
    (losses, values), counts, _ = train(rank, "1", 3, 2048, rows=2)
    others, _, _ = train(rank, "0", 3, 2048, rows=2)
    is_same = losses == others[0] and all(torch.equal(values[name], others[1][name]) for name in values)
    return is_same, len(counts) == 2 and None not in counts


def test_replicas_have_the_same_bits(ranks: Any) -> None:
    assert ranks(4, hybrid) == [(True, True)] * 4


def out_of_step(rank: int, size: int) -> list[str]:
    """Ranks come late in turn, and wait late: no slice is overwritten before all have read it."""
    world = World.discover(torch.device("cpu"))
    wires = SharedWires(world, Ledger())
    largest = SMALLEST_BYTES // 4 // (64 * size) * (64 * size) + 64 * size  # elements of fp32
    wires.reserve(4 * largest)
    problems = []
    waiting: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for number in range(24):
        if number % size == rank:
            time.sleep(0.02)
        numel = 64 * size if number % 5 == 4 else largest
        values = [torch.full((numel,), float(number * size + other)) for other in range(size)]
        mean = torch.stack([value[: numel // size] for value in values]).mean(0)
        if number % 3 == 0:
            full = torch.zeros(numel)
            shard = values[rank][: numel // size]
            waiting.append((wires.gather(full, shard), full, torch.cat([value[: numel // size] for value in values])))
        elif number % 3 == 1:
            land = torch.zeros(numel // size)
            waiting.append((wires.reduce(values[rank], land), land, mean))
        else:
            waiting.append((wires.reduce_everywhere(values[rank]), values[rank], mean.repeat(size)))
        if len(waiting) > 3:
            transfer, found, wanted = waiting.pop(0)
            transfer.wait()
            if not torch.equal(found, wanted):
                problems.append(f"collective {number - 3}: {found[:3]} and not {wanted[:3]}")
    for transfer, _, _ in waiting:
        transfer.wait()
    assert wires._segments
    dist.barrier()
    world.close()
    return problems


@pytest.mark.parametrize("size", [2, 4])
def test_slots_are_free_before_they_are_used_again(ranks: Any, size: int) -> None:
    assert ranks(size, out_of_step, size) == [[]] * size


def without_room(rank: int) -> tuple[list[str], bool]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("zerostd").addHandler(handler)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # its segment does not fit, and no other rank knows
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        _, counts, _ = train(rank, "1", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        logging.getLogger("zerostd").removeHandler(handler)
    return [line for line in lines if "sockets" in line], counts == [None]


def test_ranks_without_room_use_sockets_and_say_so_once(ranks: Any) -> None:
    (lines, is_plain), others = ranks(2, without_room)
    assert is_plain and others == ([], True)
    assert len(lines) == 1 and "bytes of shared memory: [Errno 27] File too large" in lines[0]


PROGRAM = """
import os, signal, sys
import torch, zerostd
from communication.test_shared_memory import Tower, wires_of
phase, name, when = sys.argv[1:]
torch.manual_seed(0)
model = Tower()
model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), stage=3, groups=["layers.*", "last"])
assert wires_of(model)._segments
def strike(*_):
    if os.environ["RANK"] == "1" and number == int(when):
        print("struck", flush=True)
        os.kill(os.getpid(), getattr(signal, name))
layer = model.layers[3]
if phase == "forward":
    layer.register_forward_hook(strike)
else:
    layer.register_full_backward_hook(strike)
for number in range(1000):
    model(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("phase", "name", "words"),
    [
        ("forward", "SIGKILL", "rank 1 is gone: its process has ended"),
        ("backward", "SIGKILL", "rank 1 is gone: its process has ended"),
        ("backward", "SIGSTOP", "rank 1 does not answer: its process is stopped"),
    ],
)
def test_a_rank_that_is_killed_or_stopped_between_two_slices_is_named(phase: str, name: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    everyone = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    everyone |= {"ZEROSTD_TIMEOUT_S": "6", "OMP_NUM_THREADS": "1"}
    scripts = [warm.Script(PROGRAM, phase, name, 2, env=os.environ | everyone | {"RANK": str(r)}) for r in range(3)]
    with ThreadPoolExecutor(3) as threads:
        ends = [threads.submit(script.communicate, 100.0) for script in scripts]
        errors = [ends[rank].result()[1] for rank in (0, 2)]
        if name == "SIGSTOP":
            os.kill(scripts[1].pid, signal.SIGKILL)
    assert all(words in text and "CommunicationError" in text for text in errors), errors
