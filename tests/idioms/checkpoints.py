"""Saving, loading and copying a prepared model with torch's own means."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn

from idioms.loop import Loop, idiom


@idiom
def state_dict_of_the_model(loop: Loop) -> Any:
    """Read `model.state_dict()` after training."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    return {name: value.float().clone() for name, value in model.state_dict().items()}


@idiom
def state_dict_saved_to_a_file(loop: Loop) -> Any:
    """Save `model.state_dict()` with `torch.save`, and load it into a plain model."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = loop.network()
    other.load_state_dict(torch.load(file))
    return other.state_dict()


@idiom
def model_and_optimizer_saved_to_a_file(loop: Loop) -> Any:
    """Save model and optimizer in one file with `torch.save`, load both, and continue."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    file = io.BytesIO()
    if loop.active:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    loop.train(model, optimizer, first=5)
    if loop.active:
        file.seek(0)
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def load_state_dict_into_the_model(loop: Loop) -> Any:
    """Load weights into the prepared model with `load_state_dict`."""
    other = {name: 0.5 * value for name, value in loop.network().state_dict().items()}
    model, optimizer = loop.prepare(loop.network())
    if loop.active:
        model.load_state_dict(other)
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def load_part_of_a_state_dict(loop: Loop) -> Any:
    """Load the backbone only, with `strict=False`."""
    other = {name: 0.5 * value for name, value in loop.network().state_dict().items() if "head" not in name}
    model, optimizer = loop.prepare(loop.network())
    missing = []
    if loop.active:
        missing = sorted(model.load_state_dict(other, strict=False).missing_keys)
    loop.train(model, optimizer)
    return loop.outcome(model, missing=missing)


@idiom
def load_into_a_submodule(loop: Loop) -> Any:
    """Load a part of the model: `model.head.load_state_dict(...)`."""
    other = {name: 3 * value for name, value in loop.network().head.state_dict().items()}
    model, optimizer = loop.prepare(loop.network())
    if loop.active:
        model.head.load_state_dict(other)
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def load_by_assigning(loop: Loop) -> Any:
    """Load weights with `load_state_dict(..., assign=True)`."""
    other = {name: 0.5 * value for name, value in loop.network().state_dict().items()}
    model, _ = loop.prepare(loop.network())
    if loop.active:
        model.load_state_dict(other, assign=True)
    return loop.outcome(model)


@idiom
def load_by_copying_into_state_dict(loop: Loop) -> Any:
    """Load weights by copying into the tensors of `model.state_dict()`."""
    other = {name: 0.5 * value for name, value in loop.network().state_dict().items()}
    model, optimizer = loop.prepare(loop.network())
    if loop.active:
        for name, value in model.state_dict().items():
            value.copy_(other[name])
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def load_a_wrong_state_dict(loop: Loop) -> Any:
    """Load a `state_dict` of another shape: an error that changes nothing."""
    other = loop.network().state_dict()
    other["head.weight"] = torch.zeros(3, 3)
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    raised = False
    try:
        model.load_state_dict(other)
    except RuntimeError:
        raised = True
    return [raised, loop.weights(model)["head.weight"]]


@idiom
def state_dict_of_a_submodule(loop: Loop) -> Any:
    """Save a part of the model: `model.head.state_dict()`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    return {name: value.float().clone() for name, value in model.head.state_dict().items()}


@idiom
def state_dict_with_a_hook(loop: Loop) -> Any:
    """Rename and copy tensors in a `state_dict` hook of the model."""
    model = loop.network()

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in list(state):
            state["model." + name] = state.pop(name).detach().clone()

    model.register_state_dict_post_hook(rename)
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer)
    return loop.weights(model)


class Versioned(nn.Linear):
    """A layer that keeps something else beside its tensors."""

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]


@idiom
def extra_state(loop: Loop) -> Any:
    """Keep extra state in a module with `get_extra_state`."""
    model = loop.network()
    model.head = loop.seeded(lambda: Versioned(8, 4))
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer)
    return loop.weights(model)


@idiom
def copy_the_model(loop: Loop) -> Any:
    """Copy the prepared model with `copy.deepcopy`, and evaluate the copy."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    other = copy.deepcopy(model)
    loop.train(model, optimizer, first=2)
    return other(loop.batch(9)[0])


@idiom
def copy_a_block(loop: Loop) -> Any:
    """Copy a block of the prepared model with `copy.deepcopy`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    other = copy.deepcopy(model.blocks[0])
    return other(torch.ones(2, 8))


@idiom
def copy_a_parameter(loop: Loop) -> Any:
    """Copy a parameter with `copy.deepcopy`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    return copy.deepcopy(model.head.weight).detach()


@idiom
def pickle_the_model(loop: Loop) -> Any:
    """Pickle the prepared model, as `torch.save(model)` does."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    return pickle.loads(pickle.dumps(model))(loop.batch(9)[0])


@idiom
def move_the_model_to_its_device(loop: Loop) -> Any:
    """Call `model.to(device)` with the model's own device."""
    model, optimizer = loop.prepare(loop.network())
    model.to("cpu")
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def cast_the_model(loop: Loop) -> Any:
    """Cast the prepared model: `model.half()` for inference at the end."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    model.half()
    return model(loop.batch(9)[0].half()).float()


@idiom
def parameters_shared_with_other_processes(loop: Loop) -> Any:
    """Share the model with other processes: `model.share_memory()`."""
    model, optimizer = loop.prepare(loop.network())
    model.share_memory()
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def go_on_after_release(loop: Loop) -> Any:
    """Release the model and continue with a new plain optimizer."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    model = loop.release(model)
    loop.train(model, torch.optim.SGD(model.parameters(), lr=0.1), first=2)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
