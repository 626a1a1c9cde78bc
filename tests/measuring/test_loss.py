"""A loss outside of the model: a batch that is shown goes through it, and the plan knows what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from zerostd import PrepareError
from zerostd.measuring import model as measuring
from zerostd.measuring.model import TimedPass, profile_model
from zerostd.planning import ModelProfile

BATCH = torch.randn(4, 8)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def test_the_batch_goes_through_the_loss_and_changes_nothing() -> None:
    model = make()
    before = [parameter.clone() for parameter in model.parameters()]
    seen: list[Any] = []

    def loss(output: Tensor) -> Tensor:
        seen.append(output.shape)
        return output.float().square().mean()

    profile = profile_model(model, batch=BATCH, probe=loss)
    assert seen and set(seen) == {torch.Size([4, 4])}
    assert profile.backward_s
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_the_loss_takes_is_needed_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside all that groups keep, by the first group. A CPU has no allocator to ask, so the pass is given."""
    plain = profile_model(make(), batch=BATCH)
    kept = sum(group.kept_bytes for group in plain.groups)
    for most in (0, 50_000):
        timed = TimedPass(0.1, 0.2, most, 0.0, {})
        monkeypatch.setattr(measuring, "_probe", lambda *_, timed=timed: timed)
        profile = profile_model(make(), batch=BATCH, probe=lambda output: output.sum())
        first, *others = profile.groups
        assert others == [replace(group) for group in plain.groups[1:]]
        assert first.peak_bytes == (plain.groups[0].peak_bytes if not most else most / 4 - kept)
        without = profile_model(make(), batch=BATCH, probe=True)
        assert without.groups == plain.groups


def test_a_plan_with_a_loss_is_one_for_prepare() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    plan = zerostd.plan(model, optimizer, batch=BATCH, loss=lambda output: output.square().mean())
    assert plan.predicted.step_s
    model, optimizer = zerostd.prepare(model, optimizer, plan=plan)  # type: ignore[assignment]
    model(BATCH).square().mean().backward()
    optimizer.step()
    zerostd.release(model)


@pytest.mark.parametrize("options", [{}, {"batch": ModelProfile("known", ())}, {"batch": BATCH, "machine": True}])
def test_a_loss_that_no_batch_goes_through_is_refused(options: dict[str, Any]) -> None:
    if options.get("machine"):
        options = {**options, "machine": zerostd.measure_machine()}
    with pytest.raises(PrepareError, match="loss= is measured on this machine with a batch: give batch= too"):
        zerostd.plan(make(), loss=lambda output: output.sum(), **options)


def test_a_loss_that_fails_is_named() -> None:
    with pytest.raises(PrepareError, match=r"with this batch and loss= failed \(ZeroDivisionError: .*returns a scalar"):
        zerostd.plan(make(), batch=BATCH, loss=lambda output: output.sum() / (1 // 0))


def test_a_model_without_values_has_no_loss() -> None:
    model = make().to("meta")
    with pytest.raises(PrepareError, match="Sequential or its batch has no values"):
        zerostd.plan(model, batch=BATCH.to("meta"), loss=lambda output: output.sum())
