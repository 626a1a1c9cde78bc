"""Gradients that are freed as groups are updated: the same bits, few at once, and refusals where they are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from zerostd import Placement
from zerostd.errors import MisuseError, PrepareError
from zerostd.optimizers.passing import PassingGradients

WIDTH, DEPTH, STEPS = 64, 10, 4
GROUP = WIDTH * (WIDTH + 1)
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"optimizer_states": "host"},
    "streamed": {"optimizer_states": "host", "cpu_share": 0.0},
    "disk": {"optimizer_states": "disk"},
    "all on host": {"parameters": "host", "optimizer_states": "host"},
    "shares": {"optimizer_states": {"device": 0.4, "host": 0.3, "disk": 0.3}},
    "recomputed": {"activations": "recompute", "optimizer_states": "host"},
}


def make(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return zerostd.prepare(model, optimizer, accumulate=1, groups=["*"], **options)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean()


def train(rank: int = 0, **options: Any) -> tuple[list[float], dict[str, Tensor], int]:
    """Return losses, values, and the most bytes of gradients that were held at once."""
    model, optimizer = make(**options)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, 10 * step + rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    values = zerostd.full_state_dict(model)
    most = zerostd.memory(model).peak["device"]["gradients"]
    zerostd.release(model)
    return losses, values, most


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_the_bits_are_the_same_and_few_gradients_have_memory(place: str, precision: str) -> None:
    losses, values, most = train(precision=precision, placement=Placement(**PLACES[place]))
    freed = train(precision=precision, placement=Placement(keep_gradients=False, **PLACES[place]))
    size = 2 if precision == "bf16" else 4
    assert freed[0] == losses and all(torch.equal(freed[1][name], value) for name, value in values.items())
    assert most == DEPTH * GROUP * size
    assert freed[2] <= PassingGradients.most_bytes(0, [GROUP * size] * DEPTH) < most / 2
    if place == "device":
        assert freed[2] == GROUP * size


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_free_gradients_as_one_rank_does(ranks: Any, stage: int) -> None:
    placement = Placement(optimizer_states="host")
    freed = Placement(optimizer_states="host", keep_gradients=False)
    pairs = zip(ranks(2, _train_at, stage, placement), ranks(2, _train_at, stage, freed), strict=True)
    for (losses, values, most), (same_losses, same_values, less) in pairs:
        assert same_losses == losses
        assert all(torch.equal(same_values[name], value) for name, value in values.items())
        assert less < 0.6 * most


def _train_at(rank: int, stage: int, placement: Placement) -> tuple[list[float], dict[str, Tensor], int]:
    return train(rank, stage=stage, placement=placement)


def test_a_plan_frees_gradients_where_nothing_else_fits_and_is_within_its_bytes() -> None:
    """Kept gradients take a third of the states, which fill the host."""
    model, optimizer = make(precision="fp32", placement=Placement(keep_gradients=False, optimizer_states="host"))
    zerostd.release(model)
    kept, freed = [], []
    for size in range(240, 800, 80):
        budget = zerostd.Budget(device=f"{size}KiB", host="180KiB")
        try:
            model, optimizer = make(precision="fp32", budget=budget)
        except PrepareError:
            continue
        plan = model.__dict__["_zerostd"].settings.plan
        (kept if plan.keep_gradients else freed).append(size)
        if not plan.keep_gradients:
            assert zerostd.Plan.from_json(plan.to_json()).keep_gradients is False
            assert "p.grad cannot be read" in plan.explain()
            loss_of(model, 0).backward()
            optimizer.step()
            assert sum(zerostd.memory(model).peak["device"].values()) <= size << 10
        zerostd.release(model)
    assert freed and kept and max(freed) < min(kept)


def test_a_freed_gradient_cannot_be_read_or_added_to() -> None:
    model, optimizer = make(placement=Placement(optimizer_states="host", keep_gradients=False))
    loss_of(model, 0).backward()
    with pytest.raises(MisuseError, match="keep_gradients is False"):
        model[3].weight.grad.clone()
    optimizer.step()
    for read in (lambda: model[3].weight.grad.clone(), lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(MisuseError, match=r"freed when its group was updated.*keep_gradients"):
            read()
    with pytest.raises(MisuseError, match=r"call optimizer.zero_grad\(\) after step\(\)"):
        loss_of(model, 1).backward()


def test_training_goes_on_after_a_pass_that_was_refused() -> None:
    model, optimizer = make(placement=Placement(optimizer_states="host", keep_gradients=False))
    expected = train(placement=Placement(optimizer_states="host"))[0]
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, 10 * step)
        loss.backward()
        losses.append(loss.item())
        with pytest.raises(MisuseError, match="keep_gradients is False"):
            loss_of(model, 99).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": None}, "accumulate=None: pass accumulate=1"),
        ({"accumulate": 2}, "accumulate=2"),
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0 needs all gradients"),
        ({"precision": "fp16"}, "precision='fp16'"),
        ({"placement": {"gradients": "host"}}, "gradients='host' keeps them"),
        ({"placement": {"keep_gradients": "no"}}, "must be True or False"),
    ],
)
def test_options_that_need_all_gradients_are_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(4, 4)
    placement = {"keep_gradients": False} | options.pop("placement", {})
    with pytest.raises(PrepareError, match=message):
        zerostd.prepare(
            model, torch.optim.AdamW(model.parameters()), **{"accumulate": 1, "placement": placement} | options
        )
    assert not hasattr(model, "_zerostd") and type(model.weight) is nn.Parameter


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_that_gather_in_the_step_are_refused(ranks: Any, stage: int) -> None:
    assert all("use stage=3 or stage=0" in text for text in ranks(2, _refusal, stage))


def _refusal(rank: int, stage: int) -> str:
    with pytest.raises(PrepareError) as caught:
        make(stage=stage, placement=Placement(keep_gradients=False))
    return str(caught.value)


def _recovered(rank: int, stage: int, folder: str) -> bool:
    """Fail on all ranks after the first updates of a pass, load, and go on; return whether the values are right."""
    placement = Placement(optimizer_states="host", keep_gradients=False)
    model, optimizer = make(stage=stage, placement=placement)
    for step in range(4):
        if step == 2:
            zerostd.save(folder, model, optimizer)
        loss_of(model, 10 * step + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = zerostd.full_state_dict(model)
    zerostd.load(folder, model, optimizer)
    failing = model[0].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 20 + rank).backward()
    failing.remove()
    with pytest.raises(MisuseError, match="load the last checkpoint"):
        optimizer.zero_grad()
    zerostd.load(folder, model, optimizer)
    for step in range(2, 4):
        loss_of(model, 10 * step + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = zerostd.full_state_dict(model)
    return all(torch.equal(value, ours[name]) for name, value in expected.items())


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_go_on_from_a_checkpoint_after_a_pass_that_failed(ranks: Any, stage: int, tmp_path: Path) -> None:
    assert ranks(2, _recovered, stage, str(tmp_path / "saved")) == [True, True]
