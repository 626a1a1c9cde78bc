"""The update of coded moments on a device in one pass, by Triton. Importing it needs triton.

The inputs are contiguous tensors, checked by `operations.py`; `moments.py` has the same in torch's operations, with the
same bits: quotients and roots round to nearest, and products are not fused with sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerostd.kernels.rules import Adam, Split, UpdateArguments

BLOCK = 64
BLOCKS = tl.constexpr(16)  # of a program
RECORD = tl.constexpr(68)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(numbers, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    largest = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    size = largest.to(tl.float32, bitcast=True)
    return tl.where(largest < 0x7E800000, tl.where(size < LEAST, 0.0, size), float("nan"))


@triton.jit
def _store(coded, block, codes, scale, mask):  # type: ignore[no-untyped-def]
    codes = tl.where((scale > 0.0)[:, None], codes, 0.0)
    integers = ((codes + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: the sum rounds to nearest even
    places = block[:, None] * RECORD + tl.arange(0, 64)[None, :]
    tl.store(coded + places, integers.to(tl.int8), mask=mask[:, None])
    tl.store((coded + block * RECORD + 64).to(tl.pointer_type(tl.float32)), scale, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    gradient, factor, master, low, averages, squares,
    new_master, new_low, new_averages, new_squares, weight,
    numel, decay, new_part, old_part, square_part, rate, eps,
    FACTOR: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr, DECOUPLED: tl.constexpr,
    SPLIT: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block * 64 < numel
    places = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    within = places < numel
    g = tl.load(gradient + places, mask=within, other=0.0).to(tl.float32)
    if FACTOR:
        g = g * tl.load(factor)
    if MAXIMIZE:
        g = -g
    if SPLIT:
        upper = tl.load(master + places, mask=within, other=0).to(tl.int32)
        lower = tl.load(low + places, mask=within, other=0).to(tl.int32)
        p = ((upper << 16) + lower).to(tl.float32, bitcast=True)
    else:
        p = tl.load(master + places, mask=within, other=0.0)
    if COUPLED:
        g = g + p * decay
    records = block[:, None] * RECORD + tl.arange(0, 64)[None, :]
    codes = tl.load(averages + records, mask=mask[:, None], other=0).to(tl.float32)
    scale = tl.load((averages + block * RECORD + 64).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    m = tl.div_rn(codes, 254.0 - tl.abs(codes)) * scale[:, None]
    codes = (tl.load(squares + records, mask=mask[:, None], other=0).to(tl.int32) & 255).to(tl.float32)
    scale = tl.load((squares + block * RECORD + 64).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    r = codes * 0.003921568859368563 * scale[:, None]  # 1 / 255 in fp32
    m = m + (g - m) * new_part
    r = tl.sqrt_rn(r * r * old_part + g * square_part * g)
    if DECOUPLED:
        p = p * decay
    p = p + tl.div_rn(m * rate, r + eps)
    if WEIGHT:
        tl.store(weight + places, p.to(weight.dtype.element_ty), mask=within)
    if SPLIT:
        bits = p.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
        bits = tl.where((bits & 0x1FFFF) == 0x8000, bits - 1, bits)  # ties with an even upper half
        tl.store(new_low + places, bits.to(tl.int16), mask=within)
        tl.store(new_master + places, ((bits + 0x8000) >> 16).to(tl.int16), mask=within)
    else:
        tl.store(new_master + places, p, mask=within)
    scale = _scale(m, 7.888609052210118e-31)  # 2^-100
    divisor = tl.where(scale > 0.0, scale, 1.0)
    _store(new_averages, block, tl.div_rn(m, divisor[:, None] + tl.abs(m)) * 254.0, scale, mask)
    scale = _scale(r, 5.551115123125783e-17)  # 2^-54
    divisor = tl.where(scale > 0.0, scale, 1.0)
    per_code = tl.div_rn(tl.full((BLOCKS,), 255.0, tl.float32), divisor)
    least = tl.minimum(r * 1.329227995784916e36, 1.0)  # 2^120: 1 unless the root is zero
    _store(new_squares, block, tl.maximum(r * per_code[:, None], least), scale, mask)


def update(step: UpdateArguments, numbers: tuple[float, ...]) -> None:
    """Take a step with these numbers: those of `moments.Numbers`."""
    rule = step.rule
    numel = step.gradient.numel()
    assert isinstance(rule, Adam)
    if not numel:
        return
    is_split = isinstance(step.source[0], Split)
    has_factor = isinstance(step.factor, Tensor) or step.factor != 1.0
    factor = step.factor
    if not isinstance(factor, Tensor):
        factor = step.gradient.new_full((), factor, dtype=torch.float32) if has_factor else step.gradient
    _update[(triton.cdiv(numel, BLOCK * BLOCKS.value),)](
        *(step.gradient, factor, *_arrays(step.source), *_arrays(step.target)),
        step.gradient if step.weight is None else step.weight,
        numel,
        *numbers,
        FACTOR=has_factor,
        MAXIMIZE=rule.maximize,
        COUPLED=rule.weight_decay != 0 and not rule.decoupled,
        DECOUPLED=rule.weight_decay != 0 and rule.decoupled,
        SPLIT=is_split,
        WEIGHT=step.weight is not None,
        enable_fp_fusion=False,
    )


def _arrays(arrays: tuple[Any, ...]) -> list[Tensor]:
    master, averages, squares = arrays
    halves = (master.high.view(torch.int16), master.low) if isinstance(master, Split) else (master, master)
    return [*halves, averages.view(torch.int8), squares.view(torch.int8)]
