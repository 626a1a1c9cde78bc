"""fp32 numbers kept as two halves of 16 bits, the upper one of which is the bf16 weight that the model computes with.

In comes an fp32 tensor, out go the halves, and back, bit for bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """The halves of an fp32 tensor: `(high << 16) + low`, with `low` signed, are the bits of a number.

    `high` is the number rounded to bf16, to nearest with ties away from zero (ties to even could not be undone: `low`
    would not say which way a tie went). Infinities survive in both; a NaN survives as one NaN, its payload does not.
    """

    high: Tensor  # bf16
    low: Tensor  # int16


def split(master: Tensor) -> Split:
    """Return the halves of an fp32 tensor, in new memory."""
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    return Split(_lower((bits + 0x8000) >> 16).view(torch.bfloat16), _lower(bits))


def join(halves: Split) -> Tensor:
    """Return the fp32 tensor of the halves, in new memory."""
    high = halves.high.view(torch.int16).to(torch.int32)
    return ((high << 16) + halves.low.to(torch.int32)).view(torch.float32)


def _lower(bits: Tensor) -> Tensor:
    return bits.to(torch.int16)  # torch keeps the lower 16 bits
