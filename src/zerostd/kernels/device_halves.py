"""Joining and splitting masters on a device in one pass each, by Triton. Importing it needs triton.

The inputs are contiguous tensors of one length; `rules.py` has the same in torch's operations, with the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of a program


@triton.jit  # type: ignore[untyped-decorator]
def _join(high, low, master, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < numel
    upper = tl.load(high + places, mask=mask).to(tl.int32)
    lower = tl.load(low + places, mask=mask).to(tl.int32)
    tl.store(master + places, (upper << 16) + lower, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _split(master, high, low, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < numel
    bits = tl.load(master + places, mask=mask)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits = tl.where(is_nan, 0x7FC00000, bits)  # one NaN, which no carry can change
    bits = tl.where((bits & 0x1FFFF) == 0x8000, bits - 1, bits)  # ties with an even upper half
    tl.store(low + places, bits.to(tl.int16), mask=mask)
    tl.store(high + places, ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)


def join(high: Tensor, low: Tensor, master: Tensor) -> None:
    """Write the fp32 numbers of two halves."""
    numel = master.numel()
    if numel:
        grid = (triton.cdiv(numel, BLOCK),)
        _join[grid](high.view(torch.int16), low, master.view(torch.int32), numel, BLOCK=BLOCK)


def split(master: Tensor, high: Tensor, low: Tensor) -> None:
    """Write the halves of fp32 numbers."""
    numel = master.numel()
    if numel:
        grid = (triton.cdiv(numel, BLOCK),)
        _split[grid](master.view(torch.int32), high.view(torch.int16), low, numel, BLOCK=BLOCK)
