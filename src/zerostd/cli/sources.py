"""Sources of `zerostd plan`: its options are checked and parsed, and become a module or a model in numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import operator
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zerostd.errors import PrepareError, hint_for
from zerostd.planning.profiles import WAYS
from zerostd.policy import Budget, Tier

OURS = (__file__, importlib.__file__, "<frozen importlib")  # frames that say nothing to the user

Built = tuple[nn.Module, torch.optim.Optimizer | None, Any]  # model, optimizer, batch


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other, or that a function's own batch answers."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value or type(value) is int}  # also 0
    names = given.keys()
    num_sources = len(names & {"function", "params", "config"})
    if num_sources != 1:
        problem = "more than one model" if num_sources else "no model"
        raise PrepareError(f"{problem} to plan: give one of module:function, --params or --config")
    if "params" not in names and names & {"hidden", "layers", "vocabulary"}:
        raise PrepareError("--hidden, --layers and --vocabulary go with --params")
    if "function" not in names and "meta" in names:
        raise PrepareError("--meta goes with module:function")
    if names >= {"activations", "recompute"}:
        raise PrepareError("--recompute and --activations exclude each other: give one of them")
    if "activations" in names and not names & {"samples", "batch", "scaling"}:
        raise PrepareError("--activations needs the size of a pass: give --samples or --batch")
    if "function" in names and names & {"samples", "sequence", "batch", "recompute", "activations"}:
        raise PrepareError(
            "--samples, --sequence, --batch, --recompute and --activations go with --params and --config; a function "
            "decides these itself: let it return (model, optimizer, batch)"
        )
    if "step_samples" in names and ("scaling" not in names or given["step_samples"] < 1):
        raise PrepareError(f"--step-samples {given['step_samples']} needs --scaling, and must be 1 or more")
    if names >= {"table", "scaling"}:
        raise PrepareError("--table and --scaling exclude each other: give one")
    if "table" in names and names & {"function", "output"}:
        raise PrepareError("--table goes with --params or --config, and with --json: leave the other options out")
    if names >= {"scaling", "output"}:
        raise PrepareError("--output saves one plan; for --scaling use --json and the shell's >")
    if names >= {"scaling", "batch"}:
        raise PrepareError("--batch is per rank; with --scaling give the samples of a step with --step-samples")
    if "table" not in names and len(given.get("params", ())) > 1:
        raise PrepareError("several --params go with --table only; plan one model at a time")


def make_model(name: str, *, is_meta: bool) -> Built:
    """Call a function that is named as module:function, with the current directory importable."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        with torch.device("meta") if is_meta else contextlib.nullcontext():
            function = _find(name)
            with _own_traceback(f"the function {name!r}"):
                result = function()
    finally:
        sys.path.remove(folder)
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        types = ", ".join(type(part).__name__ for part in parts) or "nothing"
        raise PrepareError(
            f"{name!r} returned {types}; it must return a model, (model, optimizer) or (model, optimizer, batch)"
        )
    model, optimizer, batch = (*parts, None, None)[:3]
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        what = type(optimizer).__name__
        raise PrepareError(f"{name!r} returned {what} as its optimizer; it must be a torch.optim.Optimizer")
    return model, optimizer, batch


def _find(name: str) -> Any:
    match = re.fullmatch("([^:]+):([^:]+)", name)
    if match is None:
        raise PrepareError(f"{name!r} must have the form module:function, such as 'train:make_model'")
    module_name, path = match.groups()
    with _own_traceback(f"the module {module_name!r}"):
        spec = None
        with contextlib.suppress(ModuleNotFoundError):  # of a package it should lie in
            spec = importlib.util.find_spec(module_name)
        module = None if spec is None else importlib.import_module(module_name)
    if module is None:
        raise PrepareError(
            f"no module {module_name!r} for {name!r}: run the command in the directory that holds it, or install it"
        )
    try:
        member = operator.attrgetter(path)(module)
    except AttributeError as error:
        raise PrepareError(f"no {path!r} in the module {module_name!r} ({module}): {error}") from error
    if not callable(member):
        raise PrepareError(f"{name!r} is of type {type(member).__name__}, not a function that returns a model")
    return member


@contextlib.contextmanager
def _own_traceback(what: str) -> Iterator[None]:
    """Run code of the user; if it fails, print its traceback without our frames and raise PrepareError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        raise PrepareError(f"{what} failed: {type(error).__name__}: {error}") from error


def parse_budget(text: str | None, disk_path: str | None) -> Budget:
    """Return a budget from 'device=24GiB,host=96GiB,disk=200GiB'."""
    tiers = [tier.value for tier in Tier]
    sizes: dict[str, Any] = {}
    for part in [] if text is None else text.split(","):
        if part.count("=") != 1:
            raise PrepareError(f"--budget {text!r}: {part!r} must have the form tier=size, such as device=24GiB")
        tier, size = (word.strip() for word in part.split("="))
        if tier not in tiers:
            raise PrepareError(
                f"--budget {text!r}: {tier!r} is not a tier; {hint_for(tier, tiers)}use {', '.join(tiers)}"
            )
        if tier in sizes:
            raise PrepareError(f"--budget {text!r}: {tier} is given twice")
        sizes[tier] = size
    return Budget(**sizes, disk_path=disk_path)


def parse_counts(text: str) -> list[int]:
    """Return numbers of ranks from '64,256,1024'."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise PrepareError(f"--scaling {text!r}: give numbers of ranks, such as 64,256,1024")
    return [int(part) for part in parts]


def parse_ways(text: str | None) -> frozenset[str]:
    """Return ways to treat activations from 'keep,recompute' or 'any', which is the default."""
    words = ["any"] if text is None else [word.strip() for word in text.split(",")]
    if words == ["any"]:
        return frozenset(WAYS)
    if unknown := [word for word in words if word not in WAYS]:
        raise PrepareError(f"--activations {text!r}: {unknown[0]!r} is unknown; use {', '.join(WAYS)}, or any")
    return frozenset(words)
