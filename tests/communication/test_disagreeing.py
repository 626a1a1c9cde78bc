"""Ranks that prepare a model with different ranks: refused before they wait for each other, and nothing is changed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerostd
from support.agreement import agree
from support.compare import worst_error
from support.parallel_gpt import ParallelGPT, loss, parallelize
from support.processes import environment
from support.side_by_side import LIMIT, adamw, seeded
from zerostd import CommunicationError, PrepareError

LONG_S = "80"  # of the time limit, which must not be waited for
SOON_S = 40.0  # ranks raise after a few messages; a busy machine takes its time


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What a refused prepare must leave alone."""
    modules = [(type(module), len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    parameters = [(id(p), type(p), p._version, p.grad) for p in model.parameters()]
    return [modules, parameters, [[id(p) for p in g["params"]] for g in optimizer.param_groups], dict(optimizer.state)]


def refusal(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> str:
    """Return what prepare says when it refuses; raises if it takes the options, waits or changes something."""
    before = state_of(model, optimizer)
    begun = time.monotonic()
    with environment(ZEROSTD_TIMEOUT_S=LONG_S), pytest.raises(PrepareError) as raised:
        zerostd.prepare(model, optimizer, **options)
    assert time.monotonic() - begun < SOON_S, f"waited for the time limit: {raised.value}"
    assert state_of(model, optimizer) == before, "the model or the optimizer was changed"
    dist.barrier()
    return str(raised.value)


def trained(num_ranks: int) -> dict[str, torch.Tensor]:
    """The same model on one rank, on the batches of data-parallel ranks."""
    model = seeded(ParallelGPT)
    optimizer = adamw(model)
    for step in range(3):
        torch.stack([loss(model, step, rank) for rank in range(num_ranks)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def goes_on(model: nn.Module, optimizer: Any, rank: int, num_ranks: int, **options: Any) -> list[str]:
    """Prepare the refused model in the right way, and train it."""
    model, optimizer = zerostd.prepare(model, optimizer, groups=["blocks.*"], stage=3, **options)
    for step in range(3):
        loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    worst = worst_error(zerostd.full_state_dict(model), trained(num_ranks))
    zerostd.release(model)
    return [] if worst.error <= LIMIT else [f"rank {dist.get_rank()}: {worst}"]


def crosses(rank: int) -> list[str]:
    """Rows of the mesh join ranks that have different parts of the DTensors. Each rank alone sees nothing wrong."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(seeded(ParallelGPT), mesh["tp"])
    optimizer = adamw(model)
    cross = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("other", "dp"))
    failures = []
    for _ in range(2):  # the second time is refused as the first
        text = refusal(model, optimizer, mesh=cross["dp"])
        if "[0, 3, 1, 2]" not in text or "[1, 2, 0, 3]" not in text:
            failures.append(f"rank {rank}: {text}")
    return failures + goes_on(model, optimizer, mesh.get_local_rank("dp"), 2, mesh=mesh["dp"])


def test_a_mesh_across_the_splits_of_dtensors_is_refused(ranks: Any) -> None:
    agree(ranks(4, crosses))


def differs(rank: int, late: int) -> list[str]:
    """Rank 0 takes the mesh of a node, the others that of all; one of them comes late."""
    node = dist.new_group([0, 1])
    model = seeded(ParallelGPT)
    optimizer = adamw(model)
    if rank == late:
        time.sleep(1.0)
    text = refusal(model, optimizer, mesh=node if rank == 0 else None)
    failures = [] if "[0, 1]" in text and "[0, 1, 2, 3]" in text else [f"rank {rank}: {text}"]
    if rank < 2:  # the set of ranks that was wrong is right for another model
        other = seeded(ParallelGPT)
        other, _ = zerostd.prepare(other, adamw(other), mesh=node, stage=2)
        zerostd.release(other)
    return failures + goes_on(model, optimizer, rank, 4)


@pytest.mark.parametrize("late", range(4))
def test_a_rank_with_a_mesh_of_fewer_ranks_is_refused_on_all(ranks: Any, late: int) -> None:
    agree(ranks(4, differs, late))


def in_turns(rank: int) -> list[str]:
    """What may look alike: models of overlapping sets of ranks, one after the other, in one order."""
    groups = {members: dist.new_group(members) for members in ((0, 1), (1, 2), (0, 1, 2), (0, 2))}
    for _ in range(2):
        for members, group in groups.items():
            if rank in members:
                time.sleep(0.2 * rank)
                model = seeded(ParallelGPT)
                model, optimizer = zerostd.prepare(model, adamw(model), mesh=group, stage=3, groups=["blocks.*"])
                loss(model, 0, rank).backward()
                optimizer.step()
                zerostd.release(model)
    return []


def test_overlapping_sets_of_ranks_may_prepare_one_after_the_other(ranks: Any) -> None:
    agree(ranks(3, in_turns))


def misses(rank: int) -> list[str]:
    """Rank 2, and then rank 0, do not prepare: each time the others name that one."""
    failures = []
    for absent in (2, 0, 2):
        if rank != absent:
            model = seeded(ParallelGPT)
            with environment(ZEROSTD_TIMEOUT_S="2"), pytest.raises(CommunicationError) as raised:
                zerostd.prepare(model, adamw(model), stage=3)
            if f": rank {absent} did not call it" not in str(raised.value):
                failures.append(f"rank {rank}, without rank {absent}: {raised.value}")
        dist.barrier()
    model = seeded(ParallelGPT)
    return failures + goes_on(model, adamw(model), rank, 3)


def test_ranks_that_do_not_come_are_named_each_time(ranks: Any) -> None:
    agree(ranks(3, misses))
