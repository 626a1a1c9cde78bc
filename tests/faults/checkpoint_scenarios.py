"""A checkpoint is on its way, and something changes the model: it must hold the values of the moment of save.

Run by test_checkpoint_exit.py in a process of its own, under the shim, which holds the writes of the checkpoint until
the change is made, or waits; prints for each placement and each change whether the checkpoint has those values."""

from __future__ import annotations

import copy
import gc
import json
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerostd
from faults.io_shim import fault

FOLDER = Path(sys.argv[1])
WAITS_S = 0.2  # a change that takes longer waits for the checkpoint; all others are done by then
PLACES = {
    "device": zerostd.Placement(),
    "host": zerostd.Placement(parameters="host", optimizer_states="host"),
    "disk": zerostd.Placement(parameters="disk", optimizer_states="disk"),
}


def prepared(place: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = zerostd.Budget(disk_path=str(FOLDER))
    model, optimizer = zerostd.prepare(model, optimizer, placement=PLACES[place], budget=budget, groups=["0", "2"])
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 24)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    states = copy.deepcopy(optimizer.state_dict()["state"])
    return {"model": zerostd.full_state_dict(model), "states": states}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def gathered(model: nn.Module, optimizer: Any) -> None:
    with zerostd.gathered(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def data(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.data.add_(1.0)


def in_place(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def load_state_dict(model: nn.Module, optimizer: Any) -> None:
    state = {name: value + 1.0 for name, value in zerostd.full_state_dict(model).items()}
    if all(group.gives_back for group in model.__dict__["_zerostd"].groups):
        with zerostd.gathered(model, write=True):
            model.load_state_dict(state)
    else:
        model.load_state_dict(state)


def optimizer_state(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"].add_(1.0)


def optimizer_load(model: nn.Module, optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for of_parameter in state["state"].values():
        of_parameter["exp_avg_sq"] += 1.0
    optimizer.load_state_dict(state)


def load(model: nn.Module, optimizer: Any) -> None:
    zerostd.load(FOLDER / "earlier", model, optimizer)


def release(model: nn.Module, optimizer: Any) -> None:
    zerostd.release(model)
    with torch.no_grad():
        model[0].weight.add_(1.0)


CHANGES: dict[str, Callable[[nn.Module, Any], None]] = {
    "a step": step,
    "gathered(write=True)": gathered,
    "p.data.add_": data,
    "p.add_": in_place,
    "load_state_dict": load_state_dict,
    "optimizer.state": optimizer_state,
    "optimizer.load_state_dict": optimizer_load,
    "zerostd.load": load,
    "release": release,
}


def saved_as_it_was(place: str, change: Callable[[nn.Module, Any], None] | None, name: str) -> bool:
    """Save, change the model meanwhile, load what was saved; return whether it is as it was before."""
    model, optimizer = prepared(place)
    before = values(model, optimizer)
    with fault(FOLDER / name, "write", "hold") as held:
        saving = zerostd.save(FOLDER / name, model, optimizer, wait=False)
        release_of_writes = threading.Timer(WAITS_S, held.let_pass)  # the change may wait for the checkpoint
        release_of_writes.start()
        if change is not None:
            change(model, optimizer)
        else:
            del model, optimizer
            gc.collect()
        release_of_writes.cancel()
        held.let_pass()
        saving.wait()
    assert held.taken > 0
    other, another = prepared(place)
    step(other, another)
    zerostd.load(FOLDER / name, other, another)
    return same(values(other, another), before)


def main() -> None:
    results: dict[str, Any] = {}
    model, optimizer = prepared("device")
    step(model, optimizer)
    zerostd.save(FOLDER / "earlier", model, optimizer)
    for place in PLACES:
        for number, (name, change) in enumerate([*CHANGES.items(), ("the model goes", None)]):
            try:
                results[f"{place}: {name}"] = saved_as_it_was(place, change, f"{place}-{number}")
            except Exception as error:
                results[f"{place}: {name}"] = repr(error)
    print(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.set_num_threads(1)
    main()
