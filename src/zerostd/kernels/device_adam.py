"""Adam with split masters on a device in one pass, by Triton. Importing it needs triton.

A gradient of any dtype comes in, and the halves of the master and both averages are changed. torch's optimizer would
need the gradient in fp32 and the master in one piece: 26 bytes of device memory an element here, 50 there. Quotients
and roots round to nearest, and products are not fused with sums. If the count of steps is on the device, the numbers
that depend on it are made there, else on the host: the same bits, and a launch less.
"""

import functools
import math
import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerostd.kernels.device_tiles import COUNT, KernelCall, compiled_call
from zerostd.kernels.rules import Adam, Split

BLOCK = 1024  # elements of a program
BITS = tl.constexpr(31)  # of a count of steps
NUM_BITS = BITS.value


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(step, numbers, lr, lr_rest, BETA1: tl.constexpr, BETA2: tl.constexpr):  # type: ignore[no-untyped-def]
    count = tl.load(step).to(tl.int32)
    base1 = tl.full((), BETA1, tl.float64)
    base2 = tl.full((), BETA2, tl.float64)
    power1 = tl.full((), 1.0, tl.float64)
    power2 = tl.full((), 1.0, tl.float64)
    for _ in range(BITS):
        is_set = (count & 1) == 1
        power1 = tl.where(is_set, power1 * base1, power1)
        power2 = tl.where(is_set, power2 * base2, power2)
        base1 = base1 * base1
        base2 = base2 * base2
        count = count >> 1
    rate = (tl.full((), 0.0, tl.float64) + lr + lr_rest) / (1.0 - power1)
    tl.store(numbers, -rate.to(tl.float32))
    tl.store(numbers + 1, tl.sqrt(1.0 - power2).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _adam(  # type: ignore[no-untyped-def]
    gradient, factor, high, low, new_high, averages, squares, numbers,
    numel, rate, root, decay, new_part, old_square, new_square, eps,
    COUNTED: tl.constexpr, FACTOR: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr, DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < numel
    g = tl.load(gradient + places, mask=mask, other=0.0).to(tl.float32)
    if FACTOR:
        g = g * tl.load(factor)
    if MAXIMIZE:
        g = -g
    upper = tl.load(high + places, mask=mask, other=0).to(tl.int32)
    lower = tl.load(low + places, mask=mask, other=0).to(tl.int32)
    p = ((upper << 16) + lower).to(tl.float32, bitcast=True)
    if DECOUPLED:
        p = p * decay
    if COUPLED:
        g = g + p * decay
    m = tl.load(averages + places, mask=mask, other=0.0)
    m = m + (g - m) * new_part
    v = tl.load(squares + places, mask=mask, other=0.0)
    v = v * old_square + g * new_square * g
    if not COUNTED:
        rate = tl.load(numbers)
        root = tl.load(numbers + 1)
    p = p + tl.div_rn(m * rate, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(averages + places, m, mask=mask)
    tl.store(squares + places, v, mask=mask)
    bits = p.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # one NaN, which no carry can change
    bits = tl.where((bits & 0x1FFFF) == 0x8000, bits - 1, bits)  # ties with an even upper half
    tl.store(low + places, bits.to(tl.int16), mask=mask)
    tl.store(new_high + places, ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)


def adam(
    rule: Adam, step: Tensor, gradient: Tensor, factor: Tensor | None, master: Split, high: Tensor, states: list[Tensor]
) -> None:
    """Update the master's halves and the states in place, for the step that `step` counts; the upper half goes to
    `high`. `rule.step` is ignored."""
    numel = gradient.numel()
    if numel:
        arguments, constants = _arguments(rule, step, gradient, factor, master, high, states)
        _adam[(triton.cdiv(numel, BLOCK),)](*arguments.values(), **constants)


def call(
    rule: Adam, step: Tensor, gradient: Tensor, factor: Tensor | None, master: Split, high: Tensor, states: list[Tensor]
) -> KernelCall | None:
    """Return what `adam` would launch, for native code; None if that cannot launch it. `step` is on the host."""
    arguments, constants = _arguments(rule, step, gradient, factor, master, high, states)
    kernel = _adam.warmup(*arguments.values(), grid=(1,), **constants)
    address = gradient.data_ptr() if factor is None else factor.data_ptr()
    return compiled_call(kernel, {**arguments, "factor": address, "numel": COUNT}, BLOCK)


def _arguments(
    rule: Adam, step: Tensor, gradient: Tensor, factor: Tensor | None, master: Split, high: Tensor, states: list[Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the kernel by name and in order, and its constants."""
    lr = _as_float(rule.lr)
    is_counted = step.device.type == "cpu"
    rate = root = 0.0
    numbers = gradient  # which is not read as such
    if is_counted:
        rate, root = _host_numbers(int(step.item()), lr, _as_float(rule.lr - lr), rule.beta1, rule.beta2)
    else:
        numbers = torch.empty(2, dtype=torch.float32, device=gradient.device)
        _numbers[(1,)](step, numbers, lr, rule.lr - lr, BETA1=rule.beta1, BETA2=rule.beta2)
    arguments = {
        "gradient": gradient,
        "factor": gradient if factor is None else factor,
        "high": master.high.view(torch.int16),
        "low": master.low,
        "new_high": high.view(torch.int16),
        "averages": states[0],
        "squares": states[1],
        "numbers": numbers,
        "numel": gradient.numel(),
        "rate": rate,
        "root": root,
        "decay": 1 - rule.lr * rule.weight_decay if rule.decoupled else rule.weight_decay,
        "new_part": 1 - rule.beta1,
        "old_square": rule.beta2,
        "new_square": 1 - rule.beta2,
        "eps": rule.eps,
    }
    constants = {
        "COUNTED": is_counted,
        "FACTOR": factor is not None,
        "MAXIMIZE": rule.maximize,
        "COUPLED": rule.weight_decay != 0 and not rule.decoupled,
        "DECOUPLED": rule.weight_decay != 0 and rule.decoupled,
        "BLOCK": BLOCK,
        "enable_fp_fusion": False,
    }
    return arguments, constants


@functools.lru_cache(maxsize=16)
def _host_numbers(count: int, lr: float, lr_rest: float, beta1: float, beta2: float) -> tuple[float, float]:
    """Return what `_numbers` makes on a device, by the same operations."""
    powers = [1.0, 1.0]
    bases = [beta1, beta2]
    for bit in range(NUM_BITS):
        for index, base in enumerate(bases):
            if count >> bit & 1:
                powers[index] *= base
            bases[index] = base * base
    return -(lr + lr_rest) / (1.0 - powers[0]), math.sqrt(1.0 - powers[1])


def _as_float(number: float) -> float:
    """Return a number rounded to fp32."""
    (rounded,) = struct.unpack("f", struct.pack("f", number))
    return float(rounded)
