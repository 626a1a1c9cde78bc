"""Debug modes, from the environment variable ZEROSTD_DEBUG: words separated by commas.

poison   fill memory that is given back or will be used again with NaN, so that a late read shows in the loss
serial   wait for every update before step() returns, and begin none inside backward
"""

from __future__ import annotations

import os

import torch

from zerostd.errors import PrepareError

VARIABLE = "ZEROSTD_DEBUG"


def _read_modes() -> set[str]:
    text = os.environ.get(VARIABLE, "")
    words = {word.strip() for word in text.split(",")} - {""}
    unknown = words - {"poison", "serial"}
    if unknown:
        raise PrepareError(f"{VARIABLE}={text!r}: {min(unknown)!r} is unknown; use poison, serial or both")
    return words


DEBUG = _read_modes()  # the modes that are on


def poison(tensor: torch.Tensor) -> None:
    """Overwrite `tensor` in the current stream, so that stale reads of it are seen; only if poison is on."""
    if "poison" in DEBUG and tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif "poison" in DEBUG:
        tensor.fill_(255 if tensor.dtype == torch.uint8 else -1)
