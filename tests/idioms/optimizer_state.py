"""The state of the optimizer, read and written by the loop."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch

from idioms.loop import Loop, idiom


@idiom
def read_state_by_parameter(loop: Loop) -> Any:
    """Read `optimizer.state[p]["exp_avg"]` after a step."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    return [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]


@idiom
def read_effective_step_sizes(loop: Loop) -> Any:
    """Log the size of `exp_avg / exp_avg_sq.sqrt()` of each parameter."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    states = [optimizer.state[p] for p in model.parameters()]
    return [(s["exp_avg"] / (s["exp_avg_sq"].sqrt() + 1e-8)).abs().mean() for s in states]


@idiom
def count_states(loop: Loop) -> Any:
    """Count the parameters that have a state: `len(optimizer.state)`."""
    model, optimizer = loop.prepare(loop.network())
    before = len(optimizer.state)
    loop.train(model, optimizer)
    return [before, len(optimizer.state)]


@idiom
def zero_momentum_by_parameter(loop: Loop) -> Any:
    """Zero the momentum of each parameter in place: `optimizer.state[p]["exp_avg"].zero_()`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    loop.train(model, optimizer)
    if loop.active:
        for p in model.parameters():
            optimizer.state[p]["exp_avg"].zero_()
    loop.train(model, optimizer, first=5)
    return loop.outcome(model)


@idiom
def zero_momentum_of_all_states(loop: Loop) -> Any:
    """Zero the momentum in a loop over `optimizer.state.values()`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    loop.train(model, optimizer)
    if loop.active:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
    loop.train(model, optimizer, first=5)
    return loop.outcome(model)


@idiom
def replace_a_state_tensor(loop: Loop) -> Any:
    """Replace a tensor of a state: `optimizer.state[p]["exp_avg"] = values`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    loop.train(model, optimizer)
    if loop.active:
        for p in model.parameters():
            optimizer.state[p]["exp_avg"] = torch.zeros_like(p)
    loop.train(model, optimizer, first=5)
    return loop.outcome(model)


@idiom
def reset_the_step_counter(loop: Loop) -> Any:
    """Reset the step counter of every state, so that bias correction begins again."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    loop.train(model, optimizer, steps=4)
    if loop.active:
        for p in model.parameters():
            optimizer.state[p]["step"] = torch.tensor(0.0)
    loop.train(model, optimizer, first=5)
    return loop.outcome(model)


@idiom
def clear_all_states(loop: Loop) -> Any:
    """Drop all states: `optimizer.state.clear()`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    loop.train(model, optimizer)
    if loop.active:
        optimizer.state.clear()
    loop.train(model, optimizer, first=5)
    return loop.outcome(model)


@idiom
def replace_all_states(loop: Loop) -> Any:
    """Drop all states: `optimizer.state = defaultdict(dict)`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    loop.train(model, optimizer)
    if loop.active:
        optimizer.state = defaultdict(dict)
    loop.train(model, optimizer, first=5)
    return loop.outcome(model)


@idiom
def delete_the_state_of_a_parameter(loop: Loop) -> Any:
    """Drop the state of one layer, which was initialized again: `del optimizer.state[p]`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    loop.train(model, optimizer)
    if loop.active:
        del optimizer.state[model.head.weight]
    loop.train(model, optimizer, first=5)
    return loop.outcome(model)


@idiom
def move_states_to_the_device(loop: Loop) -> Any:
    """Move every state to the device after resuming: `state[key] = value.to(device)`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.to("cpu")
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def load_own_state_dict(loop: Loop) -> Any:
    """Go back to an earlier state with `optimizer.load_state_dict`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    loop.train(model, optimizer, steps=1)
    kept = copy.deepcopy(optimizer.state_dict())
    loop.train(model, optimizer, first=1)
    if loop.active:
        optimizer.load_state_dict(kept)
    loop.train(model, optimizer, first=5)
    return loop.outcome(model)


@idiom
def load_a_state_dict_of_plain_torch(loop: Loop) -> Any:
    """Resume from the `state_dict` of a plain optimizer that trained the same model before."""
    before = loop.network()
    plain = loop.adamw(before, lr=0.03)
    loop.train(before, plain)
    model = loop.network()
    model.load_state_dict(before.state_dict())
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    if loop.active:
        optimizer.load_state_dict(plain.state_dict())
    loop.train(model, optimizer, first=5)
    return loop.outcome(model)


@idiom
def prepare_an_optimizer_with_states(loop: Loop) -> Any:
    """Prepare an optimizer that has already made steps."""
    model = loop.network()
    optimizer = loop.adamw(model, lr=0.03)
    loop.train(model, optimizer)
    model, optimizer = loop.prepare(model, optimizer)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def load_states_with_another_learning_rate(loop: Loop) -> Any:
    """Load a `state_dict` whose groups have another learning rate."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.2
        optimizer.load_state_dict(state)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def load_transposed_states(loop: Loop) -> Any:
    """Load states of a wrong shape, which plain torch accepts until it steps."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    state = optimizer.state_dict()
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"].t()
    outcome = "accepted"
    try:
        optimizer.load_state_dict(state)
        loop.train(model, optimizer, first=2)
    except (RuntimeError, ValueError):
        outcome = "refused"
    return outcome


@idiom
def load_states_with_a_missing_key(loop: Loop) -> Any:
    """Load states without their second moments, which plain torch accepts until it steps."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    state = optimizer.state_dict()
    for values in state["state"].values():
        del values["exp_avg_sq"]
    outcome = "accepted"
    try:
        optimizer.load_state_dict(state)
        loop.train(model, optimizer, first=2)
    except (RuntimeError, ValueError, KeyError):
        outcome = "refused"
    return outcome


@idiom
def rewind_after_a_bad_step(loop: Loop) -> Any:
    """Keep the states of model and optimizer, and restore them after a bad step."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    x, y = loop.batch(2)
    loop.step(model, optimizer, (x, 100 * y))
    if loop.active:
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
    loop.train(model, optimizer, first=3)
    return loop.outcome(model)


@idiom
def copy_the_optimizer(loop: Loop) -> Any:
    """Copy the optimizer with `copy.deepcopy`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    other = copy.deepcopy(optimizer)
    return [len(other.param_groups), len(other.state_dict()["state"])]


@idiom
def optimizer_after_release(loop: Loop) -> Any:
    """Continue with the original optimizer after `zerostd.release(model)`."""
    model = loop.network()
    original = loop.adamw(model, lr=0.03)
    model, optimizer = loop.prepare(model, original)
    loop.train(model, optimizer)
    model = loop.release(model)
    loop.train(model, original, first=2)
    with torch.no_grad():
        return [model(loop.batch(9)[0]), {name: value.clone() for name, value in model.state_dict().items()}]
