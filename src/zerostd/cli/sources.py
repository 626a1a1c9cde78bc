"""What is to be planned, from the options of `zerostd plan`: a module that a function makes, or a model in numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostd.errors import PrepareError
from zerostd.measuring.model import profile_model
from zerostd.planning import ModelProfile
from zerostd.planning.described import from_config, from_numbers
from zerostd.planning.profiles import WAYS
from zerostd.policy import Budget, Precision, Tier

SEQUENCE = 1024  # tokens of a sample of a model in numbers, if nobody says
OURS = (__file__, importlib.__file__, "<frozen importlib")  # frames that say nothing to the user


@dataclass(frozen=True)
class Source:
    """The model to plan for: one that a function makes, one of a size, or one of a config.json."""

    precision: Precision
    function: str | None = None  # module:function
    is_meta: bool = False
    params: tuple[str, ...] = ()
    hidden: int | None = None
    layers: int | None = None
    vocabulary: int | None = None
    config: Path | None = None
    samples: int | None = None  # of a pass on one rank, of a model in numbers
    sequence: int | None = None
    recomputes: bool = False

    def __post_init__(self) -> None:
        given = [bool(self.function), bool(self.params), self.config is not None]
        if sum(given) != 1:
            problem = "nothing to plan" if not any(given) else "more than one thing to plan"
            raise PrepareError(f"{problem}: give one of module:function, --params or --config")
        if not self.params and any(value is not None for value in (self.hidden, self.layers, self.vocabulary)):
            raise PrepareError("--hidden, --layers and --vocabulary go with --params")
        if self.is_meta and not self.function:
            raise PrepareError("--meta goes with module:function")

    def profiles(self) -> list[ModelProfile]:
        """Return the profiles of models in numbers."""
        if self.config is not None:
            models = [from_config(self.config, sequence=self.sequence, samples=self.samples)]
        else:
            models = [
                from_numbers(
                    params,
                    hidden=self.hidden,
                    layers=self.layers,
                    vocabulary=self.vocabulary,
                    sequence=SEQUENCE if self.sequence is None else self.sequence,
                    samples=self.samples,
                )
                for params in self.params
            ]
        return [replace(_in_precision(model, self.precision), recomputes=self.recomputes) for model in models]

    def profile(self) -> ModelProfile:
        """Return the profile of the one model, whatever it comes from."""
        if self.function:
            model, optimizer, batch = self.make()
            return profile_model(model, optimizer, precision=self.precision, batch=batch)
        models = self.profiles()
        if len(models) > 1:
            raise PrepareError("several --params go with --table only; plan one model at a time")
        return models[0]

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer | None, Any]:
        """Call the function, with the current directory importable, and return model, optimizer and batch."""
        assert self.function is not None
        folder = os.getcwd()
        sys.path.insert(0, folder)
        try:
            with torch.device("meta") if self.is_meta else contextlib.nullcontext():
                function = _find(self.function)
                with _own_traceback(f"the function {self.function!r}"):
                    result = function()
        finally:
            sys.path.remove(folder)
        return _unpack(self.function, result)


def _in_precision(model: ModelProfile, precision: Precision) -> ModelProfile:
    """Profiles in numbers are for bf16; in fp32 a parameter is its own master, and activations are twice as long."""
    if precision.name == "fp16":
        return replace(model, dtype="float16")
    if precision.name != "fp32":
        return model
    groups = tuple(
        replace(
            group,
            kept_bytes=2 * group.kept_bytes,
            boundary_bytes=2 * group.boundary_bytes,
            peak_bytes=2 * group.peak_bytes,
        )
        for group in model.groups
    )
    model = replace(model, groups=groups, dtype="float32")
    return replace(model, parameter_bytes=4, gradient_bytes=4, state_bytes=8, master_bytes=4)


def _find(name: str) -> Any:
    module_name, *rest = name.split(":")
    if len(rest) != 1 or not module_name or not rest[0]:
        raise PrepareError(f"{name!r} is not module:function, such as 'train:make_model'")
    path = rest[0]
    with _own_traceback(f"the module {module_name!r}"):
        spec = None
        with contextlib.suppress(ModuleNotFoundError):  # of a package it should lie in
            spec = importlib.util.find_spec(module_name)
        member: Any = None if spec is None else importlib.import_module(module_name)
    if member is None:
        raise PrepareError(
            f"there is no module {module_name!r} for {name!r}: start in the directory that holds it, or install it"
        )
    for part in path.split("."):
        if not hasattr(member, part):
            raise PrepareError(f"there is no {path!r} in the module {module_name!r} ({member!r} has no {part!r})")
        member = getattr(member, part)
    if not callable(member):
        raise PrepareError(f"{name!r} is {type(member).__name__}, not a function that makes a model")
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


def _unpack(name: str, result: Any) -> tuple[nn.Module, torch.optim.Optimizer | None, Any]:
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        types = ", ".join(type(part).__name__ for part in parts)
        what = f"({types})" if isinstance(result, tuple) else types
        raise PrepareError(
            f"{name!r} returned {what}; it must return a model, (model, optimizer) or (model, optimizer, batch)"
        )
    model, optimizer, batch = (*parts, None, None)[:3]
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        what = type(optimizer).__name__
        raise PrepareError(f"{name!r} returned {what} as its optimizer; it must be a torch.optim.Optimizer")
    return model, optimizer, batch


def parse_budget(text: str | None, disk_path: str | None) -> Budget:
    """Return a budget from 'device=24GiB,host=96GiB,disk=200GiB'."""
    tiers = [tier.value for tier in Tier]
    sizes: dict[str, str] = {}
    for part in [] if text is None else text.split(","):
        if part.count("=") != 1:
            raise PrepareError(f"--budget {text!r}: {part!r} is not tier=size, such as device=24GiB")
        tier, size = (word.strip() for word in part.split("="))
        if tier not in tiers:
            raise PrepareError(f"--budget {text!r}: {tier!r} is not a tier; use {', '.join(tiers)}")
        if tier in sizes:
            raise PrepareError(f"--budget {text!r}: {tier} is there twice")
        sizes[tier] = size
    return Budget(**sizes, disk_path=disk_path)


def parse_counts(text: str) -> list[int]:
    """Return numbers of ranks from '64,256,1024'."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise PrepareError(f"--scaling {text!r}: give numbers of ranks, such as 64,256,1024")
    return [int(part) for part in parts]


def parse_ways(text: str | None) -> frozenset[str]:
    """Return ways to treat activations from 'keep,recompute' or 'any'."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if words == ["any"]:
        return frozenset(WAYS)
    if unknown := [word for word in words if word not in WAYS]:
        raise PrepareError(f"--activations {text!r}: {unknown[0]!r} is unknown; use {', '.join(WAYS)}, or any")
    return frozenset(words)
