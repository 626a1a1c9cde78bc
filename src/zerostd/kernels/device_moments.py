"""The update of coded moments on a device in one pass, by Triton. Importing it needs triton.

The inputs are contiguous tensors, checked by `operations.py`; `moments.py` has the same in torch's operations, with the
same bits: quotients and roots round to nearest, and products are not fused with sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerostd.kernels.device_tiles import COUNT, KernelCall, compiled_call
from zerostd.kernels.rules import Adam, Split, UpdateArguments

BLOCK = 64
BLOCKS = tl.constexpr(16)  # of a program
RECORD = tl.constexpr(68)


@triton.jit
def _load_int8(averages, squares, block, mask):  # type: ignore[no-untyped-def]
    records = block[:, None] * RECORD + tl.arange(0, 64)[None, :]
    codes = tl.load(averages + records, mask=mask[:, None], other=0).to(tl.float32)
    scale = tl.load((averages + block * RECORD + 64).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    m = tl.div_rn(codes, 254.0 - tl.abs(codes)) * scale[:, None]
    codes = (tl.load(squares + records, mask=mask[:, None], other=0).to(tl.int32) & 255).to(tl.float32)
    scale = tl.load((squares + block * RECORD + 64).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    r = codes * 0.003921568859368563 * scale[:, None]  # 1 / 255 in fp32
    return m, r * r


@triton.jit  # type: ignore[untyped-decorator]
def _scale(numbers, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    largest = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    size = largest.to(tl.float32, bitcast=True)
    return tl.where(largest < 0x7E800000, tl.where(size < LEAST, 0.0, size), float("nan"))


@triton.jit
def _store_codes(coded, block, codes, scale, mask):  # type: ignore[no-untyped-def]
    codes = tl.where((scale > 0.0)[:, None], codes, 0.0)
    integers = ((codes + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: the sum rounds to nearest even
    places = block[:, None] * RECORD + tl.arange(0, 64)[None, :]
    tl.store(coded + places, integers.to(tl.int8), mask=mask[:, None])
    tl.store((coded + block * RECORD + 64).to(tl.pointer_type(tl.float32)), scale, mask=mask)


@triton.jit
def _plain_bits(numbers):  # type: ignore[no-untyped-def]
    bits = numbers.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    bits = tl.where(size < 0x00800000, 0, bits)  # subnormal
    return tl.where(size > 0x7F800000, 0x7FC00000, bits).to(tl.uint32)


@triton.jit
def _noise(m, v, key):  # type: ignore[no-untyped-def]
    noise = (_plain_bits(v) ^ (_plain_bits(m) << 16)) + key.to(tl.uint32, bitcast=True)
    noise = (noise ^ (noise >> 16)) * 0x21F0AAAD
    noise = (noise ^ (noise >> 15)) * 0x735A2D97
    return noise ^ (noise >> 15)


@triton.jit
def _shift(noise):  # type: ignore[no-untyped-def]
    return (2 * noise + 1).to(tl.int32).to(tl.float32) * 1.52587890625e-05 - 0.5  # 2^-16


@triton.jit
def _store_int8(averages, squares, block, m, r, noise, mask):  # type: ignore[no-untyped-def]
    scale = _scale(m, 7.888609052210118e-31)  # 2^-100
    divisor = tl.where(scale > 0.0, scale, 1.0)
    codes = tl.div_rn(m, divisor[:, None] + tl.abs(m)) * 254.0 + _shift((noise & 0xFFFF) >> 1)
    _store_codes(averages, block, codes, scale, mask)
    scale = _scale(r, 5.551115123125783e-17)  # 2^-54
    divisor = tl.where(scale > 0.0, scale, 1.0)
    per_code = tl.div_rn(tl.full((BLOCKS,), 255.0, tl.float32), divisor)
    least = tl.minimum(r * 1.329227995784916e36, 1.0)  # 2^120: 1 unless the root is zero
    _store_codes(squares, block, tl.maximum(r * per_code[:, None] + _shift(noise >> 17), least), scale, mask)


@triton.jit
def _load_bf16(state, places, within):  # type: ignore[no-untyped-def]
    return (tl.load(state + places, mask=within, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store_bf16(averages, squares, places, m, v, noise, within):  # type: ignore[no-untyped-def]
    tl.store(averages + places, ((_plain_bits(m) + (noise & 0xFFFF)) >> 16).to(tl.int16), mask=within)
    tl.store(squares + places, ((_plain_bits(v) + (noise >> 16)) >> 16).to(tl.int16), mask=within)


@triton.jit  # type: ignore[untyped-decorator]
def _load_master(master, low, places, within, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    if SPLIT:
        upper = tl.load(master + places, mask=within, other=0).to(tl.int32)
        lower = tl.load(low + places, mask=within, other=0).to(tl.int32)
        p = ((upper << 16) + lower).to(tl.float32, bitcast=True)
    else:
        p = tl.load(master + places, mask=within, other=0.0)
    return p


@triton.jit  # type: ignore[untyped-decorator]
def _store_master(master, low, places, p, within, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    if SPLIT:
        bits = p.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
        bits = tl.where((bits & 0x1FFFF) == 0x8000, bits - 1, bits)  # ties with an even upper half
        tl.store(low + places, bits.to(tl.int16), mask=within)
        tl.store(master + places, ((bits + 0x8000) >> 16).to(tl.int16), mask=within)
    else:
        tl.store(master + places, p, mask=within)


@triton.jit(do_not_specialize=["key"])  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    gradient, factor, master, low, averages, squares,
    new_master, new_low, new_averages, new_squares, weight,
    numel, key, decay, new_part, old_part, square_part, rate, eps,
    FACTOR: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr, DECOUPLED: tl.constexpr,
    SPLIT: tl.constexpr, WEIGHT: tl.constexpr, BF16: tl.constexpr,
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
    p = _load_master(master, low, places, within, SPLIT)
    if COUPLED:
        g = g + p * decay
    if BF16:
        m = _load_bf16(averages, places, within)
        v = _load_bf16(squares, places, within)
    else:
        m, v = _load_int8(averages, squares, block, mask)
    m = m + (g - m) * new_part
    v = v * old_part + g * square_part * g
    r = tl.sqrt_rn(v)
    if DECOUPLED:
        p = p * decay
    p = p + tl.div_rn(m * rate, r + eps)
    if WEIGHT:
        tl.store(weight + places, p.to(weight.dtype.element_ty), mask=within)
    _store_master(new_master, new_low, places, p, within, SPLIT)
    noise = _noise(m, v, key)
    if BF16:
        _store_bf16(new_averages, new_squares, places, m, v, noise, within)
    else:
        _store_int8(new_averages, new_squares, block, m, r, noise, mask)


def update(step: UpdateArguments, numbers: tuple[float, ...]) -> None:
    """Take a step with these numbers: those of `moments.Numbers`."""
    numel = step.gradient.numel()
    if numel:
        arguments, constants = _arguments(step, numbers)
        _update[(triton.cdiv(numel, BLOCK * BLOCKS.value),)](*arguments.values(), **constants)


def call(step: UpdateArguments, numbers: tuple[float, ...]) -> KernelCall | None:
    """Return what `update` would launch, for native code; None if that cannot launch it."""
    arguments, constants = _arguments(step, numbers)
    kernel = _update.warmup(*arguments.values(), grid=(1,), **constants)
    address = arguments["factor"].data_ptr()
    return compiled_call(kernel, {**arguments, "factor": address, "numel": COUNT}, BLOCK * BLOCKS.value)


def _arguments(step: UpdateArguments, numbers: tuple[float, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the kernel by name and in order, and its constants."""
    rule = step.rule
    assert isinstance(rule, Adam)
    is_split = isinstance(step.source[0], Split)
    has_factor = isinstance(step.factor, Tensor) or step.factor != 1.0
    factor = step.factor
    if not isinstance(factor, Tensor):
        factor = step.gradient.new_full((), factor, dtype=torch.float32) if has_factor else step.gradient
    arrays = ("master", "low", "averages", "squares")
    arguments = {
        "gradient": step.gradient,
        "factor": factor,
        **dict(zip(arrays, _arrays(step.source), strict=True)),
        **dict(zip((f"new_{name}" for name in arrays), _arrays(step.target), strict=True)),
        "weight": step.gradient if step.weight is None else step.weight,
        "numel": step.gradient.numel(),
        "key": rule.key - (rule.key >> 31 << 32),  # signed
        **dict(zip(("decay", "new_part", "old_part", "square_part", "rate", "eps"), numbers, strict=True)),
    }
    constants = {
        "FACTOR": has_factor,
        "MAXIMIZE": rule.maximize,
        "COUPLED": rule.weight_decay != 0 and not rule.decoupled,
        "DECOUPLED": rule.weight_decay != 0 and rule.decoupled,
        "SPLIT": is_split,
        "WEIGHT": step.weight is not None,
        "BF16": step.coded_dtype is torch.bfloat16,
        "enable_fp_fusion": False,
    }
    return arguments, constants


def _arrays(arrays: tuple[Any, ...]) -> list[Tensor]:
    master, averages, squares = arrays
    halves = (master.high.view(torch.int16), master.low) if isinstance(master, Split) else (master, master)
    integer = torch.int16 if averages.dtype is torch.bfloat16 else torch.int8
    return [*halves, averages.view(integer), squares.view(integer)]
