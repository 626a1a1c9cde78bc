"""Staging: a few buffers on the device that gradients pass through in turn; one fills while another empties.

The reducer has one on the way to the wires. Gradients that rest on the host share one on their way down and up.
"""

from __future__ import annotations

import torch

from zerostd.monitoring import Ledger
from zerostd.policy import Kind
from zerostd.tiers import Done, Transfer

NUM_STAGING = 2


class Staging:
    """`NUM_STAGING` buffers of the same size, as large as the largest gradient that passes."""

    def __init__(self) -> None:
        self._memories: list[torch.Tensor] = []
        self._free: list[Transfer] = []  # by buffer: when what passes through it has left
        self._turn = 0

    def reserve(self, num_bytes: int, device: torch.device, ledger: Ledger) -> None:
        """Make the buffers at least this large."""
        if self._memories and self._memories[0].nbytes >= num_bytes:
            return
        for free in self._free:
            free.wait()  # what is on its way must have left before the memory can be another tensor's
        ledger.leave(Kind.BUFFERS, sum(memory.nbytes for memory in self._memories))
        self._memories = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_STAGING)]
        self._free = [Done() for _ in range(NUM_STAGING)]
        ledger.enter(Kind.BUFFERS, num_bytes * NUM_STAGING)

    def take_turn(self) -> int:
        """Return the number of the next buffer. It may be in use until `free(number)`."""
        self._turn = (self._turn + 1) % NUM_STAGING
        return self._turn

    def buffer(self, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the beginning of a buffer as a tensor."""
        return self._memories[number][: numel * dtype.itemsize].view(dtype)

    def free(self, number: int) -> Transfer:
        """Return the transfer after which a buffer may be written."""
        return self._free[number]

    def occupy(self, number: int, until: Transfer) -> None:
        """Keep a buffer from being written until a transfer is over."""
        self._free[number] = until
