"""A column on disk takes parts that begin and end anywhere, and leaves what is around them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from zerostd.monitoring import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers import TierTensor, Transfer
from zerostd.tiers.disk import Disk
from zerostd.tiers.extents import Extent
from zerostd.tiers.host import padded

NUMEL = 50_003


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
def test_parts_anywhere(dtype: torch.dtype, tmp_path: Path) -> None:
    disk = Disk(str(tmp_path), Ledger())
    room = padded(NUMEL * dtype.itemsize)
    extent = disk.allocate(3 * room, Kind.OPTIMIZER_STATES)
    columns = [TierTensor(NUMEL, dtype, Tier.DISK, None, disk, extent, place * room) for place in range(3)]
    expected = [torch.zeros(NUMEL, dtype=dtype) for _ in columns]
    draw = random.Random(0)
    ends = [0, 1, NUMEL - 1, NUMEL, 4096 // dtype.itemsize, 8192 // dtype.itemsize, 8192 // dtype.itemsize + 1]
    for _ in range(300):
        low, high = sorted(draw.choice([*ends, draw.randrange(NUMEL + 1), draw.randrange(NUMEL + 1)]) for _ in "ab")
        which = draw.randrange(3)
        values = (torch.arange(high - low) * draw.randrange(1, 9) % 251).to(dtype)
        columns[which].write(slice(low, high), values)
        expected[which][low:high] = values
        low, high = sorted(draw.randrange(NUMEL + 1) for _ in "ab")
        assert torch.equal(columns[which].read(slice(low, high)), expected[which][low:high])
    for column, values in zip(columns, expected, strict=True):
        assert torch.equal(column.read(slice(0, NUMEL)), values)
    disk.close()


def test_only_pages_that_hold_more_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(str(tmp_path), Ledger())
    read = disk.read
    sizes: list[int] = []

    def counted(extent: Extent, offset: int, target: torch.Tensor) -> Transfer:
        sizes.append(target.nbytes)
        return read(extent, offset, target)

    monkeypatch.setattr(disk, "read", counted)
    extent = disk.allocate(padded(NUMEL * 4), Kind.OPTIMIZER_STATES)
    column = TierTensor(NUMEL, torch.float32, Tier.DISK, None, disk, extent, 0)
    for part, pages in ((slice(0, NUMEL), 0), (slice(1024, 4096), 0), (slice(1000, 4096), 1), (slice(7, 40_001), 2)):
        sizes.clear()
        column.write(part, torch.ones(part.stop - part.start))
        assert sizes == [4096] * pages, part
    disk.close()
