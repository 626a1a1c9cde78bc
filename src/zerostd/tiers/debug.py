"""Debug modes, from the environment variable ZEROSTD_DEBUG: words separated by commas.

poison   fill memory that is given back or will be used again with NaN, so that a late read shows in the loss
serial   wait for every update before step() returns, and begin none inside backward
nan      log every gradient with a value that is not finite as it arrives: the parameter, the rank and the step
"""

from __future__ import annotations

import logging
import os

import torch

from zerostd.errors import PrepareError

VARIABLE = "ZEROSTD_DEBUG"
log = logging.getLogger("zerostd")


def _read_modes() -> set[str]:
    text = os.environ.get(VARIABLE, "")
    words = {word.strip() for word in text.split(",")} - {""}
    unknown = words - {"poison", "serial", "nan"}
    if unknown:
        raise PrepareError(
            f"{VARIABLE}={text!r}: {min(unknown)!r} is unknown; use poison, serial, nan or several of them"
        )
    return words


DEBUG = _read_modes()  # the modes that are on


def poison(tensor: torch.Tensor) -> None:
    """Overwrite `tensor` in the current stream, so that stale reads of it are seen; only if poison is on."""
    if "poison" in DEBUG and tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif "poison" in DEBUG:
        tensor.fill_(255 if tensor.dtype == torch.uint8 else -1)


def trace_non_finite(gradient: torch.Tensor, what: str) -> None:
    """Log that a gradient has values that are not finite, and how many; only if nan is on. Waits for the device."""
    if "nan" in DEBUG and not bool(torch.isfinite(gradient).all()):
        num_nan = int(torch.isnan(gradient).sum())
        num_infinite = int(torch.isinf(gradient).sum())
        log.warning("%s: %d NaN and %d infinite of %d values", what, num_nan, num_infinite, gradient.numel())
