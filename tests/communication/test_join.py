"""Ranks with different numbers of batches: the mean is over those that have one, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerostd
from zerostd import MisuseError

WIDTH = 12
LIMIT = 2e-6
FORMS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
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
