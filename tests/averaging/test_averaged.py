"""`zerostd.averaged` is the average that a loop would keep of the masters by hand, wherever these and it are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from checkpoints.runs import PLACEMENTS
from idioms.networks import FEATURES, Convolutional, Network, adapted
from zerostd import Budget, MisuseError, Placement, PrepareError

DECAY = 0.9
GROUPS = ["blocks.*"]
Values = dict[str, Tensor]


def prepared(folder: str | Path, build: Callable[[], nn.Module] = Network, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(11)
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    budget = options.pop("budget", None) or Budget(disk_path=str(folder))
    return zerostd.prepare(model, optimizer, groups=GROUPS, budget=budget, **{"placement": Placement()} | options)


def step(model: nn.Module, optimizer: Any, index: int) -> None:
    x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(index))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_hand(average: Values | None, values: Values, weight: float) -> Values:
    """What `lerp` makes of masters, the first ones as they are."""
    if average is None:
        return {name: value.clone() for name, value in values.items()}
    return {name: average[name].lerp(values[name], weight) for name in values}


def unequal(ours: Values, theirs: Values) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


# -- the same bits as by hand --


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_average_has_the_bits_of_one_kept_by_hand(placement: str, precision: str, tmp_path: Path) -> None:
    """In every tier, whatever tier the masters are in."""
    model, optimizer = prepared(tmp_path, placement=PLACEMENTS[placement], precision=precision)
    averages = [zerostd.averaged(model, DECAY, tier=tier) for tier in (None, "device", "host", "disk")]
    hand: Values | None = None
    for index in range(3):
        step(model, optimizer, index)
        hand = by_hand(hand, zerostd.full_state_dict(model), 1 - DECAY)
    for average in averages:
        assert hand is not None and not unequal(zerostd.full_state_dict(average), hand)
    zerostd.release(model)


@pytest.mark.parametrize("options", [{"accumulate": 1}, {"accumulate": 1, "max_grad_norm": 1e3}, {"stage": 0}])
def test_average_follows_updates_that_begin_inside_backward(options: dict[str, Any], tmp_path: Path) -> None:
    placement = Placement(optimizer_states="host", speculate="max_grad_norm" in options)
    model, optimizer = prepared(tmp_path, placement=placement, **options)
    average = zerostd.averaged(model, DECAY)
    hand: Values | None = None
    for index in range(6):
        step(model, optimizer, index)
        hand = by_hand(hand, zerostd.full_state_dict(model), 1 - DECAY)
    assert hand is not None and not unequal(zerostd.full_state_dict(average), hand)


def test_average_does_not_wait_for_whoever_looks(tmp_path: Path) -> None:
    """Nothing but the average and the update itself keeps the two in order."""
    hands = []
    for looks in (True, False):
        model, optimizer = prepared(tmp_path, placement=PLACEMENTS["all tiers"])
        average = zerostd.averaged(model, DECAY)
        for index in range(5):
            step(model, optimizer, index)
            if looks:
                optimizer.synchronize()
        hands.append(zerostd.full_state_dict(average))
    assert not unequal(*hands)


def test_equal_weights_late_start_and_every_other_step(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    average = zerostd.averaged(model, None, start=2, every=2)
    kept = []
    for index in range(8):
        step(model, optimizer, index)
        if index in (3, 5, 7):
            kept.append(zerostd.full_state_dict(model))
    assert (average.num_steps, average.num_averaged) == (8, 3)
    ours = zerostd.full_state_dict(average)
    for name, value in ours.items():
        torch.testing.assert_close(value, torch.stack([values[name] for values in kept]).mean(0), rtol=1e-6, atol=1e-7)


def test_decay_is_asked_for_each_step(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    asked = []

    def warm(number: int) -> float:
        asked.append(number)
        return min(DECAY, number / (number + 2))

    average = zerostd.averaged(model, warm, start=1)
    hand: Values | None = None
    for index in range(5):
        step(model, optimizer, index)
        if index >= 1:
            hand = by_hand(hand, zerostd.full_state_dict(model), 1 - min(DECAY, (index + 1) / (index + 3)))
    assert asked == [3, 4, 5]  # the first one that is averaged is taken as it is
    assert hand is not None and not unequal(zerostd.full_state_dict(average), hand)


def test_average_is_the_model_until_its_first_step(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    average = zerostd.averaged(model, DECAY, start=2)
    step(model, optimizer, 0)
    assert not unequal(zerostd.full_state_dict(average), zerostd.full_state_dict(model))


# -- two ranks --


def train_on_ranks(rank: int, folder: str, stage: int, placement: str, precision: str) -> tuple[Values, Values, bool]:
    model, optimizer = prepared(folder, stage=stage, placement=PLACEMENTS[placement], precision=precision)
    average = zerostd.averaged(model, DECAY)
    hand: Values | None = None
    for index in range(4):
        step(model, optimizer, 10 * index + rank)
        hand = by_hand(hand, zerostd.full_state_dict(model), 1 - DECAY)
    before = zerostd.full_state_dict(model)
    answers = []
    for _ in range(2):
        with average.applied(), torch.no_grad():
            answers.append(model(torch.ones(2, FEATURES)))
        with torch.no_grad():
            model(torch.ones(2, FEATURES))
    ours = zerostd.full_state_dict(average)
    same = torch.equal(*answers) and not unequal(before, zerostd.full_state_dict(model))
    step(model, optimizer, 99)
    assert hand is not None
    zerostd.release(model)
    return ours, hand, same


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("placement", "precision"), [("device", "fp32"), ("all tiers", "bf16")])
def test_ranks_average_their_shards(ranks: Any, stage: int, placement: str, precision: str, tmp_path: Path) -> None:
    results = ranks(2, train_on_ranks, str(tmp_path), stage, placement, precision)
    for ours, hand, same in results:
        assert same
        for name in hand:
            torch.testing.assert_close(ours[name], hand[name], rtol=1e-6, atol=1e-7)
    assert not unequal(results[0][0], results[1][0])


def test_average_sends_nothing(ranks: Any, tmp_path: Path) -> None:
    plain, averaged = (ranks(2, bytes_sent, str(tmp_path), has_average)[0] for has_average in (False, True))
    assert plain == averaged


def bytes_sent(rank: int, folder: str, has_average: bool) -> dict[str, int]:
    model, optimizer = prepared(folder, stage=3)
    if has_average:
        zerostd.averaged(model, DECAY)
    for index in range(3):
        step(model, optimizer, index)
    return zerostd.memory(model).sent


# -- applied --


@pytest.mark.parametrize("placement", ["device", "host", "parameters on host", "different shares"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_and_masters_have_their_bits_again(placement: str, precision: str, tmp_path: Path) -> None:
    """Training goes on as if nobody had evaluated."""
    runs = []
    for evaluates in (False, True):
        model, optimizer = prepared(tmp_path, placement=PLACEMENTS[placement], precision=precision)
        average = zerostd.averaged(model, DECAY)
        for index in range(4):
            step(model, optimizer, index)
            if evaluates:
                with average.applied(), torch.no_grad():
                    model.eval()(torch.ones(2, FEATURES))
                model.train()
        runs.append({**zerostd.full_state_dict(model), "a": zerostd.full_state_dict(average)["stem.weight"]})
        zerostd.release(model)
    assert not unequal(*runs)


def test_model_answers_with_averages_inside(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, placement=PLACEMENTS["parameters on host"])
    average = zerostd.averaged(model, DECAY)
    for index in range(3):
        step(model, optimizer, index)
    other = Network()
    other.load_state_dict(zerostd.full_state_dict(average))
    x = torch.ones(2, FEATURES)
    with average.applied() as same, torch.inference_mode():
        assert same is model
        assert torch.equal(model(x), other(x))
        assert torch.equal(model.head.weight.cpu(), other.head.weight)
    assert not torch.equal(model(x), other(x))


def test_frozen_parameters_are_not_held(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, adapted, placement=PLACEMENTS["host"])
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    average = zerostd.averaged(model, DECAY, tier="device")
    held = zerostd.memory(model).now["device"]["averages"]
    assert 4 * trained <= held < 4 * trained + 3 * 4 * 64  # each of three groups is padded
    step(model, optimizer, 0)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    before = zerostd.full_state_dict(model)
    ours = zerostd.full_state_dict(average)
    assert frozen and all(torch.equal(before[name], ours[name]) for name in frozen)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_buffers_are_averaged_if_asked_for(use_buffers: bool, tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, Convolutional)
    average = zerostd.averaged(model, DECAY, use_buffers=use_buffers)
    hand: Values | None = None
    for index in range(4):
        step(model, optimizer, index)
        state = zerostd.full_state_dict(model)
        floats = {name: value for name, value in state.items() if "running" in name}
        hand = by_hand(hand, floats, 1 - DECAY)
    ours = zerostd.full_state_dict(average)
    assert hand is not None
    assert bool(unequal({name: ours[name] for name in hand}, hand)) is not use_buffers
    assert ours["blocks.0.1.num_batches_tracked"] == 4
    with average.applied(), torch.no_grad():
        model.train()(torch.ones(8, FEATURES))  # as `update_bn` does
    assert not unequal(zerostd.full_state_dict(model), state)


def test_edit_after_a_step_does_not_reach_the_average_of_that_step(tmp_path: Path) -> None:
    """Where the master is the parameter itself and its average is taken in a thread, a write waits for that."""
    values = []
    for edits in (False, True):
        model, optimizer = prepared(tmp_path, placement=PLACEMENTS["parameters on host"])
        average = zerostd.averaged(model, DECAY)
        gate = threading.Event()
        average._worker.submit(lambda gate=gate: gate.wait() and None)
        step(model, optimizer, 0)
        threading.Timer(0.2, gate.set).start()
        if edits:
            model.head.weight.data.zero_()
        gate.wait()
        values.append(zerostd.full_state_dict(average))
    assert not unequal(*values)


# -- checkpoints --


def resume(rank: int, folder: str, placement: str, saves: bool, loads: bool) -> tuple[Values, Values, dict[str, int]]:
    model, optimizer = prepared(folder, Convolutional, placement=PLACEMENTS[placement], precision="bf16")
    average = zerostd.averaged(model, DECAY, start=1, use_buffers=True)
    first = 0
    saving = None
    if loads:
        step(model, optimizer, 50)  # all of it must go
        zerostd.load(f"{folder}/saved", model, optimizer)
        first = 3
    for index in range(first, 6):
        step(model, optimizer, index)
        if saves and index == 2:
            saving = zerostd.save(f"{folder}/saved", model, optimizer, wait=False)
    if saving is not None:
        saving.wait()
    values = (zerostd.full_state_dict(average), zerostd.full_state_dict(model), average.counts())
    zerostd.release(model)
    return values


@pytest.mark.parametrize("placement", ["device", "host", "disk", "parameters on host"])
def test_average_goes_on_from_a_checkpoint_bit_by_bit(placement: str, tmp_path: Path) -> None:
    whole = resume(0, str(tmp_path), placement, True, False)
    loaded = resume(0, str(tmp_path), placement, False, True)
    assert not unequal(whole[0], loaded[0]) and not unequal(whole[1], loaded[1])
    assert whole[2] == loaded[2] == {"num_steps": 6, "num_averaged": 5}


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 2), (2, 1), (1, 2)])
def test_average_goes_on_on_other_ranks(ranks: Any, saved_by: int, loaded_by: int, tmp_path: Path) -> None:
    whole = ranks(saved_by, resume, str(tmp_path), "host", True, False)[0]
    loaded = ranks(loaded_by, resume, str(tmp_path), "disk", False, True)[0]
    assert whole[2] == loaded[2]
    for name, value in whole[0].items():
        torch.testing.assert_close(loaded[0][name], value, rtol=0 if saved_by == loaded_by else 2e-2, atol=1e-3)


def test_checkpoints_and_models_must_agree_on_averages(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    zerostd.save(tmp_path / "without", model, optimizer)
    average = zerostd.averaged(model, DECAY)
    with pytest.raises(zerostd.CheckpointError, match="average 0 is not in the checkpoint: make it after loading"):
        zerostd.load(tmp_path / "without", model, optimizer)
    step(model, optimizer, 0)
    zerostd.save(tmp_path / "with", model, optimizer)
    average.close()
    with pytest.raises(zerostd.CheckpointError, match=r"it has 1 average\(s\): make them with zerostd.averaged"):
        zerostd.load(tmp_path / "with", model, optimizer)
    zerostd.load(tmp_path / "with", model)  # to look at it, not to train


# -- refusals --


def test_training_inside_applied_is_refused(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    average = zerostd.averaged(model, DECAY)
    step(model, optimizer, 0)
    before = zerostd.full_state_dict(model)
    loss = model(torch.ones(2, FEATURES)).sum()
    with average.applied():
        with pytest.raises(MisuseError, match=r"training inside average.applied\(\): .* leave the context to train"):
            model(torch.ones(2, FEATURES))
        with pytest.raises(MisuseError, match="training inside"):
            loss.backward()
        with pytest.raises(MisuseError, match=r"optimizer.step\(\) inside .*: leave the context"):
            optimizer.step()
        with pytest.raises(MisuseError, match=r"zerostd.save\(\) inside average.applied\(\)"):
            zerostd.save(tmp_path / "inside", model, optimizer)
        with pytest.raises(MisuseError, match="leave it first"), average.applied():
            pass
        with pytest.raises(MisuseError, match="make them outside"), zerostd.gathered(model, write=True):
            pass
        with pytest.raises(MisuseError, match="leave the context first"):
            average.close()
    assert not unequal(zerostd.full_state_dict(model), before)
    optimizer.zero_grad()
    step(model, optimizer, 1)


@pytest.mark.parametrize("placement", ["device", "parameters on host"])
def test_change_of_parameters_inside_applied_is_refused(placement: str, tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, placement=PLACEMENTS[placement], precision="bf16")
    average = zerostd.averaged(model, DECAY)
    step(model, optimizer, 0)
    before = zerostd.full_state_dict(model)
    with pytest.raises(MisuseError, match="make them outside"), average.applied(), torch.no_grad():
        model.head.weight.zero_()
    assert not unequal(zerostd.full_state_dict(model), before)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"decay": 1.0}, r"decay=1.0\) must be from 0"),
        ({"start": -1}, r"start=-1\) must be a whole number"),
        ({"every": 0}, r"every=0\) must be a whole number"),
        ({"tier": "nvme"}, "did you mean 'disk'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    model, _ = prepared(tmp_path)
    with pytest.raises(PrepareError, match=text):
        zerostd.averaged(model, **options)


@pytest.mark.parametrize(("tier", "budget"), [("device", 15_000), ("host", 40_000), ("disk", 40_000)])
def test_average_that_passes_a_budget_is_refused(tier: str, budget: int, tmp_path: Path) -> None:
    limits = Budget(**{tier: budget}, disk_path=str(tmp_path))
    model, optimizer = prepared(tmp_path, placement=Placement(optimizer_states=tier), budget=limits)
    step(model, optimizer, 0)
    before = zerostd.memory(model).now
    with pytest.raises(PrepareError, match=rf"(?s){tier}.*[Bb]udget"):
        for _ in range(3):
            zerostd.averaged(model, DECAY, tier=tier)
    assert sum(zerostd.memory(model).now[tier].values()) <= budget
    assert zerostd.memory(model).now[tier]["optimizer_states"] == before[tier]["optimizer_states"]
    step(model, optimizer, 1)


def other_options(rank: int, folder: str) -> str:
    model, _ = prepared(folder)
    try:
        zerostd.averaged(model, 0.9 if rank else 0.99)
    except PrepareError as error:
        return str(error)
    return ""


def test_ranks_with_other_options_are_refused(ranks: Any, tmp_path: Path) -> None:
    assert all("different options of zerostd.averaged" in text for text in ranks(2, other_options, str(tmp_path)))


def test_closed_average_holds_nothing(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, Convolutional)
    before = zerostd.memory(model).now
    average = zerostd.averaged(model, DECAY, tier="disk", use_buffers=True)
    step(model, optimizer, 0)
    average.close()
    average.close()
    now = zerostd.memory(model).now
    assert not now["device"]["averages"] and not now["disk"]["averages"] and not now["host"]["buffers"]
    assert now["device"]["parameters"] == before["device"]["parameters"]
    with pytest.raises(MisuseError, match=r"after average.close\(\)"), average.applied():
        pass
    step(model, optimizer, 1)


def test_average_after_release_is_refused(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    average = zerostd.averaged(model, DECAY)
    step(model, optimizer, 0)
    zerostd.release(model)
    with pytest.raises(MisuseError, match=r"needs the module that zerostd.prepare was called on"), average.applied():
        pass
