"""Debug mode, from the environment variable ZEROSTD_DEBUG: words separated by commas.

poison   fill memory that is given back or will be used again with NaN, so that a late read shows in the loss
serial   wait for every update before step() returns, and begin none inside backward
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from zerostd.errors import PrepareError

VARIABLE = "ZEROSTD_DEBUG"


@dataclass
class Debug:
    """The debug modes that are on."""

    poisons: bool = False
    is_serial: bool = False

    @classmethod
    def from_environment(cls) -> Debug:
        """Read the variable; raise PrepareError for an unknown word."""
        words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
        for word in words:
            if word not in ("poison", "serial"):
                raise PrepareError(
                    f"{VARIABLE}={os.environ[VARIABLE]!r}: {word!r} is unknown; use poison, serial or both"
                )
        return cls("poison" in words, "serial" in words)

    def poison(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor` in the current stream, so that stale reads of it are seen; only if poison is on."""
        if self.poisons and tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif self.poisons:
            tensor.fill_(255 if tensor.dtype == torch.uint8 else -1)


DEBUG = Debug.from_environment()
