"""Models of any size without memory: `empty_init()` records how tensors get their values, `make_real` makes them later.

In: the code inside `with empty_init():`. Out: tensors on the meta device whose storages carry a `StorageHistory`
(replaying.py). The api exports `empty_init`, and calls `is_deferred`, `draw_seeds` and `make_real` when it prepares a
model.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import TensorWeakRef

from zerostd.compat import arguments_of, base_of, replaced_trunc_normal, version_of, written_by
from zerostd.errors import NotSupportedError, PrepareError
from zerostd.parameters.replaying import (
    CPU,
    HISTORY,
    UNINITIALISED,
    DeferredTensor,
    RecordedCall,
    StorageHistory,
    calls_for,
    drawers_of,
    history_of,
    is_deferred,
    replay,
    value_of,
)

LARGE_BYTES = 64 << 10  # constants and random tensors up to this size are made at once, as ever
REAL_BYTES = 64 << 20  # at exit, deferred tensors that are no parameters (masks, tables) are made up to this size
META = torch.device("meta")
aten = torch.ops.aten
FILLED = {aten.zeros.default, aten.ones.default, aten.full.default, aten.eye.default, aten.eye.m, aten.rand.default}
FILLED |= {aten.randn.default, aten.normal.float_float, aten.randint.default, aten.randint.low}
FILLED |= {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
# What they make is deferred above so many bytes, even if no operand is. Not empty_like: like a real tensor is real.
DEFERRED_ABOVE = dict.fromkeys(UNINITIALISED - {aten.empty_like.default}, 0) | dict.fromkeys(FILLED, LARGE_BYTES)
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
DEVICE = torch.Tensor.device.__get__
READERS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}  # of memory, without dispatch


def empty_init() -> EmptyInit:
    """Build models of any size without memory: `with zerostd.empty_init(): model = Model()`.

    Parameters are on the meta device until `prepare` gives them the values of the initialisation that ran in the
    context, each on the rank that keeps it. Code that reads values (masks, tables, `.item()`) works: small tensors are
    real, and other values are computed on demand. Run all initialisation, and casts such as `model.to(torch.bfloat16)`,
    inside the context: afterwards there are no values to change.
    """
    return EmptyInit()  # type: ignore[no-untyped-call]


def draw_seeds(named: Iterable[tuple[str, torch.Tensor]], *, seed: int) -> dict[str, int]:
    """Return the seed to make each tensor with: every name its own, but one for tensors that share draws.

    Those are tied weights, copies (`copy.deepcopy` of a layer) and what is computed from another parameter: with
    seeds of their own they would disagree.
    """
    drawers: dict[str, list[StorageHistory]] = {}
    first: dict[StorageHistory, str] = {}
    for name, tensor in named:
        drawers[name] = drawers_of(calls_for(history_of(tensor)))
        leaders = {first[drawer]: None for drawer in drawers[name] if drawer in first}
        leader = next(iter(leaders), name)
        first |= dict.fromkeys(drawers[name], leader)
        if len(leaders) > 1:  # it ties families that were apart till now
            first = {drawer: leader if name in leaders else name for drawer, name in first.items()}
    texts = {name: f"{seed}:{first[own[0]] if own else name}".encode() for name, own in drawers.items()}
    return {name: int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1 for name, text in texts.items()}


def make_real(name: str, tensor: torch.Tensor, *, seed: int, device: torch.device) -> torch.Tensor:
    """Return the values of a deferred `tensor` as an ordinary tensor of its shape, dtype and strides on `device`.

    Replays only the calls recorded for its storage and for what those calls read; `tensor` stays deferred.
    The same calls, seed and kind of device give the same bits; torch's random state is left as it was.
    """
    history = history_of(tensor)
    if history is None:
        raise PrepareError(
            f"parameter {name!r} is on the meta device without a recorded initialisation; build the model, and "
            "cast it with model.to(dtype), under zerostd.empty_init(), or give the parameter values first"
        )
    if version_of(tensor) != history.versions.get(id(tensor), version_of(tensor)):
        raise PrepareError(
            f"parameter {name!r} was changed after empty_init(), when it had no memory; move the "
            "initialisation inside the context or use zerostd.gathered(model, write=True)"
        )
    storage = replay(history, seed, device)
    real = DeferredTensor.of(tensor, history).over(storage)
    return real if storage.nbytes() == real.nbytes else real.clone()  # a part must not keep the whole alive


class EmptyInit(TorchDispatchMode):
    """The context of `empty_init()`: runs operations on deferred tensors for their shapes only, and records them."""

    def __enter__(self) -> EmptyInit:
        self._num_streams = 0
        self._parameters: dict[int, torch.nn.Parameter] = {}  # by id; registered or written in this context
        self._others: dict[int, TensorWeakRef] = {}  # by id; deferred tensors that the code was given
        with contextlib.ExitStack() as stack:
            if not is_deferred(torch.empty(1, device=CPU)):  # else the work is left to the context outside
                hook = register_module_parameter_registration_hook(lambda module, name, value: self.see(value))
                stack.callback(hook.remove)
                stack.enter_context(replaced_trunc_normal(self._trunc_normal))
                super().__enter__()  # type: ignore[no-untyped-call]
                stack.push(super().__exit__)
                stack.enter_context(_ShownDevice(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)
        for parameter in self._parameters.values():
            if history := history_of(parameter):
                history.versions[id(parameter)] = version_of(parameter)
        others = [tensor for ref in self._others.values() if (tensor := ref()) is not None]
        self._parameters = {}
        self._others = {}
        if error is None:
            _make_small_real(others)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == META:  # it came from a deferred tensor, or will be one
            kwargs["device"] = CPU
        histories = [history for leaf in tree_leaves((args, kwargs)) if (history := history_of(leaf))]
        most_bytes = DEFERRED_ABOVE.get(func)
        if not histories and (most_bytes is None or _run_on_meta(func, args, kwargs).nbytes <= most_bytes):
            return func(*args, **kwargs)
        if any(argument.name == "device" for argument in arguments_of(func)):
            kwargs["device"] = kwargs.get("device") or (histories[0].device if histories else CPU)
        return self._defer(func, args, kwargs)

    def _defer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation that reads, writes or makes deferred tensors for its shapes, and record it."""
        written = written_by(func, args, kwargs)
        operands: Any = ((), {"device": kwargs.get("device")})
        if func not in UNINITIALISED:
            operands = tree_map(_stand_in, (args, kwargs))  # before the run: `t_()` and `resize_()` change layouts
        try:
            if torch.Tag.data_dependent_output in func.tags or not all(map(is_deferred, written)):
                raise NotImplementedError  # `item()`, or a write to a real tensor: values are needed now
            result = _run_on_meta(func, args, kwargs)
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError) and torch.Tag.dynamic_output_shape not in func.tags:
                raise
            if any(map(is_deferred, written)):
                raise NotSupportedError(f"empty_init() cannot record {func}; build this part outside of it") from error
            args, kwargs = tree_map(value_of, (args, kwargs))
            return func(*args, **kwargs)
        if func in FILLED:  # the default dtype may be another one when it is done again
            operands[1].update(dtype=result.dtype, pin_memory=False)
        self._record(func, operands, result, written)
        return result

    def _record(self, call: Any, operands: tuple[Any, Any], result: Any, written: list[torch.Tensor]) -> None:
        """Record a call for the storages it writes or makes. Other calls return views."""
        leaves = tree_leaves(operands)
        touches = list(dict.fromkeys(leaf.history for leaf in leaves if isinstance(leaf, DeferredTensor)))
        writes = list(dict.fromkeys(history for tensor in written if (history := history_of(tensor))))
        versions = [(leaf, version_of(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        device = operands[1].get("device") or (touches[0].device if touches else CPU)
        clock = 1 + max((history.clock for history in touches), default=0)
        recorded = RecordedCall(call, operands, versions, touches, clock)
        for place, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, torch.Tensor) and not is_deferred(leaf):
                writes.append(StorageHistory(leaf.untyped_storage().nbytes(), device))
                setattr(leaf.untyped_storage(), HISTORY, writes[-1])
                recorded.makes.append((place, DeferredTensor.of(leaf, writes[-1])))
        if not hasattr(call, "tags") or torch.Tag.nondeterministic_seeded in call.tags:  # no tags: trunc_normal_
            recorded.draws = writes[0]
            if writes[0].stream < 0:
                writes[0].stream = self._num_streams
                self._num_streams += 1
        for history in (*touches, *writes) if writes else ():
            history.clock = recorded.clock
        for history in writes:
            history.calls.append(recorded)
        for tensor in written:
            base = base_of(tensor)
            self.see(tensor if base is None else base)

    def _trunc_normal(self, plain: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record `init.trunc_normal_` as one call: it draws until all values fit, so it would need them at once."""
        if not is_deferred(tensor):
            return plain(tensor, *args, **kwargs)
        self._record(plain, tree_map(_stand_in, ((tensor, *args), kwargs)), tensor, [tensor])
        return tensor

    def see(self, leaf: Any) -> None:
        """Remember a parameter, or a deferred tensor that may outlive the context, for its end."""
        if isinstance(leaf, torch.nn.Parameter):
            self._parameters[id(leaf)] = leaf
        elif type(leaf) is torch.Tensor and is_deferred(leaf):
            self._others[id(leaf)] = TensorWeakRef(leaf)


class _ShownDevice(TorchFunctionMode):
    """Shows deferred tensors on the device they were asked for; otherwise `orthogonal_` would skip them."""

    def __init__(self, context: EmptyInit) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in (IS_META, DEVICE) and (history := history_of(args[0])):
            return history.device if func == DEVICE else False
        if func in READERS:
            args = (value_of(args[0]), *args[1:])
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self.context.see(leaf)
        return result


def _make_small_real(tensors: list[torch.Tensor]) -> None:
    """Make masks, tables and buffers real, in place, including those that are plain attributes."""
    tensors.sort(key=lambda tensor: base_of(tensor) is None)  # views first: they hold on to their base
    for tensor in tensors:
        history = history_of(tensor)
        if history and not history.versions and history.num_bytes <= REAL_BYTES and tensor.grad_fn is None:
            real = value_of(tensor).to(history.device).requires_grad_(tensor.requires_grad)
            real.__dict__.update(tensor.__dict__)
            with contextlib.suppress(RuntimeError):  # something else holds it: it stays deferred
                torch.utils.swap_tensors(tensor, real)


def _run_on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def shape_only(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not is_deferred(leaf):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)
        return META if isinstance(leaf, torch.device) else leaf

    args, kwargs = tree_map(shape_only, (args, {key: value for key, value in kwargs.items() if key != "pin_memory"}))
    return func(*args, **kwargs)


def _stand_in(leaf: Any) -> Any:
    """Return what a recorded call keeps of an operand: a copy of a small real tensor, or a large one itself, which must
    not change."""
    if isinstance(leaf, torch.Generator):
        raise NotSupportedError("empty_init() cannot record draws from your own torch.Generator; leave it out")
    if history := history_of(leaf):
        return DeferredTensor.of(leaf, history)
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.nbytes <= LARGE_BYTES else leaf
