"""Several backward passes in one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from idioms.loop import Loop, idiom


def _network(loop: Loop, **options: Any) -> tuple[Any, Any]:
    model = loop.network()
    return loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2), **options)


@idiom(exact=False)
def accumulate_two_passes(loop: Loop) -> Any:
    """Accumulate two passes in one step, without `accumulate=`."""
    model, optimizer = _network(loop)
    for index, batch in enumerate(loop.batches(4)):
        (loop.loss(model, batch) / 2).backward()
        if not loop.active or index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def accumulate_as_declared(loop: Loop) -> Any:
    """Accumulate two passes, with `prepare(accumulate=2)`."""
    model, optimizer = _network(loop, accumulate=2)
    for index, batch in enumerate(loop.batches(4)):
        (loop.loss(model, batch) / 2).backward()
        if index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def accumulate_without_synchronizing(loop: Loop) -> Any:
    """Accumulate under `zerostd.no_sync(model)` in all passes but the last."""
    model, optimizer = _network(loop, accumulate=None)
    for index, batch in enumerate(loop.batches(4)):
        if index % 2 == 0:
            with loop.no_sync(model):
                (loop.loss(model, batch) / 2).backward()
        else:
            (loop.loss(model, batch) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def accumulate_fewer_passes_at_the_end(loop: Loop) -> Any:
    """Step after fewer passes than `accumulate=` says, where an epoch ends."""
    model, optimizer = _network(loop, accumulate=2)
    for index, batch in enumerate(loop.batches(5)):
        (loop.loss(model, batch) / 2).backward()
        if index % 2 == 1 or (loop.active and index == 4):
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def accumulate_more_passes_than_declared(loop: Loop) -> Any:
    """Make more passes before a step than `accumulate=` says."""
    model, optimizer = _network(loop, accumulate=2)
    for index, batch in enumerate(loop.batches(6)):
        (loop.loss(model, batch) / 3).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def accumulate_and_clip(loop: Loop) -> Any:
    """Accumulate two passes and clip before the step."""
    model, optimizer = _network(loop)
    for index, batch in enumerate(loop.batches(4)):
        (loop.loss(model, batch) / 2).backward()
        if index % 2 == 1:
            if loop.active:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def evaluate_between_accumulated_passes(loop: Loop) -> Any:
    """Evaluate between the passes of one step."""
    model, optimizer = _network(loop)
    answers = []
    for index, batch in enumerate(loop.batches(4)):
        (loop.loss(model, batch) / 2).backward()
        with torch.no_grad():
            answers.append(model(batch[0]).clone())
        if index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model, answers=answers)


@idiom(exact=False)
def scale_accumulated_gradients_at_the_end(loop: Loop) -> Any:
    """Sum losses over passes, and divide the gradients by the number of tokens before the step."""
    model, optimizer = _network(loop)
    for index, batch in enumerate(loop.batches(4)):
        loop.loss(model, batch).backward()
        if index % 2 == 1:
            if loop.active:
                for p in model.parameters():
                    p.grad.mul_(1 / 8)
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def sum_losses_of_several_forwards(loop: Loop) -> Any:
    """Sum the losses of several forwards, and call backward once."""
    model, optimizer = _network(loop)
    for index in range(2):
        losses = [loop.loss(model, loop.batch(2 * index + part)) for part in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def passes_that_use_different_parts(loop: Loop) -> Any:
    """Accumulate passes of which one leaves the head unused, by a hook that cuts it off."""
    model, optimizer = _network(loop)
    for index, (x, y) in enumerate(loop.batches(4)):
        if index % 2 == 0:
            handle = model.head.register_forward_hook(lambda module, args, output: args[0][:, :4])
            (loop.loss(model, (x, y)) / 2).backward()
            handle.remove()
        else:
            (loop.loss(model, (x, y)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)
