"""Pages: the unit in which files are read and written past the page cache, so arenas are laid out in whole pages."""

from __future__ import annotations

import torch

PAGE = 4096  # the largest logical block of common drives


def padded(num_bytes: int) -> int:
    """Return the bytes of the whole pages that `num_bytes` take."""
    return -(-num_bytes // PAGE) * PAGE


def aligned(num_bytes: int) -> torch.Tensor:
    """Return ordinary host memory that starts on a page."""
    memory = torch.empty(num_bytes + PAGE, dtype=torch.uint8)
    skip = -memory.data_ptr() % PAGE
    return memory[skip : skip + num_bytes]
