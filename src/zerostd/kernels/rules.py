"""What `update` takes: a rule with its numbers for one step as torch.optim has them, and the arrays that it changes."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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


class UpdateArguments(NamedTuple):
    """Checked arguments of `update`."""

    rule: Rule
    gradient: Tensor
    factor: float
    source: tuple[Tensor, ...]  # the master, and the states that the rule names
    target: tuple[Tensor, ...]
    weight: Tensor | None

    @property
    def inputs(self) -> list[Tensor]:
        return [self.gradient, *self.source]

    @property
    def outputs(self) -> list[Tensor]:
        return [*self.target] if self.weight is None else [*self.target, self.weight]
