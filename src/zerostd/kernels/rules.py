"""The optimizer rules, with their numbers for one step as torch.optim has them, and the arguments of `update`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from zerostd.kernels.halves import Split


@dataclass(frozen=True)
class Adam:
    """`torch.optim.Adam`, or AdamW when `decoupled`; `step` counts from 1.

    torch takes square roots on x86 with MKL, which is slow and may be off in the last place. So does this, to give the
    same bits, unless `exact_root`: then roots are the CPU's, rounded correctly, and the step is faster.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    step: int
    exact_root: bool = False

    @property
    def num_states(self) -> int:
        """`exp_avg` and `exp_avg_sq`."""
        return 2

    @property
    def rate(self) -> float:
        """What the quotient of the averages is multiplied by."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def correction(self) -> float:
        """What the root of `exp_avg_sq` is divided by."""
        return float((1 - self.beta2**self.step) ** 0.5)


@dataclass(frozen=True)
class Sgd:
    """`torch.optim.SGD`; `is_first` says that the momentum buffer is new and takes the gradient itself."""

    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    maximize: bool
    is_first: bool

    @property
    def num_states(self) -> int:
        """`momentum_buffer`, if any."""
        return int(self.momentum != 0)


@dataclass(frozen=True)
class Adagrad:
    """`torch.optim.Adagrad`; `step` counts from 1. For `exact_root` see `Adam`."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    maximize: bool
    step: int
    exact_root: bool = False

    @property
    def num_states(self) -> int:
        """`sum`."""
        return 1

    @property
    def rate(self) -> float:
        """The learning rate of this step."""
        return self.lr / (1 + (self.step - 1) * self.lr_decay)


Rule = Adam | Sgd | Adagrad
Arrays = Sequence[Tensor | Split]


class UpdateArguments(NamedTuple):
    """Checked arguments of `update`."""

    rule: Rule
    gradient: Tensor
    factor: float
    source: tuple[Tensor | Split, ...]
    target: tuple[Tensor | Split, ...]
    weight: Tensor | None

    @property
    def inputs(self) -> list[Tensor]:
        """The gradient, then what the source consists of."""
        return [self.gradient, *_tensors(self.source)]

    @property
    def outputs(self) -> list[Tensor]:
        """What the target consists of, then the weight if there is one."""
        return [*_tensors(self.target), *([] if self.weight is None else [self.weight])]


def _tensors(arrays: Arrays) -> list[Tensor]:
    return [tensor for array in arrays for tensor in (array if isinstance(array, Split) else (array,))]
