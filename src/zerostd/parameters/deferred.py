"""Models of any size without memory: `empty_init()` records how tensors get their values, `make_real` makes them later.

In: the code inside `with empty_init():`. Out: tensors on the meta device whose storages carry a `_History`. The api
exports `empty_init`, and asks `is_deferred`, `draw_seeds` and `make_real` when it prepares a model.

[Note: histories belong to storages] A parameter, its `.data` and its views are tensors on one storage, so records name
operands by storage and layout. Views need no record, and the history hangs on the storage object, which torch keeps
with the storage: nothing on the user's parameters, no registry, nothing to clean up.
[Note: each storage draws its own numbers] The k-th storage of a context that draws, draws from `seed + k`. A value
depends on records and seed alone, not on what else is made, and a copy equals what it was copied from.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import TensorWeakRef

from zerostd.errors import NotSupportedError, PrepareError

__all__ = ["EmptyInit", "draw_seeds", "empty_init", "is_deferred", "make_real"]

LARGE_BYTES = 64 << 10  # constants and random tensors up to this size are made at once, as ever
SETTLE_BYTES = 64 << 20  # at exit, deferred tensors that are no parameters (masks, tables) are made up to this size
META, CPU = torch.device("meta"), torch.device("cpu")
MARK = "_zerostd_history"  # the attribute of the storage
aten = torch.ops.aten
UNINITIALISED = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default}
UNINITIALISED |= {aten.new_empty.default, aten.new_empty_strided.default, aten.empty_like.default}
FILLED = {aten.zeros.default, aten.ones.default, aten.full.default, aten.eye.default, aten.eye.m, aten.rand.default}
FILLED |= {aten.randn.default, aten.normal.float_float, aten.randint.default, aten.randint.low}
FILLED |= {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
# What they make is deferred above so many bytes, even if no operand is. Not empty_like: like a real tensor is real.
DEFERRED_ABOVE = dict.fromkeys(UNINITIALISED - {aten.empty_like.default}, 0) | dict.fromkeys(FILLED, LARGE_BYTES)
IS_META, DEVICE = torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]
READERS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}  # of memory, without dispatch


@dataclass(eq=False, slots=True)
class _History:
    """How one storage gets its bytes."""

    num_bytes: int
    device: torch.device  # where the code believes the storage to be
    records: list[_Record] = field(default_factory=list)  # that write it, in order; the first one makes it
    clock: int = 0  # of the last record that reads or writes it
    stream: int = -1  # which of its context's streams of random numbers it draws from
    pinned: int | None = None  # seed that was used already, because the code asked for a value
    versions: dict[int, int] = field(default_factory=dict)  # id(parameter): its version when the context was left


@dataclass(slots=True)
class _Ref:
    """A deferred tensor as storage and layout; stands for it in records."""

    history: _History
    dtype: torch.dtype
    layout: tuple[Any, tuple[int, ...], tuple[int, ...]]  # offset, size, stride
    is_conjugate: bool
    is_negative: bool

    @classmethod
    def to(cls, tensor: torch.Tensor, history: _History) -> _Ref:
        layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return cls(history, tensor.dtype, layout, tensor.is_conj(), tensor.is_neg())

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.layout)
        tensor = tensor.conj() if self.is_conjugate else tensor
        return torch._neg_view(tensor) if self.is_negative else tensor


@dataclass(eq=False, slots=True)
class _Record:
    """One call to do again. Its clock is above that of every earlier record that touches one of its storages."""

    call: Callable[..., Any]
    operands: tuple[Any, Any]  # args and kwargs, with a _Ref for each deferred tensor
    versions: list[tuple[torch.Tensor, int]]  # of its real operands
    touches: list[_History]
    clock: int
    draws: _History | None = None  # whose stream it draws from
    makes: list[tuple[int, _Ref]] = field(default_factory=list)  # place among the results, the new tensor


def empty_init() -> EmptyInit:
    """Context in which models take no memory: `with zerostd.empty_init(): model = Model()`, whatever its size.

    Parameters come out on the meta device and get their values when the model is prepared, each on its owner, from the
    initialisation that ran in the context. Code that looks at values (masks, tables, `.item()`) works: small tensors
    are real, and what is asked for is computed. Run all initialisation, and casts such as `model.to(torch.bfloat16)`,
    inside: afterwards there is nothing they could write to.
    """
    return EmptyInit()  # type: ignore[no-untyped-call]


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was made under `empty_init()` and has no values yet."""
    return _history_of(tensor) is not None


def draw_seeds(named: Iterable[tuple[str, torch.Tensor]], *, seed: int) -> dict[str, int]:
    """The seed to make each tensor with: every name its own, but one for tensors that share draws, else they disagree.

    Those are tied weights, copies (`copy.deepcopy` of a layer) and what is computed from another parameter.
    """
    drawers: dict[str, list[_History]] = {}
    first: dict[_History, str] = {}
    for name, tensor in named:
        drawers[name] = _drawers(_records_for(_history_of(tensor)))
        leaders = {first[drawer]: None for drawer in drawers[name] if drawer in first}
        leader = next(iter(leaders), name)
        first |= dict.fromkeys(drawers[name], leader)
        if len(leaders) > 1:  # it ties families that were apart till now
            first = {drawer: leader if other in leaders else other for drawer, other in first.items()}
    texts = {name: f"{seed}:{first[own[0]] if own else name}".encode() for name, own in drawers.items()}
    return {name: int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1 for name, text in texts.items()}


def make_real(name: str, tensor: torch.Tensor, *, seed: int, device: torch.device) -> torch.Tensor:
    """The values of a deferred `tensor`, as an ordinary tensor of its shape, dtype and strides on `device`.

    Does again what was recorded for its storage and for what that reads, and nothing else; `tensor` stays deferred.
    The same records, seed and kind of device give the same bits; torch's random state is left as it was.
    """
    history = _history_of(tensor)
    if history is None:
        raise PrepareError(
            f"parameter {name!r} is on the meta device without a recorded initialisation; build it under "
            "zerostd.empty_init(), casts such as model.to(dtype) included, or give it values first"
        )
    if tensor._version != history.versions.get(id(tensor), tensor._version):
        raise PrepareError(
            f"parameter {name!r} was changed after empty_init(), when it had no memory to change; move the "
            "initialisation inside the context or use zerostd.gathered(model, write=True)"
        )
    storage = _replay(history, seed, device)
    real = _Ref.to(tensor, history).over(storage)
    return real if storage.nbytes() == real.nbytes else real.clone()  # a part must not keep the whole alive


class EmptyInit(TorchDispatchMode):
    """What `empty_init()` gives: runs operations on deferred tensors for their shapes only, and records them."""

    _stack: contextlib.ExitStack
    _num_streams: int
    _parameters: dict[int, torch.nn.Parameter]  # by id; registered or written in this context
    _others: dict[int, TensorWeakRef]  # by id; deferred tensors that the code was given

    def __enter__(self) -> EmptyInit:
        self._num_streams, self._parameters, self._others = 0, {}, {}
        with contextlib.ExitStack() as stack:
            if not is_deferred(torch.empty(1, device=CPU)):  # else the work is left to the context outside
                hook = register_module_parameter_registration_hook(lambda module, name, value: self.see(value))
                stack.callback(hook.remove)
                init: Any = torch.nn.init
                stack.callback(setattr, init, "_no_grad_trunc_normal_", init._no_grad_trunc_normal_)
                init._no_grad_trunc_normal_ = functools.partial(self._trunc_normal, init._no_grad_trunc_normal_)
                super().__enter__()  # type: ignore[no-untyped-call]
                stack.push(super().__exit__)
                stack.enter_context(_Face(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)
        for parameter in self._parameters.values():
            if history := _history_of(parameter):
                history.versions[id(parameter)] = parameter._version
        others = [tensor for ref in self._others.values() if (tensor := ref()) is not None]
        self._parameters, self._others = {}, {}
        if error is None:
            _settle(others)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == META:  # it came from a deferred tensor, or will be one
            kwargs["device"] = CPU
        histories = [history for leaf in tree_leaves((args, kwargs)) if (history := _history_of(leaf))]
        most_bytes = DEFERRED_ABOVE.get(func)
        if not histories and (most_bytes is None or _run_on_meta(func, args, kwargs).nbytes <= most_bytes):
            return func(*args, **kwargs)
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = kwargs.get("device") or (histories[0].device if histories else CPU)
        return self._defer(func, args, kwargs)

    def _defer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation that reads, writes or makes deferred tensors for its shapes, and record it."""
        marked = [(i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
        written = tree_leaves([args[i] if i < len(args) else kwargs.get(name) for i, name in marked])
        written = [leaf for leaf in written if isinstance(leaf, torch.Tensor)]
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
            args, kwargs = tree_map(_value_of, (args, kwargs))
            return func(*args, **kwargs)
        if func in FILLED:  # the default dtype may be another one when it is done again
            operands[1].update(dtype=result.dtype, pin_memory=False)
        self._record(func, operands, result, written)
        return result

    def _record(self, call: Any, operands: tuple[Any, Any], result: Any, written: list[torch.Tensor]) -> None:
        """Note a call with the storages it writes or makes. One that does neither gives views: nothing to note."""
        leaves = tree_leaves(operands)
        touches = list(dict.fromkeys(leaf.history for leaf in leaves if isinstance(leaf, _Ref)))
        writes = list(dict.fromkeys(history for tensor in written if (history := _history_of(tensor))))
        versions = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        device = operands[1].get("device") or (touches[0].device if touches else CPU)
        record = _Record(call, operands, versions, touches, 1 + max((history.clock for history in touches), default=0))
        for place, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, torch.Tensor) and not is_deferred(leaf):
                writes.append(_History(leaf.untyped_storage().nbytes(), device))
                setattr(leaf.untyped_storage(), MARK, writes[-1])
                record.makes.append((place, _Ref.to(leaf, writes[-1])))
        if not hasattr(call, "tags") or torch.Tag.nondeterministic_seeded in call.tags:  # no tags: trunc_normal_
            record.draws = writes[0]
            if writes[0].stream < 0:
                writes[0].stream, self._num_streams = self._num_streams, self._num_streams + 1
        for history in (*touches, *writes) if writes else ():
            history.clock = record.clock
        for history in writes:
            history.records.append(record)
        for tensor in written:
            self.see(tensor if tensor._base is None else tensor._base)

    def _trunc_normal(self, plain: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`init.trunc_normal_` as one call: it draws until all values fit, so it would need them at once."""
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


class _Face(TorchFunctionMode):
    """Shows deferred tensors on the device they were asked for, lest initialisation skip them as `orthogonal_` does."""

    def __init__(self, context: EmptyInit) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in (IS_META, DEVICE) and (history := _history_of(args[0])):
            return history.device if func == DEVICE else False
        if func in READERS:
            args = (_value_of(args[0]), *args[1:])
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self.context.see(leaf)
        return result


def _settle(tensors: list[torch.Tensor]) -> None:
    """Make masks, tables and buffers real, in place: nobody else could where they are plain attributes."""
    for tensor in sorted(tensors, key=lambda tensor: tensor._base is None):  # views first: they hold on to their base
        history = _history_of(tensor)
        if history and not history.versions and history.num_bytes <= SETTLE_BYTES and tensor.grad_fn is None:
            real = _value_of(tensor).to(history.device).requires_grad_(tensor.requires_grad)
            real.__dict__.update(tensor.__dict__)
            with contextlib.suppress(RuntimeError):  # something else holds it: it stays deferred
                torch.utils.swap_tensors(tensor, real)


def _records_for(history: _History | None) -> list[_Record]:
    """What to do again, in order, for the bytes of `history`."""
    found: dict[_Record, None] = {}
    seen: dict[_History, int] = {}
    todo = [(history, history.clock + 1)] if history else []
    while todo:
        history, before = todo.pop()
        start, seen[history] = seen.get(history, 0), max(before, seen.get(history, 0))
        for record in history.records if start < before else ():
            if start <= record.clock < before and record not in found:
                found[record] = None
                todo += [(other, record.clock) for other in record.touches]
    return sorted(found, key=lambda record: record.clock)


def _drawers(records: list[_Record]) -> list[_History]:
    return list(dict.fromkeys(record.draws for record in records if record.draws))


def _value_of(leaf: Any) -> Any:
    """A deferred tensor with the values it has at this point of the code; anything else as it is."""
    if (history := _history_of(leaf)) is None:
        return leaf
    # No seed is known yet. Take one from torch's generator; the draws keep to it ever after.
    free = [drawer for drawer in _drawers(_records_for(history)) if drawer.pinned is None]
    seed = int(torch.randint(2**62, (), device=CPU)) if free else 0
    for drawer in free:
        drawer.pinned = seed + drawer.stream
    return _Ref.to(leaf, history).over(_replay(history, 0, CPU))


def _replay(history: _History, seed: int, device: torch.device) -> torch.UntypedStorage:
    """Do the records of `history` again on `device`; other storages go as soon as no later record needs them."""
    records = _records_for(history)
    if device.type != "cpu" and any(drawer.pinned is not None for drawer in _drawers(records)):
        drawn = torch.empty(0, dtype=torch.uint8, device=CPU).set_(_replay(history, seed, CPU))
        return drawn.to(device).untyped_storage()  # another kind of device would draw other numbers than were seen
    uses = [[*record.touches, *(ref.history for _, ref in record.makes)] for record in records]
    last = {used: step for step, used_now in enumerate(uses) for used in used_now}
    storages: dict[_History, torch.UntypedStorage] = {}
    states: dict[_History | None, torch.Tensor] = {}
    device = torch.empty(0, device=device).device  # with its index
    is_cpu = device.type == "cpu"
    generator = torch.default_generator if is_cpu else torch.get_device_module(device).default_generators[device.index]
    before = generator.get_state()
    try:
        for step, record in enumerate(records):
            if (drawer := record.draws) in states:
                generator.set_state(states[drawer])
            elif drawer is not None:
                generator.manual_seed((seed + drawer.stream) % 2**63 if drawer.pinned is None else drawer.pinned)
            with torch.no_grad(), _disable_current_modes():  # those of a context that we may be in
                _do(record, storages, device)
            if drawer is not None:
                states[drawer] = generator.get_state()
            for used in uses[step]:
                if last[used] == step and used is not history:
                    storages.pop(used, None)
    finally:
        generator.set_state(before)
    return storages[history]


def _do(record: _Record, storages: dict[_History, torch.UntypedStorage], device: torch.device) -> None:
    """Do one call again, with `device` for all devices in it, and keep the storages it makes."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, _Ref):
            return leaf.over(storages[leaf.history])
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else device if isinstance(leaf, torch.device) else leaf

    for tensor, version in record.versions:
        if tensor._version != version:
            raise PrepareError(f"a tensor {tuple(tensor.shape)} was changed after parameters copied it; pass its clone")
    args, kwargs = tree_map(real, record.operands)
    results = tree_leaves(record.call(*args, **kwargs)) if record.call not in UNINITIALISED else ()
    taken = [leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    for place, ref in record.makes:
        storage = results[place].untyped_storage() if results else None
        if storage and storage.data_ptr() not in taken and _Ref.to(results[place], ref.history) == ref:
            storages[ref.history] = storage
            continue
        # Zeros, not what happens to lie there: ranks must agree on parameters that nobody initialised, too.
        storages[ref.history] = torch.zeros(ref.history.num_bytes, dtype=torch.uint8, device=device).untyped_storage()
        if results:  # laid out in another way than on meta
            ref.over(storages[ref.history]).copy_(results[place])


def _run_on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def shape_only(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not is_deferred(leaf):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)
        return META if isinstance(leaf, torch.device) else leaf

    args, kwargs = tree_map(shape_only, (args, {key: value for key, value in kwargs.items() if key != "pin_memory"}))
    return func(*args, **kwargs)


def _stand_in(leaf: Any) -> Any:
    """What records hold for an operand. Real tensors: a copy if it is small, else itself, which must not change."""
    if isinstance(leaf, torch.Generator):
        raise NotSupportedError("empty_init() cannot record draws from a torch.Generator of your own; leave it out")
    if history := _history_of(leaf):
        return _Ref.to(leaf, history)
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.nbytes <= LARGE_BYTES else leaf


def _history_of(leaf: Any) -> _History | None:
    try:
        return getattr(leaf.untyped_storage(), MARK, None) if isinstance(leaf, torch.Tensor) else None
    except (RuntimeError, ValueError):  # sparse tensors and uninitialised parameters have no storage to show
        return None
