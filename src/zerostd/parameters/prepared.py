"""The parameters of a prepared model, as users hold them, wherever their values are.

    PreparedParameter   shows its values, at the cost of an nn.Parameter; a change in place moves its version counter
    ReleasedParameter   its values are elsewhere or on their way: a call that needs them gets them first

A parameter stays the same object; its flat changes its class when it changes what it shows. `p.data` is lent
(lending.py), so that what is written to it is kept. `Access` brings values and keeps them (scheduling/access.py).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn

from zerostd.compat import (
    in_backward,
    in_transform,
    is_below_autograd,
    move_hook_to_end,
    no_torch_function,
    version_of,
)
from zerostd.errors import MisuseError
from zerostd.parameters.handle import GradientHandle
from zerostd.parameters.lending import Lender, LentTensor, get_data, lend, set_data

ACCESS = "_zerostd_access"  # attributes of a prepared parameter: a weak reference, so that models can go,
LENT = "_zerostd_lent"  # weak references to what `p.data` gave,
LAST_HOOK = "_zerostd_hook"  # and the hook that takes its gradient, which comes after the user's

GRAD: Any = torch.Tensor.grad  # what plain tensors have: for loops over all parameters, under no_torch_function
Classes = tuple[type[nn.Parameter], type[nn.Parameter], type[nn.Parameter]]  # of one that is ordinary, shown, released


class Access(Protocol):
    """Brings the values of parameters to code that touches them, and keeps what it writes."""

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the parameter itself if it shows its values, otherwise a copy of them outside autograd."""
        ...

    def write(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Keep what was written to the tensor that `read` returned, or to a view of it."""
        ...

    def set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Let this be the gradient of a parameter."""
        ...

    def check_trainable(self, parameter: nn.Parameter) -> None:
        """Raise if a parameter has no place for gradients and states."""
        ...

    def check_unlocked(self, call: str) -> None:
        """Raise if `call` comes between backward and step, where an update has begun inside backward."""
        ...

    def in_memory(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return values that stay where they are while they are gathered; raise if they are a copy for one call."""
        ...

    def shows_values(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter shows its values."""
        ...

    def shows_master(self, parameter: nn.Parameter) -> bool:
        """Return whether what a parameter shows is its master, now and after updates, or its forward runs."""
        ...

    def forget(self) -> None:
        """Drop the copy that `read` returned."""
        ...

    def watched(self, parameter: nn.Parameter, *, gives_view: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a method writes to a parameter, or gives a view that may be written to."""
        ...


WRITES = [name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")]
WRITES += [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor")]
WRITES += ["__setitem__"]
VIEWS = ["__getitem__", "__iter__", "view", "view_as", "reshape", "flatten", "select", "narrow", "diagonal", "unbind"]
VIEWS += ["split", "t", "transpose", "permute", "squeeze", "unsqueeze", "unflatten", "movedim"]


def _watched(name: str) -> Callable[..., Any]:
    """Return a method of torch.Tensor that gives notice before it writes to a parameter, or returns a view outside
    autograd. If a parameter is half of its master, its only copy would otherwise be overwritten unnoticed."""
    is_view = name in VIEWS

    def call(self: PreparedParameter, *args: Any, **kwargs: Any) -> Any:
        method = getattr(super(PreparedParameter, self), name)
        if torch.is_grad_enabled() and (is_view or self.requires_grad):
            return method(*args, **kwargs)
        if torch.compiler.is_compiling() or is_below_autograd() or in_transform():
            return method(*args, **kwargs)
        with self.source.access.watched(self, gives_view=is_view):
            return method(*args, **kwargs)

    return functools.update_wrapper(call, getattr(torch.Tensor, name))


@dataclass(frozen=True)
class ParameterSource:
    """The values of one parameter."""

    parameter: nn.Parameter

    @property
    def access(self) -> Access:
        access = self.parameter.__dict__[ACCESS]()
        if access is None:
            raise MisuseError("a parameter was used after its model was deleted: keep a reference to the model")
        return cast(Access, access)

    def read(self) -> torch.Tensor:
        return get_data(self.access.read(self.parameter))

    def write(self, whole: torch.Tensor) -> None:
        self.access.write(self.parameter, whole)

    def forget(self) -> None:
        self.access.forget()


class PreparedParameter(nn.Parameter):
    """A parameter of a prepared model that shows its values."""

    locals().update({name: _watched(name) for name in (*WRITES, *VIEWS)})

    @property
    def source(self) -> ParameterSource:
        return ParameterSource(self)

    @property
    def data(self) -> torch.Tensor:
        return get_data(self) if is_below_autograd() else self._lend(self.source.read())

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Take the values of a tensor, and lend them back to that tensor: in torch the two share memory. Tensors that
        were lent before keep the old values."""
        if values.shape != self.shape or values.dtype != self.dtype or values.device != self.device:
            raise MisuseError(
                f"p.data = a tensor of shape {tuple(values.shape)}, {values.dtype} on {values.device}: the parameter "
                f"has shape {tuple(self.shape)}, {self.dtype} on {self.device}, which a prepared model cannot change. "
                "Assign it before zerostd.prepare, or zerostd.release the model first"
            )
        if isinstance(values, LentTensor) and values.source not in (None, self.source):
            raise MisuseError(
                "p.data = the data of another parameter: in torch the two would share memory, but parameters of a "
                "prepared model cannot. Copy with p.data.copy_(q.data), or tie them before zerostd.prepare"
            )
        for reference in self.__dict__.pop(LENT, ()):
            lent = reference()
            if lent is not None and lent is not values:
                lent.keep()
        whole = self.source.read()
        whole.copy_(values.clone())  # which may be a view of the same memory
        self.source.write(whole)
        if type(values) is torch.Tensor and not values.requires_grad:
            values.__class__ = LentTensor
        if isinstance(values, LentTensor):
            values.become(self.source, whole)
            self._note_lent(values)

    def detach(self) -> torch.Tensor:
        """Return the values without autograd, lent if writes to them would otherwise go unnoticed."""
        values = super().detach()
        if isinstance(values, LentTensor) or is_below_autograd() or in_transform() or in_backward():
            return values
        return values if self.source.access.shows_master(self) else self._lend(values)

    def _lend(self, values: torch.Tensor) -> LentTensor:
        lent = lend(self.source, values)
        self._note_lent(lent)
        return lent

    def _note_lent(self, lent: LentTensor) -> None:
        alive = [reference for reference in self.__dict__.get(LENT, ()) if reference() is not None]
        self.__dict__[LENT] = [*alive, weakref.ref(lent)]

    def set_(self, *source: Any, **kwargs: Any) -> Any:
        """Take the values of a tensor, as `p.data = tensor` does; other memory is refused."""
        if len(source) != 1 or kwargs or not isinstance(source[0], torch.Tensor):
            self.resize_()
        if source[0] is not self:
            self.data = source[0]
        return self

    def resize_(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: parameters of a prepared model keep their memory."""
        raise MisuseError(
            "p.set_() or p.resize_() would give a parameter of a prepared model other memory: write values with "
            "p.copy_(values) under torch.no_grad(), or zerostd.release the model first"
        )

    resize_as_ = resize_

    @property
    def grad(self) -> torch.Tensor | None:
        return cast("torch.Tensor | None", GRAD.__get__(self))

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if not (gradient is None or isinstance(gradient, GradientHandle) or in_backward()):
            self.source.access.set_gradient(self, gradient)
            return
        if isinstance(gradient, GradientHandle) and not in_backward():
            gradient.ops.put_back(gradient, self)
        if gradient is None and not in_backward() and ACCESS in self.__dict__:
            self.source.access.check_unlocked("p.grad = None")
        GRAD.__set__(self, gradient)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if requires_grad:
            self.source.access.check_trainable(self)
        return super().requires_grad_(requires_grad)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Register a hook that sees `p.grad` before it goes to where gradients are kept."""
        handle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if (last := self.__dict__.get(LAST_HOOK)) is not None:
            move_hook_to_end(self, last)
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.source.read().clone(), self.requires_grad)
        return cast(nn.Parameter, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter, (self.source.read().clone(), self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{self.source.read()!r}"


class ReleasedParameter(PreparedParameter, Lender):
    """A parameter of a prepared model whose values are elsewhere, or on their way."""

    shown_class: type[nn.Parameter] = PreparedParameter

    def stand_in(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the values; gradients reach the parameter through them."""
        if torch.is_grad_enabled() and self.requires_grad and not in_transform():
            return cast(torch.Tensor, _Read.apply(self, whole))  # type: ignore[no-untyped-call]
        return whole

    @contextlib.contextmanager
    def as_leaf(self) -> Iterator[None]:
        """Return a context in which it is the leaf that the graph knows."""
        released = type(self)
        self.__class__ = self.shown_class  # type: ignore[assignment]
        try:
            yield
        finally:
            if not self.source.access.shows_values(self):
                self.__class__ = released

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return a view. A view as itself leads to the node that gathers its gradients, which hooks are put on."""
        return self._seen_by_autograd() if other is self else super().view_as(other)

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        return self._seen_by_autograd() if other is self else super().expand_as(other)

    def _seen_by_autograd(self) -> torch.Tensor:
        values = self.source.read()
        if not (isinstance(self, ReleasedParameter) and torch.is_grad_enabled()):
            return super().expand_as(self)
        if in_transform():
            return self.stand_in(values)
        with self.as_leaf(), no_torch_function():  # a view of torch's own, whose node lives as long as anyone has it
            released = get_data(self)
            set_data(self, values)
            try:
                return torch.Tensor.expand_as(self, self)
            finally:
                set_data(self, released)

    def data_ptr(self) -> int:
        """Return the address of values that stay there: they are gathered."""
        return self.source.access.in_memory(self).data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of values that stay there: they are gathered."""
        return self.source.access.in_memory(self).untyped_storage()

    __torch_function__ = Lender.__torch_function__


class _Read(torch.autograd.Function):
    """Values of a released parameter, through which gradients reach it."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class ReleasedDTensor(ReleasedParameter):
    """A parameter that is a DTensor, and whose values are elsewhere. A DTensor that shows its values is of torch's own
    class, because torch dispatches on no other."""

    def _brought(self) -> Any:
        values = self.source.access.read(self)
        return self.stand_in(values) if isinstance(self, ReleasedDTensor) else self

    def _seen_by_autograd(self) -> Any:
        return self._brought()

    @property
    def data(self) -> torch.Tensor:
        """Refuse: what is written to it would be lost."""
        raise MisuseError(
            "p.data of a DTensor that is not gathered: read it with p.detach(), write to it with p.copy_(values) "
            "under torch.no_grad(), or use zerostd.gathered(module)"
        )

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        raise MisuseError("p.data of a DTensor cannot be assigned: write p.copy_(values) under torch.no_grad()")

    def detach(self) -> torch.Tensor:
        """Return a copy of the values outside autograd."""
        with torch.no_grad():
            return cast(torch.Tensor, self._brought().detach())

    def to_local(self, **kwargs: Any) -> Any:
        """Return this rank's part, as DTensor.to_local does."""
        return self._brought().to_local(**kwargs)

    def full_tensor(self, **kwargs: Any) -> Any:
        """Return the whole tensor, as DTensor.full_tensor does."""
        return self._brought().full_tensor(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        """Return a DTensor with other placements, as DTensor.redistribute does."""
        return self._brought().redistribute(*args, **kwargs)


@functools.cache
def classes_for(original: type[nn.Parameter]) -> Classes:
    """Return the class of a parameter, and those it has while it shows its values and while it does not."""
    if original is nn.Parameter:
        return original, PreparedParameter, ReleasedParameter
    if not issubclass(original, nn.Parameter):  # a DTensor, which torch marks as a parameter
        return original, original, type(original.__name__, (ReleasedDTensor, original), {"shown_class": original})
    shown = type(original.__name__, (PreparedParameter, original), {})
    return original, shown, type(original.__name__, (ReleasedParameter, original), {"shown_class": shown})


def separate_counters(parameters: Sequence[nn.Parameter]) -> None:
    """Give separate version counters to parameters that share one, as parameters made from views of one tensor do."""
    real = [parameter for parameter in parameters if parameter.device.type != "meta"]
    before = [version_of(parameter) for parameter in real]
    torch.autograd.graph.increment_version(real)
    for parameter, version in zip(real, before, strict=True):
        if version_of(parameter) > version + 1:
            own = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, own)
