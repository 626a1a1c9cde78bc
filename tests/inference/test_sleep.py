"""`zerostd.sleep` and `zerostd.wake`: the device is empty in between, and everything goes on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zerostd
from inference.small import GROUPS, generate, make_empty, num_bytes, save_model

PLACEMENTS = {
    "device": {},
    "states on the host": {"optimizer_states": "host", "cpu_share": 0.5},
    "parameters on the host": {"parameters": "host", "optimizer_states": "host"},
    "gradients on the host": {"gradients": "host", "optimizer_states": {"device": 0.5, "host": 0.5}},
    "nothing on the device": {"parameters": "host", "gradients": "host", "optimizer_states": "host"},
}


def make(placement: dict[str, object]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    return zerostd.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        placement=zerostd.Placement(**placement),
        precision="bf16",
        groups=["0", "2", "4"],
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, *, between: bool = False) -> float:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(index))
    loss = model(x).square().mean()
    loss.backward()
    if between:
        zerostd.sleep(model)
        zerostd.wake(model)
    optimizer.step()
    if between:
        zerostd.sleep(model)
        zerostd.wake(model)
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_training_goes_on_bit_for_bit(placement: str) -> None:
    plain = make(PLACEMENTS[placement])
    tired = make(PLACEMENTS[placement])
    for index in range(4):
        assert step(*plain, index) == step(*tired, index, between=True)
        zerostd.sleep(tired[0])
        now = zerostd.memory(tired[0]).now
        assert not any(now["device"].values()), now
        zerostd.wake(tired[0])
        zerostd.sleep(tired[0])
        zerostd.wake(tired[0])
    ours = zerostd.full_state_dict(tired[0])
    assert all(torch.equal(value, ours[name]) for name, value in zerostd.full_state_dict(plain[0]).items())
    for name in ("exp_avg", "exp_avg_sq"):
        states = [optimizer.state[model[2].weight][name].clone() for model, optimizer in (plain, tired)]
        assert torch.equal(*states)


@pytest.mark.parametrize("between_passes", [False, True])
def test_a_model_that_was_saved_can_sleep(between_passes: bool, tmp_path: Path) -> None:
    """Memory that a checkpoint was written from can be given back."""
    model, optimizer = make({})
    step(model, optimizer, 0)
    if between_passes:
        model(torch.ones(16, 8)).square().mean().backward()
    zerostd.save(tmp_path / "saved", model, optimizer)
    before = zerostd.full_state_dict(model)
    zerostd.sleep(model)
    assert not any(zerostd.memory(model).now["device"].values())
    zerostd.wake(model)
    ours = zerostd.full_state_dict(model)
    assert all(torch.equal(value, ours[name]) for name, value in before.items())


def test_bytes_are_on_the_host_meanwhile() -> None:
    model, optimizer = make({})
    step(model, optimizer, 0)
    before = zerostd.memory(model).now
    zerostd.sleep(model)
    asleep = zerostd.memory(model).now
    for kind in ("parameters", "optimizer_states"):
        assert asleep["host"][kind] == before["device"][kind] > 0
    zerostd.wake(model)
    after = zerostd.memory(model).now
    assert after["device"] == {**before["device"], "gradients": 0}  # zero_grad() has dropped them
    assert not any(size for kind, size in after["host"].items() if kind != "buffers")


def test_sleeping_model_that_is_used_names_wake() -> None:
    model, optimizer = make({})
    loss = model(torch.ones(2, 8)).sum()
    zerostd.sleep(model)
    uses = [
        lambda: model(torch.ones(2, 8)),
        lambda: loss.backward(),
        lambda: optimizer.step(),
        lambda: optimizer.state_dict(),
        lambda: model[0].weight + 1,
        lambda: model[0].weight.data.clone(),
        lambda: model.state_dict(),
        lambda: zerostd.full_state_dict(model),
        lambda: zerostd.release(model),
        lambda: optimizer.state[model[0].weight]["exp_avg"],
    ]
    for use in uses:
        with pytest.raises(zerostd.MisuseError, match=r"sleeps.*zerostd.wake\(model\)"):
            use()
    with pytest.raises(zerostd.MisuseError, match="sleeps already"):
        zerostd.sleep(model)
    zerostd.wake(model)
    with pytest.raises(zerostd.MisuseError, match="does not sleep"):
        zerostd.wake(model)
    step(model, optimizer, 0)


def test_sleep_where_the_model_is_used_is_refused() -> None:
    model, _ = make({"parameters": "host"})
    errors: list[str] = []

    def try_to_sleep(*_: object) -> None:
        with pytest.raises(zerostd.MisuseError) as caught:
            zerostd.sleep(model)
        errors.append(str(caught.value))

    hook = model[2].register_forward_hook(try_to_sleep)
    loss = model(torch.ones(2, 8)).sum()
    hook.remove()
    model[2].weight.register_hook(try_to_sleep)
    loss.backward()
    with zerostd.gathered(model):
        try_to_sleep()
    assert ["inside a forward" in errors[0], "inside a backward" in errors[1], "gathered" in errors[2]] == [True] * 3


def test_dispatched_model_sleeps_too(tmp_path: Path) -> None:
    plain = save_model(tmp_path)
    model = zerostd.dispatch(make_empty(), tmp_path, budget=num_bytes(plain) // 2, groups=GROUPS)
    expected = generate(plain, 2)
    for _ in range(2):
        assert torch.equal(generate(model, 2), expected)
        zerostd.sleep(model)
        assert not any(zerostd.memory(model).now["device"].values())
        zerostd.wake(model)
