"""What the integrations share: the options of zerostd.prepare, passes that are reduced later, numbered checkpoints."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

import zerostd

__all__ = ["OPTIONS", "check_known", "late_reduction", "numbers_in"]

OPTIONS = set(inspect.signature(zerostd.prepare).parameters) - {"model", "optimizer"}
REDUCED_LATER = (0, 1)  # stages whose gradients are whole anyway


def check_known(zero: Mapping[str, Any], call: str) -> None:
    """Refuse what zerostd.prepare does not know; `call` is how the user said it, with {} for the name."""
    unknown = sorted(set(zero) - OPTIONS)
    if unknown:
        raise zerostd.PrepareError(f"{call.format(unknown[0])}: the options of zerostd.prepare are {sorted(OPTIONS)}")


def numbers_in(folder: Path) -> list[int]:
    """Of checkpoints in a directory that has a number for each: the next one is written beside the last, which goes
    when that is complete."""
    return sorted(int(one.name) for one in folder.glob("*") if one.name.isdigit())


def late_reduction(model: nn.Module, zero: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """At stages 0 and 1 passes inside are reduced by the first one outside. At stages 2 and 3 each is reduced at once
    and summed on its shard: whole gradients are what these stages save."""
    return zerostd.no_sync(model) if zero.get("stage") in REDUCED_LATER else contextlib.nullcontext()
