"""What the integrations share: the options of zerostd.prepare, and passes that are reduced later."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

import zerostd

__all__ = ["OPTIONS", "late_reduction"]

OPTIONS = set(inspect.signature(zerostd.prepare).parameters) - {"model", "optimizer"}
REDUCED_LATER = (0, 1)  # stages whose gradients are whole anyway


def late_reduction(model: nn.Module, zero: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """At stages 0 and 1 passes inside are reduced by the first one outside. At stages 2 and 3 each is reduced at once
    and summed on its shard: whole gradients are what these stages save."""
    return zerostd.no_sync(model) if zero.get("stage") in REDUCED_LATER else contextlib.nullcontext()
