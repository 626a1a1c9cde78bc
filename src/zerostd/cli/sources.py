"""What is to be planned, from the options of the command line: a module that a function makes, or numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostd.errors import PrepareError
from zerostd.planning import ModelProfile
from zerostd.planning.described import from_config, from_numbers
from zerostd.planning.model import WAYS
from zerostd.policy import Budget, Precision, Tier

__all__ = ["SEQUENCE", "Batch", "Made", "Source", "budget_of", "counts_of", "ways_of"]

SEQUENCE = 1024  # tokens of a sample of a model in numbers, if nobody says
OURS = (__file__, importlib.__file__, "<frozen importlib")  # frames that say nothing to the user


@dataclass(frozen=True)
class Batch:
    """What one pass on one rank takes, for a model in numbers."""

    samples: int | None = None
    sequence: int | None = None
    recomputes: bool = False
    ways: frozenset[str] = frozenset()  # to choose among for activations; empty: as `recomputes` says
    in_step: int | None = None  # samples of a step on one rank

    def __post_init__(self) -> None:
        if self.ways and self.recomputes:
            raise PrepareError("--recompute says what --activations leaves open: give one of them")
        if self.ways and self.samples is None and self.in_step is None:
            raise PrepareError("--activations needs to know how large a pass is: give --samples or --batch")


@dataclass(frozen=True)
class Made:
    """What a function made."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    batch: Any = None


@dataclass(frozen=True)
class Source:
    """One of a function, sizes in numbers, or a config.json."""

    function: str | None = None  # module:function
    params: tuple[str, ...] = ()
    hidden: int | None = None
    layers: int | None = None
    vocabulary: int | None = None
    config: Path | None = None
    is_meta: bool = False

    def __post_init__(self) -> None:
        given = [bool(self.function), bool(self.params), self.config is not None]
        if sum(given) != 1:
            much = "nothing to plan" if not any(given) else "more than one thing to plan"
            raise PrepareError(f"{much}: give one of module:function, --params or --config")
        if not self.params and any(value is not None for value in (self.hidden, self.layers, self.vocabulary)):
            raise PrepareError("--hidden, --layers and --vocabulary go with --params")
        if self.is_meta and not self.function:
            raise PrepareError("--meta goes with module:function")

    def check_batch(self, batch: Batch) -> None:
        """A function's model comes with its own."""
        if self.function and batch != Batch():
            raise PrepareError(
                "--samples, --sequence, --batch, --recompute and --activations go with --params and --config; a "
                "function says it itself: let it return (model, optimizer, batch)"
            )

    def profiles(self, batch: Batch, precision: Precision) -> list[ModelProfile]:
        """Of models in numbers."""
        if self.config is not None:
            found = [from_config(self.config, sequence=batch.sequence, samples=batch.samples)]
        else:
            found = [
                from_numbers(
                    params,
                    hidden=self.hidden,
                    layers=self.layers,
                    vocabulary=self.vocabulary,
                    sequence=SEQUENCE if batch.sequence is None else batch.sequence,
                    samples=batch.samples,
                )
                for params in self.params
            ]
        return [replace(_in_precision(model, precision), recomputes=batch.recomputes) for model in found]

    def make(self) -> Made:
        """Call the function, with the current directory importable, and under the meta device if that is asked for."""
        assert self.function is not None
        with _importable(os.getcwd()), torch.device("meta") if self.is_meta else contextlib.nullcontext():
            function = _find(self.function)
            with _told(f"the function {self.function!r}"):
                made = function()
        return _unpack(self.function, made)


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


def _find(name: str) -> Callable[[], Any]:
    module_name, *rest = name.split(":")
    if len(rest) != 1 or not module_name or not rest[0]:
        raise PrepareError(f"{name!r} is not module:function, such as 'train:make_model'")
    path = rest[0]
    with _told(f"the module {module_name!r}"):
        spec = None
        with contextlib.suppress(ModuleNotFoundError):  # of a package it should lie in
            spec = importlib.util.find_spec(module_name)
        found: Any = None if spec is None else importlib.import_module(module_name)
    if found is None:
        raise PrepareError(
            f"there is no module {module_name!r} for {name!r}: start in the directory that holds it, or install it"
        )
    for part in path.split("."):
        if not hasattr(found, part):
            raise PrepareError(f"there is no {path!r} in the module {module_name!r} ({found!r} has no {part!r})")
        found = getattr(found, part)
    if not callable(found):
        raise PrepareError(f"{name!r} is {type(found).__name__}, not a function that makes a model")
    made: Callable[[], Any] = found
    return made


@contextlib.contextmanager
def _importable(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Code of the user's: its own traceback first, without our frames, then which of it failed."""
    try:
        yield
    except (Exception, SystemExit) as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        raise PrepareError(f"{what} failed: {type(error).__name__}: {error}") from error


def _unpack(name: str, made: Any) -> Made:
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        raise PrepareError(
            f"{name!r} returned {_words(made)}; it must return a model, (model, optimizer) or (model, optimizer, batch)"
        )
    if len(parts) > 1 and not isinstance(parts[1], torch.optim.Optimizer | None):
        raise PrepareError(f"{name!r} returned {_words(parts[1])} as its optimizer; it must be a torch.optim.Optimizer")
    return Made(*parts)


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__


# -- values of options --


def budget_of(text: str | None, disk_path: str | None) -> Budget:
    """From 'device=24GiB,host=96GiB,disk=200GiB'."""
    tiers, sizes = [tier.value for tier in Tier], dict[str, str]()
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


def counts_of(text: str) -> list[int]:
    """From '64,256,1024'."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise PrepareError(f"--scaling {text!r}: give numbers of ranks, such as 64,256,1024")
    return [int(part) for part in parts]


def ways_of(text: str | None) -> frozenset[str]:
    """From 'keep,recompute' or 'any'."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if words == ["any"]:
        return frozenset(WAYS)
    if unknown := [word for word in words if word not in WAYS]:
        raise PrepareError(f"--activations {text!r}: {unknown[0]!r} is unknown; use {', '.join(WAYS)}, or any")
    return frozenset(words)
