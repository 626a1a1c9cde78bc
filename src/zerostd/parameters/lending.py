"""Lent tensors: users read and write the values of parameters, gradients and optimizer states, wherever these are kept.

A `LentTensor` knows its source. A function of torch that takes one gets the present values. If the function writes to
them, the source keeps the result at once. This is true for views too: `p.data[0].zero_()` and
`optimizer.state[p]["exp_avg"].mul_(0.5)` do what they do in torch. Results in other memory are plain tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.utils._pytree import tree_leaves, tree_map

from zerostd.compat import METADATA, OF_THE_GRAPH, in_transform, no_torch_function, outside_transforms, version_of
from zerostd.errors import MisuseError

DATA: Any = torch.Tensor.data  # what plain tensors have, to be used under no_torch_function


class Source(Protocol):
    """Where lent values are kept."""

    def read(self) -> torch.Tensor:
        """Return all present values, outside autograd, in memory that can be passed to `write`."""
        ...

    def write(self, whole: torch.Tensor) -> None:
        """Keep what was written to the tensor that `read` returned."""
        ...

    def forget(self) -> None:
        """Drop what was written to that tensor."""
        ...


@dataclass(frozen=True)
class CopySource:
    """Values that are read as a new copy each time."""

    read: Callable[[], Any]
    write: Callable[[torch.Tensor], None]

    def forget(self) -> None:
        """Do nothing: what was written to a copy is nowhere else."""


class Lender(torch.Tensor):
    """A tensor whose values are elsewhere: functions of torch that take it get a substitute."""

    @property
    def source(self) -> Source | None:
        """Where its values are kept. None: they are its own."""
        raise NotImplementedError

    def stand_in(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what a function gets in its place, from all values of the source."""
        raise NotImplementedError

    def as_leaf(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which it is itself: for functions that ask about its place in a graph."""
        return contextlib.nullcontext()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_with_values(func, args, kwargs or {})


class LentTensor(Lender):
    """Values of a source, or a view of them. `lend` makes one."""

    lender: Source | None
    offset: int  # of its first element in the source

    @property
    def source(self) -> Source | None:
        return self.lender

    def stand_in(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of the source's values that it shows, as a plain tensor."""
        with no_torch_function(), outside_transforms():  # or a transform would wrap the view
            start = int(whole.storage_offset()) + self.offset
            set_data(self, whole.as_strided(self.size(), self.stride(), start))
            return get_data(self)

    def become(self, source: Source, whole: torch.Tensor) -> None:
        """Show all values of a source from now on."""
        self.lender = source
        self.offset = 0
        set_data(self, whole)

    def keep(self) -> None:
        """Become an ordinary tensor with the present values."""
        if self.source is not None:
            set_data(self, self.stand_in(self.source.read()).clone())
            self.lender = None


def get_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return what `tensor.data` of a plain tensor is: its memory, outside autograd."""
    with no_torch_function():
        return cast(torch.Tensor, DATA.__get__(tensor))


def set_data(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Do what `tensor.data = values` does to a plain tensor."""
    with no_torch_function():
        DATA.__set__(tensor, values)


def lend(source: Source, values: torch.Tensor, offset: int = 0) -> LentTensor:
    """Give out a view of a source's values that begins at element `offset`."""
    with no_torch_function():
        lent = values.as_subclass(LentTensor)
    lent.lender = source
    lent.offset = offset
    return lent


@dataclass
class _Argument:
    """An argument whose values are elsewhere, and what takes its place."""

    item: torch.Tensor
    source: Source
    whole: torch.Tensor
    values: torch.Tensor
    version: int
    grad_fn: Any

    def lend(self, result: torch.Tensor) -> torch.Tensor | None:
        """Return a result that is in the memory of the source as lent by it; None if it is elsewhere."""
        offset = int(result.storage_offset() - self.whole.storage_offset())
        same = result.untyped_storage().data_ptr() == self.whole.untyped_storage().data_ptr()
        is_inside = same and 0 <= offset < max(1, self.whole.numel())
        return lend(self.source, result, offset) if is_inside else None


def call_with_values(func: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor] = ()) -> Any:
    """Call a function of torch with the values of its lent arguments, and keep what it writes. Version counters tell
    which arguments it wrote to, or `written` where torch does not count."""
    if func in METADATA:
        with no_torch_function():
            return func(*args, **kwargs)
    if func in OF_THE_GRAPH:
        with contextlib.ExitStack() as stack:
            for item in tree_leaves((args, kwargs)):
                if isinstance(item, Lender):
                    stack.enter_context(item.as_leaf())
            return func(*args, **kwargs)
    arguments: list[_Argument] = []

    def bring(item: Any) -> Any:
        if not isinstance(item, Lender):
            return item
        source = item.source
        if source is None:
            return get_data(item)
        whole = source.read()
        if not isinstance(item, Lender):
            return item  # a parameter that shows its values now
        values = item.stand_in(whole)
        arguments.append(_Argument(item, source, whole, values, version_of(values), values.grad_fn))
        return values

    values = tree_map(bring, (tuple(args), dict(kwargs)))
    if func is torch.Tensor.__dlpack__ and arguments:
        raise MisuseError(
            "__dlpack__() of values that zerostd has lent: what another library writes to them would go unnoticed. "
            "Pass it a copy, such as p.detach().clone(), and write with p.copy_(values) under torch.no_grad()"
        )
    result = func(*values[0], **values[1])
    for argument in arguments:
        if version_of(argument.values) != argument.version or any(argument.item is item for item in written):
            if argument.values.grad_fn is not argument.grad_fn:
                argument.source.forget()
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
            argument.source.write(argument.whole)

    if in_transform():
        return result

    def give(item: Any) -> Any:
        for argument in arguments:
            if item is argument.values:
                return argument.item
        if type(item) is torch.Tensor and not item.requires_grad:
            for argument in arguments:
                if (lent := argument.lend(item)) is not None:
                    return lent
        if type(item).__name__ == "ndarray":
            item.flags.writeable = False  # nobody sees what is written to an array
        return item

    return tree_map(give, result)
