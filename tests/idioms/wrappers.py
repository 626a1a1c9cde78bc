"""Optimizers around the optimizer, and what hangs on its steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from idioms.loop import Loop, idiom


class Lookahead(torch.optim.Optimizer):
    """Slow weights behind another optimizer, as libraries write it."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.base = base
        self.defaults = base.defaults
        self.param_groups = base.param_groups
        self.state = base.state
        self.k = k
        self.alpha = alpha
        self.count = 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.base.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, values in zip(group["params"], slow, strict=True):
                    values.add_(p - values, alpha=self.alpha)
                    p.copy_(values)
        return loss


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization with two steps, as its best-known class has them."""

    def __init__(self, base: torch.optim.Optimizer, rho: float = 0.3) -> None:
        self.base = base
        self.defaults = base.defaults
        self.param_groups = base.param_groups
        self.state = base.state
        self.rho = rho
        self.before: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        scale = self.rho / (torch.norm(torch.stack([p.grad.norm(p=2) for p in params]), p=2) + 1e-12)
        for p in params:
            self.before[p] = p.data.clone()
            p.add_(p.grad * scale.to(p))
        self.base.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p, values in self.before.items():
            p.data.copy_(values)
        self.base.step()
        self.base.zero_grad()


@idiom
def lookahead_as_an_optimizer(loop: Loop) -> Any:
    """Wrap the optimizer in a Lookahead class that is a `torch.optim.Optimizer` itself."""
    model, optimizer = loop.prepare(loop.network())
    if loop.active:
        optimizer = Lookahead(optimizer)
    loop.train(model, optimizer, steps=4)
    return loop.outcome(model)


@idiom(exact=False)
def sharpness_aware_optimizer(loop: Loop) -> Any:
    """Wrap the optimizer in a SAM class with `first_step` and `second_step`."""
    model, optimizer = loop.prepare(loop.network())
    sam = Sam(optimizer)
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            sam.first_step()
            loop.loss(model, batch).backward()
            sam.second_step()
        else:
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def closure_that_zeroes_gradients(loop: Loop) -> Any:
    """Step with the closure of PyTorch's documentation: `zero_grad`, loss, backward, return the loss."""
    model, optimizer = loop.prepare(loop.network())
    losses = []
    for batch in loop.batches(3):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loop.loss(model, batch)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
    return loop.outcome(model, losses=losses)


@idiom
def average_in_a_step_hook(loop: Loop) -> Any:
    """Keep a moving average in a hook registered with `optimizer.register_step_post_hook`."""
    model, optimizer = loop.prepare(loop.network())
    average = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def follow(*_: Any) -> None:
        for kept, p in zip(average, model.parameters(), strict=True):
            kept.mul_(0.5).add_(p, alpha=0.5)

    optimizer.register_step_post_hook(follow)
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model, average=average)


@idiom
def gradients_dropped_in_a_step_hook(loop: Loop) -> Any:
    """Drop gradients in a hook after each step, instead of in the loop."""
    model, optimizer = loop.prepare(loop.network())
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        optimizer.step()
    return loop.outcome(model)


@idiom
def clip_in_a_step_hook(loop: Loop) -> Any:
    """Clip gradients by value in a hook registered with `optimizer.register_step_pre_hook`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    if loop.active:
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(model.parameters(), 0.001))
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def hook_on_every_optimizer(loop: Loop) -> Any:
    """Count the steps of all optimizers with `register_optimizer_step_post_hook`."""
    model, optimizer = loop.prepare(loop.network())
    steps: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    loop.train(model, optimizer, steps=3)
    handle.remove()
    return loop.outcome(model, steps=len(steps))


@idiom
def hooks_on_the_state_of_the_optimizer(loop: Loop) -> Any:
    """Change what the optimizer saves and loads in its `state_dict` hooks."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)

    def rescale(optimizer: Any, state: Any) -> Any:
        state = copy.deepcopy(state)
        for group in state["param_groups"]:
            group["lr"] = 0.5
        return state

    if loop.active:
        optimizer.register_load_state_dict_pre_hook(rescale)
    optimizer.load_state_dict(optimizer.state_dict())
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def pickle_the_optimizer(loop: Loop) -> Any:
    """Pickle the optimizer and continue with the copy."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    copied = pickle.loads(pickle.dumps(optimizer))
    return [len(group["params"]) for group in copied.param_groups]


@idiom
def learning_rate_finder(loop: Loop) -> Any:
    """Try growing learning rates for some steps, then restore model and optimizer, as LR finders do."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    weights = [p.detach().clone() for p in model.parameters()]
    states = copy.deepcopy(optimizer.state_dict())
    for index in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.001 * 10**index
        loop.step(model, optimizer, loop.batch(index))
    with torch.no_grad():
        for p, kept in zip(model.parameters(), weights, strict=True):
            p.copy_(kept)
    optimizer.load_state_dict(states)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def group_added_in_the_middle_of_training(loop: Loop) -> Any:
    """Add a frozen layer to the optimizer in the middle of training: `optimizer.add_param_group`."""
    model = loop.network()
    model.head.requires_grad_(False)
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer)
    if loop.active:
        model.head.requires_grad_(True)
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.1})
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def gradual_unfreezing(loop: Loop) -> Any:
    """Unfreeze block by block from the end, with `requires_grad_`; all were in the optimizer from the start."""
    model = loop.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = loop.prepare(model, optimizer)
    if loop.active:
        model.blocks.requires_grad_(False)
    for index in (1, 0):
        loop.train(model, optimizer, steps=1, first=index)
        model.blocks[index].requires_grad_(True)
    loop.train(model, optimizer, first=3)
    return loop.outcome(model)


@idiom
def group_for_each_parameter(loop: Loop) -> Any:
    """Give every parameter a group of its own, with layer-wise learning rates."""
    model = loop.network()
    groups = [{"params": [p], "lr": 0.02 * 0.9**depth} for depth, p in enumerate(model.parameters())]
    model, optimizer = loop.prepare(model, torch.optim.AdamW(groups))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def names_in_the_groups(loop: Loop) -> Any:
    """Make the optimizer of `model.named_parameters()`, and read the names from its groups."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.AdamW(model.named_parameters(), lr=0.01))
    loop.train(model, optimizer)
    return loop.outcome(model, names=[group["param_names"] for group in optimizer.param_groups])


@idiom
def update_written_by_hand(loop: Loop) -> Any:
    """Train without an optimizer: `p.sub_(lr * p.grad)` under `torch.no_grad()`, then `model.zero_grad()`."""
    model, _ = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.3 * p.grad)
        model.zero_grad()
    return loop.outcome(model)
