"""What users hold: the parameters of a prepared model, wherever their values are.

    PreparedParameter   shows its values, at the cost of an nn.Parameter; a change in place moves its version counter
    ReleasedParameter   its values are elsewhere or on their way: a call that needs them gets them first
    ParameterData       what `p.data` gives: a tensor that knows its parameter, so that what is written to it is kept

A parameter stays the same object; its flat changes its class when it changes what it shows. `Access` brings values and
keeps what is written (scheduling/access.py).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn

from zerostd.compat import METADATA, no_torch_function, version_of
from zerostd.errors import MisuseError

ACCESS = "_zerostd_access"  # attributes of a prepared parameter: a weak reference, so that models can go,
LENT = "_zerostd_lent"  # and weak references to what `p.data` gave


class Access(Protocol):
    """Brings the values of parameters to whoever touches them, and keeps what is written."""

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the parameter itself, if it shows its values then, else a copy of them outside autograd."""
        ...

    def write(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Keep what was written to the tensor that `read` returned, or to a view of it."""
        ...


class PreparedParameter(nn.Parameter):
    """A parameter of a prepared model that shows its values."""

    @property
    def data(self) -> torch.Tensor:
        return lend(self, values_of(self))

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        replace_values(self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(values_of(self).clone(), self.requires_grad)
        return cast(nn.Parameter, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter, (values_of(self).clone(), self.requires_grad)


class ReleasedParameter(PreparedParameter):
    """A parameter of a prepared model whose values are elsewhere, or on their way."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class ParameterData(torch.Tensor):
    """The values of a parameter, or a view of them, outside autograd. Use `lend` to make one."""

    parameter: PreparedParameter | None  # None: a tensor of its own, since the parameter got other memory
    offset: int  # of its first element in the parameter

    def current(self) -> torch.Tensor:
        """Return it as a plain tensor with the values of now."""
        values = values_of(self.parameter) if self.parameter is not None else None
        with no_torch_function():
            if values is not None:
                start = values.storage_offset() + self.offset
                set_data(self, values.as_strided(self.size(), self.stride(), start))
            return get_data(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


@functools.cache
def classes_for(original: type[nn.Parameter]) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """Return the classes of a prepared parameter that shows its values and of one that does not."""
    if original is nn.Parameter:
        return PreparedParameter, ReleasedParameter
    name = original.__name__
    return type(name, (PreparedParameter, original), {}), type(name, (ReleasedParameter, original), {})


def get_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return what `tensor.data` of a plain tensor is: its memory, outside autograd."""
    with no_torch_function():
        return cast(torch.Tensor, torch.Tensor.data.__get__(tensor))  # type: ignore[attr-defined]


def set_data(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Do what `tensor.data = values` does to a plain tensor."""
    with no_torch_function():
        torch.Tensor.data.__set__(tensor, values)  # type: ignore[attr-defined]


def access_of(parameter: nn.Parameter) -> Access:
    """Return who brings the values of a parameter."""
    access = parameter.__dict__[ACCESS]()
    if access is None:
        raise MisuseError("a parameter of a prepared model was used after the model was gone: keep the model")
    return cast(Access, access)


def values_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return the values of a prepared parameter, outside autograd: its own memory, or a copy."""
    return get_data(access_of(parameter).read(parameter))


def lend(parameter: PreparedParameter, values: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Give out a view of a parameter's values that begins at element `offset`."""
    with no_torch_function():
        lent = values.as_subclass(ParameterData)
    lent.parameter = parameter
    lent.offset = offset
    alive = [reference for reference in parameter.__dict__.get(LENT, ()) if reference() is not None]
    parameter.__dict__[LENT] = [*alive, weakref.ref(lent)]
    return lent


def replace_values(parameter: PreparedParameter, values: torch.Tensor) -> None:
    """Do what `p.data = values` means: the parameter takes the values, and what was lent of it keeps the old ones."""
    if values.shape != parameter.shape or values.dtype != parameter.dtype or values.device != parameter.device:
        raise MisuseError(
            f"p.data = a tensor of shape {tuple(values.shape)}, {values.dtype} on {values.device}: the parameter has "
            f"shape {tuple(parameter.shape)}, {parameter.dtype} on {parameter.device}, which a prepared model cannot "
            "change. Do it before zerostd.prepare, or zerostd.release the model first"
        )
    source = values.current() if isinstance(values, ParameterData) else get_data(values)
    for reference in parameter.__dict__.pop(LENT, ()):
        lent = reference()
        if lent is not None and lent.parameter is not None:
            set_data(lent, lent.current().clone())
            lent.parameter = None
    target = values_of(parameter)
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
        access_of(parameter).write(parameter, target)


class _Read(torch.autograd.Function):
    """Values of a released parameter, through which gradients reach it."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@dataclass
class _Touched:
    """A parameter, or data of one, among the arguments of a call, and what takes its place."""

    item: torch.Tensor
    parameter: PreparedParameter
    whole: torch.Tensor  # all values of the parameter
    values: torch.Tensor  # the argument
    version: int
    grad_fn: Any

    def lend(self, result: torch.Tensor) -> torch.Tensor | None:
        """Return a result that is in the memory of the parameter as data of it; None if it is elsewhere."""
        offset = int(result.storage_offset() - self.whole.storage_offset())
        same = result.untyped_storage().data_ptr() == self.whole.untyped_storage().data_ptr()
        is_inside = same and 0 <= offset < max(1, self.whole.numel())
        return lend(self.parameter, result, offset) if is_inside else None


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch with the values of the parameters among its arguments, and keep what it writes."""
    if func in METADATA:
        with no_torch_function():
            return func(*args, **kwargs)
    touched: list[_Touched] = []

    def bring(item: Any) -> Any:
        if isinstance(item, ParameterData):
            parameter = item.parameter
            if parameter is None:
                return get_data(item)
        elif isinstance(item, ReleasedParameter):
            parameter = item
        else:
            return item
        whole = access_of(parameter).read(parameter)
        if whole is item:
            return item  # it shows its values now
        whole = get_data(whole)
        values = whole
        if isinstance(item, ParameterData):
            values = item.current()
        elif torch.is_grad_enabled() and item.requires_grad:
            values = cast(torch.Tensor, _Read.apply(item, whole))  # type: ignore[no-untyped-call]
        touched.append(_Touched(item, parameter, whole, values, version_of(values), values.grad_fn))
        return values

    result = func(*_map(args, bring), **_map(kwargs, bring))
    for argument in touched:
        if version_of(argument.values) != argument.version:
            if argument.values.grad_fn is not argument.grad_fn:
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
            access_of(argument.parameter).write(argument.parameter, argument.whole)

    def give(item: Any) -> Any:
        for argument in touched:
            if item is argument.values:
                return argument.item
        if type(item) is torch.Tensor and not item.requires_grad:
            return next(filter(None.__ne__, (argument.lend(item) for argument in touched)), item)
        if type(item).__module__ == "numpy" and type(item).__name__ == "ndarray":
            item.flags.writeable = False  # nobody sees what is written to an array
        return item

    return _map(result, give)


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return arguments or results of a function of torch with `function` applied to what they hold."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    return function(value)
