"""What a user may call on a prepared model and its optimizer: as torch does it, or refused with the remedy.

A fact is a function of the rank and the stage that asserts; `check` runs it on every rank for the stages it names.
`make test` takes the last of these stages, and of the others one, in turn; `make test-all` all of them.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerostd
from support.agreement import agree
from support.compare import assert_bitwise, assert_close_states
from support.processes import doing
from support.side_by_side import LIMIT, adamw, data, seeded, sgd, world_size
from zerostd import MisuseError, PrepareError
from zerostd.scheduling import gathering

STAGES = (0, 1, 2, 3)
Fact = Callable[[int, int], None]
FACTS: dict[str, tuple[Fact, tuple[int, ...], tuple[int, ...]]] = {}  # name: fact, stages, world sizes


def fact(stages: tuple[int, ...] = STAGES, worlds: tuple[int, ...] = (2,)) -> Callable[[Fact], Fact]:
    def keep(function: Fact) -> Fact:
        FACTS[function.__name__] = (function, stages, worlds)
        return function

    return keep


def some_stages(name: str) -> tuple[int, ...]:
    """Of a fact: the last one, and of the others one, in turn."""
    stages = FACTS[name][1]
    return tuple(sorted({stages[list(FACTS).index(name) % max(1, len(stages) - 1)], stages[-1]}))


def check(rank: int, name: str, is_rest: bool) -> list[str]:
    function, stages, _ = FACTS[name]
    failures = []
    for stage in stages:
        if (stage in some_stages(name)) == is_rest:
            continue
        doing(f"{name}, stage {stage}")
        try:
            function(rank, stage)
        except Exception as error:
            failures.append(f"stage {stage}, rank {rank}: {type(error).__name__}: {error}")
    return failures


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.outlet = nn.Linear(24, 4)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x).tanh()
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.outlet(x) * self.scale


GROUPS = ["layers.*", "outlet"]


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    return (model(data(6, 8, number=number, rank=rank)) - data(6, 4, number=number + 500, rank=rank)).square().mean()


def prepared(stage: int, *, make: Any = Net, rules: Any = adamw, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    model = seeded(make, seed)
    return zerostd.prepare(model, rules(model), **{"stage": stage, "groups": GROUPS, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
    for number in numbers:
        loss_of(model, number, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> dict[str, Tensor]:
    """Plain torch on the data of all ranks."""
    for number in numbers:
        for rank in range(world_size()):
            (loss_of(model, number, rank) / world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def plain(rules: Any = adamw, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(Net, seed)
    return model, rules(model)


def clones(state: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


# -- copies, casts, state_dict --


@fact()
def copies_are_refused(rank: int, stage: int) -> None:
    model, optimizer = prepared(stage)
    for attempt in (
        partial(copy.deepcopy, model),
        partial(copy.copy, model),
        partial(copy.deepcopy, model.layers[0]),
        partial(pickle.dumps, model),
        partial(torch.save, model, io.BytesIO()),
        partial(copy.deepcopy, optimizer),
        partial(pickle.dumps, optimizer),
    ):
        with pytest.raises(MisuseError, match=r"full_state_dict|state_dict\(\)"):
            attempt()
    zerostd.release(model)
    copy.deepcopy(model)


@fact()
def casts_that_change_nothing_are_fine_and_others_refused(rank: int, stage: int) -> None:
    model, _ = prepared(stage)
    before = zerostd.full_state_dict(model)
    for attempt in (partial(model.to, "cpu"), partial(model.to, torch.float32), model.float, model.cpu):
        assert attempt() is model
    for attempt in (partial(model.to, torch.float64), model.half, model.bfloat16, model.double, model.layers[0].half):
        with pytest.raises(MisuseError, match=r"precision="):
            attempt()
    with pytest.raises(MisuseError, match=r"before zerostd\.prepare"):
        model.to("meta")
    with pytest.raises(MisuseError, match=r"new memory for torch\.float32 on cpu"):
        model.to_empty(device="cpu")
    assert_bitwise(zerostd.full_state_dict(model), before)
    zerostd.release(model)


@fact()
def memory_formats_and_sharing_are_refused(rank: int, stage: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)))
    model, _ = zerostd.prepare(model, sgd(model), stage=stage, groups=["0", "1"])
    for attempt in (partial(model.to, memory_format=torch.channels_last), model.share_memory):
        with pytest.raises(MisuseError, match=r"before zerostd\.prepare"):
            attempt()
    zerostd.release(model)


def test_channels_last_trains_as_in_torch_and_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    """Parameters become contiguous, and convolutions follow their inputs."""
    results = []
    for is_prepared in (False, True):
        model: nn.Module = seeded(lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8)))
        model = model.to(memory_format=torch.channels_last)
        optimizer: Any = sgd(model)
        if is_prepared:
            model, optimizer = zerostd.prepare(model, optimizer, placement=zerostd.Placement())
        for step in range(2):
            x = data(3, 4 * 9 * 9, number=step).view(3, 4, 9, 9).to(memory_format=torch.channels_last)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(
            {
                name: value.clone()
                for name, value in (zerostd.full_state_dict(model) if is_prepared else model.state_dict()).items()
            }
        )
    assert_bitwise(results[1], results[0])
    assert "1 of 4 parameters, such as '0.weight', are not contiguous" in caplog.text


@fact()
def state_dict_is_right_or_refused(rank: int, stage: int) -> None:
    model, optimizer = prepared(stage)
    reference = train_plain(*plain(), range(2))
    train(model, optimizer, rank, range(2))
    if stage == 3:
        for module in (model, model.layers[0], model.inlet):
            with pytest.raises(MisuseError, match="full_state_dict"):
                module.state_dict()
    else:
        assert_close_states(model.state_dict(), reference, LIMIT)
        train(model, optimizer, rank, range(2, 3))
        child = clones(model.layers[1].state_dict())  # right after a step, while parameters are on their way
        assert_bitwise(
            {f"layers.1.{k}": v for k, v in child.items()},
            {k: v for k, v in zerostd.full_state_dict(model).items() if k.startswith("layers.1.")},
        )
    assert set(zerostd.full_state_dict(model)) == set(reference)
    only = zerostd.full_state_dict(model, rank=1)
    assert set(only) == (set(reference) if rank == 1 else set())
    zerostd.release(model)


@fact()
def loaded_state_trains_as_in_plain_torch(rank: int, stage: int) -> None:
    other = clones(seeded(Net, 9).state_dict())
    reference, rules = plain()
    reference.load_state_dict(other)
    expected = train_plain(reference, rules, range(3))
    model, optimizer = prepared(stage)
    train(model, optimizer, rank, range(5, 6))  # parameters are on their way when the state comes
    model.load_state_dict(other)
    assert_bitwise(zerostd.full_state_dict(model), other, "what was loaded after a step")
    zerostd.release(model)
    model, optimizer = prepared(stage)
    model.load_state_dict(other)
    train(model, optimizer, rank, range(3))
    assert_close_states(zerostd.full_state_dict(model), expected, LIMIT)
    before = zerostd.full_state_dict(model)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**before, "inlet.weight": torch.zeros(3, 3)})
    assert_bitwise(zerostd.full_state_dict(model), before, "after a refused load")
    with pytest.raises(MisuseError, match="assign"):
        model.load_state_dict(other, assign=True)
    model.layers[0].load_state_dict({"weight": other["layers.0.weight"], "bias": other["layers.0.bias"]})
    mixed = {**before, "layers.0.weight": other["layers.0.weight"], "layers.0.bias": other["layers.0.bias"]}
    assert_bitwise(zerostd.full_state_dict(model), mixed, "after a child's load")
    zerostd.release(model)


@fact()
def loaded_state_reaches_the_masters(rank: int, stage: int) -> None:
    """In bf16 and fp16 the masters are exact, not rounded; those not loaded keep their bits."""
    other = clones(seeded(Net, 9).state_dict())
    for precision in ("bf16", "fp16"):
        model, optimizer = prepared(stage, precision=precision)
        train(model, optimizer, rank, range(1))
        before = zerostd.full_state_dict(model)
        model.load_state_dict({"inlet.weight": other["inlet.weight"]}, strict=False)
        assert_bitwise(zerostd.full_state_dict(model), {**before, "inlet.weight": other["inlet.weight"]}, precision)
        model.load_state_dict(other)
        assert_bitwise(zerostd.full_state_dict(model), other, precision)
        trained, rules = prepared(stage, precision=precision, seed=9)
        zerostd.release(model)
        model, optimizer = prepared(stage, precision=precision)
        model.load_state_dict(other)
        train(model, optimizer, rank, range(2))
        train(trained, rules, rank, range(2))
        assert_bitwise(zerostd.full_state_dict(model), zerostd.full_state_dict(trained), f"{precision}, trained on")
        zerostd.release(model)
        zerostd.release(trained)


# -- gradients --


@fact()
def dropped_gradients_are_gone(rank: int, stage: int) -> None:
    """model.zero_grad(), and None put into every p.grad, drop a pass that no step has used."""
    expected = train_plain(*plain(), range(2))
    for drop in (
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    ):
        model, optimizer = prepared(stage)
        for number in range(2):
            loss_of(model, 50 + number, rank).backward()
            drop(model, optimizer)
            loss_of(model, number, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close_states(zerostd.full_state_dict(model), expected, LIMIT)
        zerostd.release(model)


@fact()
def one_gradient_set_to_none_leaves_its_parameter_alone(rank: int, stage: int) -> None:
    reference, rules = plain()
    for who in range(2):
        (loss_of(reference, 0, who) / 2).backward()
    reference.layers[0].weight.grad = None
    rules.step()
    model, optimizer = prepared(stage)
    loss_of(model, 0, rank).backward()
    model.layers[0].weight.grad = None
    optimizer.step()
    assert_close_states(zerostd.full_state_dict(model), reference.state_dict(), LIMIT)
    zerostd.release(model)


@fact()
def gradients_written_by_the_user_are_never_ignored(rank: int, stage: int) -> None:
    """What is done to p.grad counts: a step gives what it gives where the gradient itself was changed so."""
    for write in (
        lambda p: setattr(p, "grad", torch.ones_like(p)),
        lambda p: p.grad.add_(torch.ones_like(p)),
        lambda p: p.grad.copy_(torch.ones_like(p)),
        lambda p: p.grad.clamp_(-0.1, 0.1),
        lambda p: p.grad.div_(2.0),
        lambda p: p.grad.data.zero_(),
        lambda p: p.grad[1:].mul_(3.0),
    ):
        model, optimizer = prepared(stage, rules=sgd)
        loss_of(model, 0, rank).backward()
        before = zerostd.full_state_dict(model)["inlet.bias"]
        wanted = nn.Parameter(before.clone())
        wanted.grad = model.inlet.bias.grad.clone()
        write(wanted)
        write(model.inlet.bias)
        torch.testing.assert_close(model.inlet.bias.grad.clone(), wanted.grad)
        optimizer.step()
        (group,) = (group for group in optimizer.param_groups if any(p is model.inlet.bias for p in group["params"]))
        plain = torch.optim.SGD([wanted], lr=group["lr"], momentum=group["momentum"])
        plain.param_groups[0].update({**group, "params": [wanted]})
        plain.step()
        after = zerostd.full_state_dict(model)["inlet.bias"]
        torch.testing.assert_close(after, wanted.detach(), rtol=1e-5, atol=1e-7)
        zerostd.release(model)


def clip_as_ddp(rank: int, stage: int, clip: Callable[[list[nn.Parameter]], Tensor], **options: Any) -> None:
    reference = seeded(Net)
    ddp, rules = DistributedDataParallel(reference), sgd(reference)
    model, optimizer = prepared(stage, rules=sgd, **options)
    for number in range(3):
        loss_of(ddp, number, rank).backward()
        loss_of(model, number, rank).backward()
        mine, theirs = clip(list(model.parameters())), clip(list(reference.parameters()))
        torch.testing.assert_close(mine.float(), theirs, rtol=LIMIT, atol=0.0)
        for step in (rules, optimizer):
            step.step()
            step.zero_grad()
    assert_close_states(zerostd.full_state_dict(model), reference.state_dict(), LIMIT)
    zerostd.release(model)


@fact()
def torch_clips_norms_exactly(rank: int, stage: int) -> None:
    for foreach in (None, False):
        for order in (2.0, 1.0, float("inf")):
            clip_as_ddp(rank, stage, partial(nn.utils.clip_grad_norm_, max_norm=0.4, norm_type=order, foreach=foreach))


@fact()
def torch_clips_norms_with_foreach_or_says_no(rank: int, stage: int) -> None:
    model, _ = prepared(stage, rules=sgd)
    loss_of(model, 0, rank).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    wanted = [p.grad * (0.4 / (norm + 1e-6)).clamp(max=1.0) for p in model.parameters()]
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 0.4, foreach=True)
    except RuntimeError as error:
        assert "foreach" in str(error)
    else:
        for p, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad.clone(), gradient)
    zerostd.release(model)


@fact()
def torch_clips_a_part_and_then_all(rank: int, stage: int) -> None:
    """Norms of an earlier step must not be remembered."""

    turns = iter([-2, -2, -2, -2, 0, 0])  # the model's and the reference's, step by step

    def clip(parameters: list[nn.Parameter]) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters[next(turns) :], 0.3)

    clip_as_ddp(rank, stage, clip)


@fact()
def norms_looked_at_between_passes_are_not_remembered(rank: int, stage: int) -> None:
    reference, _ = plain()
    model, _ = prepared(stage)
    for number in range(2):
        for who in range(2):
            (loss_of(reference, number, who) / 2).backward()
        loss_of(model, number, rank).backward()
        if number == 0:
            torch.testing.assert_close(model.inlet.bias.grad.norm(), reference.inlet.bias.grad.norm())
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.norm(), theirs.grad.norm(), rtol=LIMIT, atol=0.0)
    zerostd.release(model)


@fact()
def torch_clips_where_ranks_use_different_parameters(rank: int, stage: int) -> None:
    """A parameter that only the other rank used has a gradient here too, and it counts."""

    def loss(model: nn.Module, number: int, who: int) -> Tensor:
        x = data(6, 8, number=number, rank=who)
        return (model.inlet(x).tanh().sum() if who else model.second(x).square().sum()) / 10

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inlet, self.second = nn.Linear(8, 24), nn.Linear(8, 24)

        def forward(self, number: int, who: int) -> Tensor:
            return loss(self, number, who)

    reference = seeded(Either)
    rules = sgd(reference)
    model = seeded(Either)
    model, optimizer = zerostd.prepare(model, sgd(model), stage=stage)
    for number in range(3):
        for who in range(2):
            (reference(number, who) / 2).backward()
        model(number, rank).backward()
        theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.4)
        mine = nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        rules.step()
        optimizer.step()
        rules.zero_grad()
        optimizer.zero_grad()
        torch.testing.assert_close(mine, theirs, rtol=LIMIT, atol=0.0)
    assert_close_states(zerostd.full_state_dict(model), reference.state_dict(), LIMIT)
    zerostd.release(model)


@fact()
def torch_clips_what_fp16_has_scaled(rank: int, stage: int) -> None:
    """The loss scale is zerostd's own business: a norm that the user sees is that of the true gradients."""
    norms = []
    for clip in (
        lambda model, optimizer: optimizer.clip_grad_norm_(0.4),
        lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.4),
    ):
        model, optimizer = prepared(stage, rules=sgd, precision="fp16")
        optimizer.loss_scale.value = 1024.0
        loss_of(model, 0, rank).backward()
        norms.append(clip(model, optimizer).float())
        optimizer.step()
        norms.append(zerostd.full_state_dict(model)["inlet.weight"])
        zerostd.release(model)
    torch.testing.assert_close(norms[2], norms[0], rtol=1e-3, atol=0.0)
    torch.testing.assert_close(norms[3], norms[1], rtol=1e-4, atol=1e-5)


@fact()
def torch_clips_values(rank: int, stage: int) -> None:
    for foreach in (None, False):
        model, _ = prepared(stage)
        loss_of(model, 0, rank).backward()
        wanted = [p.grad.clamp(-1e-3, 1e-3) for p in model.parameters()]
        nn.utils.clip_grad_value_(model.parameters(), 1e-3, foreach=foreach)
        for p, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad.clone(), gradient)
        zerostd.release(model)


# -- loss scale --


@fact()
def a_gradscaler_on_fp32_works(rank: int, stage: int) -> None:
    expected = train_plain(*plain(), range(4))
    model, optimizer = prepared(stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for number in range(4):
        scaler.scale(loss_of(model, number, rank)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if number == 1:  # a step that overflows on one rank is skipped on both
            before = zerostd.full_state_dict(model)
            loss = loss_of(model, 60, rank) * (float("inf") if rank else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 512.0
            assert_bitwise(zerostd.full_state_dict(model), before, "after a skipped step")
    assert_close_states(zerostd.full_state_dict(model), expected, LIMIT)
    zerostd.release(model)


@fact()
def a_gradscaler_on_fp16_is_refused(rank: int, stage: int) -> None:
    model, optimizer = prepared(stage, precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, 0, rank)).backward()
    with pytest.raises((MisuseError, ValueError), match=r"fp16|FP16"):
        scaler.step(optimizer)
    zerostd.release(model)


@fact()
def an_overflow_on_one_rank_skips_the_step_on_all(rank: int, stage: int) -> None:
    for set_to_none in (True, False):
        model, optimizer = prepared(stage, precision="fp16", rules=sgd)
        optimizer.loss_scale.value = 256.0
        before = zerostd.full_state_dict(model)
        (loss_of(model, 0, rank) * (1e30 if rank else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert_bitwise(zerostd.full_state_dict(model), before, "after an overflow")
        assert (optimizer.loss_scale.value, optimizer.loss_scale.num_skipped) == (128.0, 1)
        loss_of(model, 1, rank).backward()
        optimizer.step()
        assert optimizer.loss_scale.num_skipped == 1, f"set_to_none={set_to_none}: the overflow stays for ever"
        assert not torch.equal(zerostd.full_state_dict(model)["inlet.weight"], before["inlet.weight"])
        zerostd.release(model)


@fact(stages=(3,))
def fp16_outputs_may_be_changed_in_place(rank: int, stage: int) -> None:
    model, _ = prepared(stage, precision="fp16")
    y = model(data(6, 8, rank=rank))
    y *= 2.0
    y.square().mean().backward()
    zerostd.release(model)


# -- the optimizer --


@fact(worlds=(1, 2))
def optimizer_state_comes_back_bitwise(rank: int, stage: int) -> None:
    for precision in ("fp32", "bf16", "fp16"):
        model, optimizer = prepared(stage, precision=precision)
        train(model, optimizer, rank, range(2))
        saved = zerostd.full_state_dict(model), copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, rank, range(2, 4))
        expected = zerostd.full_state_dict(model)
        zerostd.release(model)
        stream = io.BytesIO()
        torch.save(saved, stream)
        stream.seek(0)
        weights, states = torch.load(stream)
        model, optimizer = prepared(stage, precision=precision, seed=4)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        train(model, optimizer, rank, range(2, 4))
        assert_bitwise(zerostd.full_state_dict(model), expected, precision)
        zerostd.release(model)


@fact()
def optimizer_state_of_another_rank_is_refused(rank: int, stage: int) -> None:
    model, optimizer = prepared(stage)
    train(model, optimizer, rank, range(1))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, optimizer.state_dict())
    with pytest.raises(MisuseError, match="rank"):
        optimizer.load_state_dict(everyone[1 - rank])
    zerostd.release(model)


@fact(worlds=(1,))
def state_of_a_world_of_one_is_torchs(rank: int, stage: int) -> None:
    model, optimizer = prepared(stage)
    train(model, optimizer, rank, range(2))
    reference, rules = plain()
    reference.load_state_dict(zerostd.full_state_dict(model))
    rules.load_state_dict(optimizer.state_dict())
    train(model, optimizer, rank, range(2, 4))
    assert_close_states(zerostd.full_state_dict(model), train_plain(reference, rules, range(2, 4)), 1e-6)
    zerostd.release(model)


@fact(worlds=(1, 2))
def an_optimizer_with_states_goes_on(rank: int, stage: int) -> None:
    for rules in (adamw, sgd):
        expected = train_plain(*plain(rules), range(5))
        model, optimizer = plain(rules)
        train_plain(model, optimizer, range(2))
        model, optimizer = zerostd.prepare(model, optimizer, stage=stage, groups=GROUPS)
        train(model, optimizer, rank, range(2, 5))
        assert_close_states(zerostd.full_state_dict(model), expected, LIMIT)
        zerostd.release(model)


@fact()
def schedulers_and_edits_reach_the_update(rank: int, stage: int) -> None:
    def run(model: Any, optimizer: Any, scheduler: Any, everyone: list[int]) -> None:
        for number in range(4):
            for who in everyone:
                (loss_of(model, number, who) / len(everyone)).backward()
            if number == 2:
                optimizer.param_groups[1]["lr"] = 0.02
                optimizer.param_groups[0]["weight_decay"] = 0.5
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    make = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    reference, rules = plain()
    run(reference, rules, make(rules), [0, 1])
    for early in (True, False):
        model, optimizer = plain()
        scheduler = make(optimizer) if early else None
        model, optimizer = zerostd.prepare(model, optimizer, stage=stage, groups=GROUPS)
        run(model, optimizer, scheduler or make(optimizer), [rank])
        assert_close_states(zerostd.full_state_dict(model), reference.state_dict(), LIMIT)
        zerostd.release(model)


@fact()
def closures_are_called_once_and_param_groups_are_closed(rank: int, stage: int) -> None:
    expected = train_plain(*plain(), range(1))
    model, optimizer = prepared(stage)
    assert isinstance(optimizer, torch.optim.Optimizer)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0, rank)
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0] and len(calls) == 1
    assert_close_states(zerostd.full_state_dict(model), expected, LIMIT)
    with pytest.raises(MisuseError, match=r"before zerostd\.prepare"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    zerostd.release(model)


class Counting(torch.optim.Optimizer):
    """A user's own, which keeps something on itself."""

    def __init__(self, params: Any, pace: float) -> None:
        super().__init__(params, {"lr": 1.0})
        self.pace = pace

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-self.pace * group["lr"])


@fact(stages=(0, 3))
def a_users_optimizer_may_have_attributes(rank: int, stage: int) -> None:
    model, optimizer = prepared(stage, rules=lambda model: Counting(model.parameters(), 0.01))
    before = zerostd.full_state_dict(model)
    train(model, optimizer, rank, range(1))
    moved = (zerostd.full_state_dict(model)["inlet.weight"] - before["inlet.weight"]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-3, atol=0.0)
    zerostd.release(model)


@fact(stages=(3,), worlds=(1, 2))
def an_optimizer_made_afterwards_works(rank: int, stage: int) -> None:
    for rules in (adamw, sgd):
        expected = train_plain(*plain(rules), range(4))
        model = zerostd.apply_to_device(seeded(Net), "cpu")
        optimizer = rules(model)
        train(model, optimizer, rank, range(3))
        calls = []

        def closure(model: Any = model, calls: Any = calls) -> Tensor:
            loss = loss_of(model, 3, rank)
            loss.backward()
            calls.append(loss)
            return loss

        assert optimizer.step(closure) is calls[0] and len(calls) == 1
        assert_close_states(zerostd.full_state_dict(model), expected, LIMIT)
        zerostd.release(model)


@fact(stages=(3,), worlds=(1, 2))
def an_optimizer_made_afterwards_has_its_state_dict(rank: int, stage: int) -> None:
    """As torch's, though its states lie in shards."""
    model = zerostd.apply_to_device(seeded(Net), "cpu")
    optimizer = adamw(model)
    train(model, optimizer, rank, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, rank, range(2, 4))
    expected = zerostd.full_state_dict(model)
    zerostd.release(model)
    model = zerostd.apply_to_device(seeded(Net), "cpu")
    optimizer = adamw(model)
    train(model, optimizer, rank, range(2))
    optimizer.load_state_dict(saved)
    train(model, optimizer, rank, range(2, 4))
    assert_bitwise(zerostd.full_state_dict(model), expected)
    zerostd.release(model)


# -- undoing, editing, building --


def anatomy(model: nn.Module) -> dict[str, Any]:
    """What hangs on the modules and parameters, values left out."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            is_hooks = isinstance(value, dict) and not key.startswith(("_parameters", "_buffers", "_modules"))
            found[f"{name}/{key}"] = (
                type(value),
                dict(value) if is_hooks else list(value) if isinstance(value, dict) else 0,
            )
    for name, p in model.named_parameters():
        hooks = [bool(p._backward_hooks), bool(p._post_accumulate_grad_hooks)]
        found[name] = (
            type(p),
            p.shape,
            p.stride(),
            p.dtype,
            p.requires_grad,
            p.is_leaf,
            p.grad,
            dict(p.__dict__),
            hooks,
        )
    return found


@fact(worlds=(1, 2))
def release_leaves_an_ordinary_module(rank: int, stage: int) -> None:
    for precision in ("fp32", "bf16"):
        model, optimizer = prepared(stage, precision=precision)
        train(model, optimizer, rank, range(2))
        loss_of(model, 3, rank).backward()
        expected = zerostd.full_state_dict(model)
        mine = list(model.parameters())
        assert zerostd.release(model) is model
        assert_bitwise(model.state_dict(), expected, precision)
        assert all(a is b for a, b in zip(mine, model.parameters(), strict=True))
        assert anatomy(model) == anatomy(seeded(Net))
        twin = copy.deepcopy(model)
        states = [train_plain(m, adamw(m), range(2)) for m in (model, twin)]
        assert_bitwise(states[0], states[1], "after release")
        with pytest.raises(MisuseError, match="prepare"):
            zerostd.release(model)
        zerostd.release(zerostd.prepare(model, adamw(model), stage=stage)[0])


@fact(worlds=(1, 2))
def the_optimizer_of_a_released_model_takes_no_step(rank: int, stage: int) -> None:
    model, optimizer = prepared(stage, rules=sgd)
    train(model, optimizer, rank, range(1))
    zerostd.release(model)
    before = clones(model.state_dict())
    loss_of(model, 1, 0).backward()
    with pytest.raises(MisuseError, match="released"):
        optimizer.step()
    assert_bitwise(model.state_dict(), before)


@fact(worlds=(1, 2))
def edits_under_gathered_are_kept(rank: int, stage: int) -> None:
    for precision in ("fp32", "bf16"):
        model, optimizer = prepared(stage, precision=precision)
        train(model, optimizer, rank, range(2))
        before = zerostd.full_state_dict(model)
        with zerostd.gathered(model) as inside:
            shown = clones(dict(inside.named_parameters()))
            assert not any(t.isnan().any() for t in shown.values())
        assert all(torch.equal(before[name].to(t.dtype), t) for name, t in shown.items())
        with zerostd.gathered(model.layers[0], write=True), torch.no_grad():
            model.layers[0].weight[3].fill_(0.25 if rank == 0 else 99.0)  # rank 0's word counts
        edited = {**before, "layers.0.weight": before["layers.0.weight"].clone()}
        edited["layers.0.weight"][3] = 0.25
        assert_bitwise(zerostd.full_state_dict(model), edited, precision)
        train(model, optimizer, rank, range(2, 3))
        assert not any(t.isnan().any() for t in zerostd.full_state_dict(model).values())
        zerostd.release(model)


@fact(worlds=(1, 2))
def a_forward_under_gathered_takes_nothing_away(rank: int, stage: int) -> None:
    model, _ = prepared(stage)
    before = zerostd.full_state_dict(model)
    with zerostd.gathered(model, write=True), torch.no_grad():
        model.inlet.bias.fill_(0.5)
        model(data(6, 8))
        assert not model.outlet.weight.isnan().any(), "a forward released parameters inside the context"
        assert torch.equal(model.inlet.bias, torch.full((24,), 0.5))
    assert_bitwise(zerostd.full_state_dict(model), {**before, "inlet.bias": torch.full((24,), 0.5)})
    zerostd.release(model)


def empty_states(rank: int, steps: int) -> dict[str, Tensor]:
    torch.manual_seed(11)
    with zerostd.empty_init():
        model = Net()
    model, optimizer = zerostd.prepare(model, adamw(model), stage=3, groups=GROUPS)
    for number in range(steps):
        loss_of(model, number, 0).backward()  # the same data on all ranks: the same training for any number of them
        optimizer.step()
        optimizer.zero_grad()
    state = zerostd.full_state_dict(model)
    zerostd.release(model)
    return state


def test_models_built_without_memory_are_the_same_on_any_number_of_ranks(ranks):
    alone, both = ranks(1, empty_states, 0)[0], ranks(2, empty_states, 0)
    assert_bitwise(both[0], alone)
    assert_bitwise(both[1], alone)
    assert alone["inlet.weight"].std() > 0.1
    assert_close_states(ranks(2, empty_states, 3)[1], ranks(1, empty_states, 3)[0], LIMIT)


@fact()
def prefetching_changes_no_bit(rank: int, stage: int) -> None:
    states, number = [], gathering.NUM_NEIGHBOURS
    try:
        for gathering.NUM_NEIGHBOURS in (1, 3, 5):
            model, optimizer = prepared(stage, precision="bf16")
            train(model, optimizer, rank, range(4))
            states.append(zerostd.full_state_dict(model))
            zerostd.release(model)
    finally:
        gathering.NUM_NEIGHBOURS = number
    assert_bitwise(states[1], states[0], "3 neighbours")
    assert_bitwise(states[2], states[0], "5 neighbours")


@pytest.mark.parametrize("name", FACTS)
def test_on_ranks(ranks, name):
    for size in FACTS[name][2]:
        agree(ranks(size, check, name, False, timeout=90))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in FACTS if some_stages(name) != FACTS[name][1]])
def test_on_ranks_at_the_other_stages(ranks, name):
    for size in FACTS[name][2]:
        agree(ranks(size, check, name, True, timeout=90))


def test_refusals_are_errors_of_the_family():
    assert issubclass(PrepareError, ValueError) and issubclass(MisuseError, RuntimeError)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_scheduler_of_the_optimizer_that_was_given_does_not_warn() -> None:
    model = nn.Linear(4, 4)
    inner = torch.optim.AdamW(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    _, optimizer = zerostd.prepare(model, inner, placement=zerostd.Placement(optimizer_states="host"))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gain


@pytest.mark.parametrize("placement", [zerostd.Placement(), zerostd.Placement(optimizer_states="host")])
@pytest.mark.parametrize("make", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.AdamW])
def test_states_of_a_parameter_that_is_one_number_come_back(make: Any, placement: Any, tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = Gain()
    other = copy.deepcopy(model)
    _, optimizer = zerostd.prepare(model, make(model.parameters()), placement=placement)
    train(model, optimizer, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    zerostd.save(tmp_path / "saved", model, optimizer)
    train(model, optimizer, 1)
    zerostd.load(tmp_path / "saved", model, optimizer)
    train(model, optimizer, 2)
    train(other, make(other.parameters()), 4)
    state = zerostd.full_state_dict(model)
    assert all(torch.allclose(state[name], value, atol=1e-6) for name, value in other.state_dict().items())


def test_gathered_parameters_that_became_arrays_of_numpy_keep_their_memory() -> None:
    model = nn.Linear(4, 4)
    _, optimizer = zerostd.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), placement=zerostd.Placement(parameters="host")
    )
    with zerostd.gathered(model):
        array = model.weight.detach().numpy()
        wanted = array.copy()
    assert (array == wanted).all()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert torch.allclose(zerostd.full_state_dict(model)["weight"], torch.from_numpy(wanted) - 0.2)
