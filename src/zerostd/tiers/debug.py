"""Debug mode, from the environment variable ZEROSTD_DEBUG: words separated by commas.

poison   memory that is given back or will be used again is filled with NaN first, so that whoever reads it too late
         shows it in the loss
serial   every update is waited for before step() returns, and none begins inside backward
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from zerostd.errors import PrepareError

__all__ = ["DEBUG", "Debug"]

VARIABLE = "ZEROSTD_DEBUG"


@dataclass
class Debug:
    """What is switched on."""

    poisons: bool = False
    is_serial: bool = False

    @classmethod
    def from_environment(cls) -> Debug:
        """As the variable says; an unknown word is an error."""
        words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
        for word in words:
            if word not in ("poison", "serial"):
                raise PrepareError(
                    f"{VARIABLE}={os.environ[VARIABLE]!r}: {word!r} is unknown; use poison, serial or both"
                )
        return cls("poison" in words, "serial" in words)

    def poison(self, tensor: torch.Tensor) -> None:
        """Make stale reads of `tensor` visible, on the current stream."""
        if self.poisons and tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif self.poisons:
            tensor.fill_(255 if tensor.dtype == torch.uint8 else -1)


DEBUG = Debug.from_environment()
