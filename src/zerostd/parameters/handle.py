"""The handle that `p.grad` returns after a backward pass; the gradient itself is kept in its flat buffer.

A handle has the parameter's shape, dtype and device and no memory. It keeps torch's own protocol: `p.grad is None`
means that there is no gradient, setting it to None drops the gradient, and a backward pass into a parameter that still
has one adds to it. Everything else is passed on to `ops`, the `Gradients` of the model (optimizers/gradients.py).
Element-wise changes reach this rank's part. Any other use gets the whole gradient, so every rank must make it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from zerostd.communication.dtensors import Spec
from zerostd.compat import in_backward, written_by
from zerostd.errors import MisuseError
from zerostd.parameters.lending import CopySource, call_with_values, lend

aten = torch.ops.aten
# Changes in place that are the same for each element, and new tensors of the same shape.
ELEMENTWISE = {
    *(aten.abs_, aten.add_, aten.addcdiv_, aten.addcmul_, aten.clamp_, aten.clamp_max_, aten.clamp_min_, aten.copy_),
    *(aten.div_, aten.fill_, aten.hardtanh_, aten.lerp_, aten.masked_fill_, aten.mul_, aten.nan_to_num_, aten.neg_),
    *(aten.pow_, aten.sgn_, aten.sign_, aten.sub_, aten.tanh_, aten.zero_),
}
LIKE = {
    *(aten.empty_like, aten.full_like, aten.ones_like, aten.rand_like, aten.randn_like, aten.zeros_like),
    *(aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros),
}


class GradientHandle(torch.Tensor):
    """Stands for one parameter's gradient; see the module's docstring."""

    @staticmethod
    def __new__(cls, of: str, parameter: nn.Parameter, ops: object) -> GradientHandle:
        make = cast(Callable[..., Any], torch.Tensor._make_wrapper_subclass)
        handle = make(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return cast(GradientHandle, handle)

    def __init__(self, of: str, parameter: nn.Parameter, ops: object) -> None:
        self.of = of  # the parameter it stands for
        self.spec = Spec.of(parameter)  # of a DTensor
        self._ops = weakref.ref(ops)  # parameters hold handles in C++, where Python's collector sees no cycle
        self.incoming: torch.Tensor | None = None  # what the running backward pass wants to add, taken by the reducer

    @property
    def ops(self) -> Any:
        ops = self._ops()
        if ops is None:
            raise MisuseError(f"the gradient of {self.of!r} was freed with its model: keep a reference to the model")
        return ops

    def take_incoming(self) -> torch.Tensor:
        """Return, once, the gradient that the running backward pass added."""
        incoming = self.incoming
        self.incoming = None
        assert incoming is not None
        return incoming

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only a DTensor has, such as `full_tensor`; all ranks must ask for it."""
        spec = self.__dict__.get("spec")
        if spec is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(spec.empty(self) if name in ("placements", "device_mesh") else self.ops.read(self), name)

    def __setitem__(self, index: Any, value: Any) -> None:
        _lent(self)[index] = value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of {self.of}, {tuple(self.shape)}, kept in its group>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_autograds = func is aten.add_.Tensor and not kwargs and in_backward()
        if is_autograds and isinstance(args[0], cls) and not isinstance(args[1], cls):
            handle = args[0]
            handle.incoming = args[1] if handle.incoming is None else handle.incoming + args[1]
            return handle
        if func in (aten.detach.default, aten.alias.default):
            return args[0]
        if func is aten.linalg_vector_norm.default and len(args) <= 2 and not (kwargs or {}).get("dim"):
            return args[0].ops.norm(args[0], float(args[1]) if len(args) > 1 else 2.0)
        if func.overloadpacket in ELEMENTWISE and isinstance(args[0], cls):
            args[0].ops.change(args[0], func, args[1:], kwargs or {})
            return args[0]
        if func.overloadpacket in LIKE:
            handle = args[0]
            plain = torch.empty(handle.shape, dtype=handle.dtype, device=handle.device)
            return func(plain if handle.spec is None else handle.spec.empty(plain), *args[1:], **(kwargs or {}))
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            args[0][0].ops.unscale(args[0], args[1], args[2])
            return None
        handles = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        lent = {id(handle): _lent(handle) for handle in handles}
        values = tree_map(lambda leaf: lent.get(id(leaf), leaf), (tuple(args), kwargs or {}))
        written = [lent[id(leaf)] for leaf in written_by(func, args, kwargs or {}) if id(leaf) in lent]
        return call_with_values(func, values[0], values[1], written)


def _lent(handle: GradientHandle) -> torch.Tensor:
    """Return the gradient, lent; of a DTensor it is a copy."""
    values = cast(torch.Tensor, handle.ops.read(handle))
    if handle.spec is not None:
        return values

    def write(whole: torch.Tensor) -> None:
        handle.ops.change(handle, aten.copy_.default, (whole,), {})

    return lend(CopySource(partial(handle.ops.read, handle), write), values)
