"""Arguments that make no sense, for every public function: each is taken, or refused by an error of ours."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerostd

JUNK: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "10**30": lambda: 10**30,
    "0.5": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "complex": lambda: 1j,
    "empty text": lambda: "",
    "text": lambda: "nonsense",
    "null character": lambda: "a\x00b",
    "long text": lambda: "x" * 5000,
    "bytes": lambda: b"bytes",
    "list": lambda: [],
    "nested list": lambda: [[1], None],
    "dict": lambda: {},
    "odd dict": lambda: {"nonsense": object()},
    "keys of other types": lambda: {1: 2, None: 3},
    "object": object,
    "class": lambda: dict,
    "function": lambda: print,
    "tensor": lambda: torch.zeros(3),
    "meta tensor": lambda: torch.zeros(3, device="meta"),
    "module": lambda: nn.Linear(2, 2),
    "empty module": nn.Module,
    "module on meta": lambda: nn.Linear(2, 2, device="meta"),
    "optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1),
    "device": lambda: torch.device("meta"),
    "missing file": lambda: "/nowhere/file",
    "device file": lambda: "/dev/zero",
    "directory": lambda: "/",
    "path": lambda: Path("/proc/self/mem"),
}


class Case:
    """A prepared model and the arguments with which every function works."""

    def __init__(self, folder: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.model, self.optimizer = zerostd.prepare(
            model, torch.optim.AdamW(model.parameters()), placement=zerostd.Placement(parameters="host")
        )
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.saved = os.path.join(folder, "saved")
        zerostd.save(self.saved, self.model, self.optimizer)
        self.before = zerostd.full_state_dict(self.model)

    def check(self) -> str:
        """Return what has changed of the model."""
        now = zerostd.full_state_dict(self.model)
        wrong = [name for name, value in self.before.items() if not torch.equal(value, now[name])]
        return f"{wrong} changed" if wrong else ""


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, torch.optim.AdamW(model.parameters())


def arguments(name: str, case: Case, folder: str) -> dict[str, Any]:
    """Return arguments with which a public function works, by name."""
    model, optimizer = fresh()
    trained = {"model": case.model, "optimizer": case.optimizer}
    return {
        "prepare": {"model": model, "optimizer": optimizer, "stage": 0},
        "plan": {"model": model, "optimizer": optimizer, "world_size": 2},
        "apply_to_device": {"model": model, "device": "cpu"},
        "gathered": {"module": case.model},
        "no_sync": {"model": case.model},
        "memory": {"model": case.model},
        "full_state_dict": {"model": case.model},
        "release": {"model": case.model},
        "save": {"path": os.path.join(folder, "new"), **trained},
        "load": {"path": case.saved, **trained},
        "save_dcp": {"path": os.path.join(folder, "new"), **trained},
        "load_dcp": {"path": case.saved, **trained},
        "latest": {"parent": folder},
        "merge": {"checkpoint": case.saved, "out": os.path.join(folder, "merged")},
        "dispatch": {"model": model},
        "sleep": {"model": case.model},
        "record": {"model": case.model, "path": os.path.join(folder, "run")},
    }.get(name, {})


FLAGS = {"write", "wait", "frozen", "speculate"}  # anything that is true or false will do
OF_THE_USERS_CODE = {"batch", "extra"}  # what is wrong with these the model's forward says, or the test of `extra`
FUNCTIONS = [
    *("prepare", "plan", "apply_to_device", "gathered", "no_sync", "memory", "full_state_dict", "release", "save"),
    *("load", "save_dcp", "load_dcp", "latest", "merge", "record", "Placement", "Budget", "dispatch", "sleep"),
]


def cases() -> list[tuple[str, str]]:
    """Return each public function with each of its arguments that can be wrong."""
    return [
        (name, argument)
        for name in FUNCTIONS
        for argument in inspect.signature(getattr(zerostd, name)).parameters
        if argument not in FLAGS | OF_THE_USERS_CODE and (name[-4:], argument) != ("_dcp", "path")  # torch's own errors
    ]


def attempt(name: str, argument: str, junk: str, case: Case, folder: str) -> str:
    """Call a function with one argument of junk; return what is wrong with how it ended."""
    given = arguments(name, case, folder) | {argument: JUNK[junk]()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = getattr(zerostd, name)(**given)
            if hasattr(result, "__enter__") and name in ("gathered", "no_sync", "record"):
                with result:
                    pass
    except zerostd.ZerostdError as error:
        return "" if len(str(error)) > 20 else f"says only {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


def check(name: str, argument: str, kinds: Iterable[str] = JUNK) -> list[str]:
    """Try junk as one argument of one function; return what is wrong."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # junk that is a path ends there
        case = Case(folder)
        for junk in kinds:
            problem = attempt(name, argument, junk, case, tempfile.mkdtemp(dir=folder))
            changed = "" if problem else case.check()
            if problem or changed:
                wrong.append(f"{name}({argument}={junk}): {problem or changed}")
                case = Case(tempfile.mkdtemp(dir=folder))
    return wrong


if __name__ == "__main__":
    for function, changed_argument in cases():
        print(*check(function, changed_argument), sep="\n", flush=True)
