"""What users see as `p.grad` after a backward pass: a handle, since the gradient itself rests in its flat buffer.

A handle has the parameter's shape, dtype and device and no memory. It keeps torch's own protocol: `p.grad is None`
means that there is no gradient, setting it to None drops the gradient, and a backward pass into a parameter that still
has one adds to it. The few operations that make sense on a sharded gradient are passed on to `ops`, the `Gradients` of
the model (optimizers/gradients.py): all ranks must make such a call. Any other raises and names the call to use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zerostd.compat import in_backward
from zerostd.errors import MisuseError

aten = torch.ops.aten


class GradientHandle(torch.Tensor):
    """Stands for one parameter's gradient; see the module's docstring."""

    @staticmethod
    def __new__(cls, of: str, parameter: nn.Parameter, ops: object) -> GradientHandle:
        make = cast(Callable[..., Any], torch.Tensor._make_wrapper_subclass)
        handle = make(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return cast(GradientHandle, handle)

    def __init__(self, of: str, parameter: nn.Parameter, ops: object) -> None:
        self.of = of  # the parameter it stands for
        self._ops = weakref.ref(ops)  # parameters hold handles in C++, where Python's collector sees no cycle
        self.incoming: torch.Tensor | None = None  # what the running backward pass wants to add, taken by the reducer

    @property
    def ops(self) -> Any:
        ops = self._ops()
        if ops is None:
            raise MisuseError(f"the gradient of {self.of!r} is gone with its model; keep a reference to the model")
        return ops

    def take_incoming(self) -> torch.Tensor:
        """Return, once, the gradient that the running backward pass added."""
        incoming = self.incoming
        self.incoming = None
        assert incoming is not None
        return incoming

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of {self.of}, {tuple(self.shape)}, rests in its group>"

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
        if func in (aten.mul_.Tensor, aten.zero_.default):
            args[0].ops.scale(args[0], args[1] if len(args) > 1 else 0.0)
            return args[0]
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            args[0][0].ops.unscale(args[0], args[1], args[2])
            return None
        first = next((arg for arg in tree_leaves(args) if isinstance(arg, cls)), None)
        raise MisuseError(
            f"{func} on the gradient of {first.of if first is not None else 'a parameter'}: a prepared model keeps "
            "gradients sharded, so `p.grad` only stands for one. Clip with optimizer.clip_grad_norm_(max_norm), drop "
            "with optimizer.zero_grad(), update with the optimizer that zerostd.prepare returned"
        )
