"""Every public function takes or refuses whatever it is given, by an error of ours; and order of calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from models.junk import CLASSES, METHODS, NOT_CALLED, cases, check
from zerostd import MisuseError, PrepareError, ZerostdError
from zerostd.errors import CheckpointError

SOME = ["True", "-1", "nan", "text", "null character", "nested list", "object", "tensor", "empty module", "device file"]
SOME += ["not UTF-8", "10**30", "long list"]
OF_OTHER_ROOMS = {  # public methods that users have no use for, and torch's own
    *("optimizer.step", "optimizer.zero_grad", "optimizer.begin_backward_updates", "optimizer.check_consistent"),
    *("plan.activations_of", "plan.placement"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument"), cases(), ids=lambda value: value)
def test_junk_is_refused_by_an_error_of_ours(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some junk is a fine relative path to write to
    assert check(name, argument, SOME) == []


def test_every_public_name_and_method_with_arguments_is_tried() -> None:
    tried = {name for name, _ in cases()}
    names = {name for name in zerostd.__all__ if not name.endswith("Error")}
    assert names - tried == set(NOT_CALLED)
    methods = {
        f"{name}.{method}"
        for name, kind in CLASSES.items()
        for method, value in vars(kind).items()
        if not method.startswith("_") and {*signature(value)} - {"self", "cls"}
    }
    assert methods - OF_OTHER_ROOMS == set(METHODS)


def signature(value: Any) -> list[str]:
    function = getattr(value, "__func__", value)
    return list(inspect.signature(function).parameters) if inspect.isroutine(function) else []


def make(width: int = 4) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
    placement = zerostd.Placement(parameters="host", optimizer_states="host", gradients="host")
    return zerostd.prepare(model, torch.optim.AdamW(model.parameters()), placement=placement, groups=["*"])


def prepare_twice(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zerostd.prepare(model)


def prepare_with_its_optimizer(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zerostd.prepare(nn.Linear(4, 4), optimizer)


def share_parameters_with_another_model(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zerostd.prepare(nn.Sequential(model[0], nn.Linear(4, 4)))


def step_inside_gathered(model: nn.Module, optimizer: Any, folder: Path) -> None:
    model(torch.ones(2, 4)).sum().backward()
    with zerostd.gathered(model):
        optimizer.step()


def save_after_release(model: nn.Module, optimizer: Any, folder: Path) -> None:
    other, its_optimizer = make()
    zerostd.release(other)
    zerostd.save(folder / "new", other, its_optimizer)


def release_twice(model: nn.Module, optimizer: Any, folder: Path) -> None:
    other, _ = make()
    zerostd.release(zerostd.release(other))


def load_of_another_model(model: nn.Module, optimizer: Any, folder: Path) -> None:
    other, its_optimizer = make(width=8)
    zerostd.save(folder / "other", other, its_optimizer)
    zerostd.load(folder / "other", model, optimizer)


def save_where_one_is(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zerostd.save(folder / "same", model, optimizer)
    zerostd.save(folder / "same", model, optimizer)


def save_with_the_inner_optimizer(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zerostd.save(folder / "new", model, optimizer.inner)


def write_without_saying_so(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with zerostd.gathered(model), torch.no_grad():
        model[0].weight.add_(1)


def record_twice(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with zerostd.record(model, folder / "run"):
        zerostd.record(model, folder / "more")


ORDERS: dict[Callable[[nn.Module, Any, Path], None], tuple[type[ZerostdError], str]] = {
    prepare_twice: (PrepareError, "already prepared"),
    prepare_with_its_optimizer: (PrepareError, "optimizer"),
    share_parameters_with_another_model: (PrepareError, "prepared"),
    step_inside_gathered: (MisuseError, "leave the context before the step"),
    save_after_release: (MisuseError, "zerostd.save needs the module that zerostd.prepare was called on"),
    release_twice: (MisuseError, "zerostd.release needs the module"),
    load_of_another_model: (CheckpointError, "0.weight"),
    save_where_one_is: (CheckpointError, "same"),
    save_with_the_inner_optimizer: (MisuseError, "needs the optimizer that zerostd.prepare returned"),
    write_without_saying_so: (MisuseError, "write=True"),
    record_twice: (MisuseError, "already being recorded"),
}


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_calls_in_the_wrong_order_are_refused_and_change_nothing(
    order: Callable[[nn.Module, Any, Path], None], tmp_path: Path
) -> None:
    model, optimizer = make()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = zerostd.full_state_dict(model)
    error, words = ORDERS[order]
    with pytest.raises(error, match=words):
        order(model, optimizer, tmp_path)
    now = zerostd.full_state_dict(model)
    assert all(torch.equal(value, now[name]) for name, value in before.items())
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_step_before_any_backward_changes_nothing() -> None:
    model, optimizer = make()
    before = zerostd.full_state_dict(model)
    optimizer.step()
    now = zerostd.full_state_dict(model)
    assert all(torch.equal(value, now[name]) for name, value in before.items())
