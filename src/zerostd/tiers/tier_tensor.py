"""A tier tensor: numbers in a row that are kept in one tier.

On the device and the host it is a torch tensor, and whoever works on it works on that. On disk it is an interval of a
file, read and written in parts: through memory of the caller's or, outside the step, through memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerostd.policy import Tier
from zerostd.tiers.disk import Disk, Extent
from zerostd.tiers.pages import PAGE, aligned
from zerostd.tiers.transfer import Transfer


@dataclass(eq=False)
class TierTensor:
    """`numel` numbers of one dtype. `tensor` is None on disk."""

    numel: int
    dtype: torch.dtype
    tier: Tier
    tensor: torch.Tensor | None
    disk: Disk | None = None
    extent: Extent | None = None
    offset: int = 0  # bytes, in the extent

    @classmethod
    def cut(
        cls, memory: torch.Tensor | Extent, start: int, numel: int, dtype: torch.dtype, disk: Disk | None
    ) -> TierTensor:
        """Return the numbers from byte `start` of host memory or of an extent on `disk`."""
        if isinstance(memory, Extent):
            return cls(numel, dtype, Tier.DISK, None, disk, memory, start)
        return cls(numel, dtype, Tier.HOST, memory[start : start + numel * dtype.itemsize].view(dtype))

    def read(self, part: slice, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return the numbers of a part: a view, or from disk a copy. Holds the host, so it is not for the step.

        The copy is in `memory`, which starts on a page and has one to spare, or in memory of its own.
        """
        if self.tensor is not None:
            return self.tensor[part]
        low = part.start * self.dtype.itemsize // PAGE * PAGE
        size = part.stop * self.dtype.itemsize - low
        buffer = aligned(size) if memory is None else memory[:size]
        self.start_read(low // self.dtype.itemsize, buffer).wait()
        skip = part.start * self.dtype.itemsize - low
        return buffer[skip:].view(self.dtype)

    def write(self, part: slice, values: torch.Tensor) -> None:
        """Write numbers to a part. Holds the host, so it is not for the step."""
        if self.tensor is not None:
            self.tensor[part].copy_(values)
            return
        if part.start == part.stop:
            return
        per_page = PAGE // self.dtype.itemsize
        low = part.start // per_page * per_page
        high = min(self.numel, -(-part.stop // per_page) * per_page)
        buffer = aligned((high - low) * self.dtype.itemsize)
        shared = {low} if low < part.start else set()  # pages that hold more than the part
        shared |= {(high - 1) // per_page * per_page} if part.stop < high else set()
        for page in shared:
            begin = (page - low) * self.dtype.itemsize
            self.start_read(page, buffer[begin : begin + PAGE]).wait()
        buffer.view(self.dtype)[part.start - low : part.stop - low].copy_(values)
        self.start_write(low, buffer).wait()

    def start_read(self, start: int, target: torch.Tensor) -> Transfer:
        """Start reading from disk, from element `start` (on a page), into memory that starts on a page."""
        assert self.disk is not None and self.extent is not None
        return self.disk.read(self.extent, self.offset + start * self.dtype.itemsize, target)

    def start_write(self, start: int, source: torch.Tensor) -> Transfer:
        """Start writing to disk, to element `start` (on a page), from memory that starts on a page."""
        assert self.disk is not None and self.extent is not None
        return self.disk.write(self.extent, self.offset + start * self.dtype.itemsize, source)
