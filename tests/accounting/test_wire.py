"""Bytes sent per rank and step, by closed form: 2P(N-1)/N elements for stages 0 to 2, (3P - K)(N-1)/N for stage 3.

K are the parameters that backward begins with: the root's and the last layer's stay gathered from forward on. With
secondary shards, the first gather of a step and the reduces are those of stage 3, and the other gathers are inside a
node of S ranks: (P - K)(S-1)/S.
Counted three times: by the ledger, by watching what goes into torch.distributed, and by the kernel, which counts what
this process's TCP sockets sent. P is padded as the layout states.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zerostd
from support.agreement import agree
from support.processes import doing
from support.side_by_side import data, seeded

Ends = tuple[tuple[str, int], tuple[str, int]]  # of a connection: this process's address, and the other's
BYTES_SENT = 200  # offset of tcpi_bytes_sent in Linux's struct tcp_info
STEPS = 3


class Tower(nn.Module):
    def __init__(self, width: int = 96, depth: int = 4, reentrant: bool | None = None) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = x + 0.1 * (layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


def padded_numel(model: nn.Module) -> int:
    return sum(flat.layout.numel for group in model.__dict__["_zerostd"].groups for flat in group.flats)


def kept_numel(model: nn.Module) -> int:
    """K: what the root and the last layer have."""
    last = (model, model.layers[-1])
    groups = [group for group in model.__dict__["_zerostd"].groups if any(m in last for m in group.blueprint.modules)]
    assert len(groups) == len(last)
    return sum(flat.layout.numel for group in groups for flat in group.flats)


@contextmanager
def watching(counted: dict[int, int]) -> Iterator[None]:
    """Count what is handed to torch.distributed, by the number of ranks in the group: each collective's bytes that must
    leave this rank, on average."""
    passed: Counter[int] = Counter()

    def watch(name: str) -> Any:
        original = getattr(dist, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            passed[dist.get_world_size(kwargs.get("group"))] += tensor.nbytes
            return original(tensor, *args, **kwargs)

        return mock.patch.object(dist, name, call)

    # a broadcast moves its bytes to size - 1 ranks, and each rank takes its turn as the source
    with watch("broadcast"), watch("all_to_all_single"):
        yield
    counted |= {size: num_bytes * (size - 1) // size for size, num_bytes in passed.items()}


def tcp_bytes_sent() -> dict[Ends, int]:
    """By the two ends of a connection: one that is closed between two looks takes nothing away from the others."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    ends = (copy.getsockname()[:2], copy.getpeername()[:2])
                    found[ends] = struct.unpack_from("Q", info, BYTES_SENT)[0]
        except OSError:
            continue
    return found


def counts(
    rank: int, stage: int, precision: str, passes: int, width: int, reentrant: bool | None, **options: Any
) -> dict[str, Any]:
    """Bytes of one step after the first, in which orders are learnt."""
    doing(f"stage {stage}, {precision}, {passes} passes")
    model = seeded(lambda: Tower(width, reentrant=reentrant))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zerostd.prepare(
        model, optimizer, stage=stage, precision=precision, groups=["layers.*"], **options
    )

    def step(number: int) -> None:
        for micro in range(passes):
            model(data(2, width, number=number, rank=rank) + micro).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        step(number)
    with zerostd.gathered(model):  # nothing is on its way
        pass
    dist.barrier()
    before = zerostd.memory(model).sent
    sockets = tcp_bytes_sent()
    calls: dict[int, int] = {}
    with watching(calls):
        for number in range(STEPS):
            step(number)
        if stage in (1, 2):
            model.state_dict()  # the last step's parameters have arrived
    dist.barrier()
    sent = {ends: (total - sockets.get(ends, 0)) / STEPS for ends, total in tcp_bytes_sent().items()}
    dist.barrier()  # a rank that is done closes its connections, and with them what the others count
    after = zerostd.memory(model).sent
    verbs = {verb: (total - before.get(verb, 0)) // STEPS for verb, total in after.items()}
    found = {
        "verbs": verbs,
        "ledger": verbs.get("gather", 0) + verbs.get("reduce", 0),
        "calls": sum(calls.values()) // STEPS,
        "by size": {size: num_bytes // STEPS for size, num_bytes in calls.items()},
        "tcp": sum(sent.values()),
        "connections": sent,
        "padded": padded_numel(model),
        "kept": kept_numel(model),
        "form": zerostd.memory(model).gradients,
    }
    zerostd.release(model)
    return found


def closed_form(stage: int, found: dict[str, Any], size: int, itemsize: int, passes: int = 1) -> int:
    gathers = {0: passes, 1: 1, 2: 1, 3: 2 * passes}[stage]  # stage 0 reduces to everyone: a reduce and a gather
    kept = passes * found["kept"] if stage == 3 else 0
    return ((gathers + passes) * found["padded"] - kept) * itemsize * (size - 1) // size


def in_the_books(rank: int, size: int) -> list[str]:
    failures = []
    for stage in (0, 1, 2, 3):
        for precision, itemsize in (("fp32", 4), ("bf16", 2)):
            for passes in (1, 2):
                found = counts(rank, stage, precision, passes, 96, None)
                wanted = closed_form(stage, found, size, itemsize, passes)
                form = "bfloat16" if precision == "bf16" and passes == 1 else "float32"
                if not found["ledger"] == found["calls"] == wanted or not found["form"].startswith(form):
                    failures.append(f"rank {rank} of {size}, stage {stage}, {precision}, {passes}: {wanted}, {found}")
    return failures


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_sends_what_the_paper_says(ranks, size):
    agree(ranks(size, in_the_books, size))


def with_checkpoints(rank: int, reentrant: bool) -> list[str]:
    """Recomputing a forward inside backward gathers nothing that backward had not gathered anyway."""
    found = counts(rank, 3, "fp32", 1, 96, reentrant)
    wanted = closed_form(3, found, 2, 4)
    return [] if found["ledger"] == wanted else [f"rank {rank}: {found['ledger']} bytes, expected {wanted}"]


@pytest.mark.parametrize(
    "reentrant",
    [
        False,
        True,
    ],
)
def test_checkpointing_sends_no_more(ranks, reentrant):
    agree(ranks(2, with_checkpoints, reentrant))


def on_the_wire(rank: int, size: int) -> list[tuple[int, float, float]]:
    found = [(stage, counts(rank, stage, "fp32", 1, 512, None)) for stage in (0, 1, 2, 3)]
    return [(stage, counted["tcp"], closed_form(stage, counted, size, 4)) for stage, counted in found]


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"), reason="needs Linux")
@pytest.mark.parametrize("size", [2, 4])
def test_the_kernel_counts_the_same_bytes(ranks, size):
    """Mean over the ranks, since gloo passes a broadcast on along a tree; headers and agreements are small change."""
    answers = ranks(size, partial(on_the_wire, size=size))
    for each in zip(*answers, strict=True):
        stage, wanted = each[0][0], each[0][2]
        mean = sum(sent for _, sent, _ in each) / size
        assert wanted <= mean <= 1.01 * wanted, f"stage {stage}, {size} ranks: {mean:.0f} bytes each, not {wanted}"


NODES = (2, 2)  # of ranks


def with_nodes() -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", NODES), "placement": zerostd.Placement(secondary_shards=True)}


def with_secondary_shards(rank: int) -> list[str]:
    failures = []
    size = NODES[0] * NODES[1]
    for precision, itemsize in (("fp32", 4), ("bf16", 2)):
        for passes in (1, 2):
            for reentrant in (None, False):
                found = counts(rank, 3, precision, passes, 96, reentrant, **with_nodes())
                everywhere = found["padded"] * itemsize * (size - 1) // size
                inside = ((2 * passes - 1) * found["padded"] - passes * found["kept"]) * itemsize
                inside = inside * (NODES[1] - 1) // NODES[1]
                wanted = {"gather": everywhere, "reduce": passes * everywhere, "node": inside}
                calls = {size: (1 + passes) * everywhere, NODES[1]: inside}
                if {verb: found["verbs"][verb] for verb in wanted} != wanted or found["by size"] != calls:
                    failures.append(f"rank {rank}, {precision}, {passes}, {reentrant}: {wanted}, {found}")
    return failures


def test_secondary_shards_keep_gathers_inside_the_node(ranks):
    agree(ranks(4, with_secondary_shards))


def between_nodes(rank: int) -> list[dict[str, Any]]:
    forms: list[tuple[int, dict[str, Any]]] = [(2, {}), (3, with_nodes()), (3, {})]
    return [counts(rank, stage, "fp32", 1, 512, None, **options) for stage, options in forms]


def crossing_bytes(by_rank: Sequence[dict[str, Any]]) -> float:
    """Bytes that all ranks of one node have sent to ranks of another."""
    owners = {ours: rank for rank, counted in enumerate(by_rank) for ours, _ in counted["connections"]}
    nodes = [rank // NODES[1] for rank in range(len(by_rank))]
    return sum(
        num_bytes
        for rank, counted in enumerate(by_rank)
        for (_, theirs), num_bytes in counted["connections"].items()
        if theirs in owners and nodes[owners[theirs]] != nodes[rank]
    )


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"), reason="needs Linux")
def test_a_backward_with_secondary_shards_gathers_nothing_between_nodes(ranks):
    """By the kernel's count: the reduces and one gather cross, as at stage 2. The reduces are 2P; what gloo sends over
    the boundary for a gather is taken from stage 2, and flat stage 3 sends as much again for P - K."""
    answers = list(zip(*ranks(4, between_nodes), strict=True))
    stage_2, secondary, flat = map(crossing_bytes, answers)
    padded = answers[0][0]["padded"]
    part = (padded - answers[2][0]["kept"]) / padded
    assert secondary == pytest.approx(stage_2, rel=0.01)
    assert flat - secondary == pytest.approx((stage_2 - 2 * 4 * padded) * part, rel=0.02)
    assert flat > 1.2 * secondary
