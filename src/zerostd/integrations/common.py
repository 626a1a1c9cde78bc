"""Helpers of all integrations: options of zerostd.prepare and their conflicts, delayed reduction, checkpoints.

`call` is how a user writes an option in the integration at hand, with {} for its name: "ZeroStrategy({}=...)".
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import zerostd

OPTIONS = set(inspect.signature(zerostd.prepare).parameters) - {"model", "optimizer"}
FOLDER = "zerostd"  # in a directory that the other library writes: the checkpoints of zerostd, by number


def check_options(zero: Mapping[str, Any], call: str, settings: Mapping[str, str]) -> None:
    """Refuse what zerostd.prepare does not know, and options that the other library has `settings` for."""
    unknown = sorted(set(zero) - OPTIONS)
    if unknown:
        raise zerostd.PrepareError(f"{call.format(unknown[0])}: the options of zerostd.prepare are {sorted(OPTIONS)}")
    for name, setting in settings.items():
        if zero.get(name) is not None:
            raise zerostd.PrepareError(f"{call.format(name)}: use {setting} instead of {name}={zero[name]!r}")


def check_precision(zero: Mapping[str, Any], call: str, precision: str, allowed: tuple[str, str]) -> None:
    """Refuse a precision of the other library that scales or casts, and one that is asked for twice. `allowed` are its
    words for fp32 and for autocast in bf16."""
    if precision not in allowed:
        raise zerostd.NotSupportedError(
            f"precision {precision!r} would scale or cast sharded tensors: leave it out, and pass "
            f"{call.format('precision')} with 'bf16', which keeps fp32 masters, or 'fp16', which also scales the loss "
            "automatically"
        )
    if precision != allowed[0] and zero.get("precision") is not None:
        raise zerostd.PrepareError(
            f"precision {precision!r} (autocast) and {call.format('precision')} with {zero['precision']!r} (weights of "
            "that precision): use one of the two"
        )


def only_one(optimizers: Sequence[Any], model: nn.Module) -> Any:
    """Return the optimizer of a model, or refuse several."""
    if len(optimizers) != 1:
        raise zerostd.NotSupportedError(
            f"{len(optimizers)} optimizers train one {type(model).__name__}: make them param_groups of one optimizer, "
            "or split the model and prepare each part with its own optimizer"
        )
    return optimizers[0]


def has_memory(model: nn.Module) -> bool:
    """Return whether a model can be moved. One made under zerostd.empty_init gets its memory from zerostd.prepare."""
    return not any(parameter.is_meta for parameter in model.parameters())


def late_reduction(model: nn.Module, zero: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Reduce the passes inside with the first one outside, at stages 0 and 1. At stages 2 and 3 each is reduced at once
    and summed on its shard: whole gradients are what these stages save."""
    return zerostd.no_sync(model) if zero.get("stage") in (0, 1) else contextlib.nullcontext()


def next_number(parent: Path) -> int:
    """Return the number of the next checkpoint in a directory that has one directory for each."""
    return max((int(path.name) for path in parent.glob("*") if path.name.isdigit()), default=0) + 1


def newest_in(parent: Path) -> str:
    """Return the path of the newest complete checkpoint in such a directory."""
    path = zerostd.latest(parent)
    if path is None:
        raise zerostd.CheckpointError(
            f"{parent} has no complete zerostd checkpoint: it was saved without zerostd, or never completed"
        )
    return path
