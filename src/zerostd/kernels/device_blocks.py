"""Blocks of small integers on a device in one pass each, by Triton. Importing it needs triton.

The inputs are contiguous tensors, checked by `blocks.py`, which has the same in torch's operations, with the same bits.
Division rounds to nearest, and products are not fused with sums, so the bits are those of the CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
BLOCKS = tl.constexpr(32)  # of a program


@triton.jit(do_not_specialize=["num_blocks"])  # type: ignore[untyped-decorator]
def _encode(values, codes, scales, num_blocks, MOST: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block < num_blocks
    places = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    numbers = tl.load(values + places, mask=mask[:, None], other=0.0).to(tl.float32)
    largest = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    is_finite = largest < 0x7F800000
    most = tl.full((BLOCKS,), MOST, tl.float32)
    scale = tl.where(is_finite, tl.div_rn(largest.to(tl.float32, bitcast=True), most), float("nan"))
    has_codes = scale > 0.0
    divisor = tl.where(has_codes, scale, 1.0)
    quotients = tl.div_rn(numbers, tl.broadcast_to(divisor[:, None], (BLOCKS, 64)))
    quotients = tl.where(has_codes[:, None], quotients, 0.0)
    quotients = tl.minimum(tl.maximum(quotients, -MOST), MOST)
    integers = ((quotients + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: the sum rounds to nearest even
    tl.store(scales + block, scale, mask=mask)
    if BITS == 8:
        tl.store(codes + places, integers.to(tl.int8), mask=mask[:, None])
    else:
        lower, upper = tl.split(tl.reshape(integers + 8, (BLOCKS, 32, 2)))
        halves = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(codes + halves, (lower | (upper << 4)).to(tl.int8), mask=mask[:, None])


@triton.jit(do_not_specialize=["num_blocks"])  # type: ignore[untyped-decorator]
def _decode(codes, scales, out, num_blocks, SLICES: tl.constexpr, BITS: tl.constexpr, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block < num_blocks
    places = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    slice_words = num_blocks.to(tl.int64) * (2 * BITS + 1)  # of 4 bytes: the codes of a block, and its scale
    total = tl.full((BLOCKS, 64), -0.0, tl.float32)  # -0 plus a number is that number
    for index in range(SLICES):
        scale = tl.load(scales + index * slice_words + block, mask=mask, other=0.0)
        first = codes + index * slice_words * 4
        if BITS == 8:
            integers = tl.load(first + places, mask=mask[:, None], other=0).to(tl.int32)
        else:
            halves = block[:, None] * 32 + tl.arange(0, 32)[None, :]
            pairs = tl.load(first + halves, mask=mask[:, None], other=0).to(tl.int32)
            integers = tl.reshape(tl.join(pairs & 15, (pairs >> 4) & 15), (BLOCKS, 64)) - 8
        total += integers.to(tl.float32) * scale[:, None]
    total *= 1.0 / SLICES
    if ADD:
        total += tl.load(out + places, mask=mask[:, None], other=0.0)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=mask[:, None])


def encode(values: Tensor, bits: int, codes: Tensor, scales: Tensor, most: int) -> None:
    """Write codes and scales."""
    num_blocks = scales.numel()
    if num_blocks:
        grid = (triton.cdiv(num_blocks, BLOCKS.value),)
        _encode[grid](
            values, codes.view(torch.int8), scales, num_blocks, MOST=float(most), BITS=bits, enable_fp_fusion=False
        )


def decode(codes: Tensor, scales: Tensor, bits: int, out: Tensor, *, accumulate: bool) -> None:
    """Write or add the mean of slices that lie one after another: rows of codes, and of the scales behind them."""
    num_blocks = out.numel() // BLOCK
    if num_blocks:
        grid = (triton.cdiv(num_blocks, BLOCKS.value),)
        _decode[grid](
            codes.view(torch.int8),
            scales,
            out,
            num_blocks,
            SLICES=len(codes),
            BITS=bits,
            ADD=accumulate,
            enable_fp_fusion=False,
        )
