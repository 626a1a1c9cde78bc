"""What the halves of split masters must be, for every lower half."""

from __future__ import annotations

import torch
from torch import Tensor

from zerostd.kernels import Split, join

UPPER = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x4049, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF]


def every_lower_half() -> Tensor:
    """All 65,536 lower halves under upper halves of either sign: zero, denormal, normal, largest, infinite and NaN."""
    upper = torch.tensor(UPPER + [half - 0x8000 for half in UPPER], dtype=torch.int32)
    return ((upper << 16)[:, None] + torch.arange(2**16, dtype=torch.int32)).flatten().view(torch.float32)


def moved_from_ties(numbers: Tensor) -> Tensor:
    """Move ties with an even upper half by one unit of fp32 towards zero."""
    bits = numbers.view(torch.int32)
    return torch.where((bits & 0x1FFFF) == 0x8000, bits - 1, bits).view(torch.float32)


def assert_halves(halves: Split, numbers: Tensor) -> None:
    """Hold the upper half to the number as torch rounds it, and both to the number, but for those ties."""
    is_nan = numbers.isnan()
    expected = moved_from_ties(numbers)
    assert 0 < (expected.view(torch.int32) != numbers.view(torch.int32)).sum() < numbers.numel() / 50_000
    rounded = numbers.bfloat16()
    assert ((halves.high.view(torch.int16) == rounded.view(torch.int16)) | is_nan).all()
    assert ((expected.bfloat16().view(torch.int16) == rounded.view(torch.int16)) | is_nan).all()
    assert ((join(halves).view(torch.int32) == expected.view(torch.int32)) | is_nan).all()
    assert halves.high[is_nan].isnan().all() and join(halves)[is_nan].isnan().all()
