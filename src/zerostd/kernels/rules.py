"""Arguments of `update`: a rule with its numbers for one step, as torch.optim has them, and the arrays it changes.

A master may be kept as two halves of 16 bits, the upper one of which is the bf16 weight that the model computes with.
"""

import functools
import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class BaseRule:
    """The numbers that all rules have, under torch's names."""

    lr: float
    weight_decay: float
    maximize: bool


@dataclass(frozen=True)
class Adam(BaseRule):
    """`torch.optim.Adam`, or AdamW when `decoupled`; `step` counts from 1.

    torch takes square roots on x86 with MKL, which is slow and may be off in the last place. So does this, to give the
    same bits, unless `exact_root`: then roots are the CPU's, rounded correctly, and the step is faster.
    """

    beta1: float
    beta2: float
    eps: float
    decoupled: bool
    step: int
    exact_root: bool = False
    state_names: ClassVar = ("exp_avg", "exp_avg_sq")

    @property
    def rate(self) -> float:
        return self.lr / (1 - self.beta1**self.step)  # times the quotient of the averages

    @property
    def correction(self) -> float:
        return float((1 - self.beta2**self.step) ** 0.5)  # divides the root of `exp_avg_sq`

    @property
    def key(self) -> int:
        """Return 32 bits, other ones for each step, for the dither of moments in bf16."""
        return self.step * 0x9E3779B9 & 0xFFFFFFFF


@dataclass(frozen=True)
class Sgd(BaseRule):
    """`torch.optim.SGD`; `is_first` says that the momentum buffer is new and takes the gradient itself."""

    momentum: float
    dampening: float
    nesterov: bool
    is_first: bool

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()


@dataclass(frozen=True)
class Adagrad(BaseRule):
    """`torch.optim.Adagrad`; `step` counts from 1. For `exact_root` see `Adam`."""

    lr_decay: float
    eps: float
    step: int
    exact_root: bool = False
    state_names: ClassVar = ("sum",)

    @property
    def rate(self) -> float:
        return self.lr / (1 + (self.step - 1) * self.lr_decay)


Rule = Adam | Sgd | Adagrad


class Split(NamedTuple):
    """The halves of an fp32 tensor: `(high << 16) + low`, with `low` signed, are the bits of a number.

    `high` is the number rounded to bf16 as torch rounds it: to nearest, ties to even. 65,537 numbers round to an even
    `high`, one more than `low` can tell apart, so the tie that rounds down to it has no halves. The number next to it
    is kept instead, one unit of fp32 towards zero, which rounds to the same `high`. That is one number in 131,072.
    Infinities survive; a NaN survives as one NaN, its payload does not.
    """

    high: Tensor  # bf16
    low: Tensor  # int16


def split(master: Tensor) -> Split:
    """Return the halves of an fp32 tensor, in new memory."""
    halves = Split(torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16))
    split_into(master.clone(memory_format=torch.contiguous_format), halves)
    return halves


def split_into(master: Tensor, halves: Split) -> None:
    """Write the halves of an fp32 tensor, without more memory. The tensor is used up."""
    if on_device := _device_halves(master.device.type):
        on_device.split(master, *halves)
        return
    bits = master.nan_to_num_(math.nan, math.inf, -math.inf).view(torch.int32)  # one NaN, which no carry can change
    high = halves.high.view(torch.int16)
    low = halves.low.copy_(bits)  # torch keeps the lower 16 bits
    bits.bitwise_right_shift_(16)
    is_even_tie = high.copy_(bits).bitwise_and_(1).bitwise_or_(low.bitwise_xor_(-0x8000)).eq_(0)
    low.bitwise_xor_(-0x8000).sub_(is_even_tie)
    bits.sub_(high.copy_(low).bitwise_right_shift_(15))  # plus one where the lower half is negative
    high.copy_(bits)


def join(halves: Split) -> Tensor:
    """Return the fp32 tensor of the halves, in new memory."""
    master = torch.empty_like(halves.low, dtype=torch.float32)
    join_into(halves, master)
    return master


def join_into(halves: Split, master: Tensor) -> None:
    """Write the fp32 numbers of the halves, without more memory."""
    if on_device := _device_halves(master.device.type):
        on_device.join(*halves, master)
        return
    master.copy_(halves.high).view(torch.int32).add_(halves.low)


@functools.cache
def _device_halves(device_type: str) -> ModuleType | None:
    """Return the operations of a device that has them. Without, torch's take several passes."""
    return tried("device_halves", device_type, "masters are joined and split", _try_halves)


@functools.cache
def adam_on(device_type: str) -> ModuleType | None:
    """Return the one-pass Adam of a device that has it."""
    return tried("device_adam", device_type, "masters are updated", _try_adam)


def tried(name: str, device_type: str, what: str, is_right: Callable[[ModuleType, str], bool]) -> ModuleType | None:
    """Return the module of Triton operations if they work on this device."""
    if device_type != "cuda":
        return None
    try:
        module = importlib.import_module(f"zerostd.kernels.{name}")
        if is_right(module, device_type):
            return module
        reason = "it gave wrong numbers"
    except Exception as error:  # of triton, of a compiler that is missing, of the driver
        reason = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"{what} by torch's operations, in several passes, because Triton failed ({reason})",
        RuntimeWarning,
        stacklevel=3,
    )
    return None


def _try_halves(module: ModuleType, device_type: str) -> bool:
    numbers = torch.linspace(-3.0, 3.0, 1000, device=device_type)
    halves = Split(torch.empty_like(numbers, dtype=torch.bfloat16), torch.empty_like(numbers, dtype=torch.int16))
    joined = torch.empty_like(numbers)
    module.split(numbers, *halves)
    module.join(*halves, joined)
    return torch.equal(numbers, joined)


def _try_adam(module: ModuleType, device_type: str) -> bool:
    """Take a first step, which is as long as the rate wherever there is a gradient."""
    halves = split(torch.ones(1000, device=device_type))
    rule = Adam(0.5, 0.0, False, 0.9, 0.999, 0.0, decoupled=True, step=1)
    gradient = torch.linspace(1.0, 3.0, 1000, device=device_type, dtype=torch.bfloat16)
    states = [torch.zeros(1000, device=device_type), torch.zeros(1000, device=device_type)]
    module.adam(rule, torch.ones((), device=device_type), gradient, None, halves, halves.high, states)
    return torch.allclose(join(halves), torch.full_like(states[0], 0.5), atol=1e-5)


Arrays = Sequence[Tensor | Split]
CODED_DTYPES = (torch.uint8, torch.bfloat16)  # of states, see `moments.py`


@dataclass(eq=False)
class UpdateArguments:
    """Checked arguments of `update`. In place, `target` is the very tuple that `source` is."""

    rule: Rule
    gradient: Tensor
    factor: float | Tensor
    source: tuple[Tensor | Split, ...]
    target: tuple[Tensor | Split, ...]
    weight: Tensor | None

    def __post_init__(self) -> None:
        is_in_place = self.target is self.source
        weights = [] if self.weight is None else [self.weight]
        self.inputs = [self.gradient, *_tensors(self.source)]
        self.outputs = [*(self.inputs[1:] if is_in_place else _tensors(self.target)), *weights]
        self.distinct = [*self.inputs, *(weights if is_in_place else self.outputs)]  # in place, arrays count once
        dtypes = [array.dtype for array in self.source[1:] if not isinstance(array, Split)]
        # Of coded states, which tells their codec; None if states are fp32
        self.coded_dtype = dtypes[0] if dtypes and dtypes[0] in CODED_DTYPES else None


def _tensors(arrays: Arrays) -> list[Tensor]:
    return [tensor for array in arrays for tensor in (array if isinstance(array, Split) else (array,))]
