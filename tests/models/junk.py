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
from zerostd.measuring import TrialSizes
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.policy import Homes
from zerostd.reporting.tracking import Tracker
from zerostd.tiers.store import KeptTensor


def closed_file() -> Any:
    with open(os.devnull) as file:
        return file


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
    "missing file": lambda: "/proc/nowhere/file",
    "device file": lambda: "/dev/zero",
    "directory": lambda: "/",
    "path": lambda: Path("/proc/self/mem"),
    "-inf": lambda: float("-inf"),
    "denormal": lambda: 1e-320,
    "2**63": lambda: 2**63,
    "long list": lambda: [0] * 200_000,
    "not UTF-8": lambda: "\udcff",
    "Chinese": lambda: "\u6a21\u578b",
    "set": set,
    "generator": lambda: (number for number in range(2)),
    "closed file": closed_file,
    "class of modules": lambda: nn.Linear,
    "scalar tensor": lambda: torch.tensor(2.0),
    "tensor that is NaN": lambda: torch.tensor(float("nan")),
    "exception": lambda: ValueError("nonsense"),
    "dtype": lambda: torch.int32,
    "slice": lambda: slice(0, 1),
    "function that fails": lambda: lambda *_: 1 / 0,
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
        "averaged": {"model": case.model},
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
        "deduplicate": {"models": case.model},
        "sleep": {"model": case.model},
        "wake": {"model": case.model},
        "record": {"model": case.model, "path": os.path.join(folder, "run")},
        "track": {"loader": [1, 2], "model": case.model, "run_dir": os.path.join(folder, "run")},
        "join": {"model": case.model, "batches": [1, 2]},
        "measure_machine": {"device": "cpu", "sizes": SMALL},
        "Precision": {"name": "mine"},
        "Plan": {"homes": {"*": Homes()}, "stage": 0},
        "plan.load": {"path": "nowhere"},
        "plan.from_json": {"text": "{}"},
        "profile.from_json": {"text": "{}"},
        "plan.save": {"path": os.path.join(folder, "plan")},
        "store.allocate": {"name": "n", "shape": (2, 2)},
        "store.move": {"name": "kept", "tier": "disk"},
        "kept.write": {"values": torch.zeros(4, 3)},
        "optimizer.clip_grad_norm_": {"max_norm": 1.0},
    }.get(name, {})


SMALL = TrialSizes(1 << 16, 1 << 16, 1, 64, 64, 1 << 20, 1 << 16, 1, 0.01, 0.01)
# Public names that are not called by users, and why.
NOT_CALLED = {
    "Average": "zerostd.averaged makes them",
    "MachineProfile": "read from JSON: profile.from_json",
    "Memory": "zerostd.memory makes them",
    "Recording": "zerostd.record makes them",
    "Stage": "an enum: torch's users pass a number to prepare",
    "empty_init": "takes no arguments",
}
OF_THE_USERS_CODE = {
    "batch",
    "extra",
    "closure",
    "name",
    "on_progress",
}  # the model's forward, the test of `extra`, or any text
FAILS_BY_ITSELF = {"closed file", "scalar tensor", "tensor that is NaN"}  # when it is iterated over
OTHERS_ERRORS = {("save_dcp", "path"), ("load_dcp", "path"), ("plan", "spans")}  # torch's own, or not for users
CLASSES: dict[str, Any] = {
    "optimizer": ZeroOptimizer,
    "store": zerostd.TierStore,
    "kept": KeptTensor,
    "plan": zerostd.Plan,
    "profile": zerostd.MachineProfile,
    "recording": zerostd.Recording,
    "tracker": Tracker,
}
METHODS = [
    *("optimizer.clip_grad_norm_", "optimizer.load_state_dict", "optimizer.add_param_group", "store.allocate"),
    *("store.move", "kept.read", "kept.write", "plan.load", "plan.from_json", "plan.save", "plan.homes_of"),
    *("profile.from_json", "recording.log", "tracker.log"),
]
FUNCTIONS = [name for name in zerostd.__all__ if not name.endswith("Error") and name not in NOT_CALLED]


def cases() -> list[tuple[str, str]]:
    """Return each public function and method with each of its arguments that can be wrong."""
    found = []
    for name in (*FUNCTIONS, *METHODS):
        owner, _, method = name.rpartition(".")
        parameters = inspect.signature(getattr(CLASSES[owner] if owner else zerostd, method)).parameters
        found += [(name, argument) for argument in parameters if argument not in {"self"} | OF_THE_USERS_CODE]
    return [case for case in found if case not in OTHERS_ERRORS]


def find(name: str, case: Case, folder: str, on_exit: contextlib.ExitStack) -> Callable[..., Any]:
    """Return a public function, or a method of an object that is made for it."""
    owner, _, method = name.rpartition(".")
    if not owner:
        return getattr(zerostd, name)  # type: ignore[no-any-return]
    if owner in ("store", "kept"):
        store = on_exit.enter_context(zerostd.TierStore(budget={"disk_path": folder}))
        kept = store.allocate("kept", (4, 3))
        return getattr(store if owner == "store" else kept, method)  # type: ignore[no-any-return]
    if owner in ("recording", "tracker"):
        tracker = zerostd.track([1], case.model, run_dir=os.path.join(folder, "run"))
        on_exit.callback(tracker.close)
        return getattr(tracker.recording if owner == "recording" else tracker, method)  # type: ignore[no-any-return]
    objects = {"optimizer": case.optimizer, "plan": zerostd.Plan({"*": Homes()}), "profile": zerostd.MachineProfile}
    return getattr(objects[owner], method)  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def use(name: str, result: Any, case: Case) -> None:
    """Use what a function has returned: an argument that it took must not fail later."""
    if name == "prepare":
        train(*result)
        zerostd.release(result[0])
    elif name in ("Placement", "Budget", "Precision", "Plan"):
        model, optimizer = fresh()
        options = {name.lower(): result} if name == "Plan" else {"stage": 0, name.lower(): result}
        if name == "Budget":
            options["placement"] = zerostd.Placement(optimizer_states="disk")
        use("prepare", zerostd.prepare(model, optimizer, **options), case)
    elif name == "averaged":
        with contextlib.closing(result), result.applied():
            pass
    elif name in ("gathered", "no_sync", "record", "TierStore"):
        with result:
            pass
    elif name in ("join", "track"):
        list(result)
    elif name == "sleep":
        zerostd.wake(case.model)
    elif name in ("save", "save_dcp", "kept.read", "kept.write"):
        result.wait()
    elif name == "store.allocate":
        result.write(torch.zeros(result.shape, dtype=result.dtype)).wait()


def attempt(name: str, argument: str, junk: str, case: Case, folder: str) -> str:
    """Call a function with one argument of junk; return what is wrong with how it ended."""
    value = JUNK[junk]()
    given = arguments(name, case, folder) | {argument: value}
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as on_exit:
            warnings.simplefilter("ignore")
            function = find(name, case, folder, on_exit)
            if argument == "numbers":
                train(case.model, case.optimizer)
                case.before = zerostd.full_state_dict(case.model)
                function(loss=value)
            else:
                use(name, function(value) if name == "deduplicate" else function(**given), case)
    except zerostd.ZerostdError as error:
        return "" if 20 < len(str(error)) < 20_000 else f"says {len(str(error))} characters: {error!s:.100}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


def check(name: str, argument: str, kinds: Iterable[str] = JUNK) -> list[str]:
    """Try junk as one argument of one function; return what is wrong."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # junk that is a path ends there
        case = Case(folder)
        for junk in kinds:
            if argument in ("batches", "loader") and junk in FAILS_BY_ITSELF:
                continue
            problem = attempt(name, argument, junk, case, tempfile.mkdtemp(dir=folder))
            changed = "" if problem else case.check()
            if problem or changed:
                wrong.append(f"{name}({argument}={junk}): {problem or changed}")
                case = Case(tempfile.mkdtemp(dir=folder))
    return wrong


if __name__ == "__main__":
    for function, changed_argument in cases():
        print(*check(function, changed_argument), sep="\n", flush=True)
