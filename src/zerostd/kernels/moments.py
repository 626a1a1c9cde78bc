"""Adam's moments as codes of 8 bits: what they mean, and the update of them in torch, on any device.

A state is a row of records: 64 codes and one fp32 scale, the largest magnitude among 64 numbers. `exp_avg` is companded
by softsign, so that small numbers beside a large one keep their digits, and of `exp_avg_sq` the root is coded. The bits
are the same in src/native/update_moments.h and in `device_moments.py`: each operation rounds separately, roots and
quotients are rounded correctly, codes to nearest even. Decoded numbers get the same codes when they are coded again, so
checkpoints store numbers. `kernels.update` takes such states in place of fp32 ones.
"""

import enum
import functools
import math
from types import ModuleType
from typing import NamedTuple, cast

import torch
from torch import Tensor

from zerostd.kernels.rules import Adam, Split, UpdateArguments, join, split, tried

BLOCK = 64
RECORD = BLOCK + 4  # bytes
TILE = 1 << 20  # numbers coded at once by torch, whose temporaries are fp32


class Moment(enum.Enum):
    """The two ways to code a state. It is used in place of the dtype of a state."""

    AVERAGE = "average"  # of either sign
    SQUARES = "squares"  # never negative

    @staticmethod
    def num_bytes(numel: int) -> int:
        """Return the bytes of `numel` numbers; the last record is whole."""
        return -(-numel // BLOCK) * RECORD


TOO_LARGE = 0x7E800000  # bits of 2^126: from here on sums may overflow, so a block with such a number is NaN
LEAST = {Moment.AVERAGE: 2.0**-100, Moment.SQUARES: 2.0**-54}  # scale; below it numbers count as zero


def column_bytes(dtype: torch.dtype | Moment, numel: int) -> int:
    """Return the bytes of `numel` numbers, coded or not."""
    return Moment.num_bytes(numel) if isinstance(dtype, Moment) else numel * dtype.itemsize


@torch.no_grad()
def encode_moments(values: Tensor, moment: Moment, coded: Tensor) -> None:
    """Write the records of a row of fp32 numbers to `coded`, `Moment.num_bytes(values.numel())` bytes."""
    for start in range(0, values.numel(), TILE):
        tile = values[start : start + TILE]
        numbers = tile if moment is Moment.AVERAGE else _root(tile)
        _encode(numbers, moment, coded[Moment.num_bytes(start) :][: Moment.num_bytes(tile.numel())])


@torch.no_grad()
def decode_moments(coded: Tensor, moment: Moment, numel: int) -> Tensor:
    """Return the fp32 numbers of records, in new memory."""
    numbers = torch.empty(numel, dtype=torch.float32, device=coded.device)
    for start in range(0, numel, TILE):
        tile = numbers[start : start + TILE]
        tile.copy_(_decode(coded[Moment.num_bytes(start) :][: Moment.num_bytes(tile.numel())], moment, tile.numel()))
    return numbers


def _encode(numbers: Tensor, moment: Moment, coded: Tensor) -> None:
    """Write the records of averages, or of roots."""
    rows = torch.nn.functional.pad(numbers, (0, -numbers.numel() % BLOCK)).view(-1, BLOCK)
    sizes = rows.abs()
    largest = sizes.view(torch.int32).amax(1, keepdim=True)
    scales = largest.view(torch.float32)
    scales = scales.masked_fill(scales < LEAST[moment], 0.0).masked_fill(largest >= TOO_LARGE, math.nan)
    has_codes = scales > 0.0
    divisors = torch.where(has_codes, scales, 1.0)
    if moment is Moment.AVERAGE:
        codes = rows / (divisors + sizes) * 254.0
    else:
        codes = torch.maximum(rows * (torch.full_like(divisors, 255.0) / divisors), (rows * 2.0**120).clamp_(max=1.0))
    integers = codes.masked_fill_(~has_codes, 0.0).round_().to(torch.int32)
    records = coded.view(-1, RECORD)
    records[:, :BLOCK] = integers.to(torch.int8 if moment is Moment.AVERAGE else torch.uint8).view(torch.uint8)
    records[:, BLOCK:] = scales.contiguous().view(torch.uint8)


def _decode(coded: Tensor, moment: Moment, numel: int) -> Tensor:
    records = coded.view(-1, RECORD)
    scales = records[:, BLOCK:].contiguous().view(torch.float32)
    codes = records[:, :BLOCK].contiguous()
    if moment is Moment.AVERAGE:
        numbers = codes.view(torch.int8).float()
        numbers = numbers / (254.0 - numbers.abs()) * scales
    else:
        numbers = codes.float() * (1.0 / 255.0) * scales
        numbers = numbers * numbers
    return numbers.view(-1)[:numel]


def _root(squares: Tensor) -> Tensor:
    return squares.double().sqrt().float()  # a root in double rounds to the nearest fp32


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


def _update_tile(step: UpdateArguments, tile: slice) -> None:
    rule = cast(Adam, step.rule)
    by = Numbers.of(rule)
    numel = tile.stop - tile.start
    records = slice(Moment.num_bytes(tile.start), Moment.num_bytes(tile.stop))
    gradient = step.gradient[tile].to(torch.float32) * step.factor
    if rule.maximize:
        gradient = -gradient
    kept, averages, squares = step.source
    assert isinstance(averages, Tensor) and isinstance(squares, Tensor)
    master = join(Split(kept.high[tile], kept.low[tile])) if isinstance(kept, Split) else kept[tile].clone()
    if rule.weight_decay != 0 and not rule.decoupled:
        gradient = gradient + master * by.decay
    average = _decode(averages[records], Moment.AVERAGE, numel)
    average = average + (gradient - average) * by.new_part
    square = _decode(squares[records], Moment.SQUARES, numel) * by.old_part
    root = _root(square + gradient * by.square_part * gradient)
    if rule.weight_decay != 0 and rule.decoupled:
        master = master * by.decay
    master = master + average * by.rate / (root + by.eps)
    target, *coded = step.target
    for numbers, moment, column in zip((average, root), Moment, coded, strict=True):
        assert isinstance(column, Tensor)
        _encode(numbers, moment, column[records])
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
    coded = [gradient.new_zeros(Moment.num_bytes(1000), dtype=torch.uint8) for _ in Moment]
    arrays = (torch.zeros_like(gradient), *coded)
    module.update(UpdateArguments(rule, gradient, 1.0, arrays, arrays, None), Numbers.of(rule))
    return torch.allclose(arrays[0], gradient.sign() * -0.1)
