"""Averages of weights, and other models that follow the trained one."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import zerostd
from idioms.loop import Loop, idiom
from idioms.networks import Network


@idiom
def moving_average_by_hand(loop: Loop) -> Any:
    """Keep a moving average by hand, over a new call of `model.parameters()` each time."""
    model, optimizer = loop.prepare(loop.network())
    average = [p.detach().clone() for p in model.parameters()]
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        for a, p in zip(average, model.parameters(), strict=True):
            a.lerp_(p.detach(), 0.5)
    return loop.outcome(model, average=average)


@idiom
def moving_average_over_a_kept_list(loop: Loop) -> Any:
    """Keep a moving average by hand, over a list of parameters made before `prepare`."""
    model = loop.network()
    kept = list(model.parameters())
    average = [p.detach().clone() for p in kept]
    model, optimizer = loop.prepare(model)
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        for a, p in zip(average, kept, strict=True):
            a.mul_(0.5).add_(p.data, alpha=0.5)
    return loop.outcome(model, average=average)


@idiom
def moving_average_over_state_dict(loop: Loop) -> Any:
    """Keep a moving average over the values of `model.state_dict()`, as timm does."""
    model = loop.convolutional()
    average = copy.deepcopy(model)
    model, optimizer = loop.prepare(model)
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        for a, v in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            a.copy_(0.5 * a + 0.5 * v)
    return loop.outcome(model, average=average.state_dict())


@idiom
def averaged_model_made_before(loop: Loop) -> Any:
    """Make an `AveragedModel` before `prepare` and update it after each step."""
    model = loop.network()
    average = AveragedModel(model)
    model, optimizer = loop.prepare(model)
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        average.update_parameters(model)
    return loop.outcome(model, average=average.state_dict(), averaged=average(loop.batch(8)[0]))


@idiom
def averaged_model_made_after(loop: Loop) -> Any:
    """Make an `AveragedModel` of the prepared model and update it after each step."""
    model, optimizer = loop.prepare(loop.network())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        average.update_parameters(model)
    return loop.outcome(model, average=average.state_dict())


@idiom
def averaged_model_with_multi_avg_fn(loop: Loop) -> Any:
    """Update an `AveragedModel` made before `prepare` with `get_ema_multi_avg_fn`, in fused calls."""
    model = loop.network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    model, optimizer = loop.prepare(model)
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        average.update_parameters(model)
    return loop.outcome(model, average=average.state_dict())


@idiom
def stochastic_weight_averaging(loop: Loop) -> Any:
    """Stochastic weight averaging whole: `AveragedModel`, `SWALR` and `update_bn` at the end."""
    model = loop.convolutional()
    average = AveragedModel(model)
    model, optimizer = loop.prepare(model)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for batch in loop.batches(4):
        loop.step(model, optimizer, batch)
        average.update_parameters(model)
        schedule.step()
    update_bn((x for x, _ in loop.batches(2)), average)
    return loop.outcome(model, average=average.state_dict())


@idiom
def average_assigned_for_evaluation(loop: Loop) -> Any:
    """Evaluate with averaged weights put in place through `p.data = average`, then put back."""
    model, optimizer = loop.prepare(loop.network())
    start = loop.network()
    answers = []
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            kept = [p.data for p in model.parameters()]
            for p, a in zip(model.parameters(), start.parameters(), strict=True):
                p.data = a.detach() * 0.5
        with torch.no_grad():
            answers.append(model(batch[0]))
        if loop.active:
            for p, k in zip(model.parameters(), kept, strict=True):
                p.data = k
    return loop.outcome(model, answers=answers)


@idiom
def average_exchanged_for_evaluation(loop: Loop) -> Any:
    """Exchange weights with their average for an evaluation: `p.data, a.data = a.data, p.data`, and back."""
    model, optimizer = loop.prepare(loop.network())
    average = [0.5 * p.detach() for p in loop.network().parameters()]
    answers = []
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        for is_back in (False, True):
            if loop.active:
                for p, a in zip(model.parameters(), average, strict=True):
                    p.data, a.data = a.data, p.data
            if not is_back:
                with torch.no_grad():
                    answers.append(model(batch[0]).clone())
    return loop.outcome(model, answers=answers, average=average)


@idiom
def average_copied_in_for_evaluation(loop: Loop) -> Any:
    """Evaluate with averaged weights copied in by `p.data.copy_()` and restored, as diffusers' EMA does."""
    model, optimizer = loop.prepare(loop.network())
    start = loop.network()
    answers = []
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            kept = [p.detach().cpu().clone() for p in model.parameters()]
            for p, a in zip(model.parameters(), start.parameters(), strict=True):
                p.data.copy_(a.data * 0.5)
        with torch.no_grad():
            answers.append(model(batch[0]))
        if loop.active:
            for p, k in zip(model.parameters(), kept, strict=True):
                p.data.copy_(k.data)
    return loop.outcome(model, answers=answers)


@idiom
def average_loaded_for_evaluation(loop: Loop) -> Any:
    """Load other weights with `load_state_dict` for an evaluation, and load the trained ones again."""
    model, optimizer = loop.prepare(loop.network())
    other = {name: value * 0.5 for name, value in loop.network().state_dict().items()}
    answers = []
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(other)
        with torch.no_grad():
            answers.append(model(batch[0]))
        if loop.active:
            model.load_state_dict(kept)
    return loop.outcome(model, answers=answers)


@idiom
def lookahead(loop: Loop) -> Any:
    """Lookahead by hand: every second step, slow weights move half way to the fast ones, which restart there."""
    model = loop.network()
    slow = [p.detach().clone() for p in model.parameters()]
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.1))
    for index, batch in enumerate(loop.batches(4)):
        loop.step(model, optimizer, batch)
        if loop.active and index % 2 == 1:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    s.add_(p - s, alpha=0.5)
                    p.copy_(s)
    return loop.outcome(model)


@idiom
def target_network_soft_update(loop: Loop) -> Any:
    """Update a target network softly, as DDPG does; its outputs are the training targets."""
    model = loop.network()
    target = copy.deepcopy(model).requires_grad_(False)
    model, optimizer = loop.prepare(model)
    for x, y in loop.batches(3):
        F.mse_loss(model(x), y + target(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for t, p in zip(target.parameters(), model.parameters(), strict=True):
            t.data.copy_(0.5 * p.data + 0.5 * t.data)
    return loop.outcome(model, target=target.state_dict())


@idiom
def target_network_hard_update(loop: Loop) -> Any:
    """Update a target network by `target.load_state_dict(model.state_dict())`, as DQN does."""
    model = loop.network()
    target = copy.deepcopy(model)
    model, optimizer = loop.prepare(model)
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        target.load_state_dict(model.state_dict())
    return loop.outcome(model, target=target.state_dict())


@idiom
def teacher_copied_before(loop: Loop) -> Any:
    """Distil from a deep copy of the model that was made before `prepare`."""
    model = loop.network()
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    model, optimizer = loop.prepare(model)
    for x, y in loop.batches(3):
        (F.mse_loss(model(x), y) + F.mse_loss(model(x), teacher(x))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def teacher_copied_after(loop: Loop) -> Any:
    """Make a teacher of the prepared model with `copy.deepcopy(model)`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    teacher = copy.deepcopy(model).requires_grad_(False)
    for x, _ in loop.batches(2):
        F.mse_loss(model(x), 2 * teacher(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


class Bootstrap(nn.Module):
    """An online network and the frozen one that follows it, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Network()
        self.target = Network().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.online(x) - 0.5 * self.target(x)

    @torch.no_grad()
    def follow(self) -> None:
        for t, p in zip(self.target.parameters(), self.online.parameters(), strict=True):
            t.mul_(0.5).add_(p, alpha=0.5)


@idiom
def momentum_encoder_inside_the_model(loop: Loop) -> Any:
    """Update a frozen momentum encoder inside the model after each step, as MoCo and BYOL do."""
    model, optimizer = loop.prepare(loop.seeded(Bootstrap))
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            model.follow()
    return loop.outcome(model)


@idiom
def average_of_state_dicts(loop: Loop) -> Any:
    """Average the `state_dict` of two moments and load it, as model soups do."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer, steps=1)
    if loop.active:
        first = {name: value.clone() for name, value in model.state_dict().items()}
    loop.train(model, optimizer, steps=2, first=1)
    if loop.active:
        second = model.state_dict()
        model.load_state_dict({name: 0.8 * first[name] - 0.3 * second[name] for name in first})
    return loop.outcome(model)


@idiom
def average_called_functionally(loop: Loop) -> Any:
    """Evaluate averaged weights with `torch.func.functional_call(model, average, x)`."""
    model, optimizer = loop.prepare(loop.network())
    average = {name: 0.5 * p.detach().clone() for name, p in loop.network().named_parameters()}
    answers = []
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        with torch.no_grad():
            answers.append(torch.func.functional_call(model, average, (batch[0],)))
    return loop.outcome(model, answers=answers)


@idiom
def average_kept_by_zerostd(loop: Loop) -> Any:
    """Keep a moving average with `zerostd.averaged(model, 0.5)`, where plain torch has an `AveragedModel`."""
    model, optimizer = loop.prepare(loop.network())
    average = loop.averaged(model, 0.5)
    for batch in loop.batches(4):
        loop.step(model, optimizer, batch)
        if loop.is_plain:
            average.update_parameters(model)
    if loop.is_plain:
        return loop.outcome(model, average=average.module.state_dict())
    return loop.outcome(model, average=zerostd.full_state_dict(average))


@idiom
def evaluation_with_an_average_applied(loop: Loop) -> Any:
    """Evaluate in `with average.applied():` after each step; training continues with its own weights."""
    model, optimizer = loop.prepare(loop.network())
    average = loop.averaged(model, 0.5)
    answers = []
    for batch in loop.batches(4):
        loop.step(model, optimizer, batch)
        if loop.is_plain:
            average.update_parameters(model)
        with nullcontext() if loop.is_plain else average.applied(), torch.no_grad():
            answers.append((average.module if loop.is_plain else model)(loop.batch(9)[0]).clone())
    return loop.outcome(model, answers=answers)
