"""Ranks with different numbers of batches: the mean is over those that have one, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerostd
from support.compare import worst_error
from support.parallel_gpt import ParallelGPT, loss, parallelize
from support.side_by_side import adamw, seeded
from zerostd import MisuseError

WIDTH = 12
LIMIT = 2e-6
FORMS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2, host": {"stage": 2, "placement": zerostd.Placement(optimizer_states="host")},
    "stage 3": {"stage": 3},
    "stage 3, clipped": {"stage": 3, "max_grad_norm": 0.05},
    "stage 3, early": {"stage": 3, "placement": zerostd.Placement(optimizer_states="host"), "accumulate": 1},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def batches_of(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def by_hand(counts: list[int], max_norm: float | None, passes: int) -> dict[str, Tensor]:
    """Train on one rank with the mean over the batches that ranks have in each pass."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    everyone = [batches_of(rank, count) for rank, count in enumerate(counts)]
    for number in range(max(counts)):
        present = [batches[number] for batches in everyone if number < len(batches)]
        for batch in present:
            (model(batch).square().mean() / len(present)).backward()
        if (number + 1) % passes == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def joined(rank: int, counts: list[int], options: dict[str, Any], passes: int) -> tuple[float, int]:
    """Train with join; returns the error against the mean by hand, and how many batches were seen."""
    model = network()
    model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), groups=["*"], **options)
    num_seen = 0
    for batch in zerostd.join(model, batches_of(rank, counts[rank])):
        model(batch).square().mean().backward()
        num_seen += 1
        if num_seen % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    found = zerostd.full_state_dict(model)
    zerostd.release(model)
    expected = by_hand(counts, options.get("max_grad_norm"), passes)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items()), num_seen


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS.keys())
def test_the_mean_is_over_ranks_that_have_a_batch(ranks, options):
    for error, num_seen in ranks(3, joined, [2, 5, 3], options, 1):
        assert error < LIMIT
        assert num_seen == 5


def joined_in_replicas(rank: int) -> list[float]:
    """Two replicas on two ranks each: the last batch is that of one rank of one replica."""
    mesh = init_device_mesh("cpu", (2, 2))
    secondary = {"placement": zerostd.Placement(secondary_shards=True)}
    forms = [{"stage": stage, "max_grad_norm": 0.05} for stage in (1, 2, 3)] + [{"stage": 3, **secondary}]
    return [joined(rank, [2, 5, 3, 1], {"mesh": mesh, **form}, 1)[0] for form in forms]


def test_replicas_join(ranks):
    for errors in ranks(4, joined_in_replicas):
        assert max(errors) < LIMIT, errors


def joined_in_splits(rank: int) -> list[float]:
    """A tensor-parallel model of which one pair of ranks has fewer batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    here = mesh.get_local_rank("dp")
    counts = [2, 4]
    whole = seeded(ParallelGPT)
    plain = adamw(whole)
    for step in range(max(counts)):
        torch.stack([loss(whole, step, dp) for dp in range(2) if step < counts[dp]]).mean().backward()
        plain.step()
        plain.zero_grad()
    errors = []
    for stage in (1, 3):
        model = parallelize(seeded(ParallelGPT), mesh["tp"])
        model, optimizer = zerostd.prepare(model, adamw(model), mesh=mesh["dp"], stage=stage, groups=["blocks.*"])
        for step in zerostd.join(model, list(range(counts[here]))):
            loss(model, step, here).backward()
            optimizer.step()
            optimizer.zero_grad()
        errors.append(worst_error(zerostd.full_state_dict(model), whole.state_dict()).error)
        zerostd.release(model)
    return errors


def test_splits_join(ranks):
    for errors in ranks(4, joined_in_splits):
        assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_ends_inside_a_step_keeps_what_it_brought(ranks, stage):
    for error, num_seen in ranks(2, joined, [3, 6], {"stage": stage}, 2):
        assert error < LIMIT
        assert num_seen == 6


def nan_at_the_end(rank: int) -> bool:
    """A rank whose last batch gives NaN goes on with it; no other may see that."""
    model = network()
    model, optimizer = zerostd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), stage=3)
    batches = batches_of(rank, 1 + 2 * rank)
    for number, batch in enumerate(zerostd.join(model, batches)):
        loss = model(batch).square().mean()
        (loss * float("nan") if rank == 0 and number > 0 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return all(bool(value.isfinite().all()) for value in zerostd.full_state_dict(model).values())


def test_what_an_absent_rank_computes_reaches_nobody(ranks):
    assert ranks(2, nan_at_the_end) == [True, True]


def without_a_batch(rank: int) -> str:
    model, _ = zerostd.prepare(network(), stage=3)
    with pytest.raises(MisuseError) as raised:
        next(iter(zerostd.join(model, batches_of(rank, rank))))
    dist.barrier()
    return str(raised.value)


def test_a_rank_without_any_batch_is_named_on_all(ranks):
    for text in ranks(2, without_a_batch):
        assert "rank 0 had none" in text


def test_alone_it_is_the_batches_themselves():
    model, _ = zerostd.prepare(network())
    assert list(zerostd.join(model, [1, 2, 3])) == [1, 2, 3]
