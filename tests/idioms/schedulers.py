"""Learning-rate schedules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from idioms.loop import Loop, idiom


def _train(loop: Loop, make: Callable[[Any], Any], momentum: float | None = None) -> Any:
    model = loop.network()
    optimizer = loop.adamw(model, lr=0.03)
    if momentum is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    model, optimizer = loop.prepare(model, optimizer)
    schedule = make(optimizer) if loop.active else None
    rates = []
    for batch in loop.batches(4):
        loop.step(model, optimizer, batch)
        if schedule is not None:
            schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return loop.outcome(model, rates=rates)


@idiom
def step_decay(loop: Loop) -> Any:
    """Decay the learning rate with `StepLR`."""
    return _train(loop, lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.3))


@idiom
def cosine_decay(loop: Loop) -> Any:
    """Decay the learning rate with `CosineAnnealingLR`."""
    return _train(loop, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4))


@idiom
def cosine_with_restarts(loop: Loop) -> Any:
    """Restart the learning rate with `CosineAnnealingWarmRestarts`."""
    return _train(loop, lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2))


@idiom
def linear_warmup(loop: Loop) -> Any:
    """Warm up with `LambdaLR`, as transformers' schedules do."""
    return _train(loop, lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4))


@idiom
def warmup_then_decay(loop: Loop) -> Any:
    """Warm up and decay with `SequentialLR`."""

    def make(optimizer: Any) -> Any:
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])

    return _train(loop, make)


@idiom
def one_cycle_with_momentum(loop: Loop) -> Any:
    """Cycle learning rate and betas with `OneCycleLR(cycle_momentum=True)`."""
    return _train(loop, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5))


@idiom
def cyclic_with_momentum(loop: Loop) -> Any:
    """Cycle learning rate and momentum of SGD with `CyclicLR`."""
    return _train(loop, lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2), momentum=0.9)


@idiom
def reduce_on_plateau(loop: Loop) -> Any:
    """Reduce the learning rate with `ReduceLROnPlateau` when a metric stops falling."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.05))
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    for batch in loop.batches(4):
        loop.step(model, optimizer, batch)
        if loop.active:
            schedule.step(1.0)
    return loop.outcome(model)


@idiom
def schedule_made_before_prepare(loop: Loop) -> Any:
    """Make the schedule on the user's optimizer, before `prepare`."""
    model = loop.network()
    original = loop.adamw(model, lr=0.03)
    schedule = lr_scheduler.StepLR(original, 1, gamma=0.3)
    model, optimizer = loop.prepare(model, original)
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            schedule.step()
    return loop.outcome(model)


@idiom
def schedule_resumed(loop: Loop) -> Any:
    """Resume a schedule from its `state_dict`."""
    model, optimizer = loop.prepare(loop.network())
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=3.0)
    loop.train(model, optimizer, steps=1)
    schedule.step()
    kept = copy.deepcopy(schedule.state_dict())
    schedule.step()
    schedule.step()
    if loop.active:
        schedule.load_state_dict(kept)
        optimizer.param_groups[0]["lr"] = schedule.get_last_lr()[0]
    loop.train(model, optimizer, first=1)
    return loop.outcome(model)


@idiom
def schedule_stepped_before_the_optimizer(loop: Loop) -> Any:
    """Step the schedule between `backward` and `optimizer.step()`."""
    model, optimizer = loop.prepare(loop.network())
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=2.0)
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def weight_decay_schedule(loop: Loop) -> Any:
    """Schedule the weight decay by hand, as DINO does."""
    model, optimizer = loop.prepare(loop.network())
    for index, batch in enumerate(loop.batches(3)):
        if loop.active:
            optimizer.param_groups[0]["weight_decay"] = 10.0 * (index + 1)
        loop.step(model, optimizer, batch)
    return loop.outcome(model)
