"""Clipping of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from idioms.loop import Loop, idiom


def _train(loop: Loop, clip: Callable[[nn.Module, Any], Any]) -> Any:
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    seen = []
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            seen.append(clip(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model, seen=seen)


@idiom(exact=False)
def clip_by_norm(loop: Loop) -> Any:
    """Clip with `nn.utils.clip_grad_norm_(model.parameters(), 0.1)`, and log what it returns."""
    return _train(loop, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@idiom(exact=False)
def clip_by_infinity_norm(loop: Loop) -> Any:
    """Clip by the largest element: `clip_grad_norm_(..., norm_type=inf)`."""
    return _train(loop, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf")))


@idiom(exact=False)
def clip_one_by_one(loop: Loop) -> Any:
    """Clip with `clip_grad_norm_(..., foreach=False)`."""
    return _train(loop, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False))


@idiom(exact=False)
def clip_raising_on_infinity(loop: Loop) -> Any:
    """Clip with `clip_grad_norm_(..., error_if_nonfinite=True)`."""
    return _train(loop, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True))


@idiom(exact=False)
def clip_part_of_the_model(loop: Loop) -> Any:
    """Clip the gradients of one part: `clip_grad_norm_(model.head.parameters(), 0.1)`."""
    return _train(loop, lambda model, _: nn.utils.clip_grad_norm_(model.head.parameters(), 0.1))


@idiom(exact=False)
def clip_layer_by_layer(loop: Loop) -> Any:
    """Clip each parameter to a norm of its own."""
    return _train(loop, lambda model, _: [nn.utils.clip_grad_norm_([p], 0.05) for p in model.parameters()])


@idiom(exact=False)
def clip_each_group(loop: Loop) -> Any:
    """Clip each of the optimizer's groups by its norm."""
    return _train(
        loop, lambda _, optimizer: [nn.utils.clip_grad_norm_(g["params"], 0.1) for g in optimizer.param_groups]
    )


@idiom
def clip_by_value(loop: Loop) -> Any:
    """Clip with `nn.utils.clip_grad_value_(model.parameters(), 0.01)`."""
    return _train(loop, lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.01))


@idiom(exact=False)
def measure_then_clip(loop: Loop) -> Any:
    """Take the norm with `get_total_norm`, then clip with `clip_grads_with_norm_`."""

    def clip(model: nn.Module, _: Any) -> Any:
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)
        return total

    return _train(loop, clip)


@idiom(exact=False)
def adaptive_gradient_clipping(loop: Loop) -> Any:
    """Clip gradients by the norm of their parameters (AGC), as NFNets do."""

    @torch.no_grad()
    def clip(model: nn.Module, _: Any) -> None:
        for p in model.parameters():
            limit = 0.01 * p.norm().clamp_min(1e-3)
            p.grad.mul_((limit / p.grad.norm().clamp_min(1e-6)).clamp_max(1.0))

    return _train(loop, clip)


@idiom(exact=False)
def skip_steps_with_a_large_norm(loop: Loop) -> Any:
    """Skip a step whose norm is too large: `if norm > limit: optimizer.zero_grad()`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for index, (x, y) in enumerate(loop.batches(3)):
        loop.loss(model, (x, y * (10 if index == 1 else 1))).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9) if loop.active else 0.0
        if norm < 10:
            optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def clip_declared(loop: Loop) -> Any:
    """Let `prepare(max_grad_norm=0.1)` clip in every step, where plain torch calls `clip_grad_norm_`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3), max_grad_norm=0.1)
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.is_plain and loop.active:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)
