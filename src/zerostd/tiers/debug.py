"""Debug modes, from the environment variable ZEROSTD_DEBUG: words separated by commas.

- poison: fill memory with NaN when it is freed or reused, so that a late read shows in the loss.
- serial: wait for every update before step() returns, and begin none inside backward.
- nan: log every gradient with a value that is not finite as it arrives: the parameter, the rank and the step.
- checksums: check masters and states in host memory before each update.
- late: delay a part of the background work by up to 0.1 s, at random, to find code that does not wait for it.
"""

from __future__ import annotations

import logging
import os
import random
import time

import torch

from zerostd.compat import version_of
from zerostd.errors import PrepareError, StorageError
from zerostd.kernels import crc32

VARIABLE = "ZEROSTD_DEBUG"
WORDS = ("poison", "serial", "nan", "checksums", "late")
MOST_LATE_S = 0.1
LATE_PART = 0.25  # of the background work: if all of it is late, little overtakes other work
_CHANCE = random.Random()  # a separate generator: the user's random numbers do not change
log = logging.getLogger("zerostd")


def _read_modes() -> set[str]:
    text = os.environ.get(VARIABLE, "")
    words = {word.strip() for word in text.split(",")} - {""}
    unknown = words - {*WORDS}
    if unknown:
        raise PrepareError(
            f"{VARIABLE}={text!r}: {min(unknown)!r} is unknown; use {', '.join(WORDS)} or several of them"
        )
    return words


DEBUG = _read_modes()  # the modes that are on


def poison(tensor: torch.Tensor) -> None:
    """Overwrite `tensor` in the current stream, so that stale reads of it are seen; only if poison is on."""
    if "poison" in DEBUG and tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif "poison" in DEBUG:
        tensor.fill_(255 if tensor.dtype == torch.uint8 else -1)


def be_late() -> None:
    """Sleep for a moment before a piece of work; only if late is on."""
    if "late" in DEBUG and _CHANCE.random() < LATE_PART:
        time.sleep(_CHANCE.uniform(0.0, MOST_LATE_S))


def trace_non_finite(gradient: torch.Tensor, what: str) -> None:
    """Log that a gradient has values that are not finite, and how many; only if nan is on. Waits for the device."""
    if "nan" in DEBUG and not bool(torch.isfinite(gradient).all()):
        num_nan = int(torch.isnan(gradient).sum())
        num_infinite = int(torch.isinf(gradient).sum())
        log.warning("%s: %d NaN and %d infinite of %d values", what, num_nan, num_infinite, gradient.numel())


class Seals:
    """Checksums of one tensor in host memory between updates, stretch by stretch."""

    def __init__(self) -> None:
        self._seals: dict[tuple[int, int], tuple[int, int]] = {}  # by start and stop: writes by others, checksum

    def close(self, tensor: torch.Tensor, part: slice) -> None:
        """Keep the checksum of a part that was updated. Torch counts other writes, such as those of users."""
        apart = [place for place in self._seals if place[1] <= part.start or part.stop <= place[0]]
        self._seals = {place: self._seals[place] for place in apart}
        self._seals[part.start, part.stop] = (version_of(tensor), crc32(tensor[part]))

    def check(self, tensor: torch.Tensor, part: slice, what: str) -> None:
        """Raise StorageError if bytes of a part have changed, and nothing of torch has written to the tensor."""
        version, expected = self._seals.get((part.start, part.stop), (-1, 0))
        checksum = crc32(tensor[part]) if version == version_of(tensor) else expected
        if checksum != expected:
            raise StorageError(
                f"the {tensor[part].nbytes} bytes at offset {part.start * tensor.itemsize} of {what} in host memory "
                f"are not those of the last update: checksum {expected:#010x} expected and {checksum:#010x} found. The "
                "memory is damaged, or code outside torch wrote there: load the last checkpoint into a new "
                "model, and check the memory"
            )
