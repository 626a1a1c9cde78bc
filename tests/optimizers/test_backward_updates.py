"""Updates inside backward: when they begin, when speculation is committed, and what is refused in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from zerostd import Placement
from zerostd.errors import MisuseError
from zerostd.optimizers import optimizer as optimizer_module

HOST = Placement(optimizer_states="host", cpu_share=1.0)
SPECULATING = Placement(optimizer_states="host", cpu_share=1.0, speculate=True)
LARGE = 1e6  # a norm that no step here has


def prepared(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zerostd.prepare(model, optimizer, **{"placement": HOST, "accumulate": 1, "groups": ["0", "2"], **options})


def loss(model: nn.Module, size: float = 1.0) -> torch.Tensor:
    inputs = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
    return model(inputs).square().mean() * size


def step(model: Any, optimizer: Any, size: float = 1.0) -> None:
    loss(model, size).backward()
    optimizer.step()
    optimizer.zero_grad()


def begun(**options: Any) -> tuple[Any, Any]:
    """After the first step, which shows how many passes a step has: updates begin inside backward from then on."""
    model, optimizer = prepared(**options)
    step(model, optimizer)
    return model, optimizer


def master_of(optimizer: Any, group: str) -> torch.Tensor:
    """The second layer's is updated inside backward; that of the first, whose input has no gradient, at its end."""
    optimizer.synchronize()
    flats = [flat for flat in optimizer.updater.spans if flat.layout.intervals[0].name.startswith(group)]
    return torch.cat([shard.read_master().clone() for flat in flats for shard in flat.state_shards])


def test_states_change_inside_backward_and_step_adds_nothing():
    model, optimizer = begun()
    first, before = (master_of(optimizer, group) for group in ("0", "2"))
    loss(model).backward()
    updated = master_of(optimizer, "2")
    assert not torch.equal(before, updated)
    assert torch.equal(master_of(optimizer, "0"), first)
    optimizer.step()
    assert torch.equal(master_of(optimizer, "2"), updated)
    assert not torch.equal(master_of(optimizer, "0"), first)


def test_updates_wait_for_step_until_a_step_has_had_as_many_passes_as_was_said():
    model, optimizer = prepared()
    loss(model).backward()
    loss(model).backward()  # one more than accumulate=1 says
    optimizer.step()
    optimizer.zero_grad()
    loss(model).backward()
    assert not optimizer.backward_updates.has_begun
    optimizer.step()
    optimizer.zero_grad()
    last = loss(model)
    last.backward(retain_graph=True)
    assert optimizer.backward_updates.has_begun
    with pytest.raises(MisuseError, match=r"backward pass 2 since the last step, but prepare\(accumulate=1\)"):
        last.backward()
    with pytest.raises(MisuseError, match=r"a forward between backward and optimizer\.step"):
        loss(model)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": None},
        {"placement": None},
        {"max_grad_norm": 1.0},
        {"precision": "fp16"},
    ],
    ids=["the last pass is unknown", "states on the device", "clipping without speculation", "a loss scale"],
)
def test_updates_wait_for_step(options):
    _, optimizer = prepared(**options)
    assert optimizer.backward_updates is None


def test_updates_wait_for_step_when_debugging_serially(monkeypatch):
    monkeypatch.setattr(optimizer_module, "DEBUG", {"serial"})
    _, optimizer = prepared()
    assert optimizer.backward_updates is None


def test_an_option_changed_between_backward_and_step_is_refused():
    model, optimizer = begun()
    loss(model).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(MisuseError, match=r"param_groups\[0\]\['lr'\] was changed from 0.01 to 0.5"):
        optimizer.step()


def test_a_gradient_cannot_be_dropped_when_its_update_has_begun():
    model, optimizer = begun()
    loss(model).backward()
    with pytest.raises(MisuseError, match=r"p\.grad = None between backward and optimizer\.step"):
        model[2].weight.grad = None
    optimizer.step()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda _, optimizer: optimizer.zero_grad(), r"zero_grad\(\)"),
        (lambda _, optimizer: optimizer.clip_grad_norm_(1.0), r"clip_grad_norm_\(\)"),
        (lambda _, optimizer: optimizer.state_dict(), r"state_dict\(\)"),
        (lambda model, _: model[0].weight.grad.mul_(2.0), "a change of p.grad"),
    ],
    ids=["zero_grad", "clip", "state_dict", "p.grad"],
)
def test_what_would_read_or_change_half_an_update_is_refused_until_step(call, words):
    model, optimizer = begun()
    loss(model).backward()
    with pytest.raises(MisuseError, match=words + " between backward and optimizer.step"):
        call(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def test_a_second_backward_after_a_failed_one_is_refused():
    model, optimizer = begun()
    loss(model).backward()
    group = next(iter(optimizer.backward_updates._done))
    with pytest.raises(MisuseError, match=f"update of group '{group.name}' had begun inside it"):
        optimizer.backward_updates.start(group)


def test_speculation_begins_after_two_steps_that_did_not_clip_and_is_committed():
    model, optimizer = prepared(placement=SPECULATING, max_grad_norm=LARGE)
    counts = []
    for _ in range(4):
        step(model, optimizer)
        counts.append((optimizer.backward_updates.num_speculated, optimizer.backward_updates.num_committed))
    assert counts == [(0, 0), (0, 0), (1, 1), (2, 2)]


def test_a_clipped_step_discards_the_speculation_and_the_next_one_waits():
    model, optimizer = prepared(placement=SPECULATING, max_grad_norm=1.0)
    reference, plain = prepared(placement=None, accumulate=None, max_grad_norm=1.0)
    counts = []
    for size in (1e-3, 1e-3, 1e3, 1e-3):
        step(model, optimizer, size)
        step(reference, plain, size)
        counts.append((optimizer.backward_updates.num_speculated, optimizer.backward_updates.num_committed))
    assert counts == [(0, 0), (0, 0), (1, 0), (1, 0)]
    expected = zerostd.full_state_dict(reference)
    assert all(torch.equal(value, expected[name]) for name, value in zerostd.full_state_dict(model).items())


def test_an_uncommitted_speculation_leaves_masters_and_step_counts():
    model, optimizer = prepared(placement=SPECULATING, max_grad_norm=LARGE)
    step(model, optimizer)
    step(model, optimizer)
    before = master_of(optimizer, "2")
    loss(model).backward()
    assert torch.equal(master_of(optimizer, "2"), before)
    (group,) = optimizer.backward_updates._done
    (span,) = optimizer.updater.spans[group.trainable[0]]
    assert span.scalars["step"].item() == 2.0
    assert span.speculative_scalars["step"].item() == 3.0
    optimizer.step()
    assert not torch.equal(master_of(optimizer, "2"), before)
    assert {states["step"].item() for states in optimizer.state_dict()["state"].values()} == {3.0}


def test_a_loop_that_asks_for_the_norm_of_max_grad_norm_speculates_all_the_same():
    model, optimizer = prepared(placement=SPECULATING, max_grad_norm=1.0)
    reference, plain = prepared(placement=None, accumulate=None)
    for size in (1.0, 1.0, 1.0, 1.0, 100.0, 1.0):  # the fifth is clipped
        norms = []
        for trained, own, most in ((model, optimizer, 1.0), (reference, plain, 1.0)):
            loss(trained, size).backward()
            norms += [own.clip_grad_norm_(most) for _ in range(1 if own is plain else 2)]  # the second clips no more
            own.step()
            own.zero_grad()
        assert norms[0] == norms[1] == norms[2]
    assert optimizer.backward_updates.num_speculated == 3
    assert optimizer.backward_updates.num_committed == 2
    ours = zerostd.full_state_dict(model)
    assert all(torch.equal(ours[name], value) for name, value in zerostd.full_state_dict(reference).items())


def test_another_norm_than_max_grad_norm_is_refused():
    model, optimizer = prepared(placement=SPECULATING, max_grad_norm=1.0)
    loss(model).backward()
    for call in ((0.5,), (1.0, 1.0)):
        with pytest.raises(MisuseError, match=r"clip_grad_norm_\(.* prepared with max_grad_norm=1\.0"):
            optimizer.clip_grad_norm_(*call)


def test_the_norm_can_be_read_when_updates_have_begun():
    model, optimizer = begun()
    reference, plain = prepared(placement=None, accumulate=None)
    step(reference, plain)
    for trained in (model, reference):
        loss(trained).backward()
    assert optimizer.backward_updates.has_begun
    assert optimizer.clip_grad_norm_(float("inf")) == plain.clip_grad_norm_(float("inf"))
    optimizer.step()
