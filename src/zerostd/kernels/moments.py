"""Adam's moments in fewer bytes: what their codes mean, and the update of them in torch, on any device.

int8: a state is a row of records, 64 codes and one fp32 scale, the largest magnitude among 64 numbers. `exp_avg` is
companded by softsign, so that small numbers beside a large one keep their digits. Of `exp_avg_sq` the root is coded.

bf16: a state is a row of bf16 numbers.

At beta2=0.999 a step changes `exp_avg_sq` by less than half a unit of either, so rounded to nearest it would not fall
when gradients become smaller. An update therefore dithers. It rounds a number up or down at random, and the nearer
neighbour is as much more likely as it is nearer. The random bits are a hash of both moments of the element and of the
step. So they need no index, and do not depend on where in a tensor, a shard or a tile an element lies.

The bits are the same in src/native/update_moments.h and in `device_moments.py`: each operation rounds separately, roots
and quotients are rounded correctly. Without an update, numbers are rounded to nearest even. Decoded numbers get the
same codes when they are coded again, so checkpoints store numbers. `kernels.update` takes such states in place of fp32
ones.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, cast

import torch
from torch import Tensor

from zerostd.kernels.device_tiles import KernelCall
from zerostd.kernels.rules import Adam, Split, UpdateArguments, join, split, tried

TILE = 1 << 20  # numbers coded at once by torch, whose temporaries are fp32
BLOCK = 64  # codes of a record of int8
TOO_LARGE = 0x7E800000  # bits of 2^126: from here on sums may overflow, so a block with such a number is NaN
LEAST_AVERAGE = 2.0**-100  # scale; below it numbers count as zero
LEAST_ROOT = 2.0**-54
LEAST_NUMBER = 2.0**-126  # of bf16; below it they are subnormal


@dataclass(frozen=True)
class Moment:
    """One way to keep a state in fewer bytes. It is used in place of the dtype of a state."""

    name: str
    dtype: torch.dtype  # of the memory, where it tells which way it is
    block: int  # numbers that are coded together
    record: int  # elements of the memory for one block
    encode: Callable[[Tensor, Tensor, Tensor | None], None]  # fp32 numbers, where records go; 16 random bits for each
    decode: Callable[[Tensor, int], Tensor]  # records, and the number of fp32 numbers to return

    def num_elements(self, numel: int) -> int:
        """Return the elements of memory for `numel` numbers; the last record is whole."""
        return -(-numel // self.block) * self.record

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` numbers."""
        return self.num_elements(numel) * self.dtype.itemsize


def column_bytes(column: torch.dtype | Moment, numel: int) -> int:
    """Return the bytes of `numel` numbers, coded or not."""
    return column.num_bytes(numel) if isinstance(column, Moment) else numel * column.itemsize


@torch.no_grad()
def encode_moments(values: Tensor, moment: Moment, coded: Tensor) -> None:
    """Write the records of a row of fp32 numbers to `coded`, `moment.num_elements(values.numel())` elements."""
    for start in range(0, values.numel(), TILE):
        tile = values[start : start + TILE]
        moment.encode(tile, coded[moment.num_elements(start) :][: moment.num_elements(tile.numel())], None)


@torch.no_grad()
def decode_moments(coded: Tensor, moment: Moment, numel: int) -> Tensor:
    """Return the fp32 numbers of records, in new memory."""
    numbers = torch.empty(numel, dtype=torch.float32, device=coded.device)
    for start in range(0, numel, TILE):
        tile = numbers[start : start + TILE]
        records = coded[moment.num_elements(start) :][: moment.num_elements(tile.numel())]
        tile.copy_(moment.decode(records, tile.numel()))
    return numbers


def _encode_average(numbers: Tensor, coded: Tensor, noise: Tensor | None) -> None:
    rows, scales = _rows_and_scales(numbers, LEAST_AVERAGE)
    codes = rows / (_divisors(scales) + rows.abs()) * 254.0 + _shifts(noise)
    _write_records(codes, scales, torch.int8, coded)


def _encode_squares(squares: Tensor, coded: Tensor, noise: Tensor | None) -> None:
    """Write the records of the roots. A root above zero has a code above zero."""
    rows, scales = _rows_and_scales(_root(squares), LEAST_ROOT)
    per_code = torch.full_like(scales, 255.0) / _divisors(scales)
    codes = torch.maximum(rows * per_code + _shifts(noise), (rows * 2.0**120).clamp_(max=1.0))
    _write_records(codes, scales, torch.uint8, coded)


def _shifts(noise: Tensor | None) -> Tensor | float:
    """Return what is added to codes before they are rounded: a number between -1/2 and 1/2, and neither of these."""
    if noise is None:
        return 0.0
    rows = torch.nn.functional.pad(noise >> 1, (0, -noise.numel() % BLOCK)).view(-1, BLOCK)
    return (2 * rows + 1).float() * 2.0**-16 - 0.5


def _rows_and_scales(numbers: Tensor, least: float) -> tuple[Tensor, Tensor]:
    rows = torch.nn.functional.pad(numbers, (0, -numbers.numel() % BLOCK)).view(-1, BLOCK)
    largest = rows.abs().view(torch.int32).amax(1, keepdim=True)
    scales = largest.view(torch.float32)
    return rows, scales.masked_fill(scales < least, 0.0).masked_fill(largest >= TOO_LARGE, math.nan)


def _divisors(scales: Tensor) -> Tensor:
    return torch.where(scales > 0.0, scales, 1.0)


def _write_records(codes: Tensor, scales: Tensor, dtype: torch.dtype, coded: Tensor) -> None:
    integers = codes.masked_fill_(~(scales > 0.0), 0.0).round_().to(torch.int32)
    records = coded.view(-1, INT8_AVERAGE.record)
    records[:, :BLOCK] = integers.to(dtype).view(torch.uint8)
    records[:, BLOCK:] = scales.contiguous().view(torch.uint8)


def _decode_average(coded: Tensor, numel: int) -> Tensor:
    codes, scales = _codes_and_scales(coded)
    numbers = codes.view(torch.int8).float()
    return (numbers / (254.0 - numbers.abs()) * scales).view(-1)[:numel]


def _decode_squares(coded: Tensor, numel: int) -> Tensor:
    codes, scales = _codes_and_scales(coded)
    roots = codes.float() * (1.0 / 255.0) * scales
    return (roots * roots).view(-1)[:numel]


def _codes_and_scales(coded: Tensor) -> tuple[Tensor, Tensor]:
    records = coded.view(-1, INT8_AVERAGE.record)
    return records[:, :BLOCK].contiguous(), records[:, BLOCK:].contiguous().view(torch.float32)


def _root(squares: Tensor) -> Tensor:
    return squares.double().sqrt().float()  # a root in double rounds to the nearest fp32


def _encode_bf16(numbers: Tensor, coded: Tensor, noise: Tensor | None) -> None:
    numbers = _plain(numbers)
    if noise is not None:
        numbers = ((_bits(numbers) + noise) >> 16 << 16).to(torch.int32).view(torch.float32)
    coded.copy_(numbers)


def _decode_bf16(coded: Tensor, numel: int) -> Tensor:
    return coded[:numel].float()


def _plain(numbers: Tensor) -> Tensor:
    """Return the numbers with one NaN for all, and zero for what is subnormal."""
    return numbers.masked_fill(numbers.abs() < LEAST_NUMBER, 0.0).masked_fill_(numbers.isnan(), math.nan)


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _noises(average: Tensor, square: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Return 16 random bits for each number of both moments."""
    noise = _bits(_plain(square)) ^ (_bits(_plain(average)) << 16 & 0xFFFFFFFF)
    noise = (noise + key) & 0xFFFFFFFF
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        noise = ((noise ^ (noise >> shift)) * factor) & 0xFFFFFFFF
    noise = noise ^ (noise >> 15)
    return noise & 0xFFFF, noise >> 16


INT8_AVERAGE = Moment("average", torch.uint8, BLOCK, BLOCK + 4, _encode_average, _decode_average)
INT8_SQUARES = Moment("squares", torch.uint8, BLOCK, BLOCK + 4, _encode_squares, _decode_squares)
BF16 = Moment("bf16", torch.bfloat16, 1, 1, _encode_bf16, _decode_bf16)

# How `exp_avg` and `exp_avg_sq` are kept, by the codec that users name
MOMENT_CODECS = {"int8": (INT8_AVERAGE, INT8_SQUARES), "bf16": (BF16, BF16)}


class Numbers(NamedTuple):
    """The constants of a step, each rounded to fp32."""

    decay: float
    new_part: float
    old_part: float
    square_part: float
    rate: float
    eps: float

    @classmethod
    def of(cls, rule: Adam) -> "Numbers":
        decay = 1 - rule.lr * rule.weight_decay if rule.decoupled else rule.weight_decay
        parts = (1 - rule.beta1, rule.beta2, 1 - rule.beta2)
        return cls(decay, *parts, -rule.rate * rule.correction, rule.eps * rule.correction)


@torch.no_grad()
def update(step: UpdateArguments) -> None:
    """See `zerostd.kernels.update`: its step of Adam where states are coded."""
    if on_device := _device_moments(step.gradient.device.type):
        on_device.update(step, Numbers.of(cast(Adam, step.rule)))
        return
    numel = step.gradient.numel()
    for start in range(0, numel, TILE):
        _update_tile(step, slice(start, min(numel, start + TILE)))


def moments_call(step: UpdateArguments) -> KernelCall | None:
    """Return the kernel that `update` would launch on a device, for native code; None if that cannot launch it."""
    on_device = _device_moments(step.gradient.device.type)
    if on_device is None:
        return None
    call: KernelCall | None = on_device.call(step, Numbers.of(cast(Adam, step.rule)))
    return call


def _update_tile(step: UpdateArguments, tile: slice) -> None:
    rule = cast(Adam, step.rule)
    by = Numbers.of(rule)
    numel = tile.stop - tile.start
    pair = next(pair for pair in MOMENT_CODECS.values() if pair[0].dtype is step.coded_dtype)
    records = slice(pair[0].num_elements(tile.start), pair[0].num_elements(tile.stop))
    gradient = step.gradient[tile].to(torch.float32) * step.factor
    if rule.maximize:
        gradient = -gradient
    kept, averages, squares = step.source
    assert isinstance(averages, Tensor) and isinstance(squares, Tensor)
    master = join(Split(kept.high[tile], kept.low[tile])) if isinstance(kept, Split) else kept[tile].clone()
    if rule.weight_decay != 0 and not rule.decoupled:
        gradient = gradient + master * by.decay
    average = pair[0].decode(averages[records], numel)
    average = average + (gradient - average) * by.new_part
    square = pair[1].decode(squares[records], numel) * by.old_part
    square = square + gradient * by.square_part * gradient
    if rule.weight_decay != 0 and rule.decoupled:
        master = master * by.decay
    master = master + average * by.rate / (_root(square) + by.eps)
    noises = _noises(average, square, rule.key)
    target, *coded = step.target
    for numbers, moment, column, noise in zip((average, square), pair, coded, noises, strict=True):
        assert isinstance(column, Tensor)
        moment.encode(numbers, column[records], noise)
    if step.weight is not None:
        step.weight[tile] = master
    if isinstance(target, Split):
        for half, new in zip(target, split(master), strict=True):
            half[tile] = new
    else:
        target[tile] = master


@functools.cache
def _device_moments(device_type: str) -> ModuleType | None:
    """Return the update of a device that has it. Without, torch's takes many passes."""
    return tried("device_moments", device_type, "coded moments are updated", _try_moments)


def _try_moments(module: ModuleType, device_type: str) -> bool:
    """Take a first step, which is as long as the rate."""
    gradient = torch.linspace(-3.0, 3.0, 1000, device=device_type)
    rule = Adam(0.1, 0.0, False, 0.9, 0.99, 1e-8, True, 1, True)
    for pair in MOMENT_CODECS.values():
        coded = [gradient.new_zeros(moment.num_elements(1000), dtype=moment.dtype) for moment in pair]
        arrays = (torch.zeros_like(gradient), *coded)
        module.update(UpdateArguments(rule, gradient, 1.0, arrays, arrays, None), Numbers.of(rule))
        if not torch.allclose(arrays[0], gradient.sign() * -0.1):
            return False
    return True
