"""Histories of deferred tensors: the calls that write a storage, and how to do them again.

`empty_init()` (deferred.py) records calls on storages that have no memory; `replay` makes such a storage real later.

[Note: histories belong to storages] A parameter, its `.data` and its views are tensors on one storage, so calls name
operands by storage and layout. Views need no record. The history is an attribute of the storage object, which torch
keeps with the storage, so there is nothing on the user's parameters, no registry and nothing to clean up. [Note: each
storage draws its own numbers] The k-th storage of a context that draws, draws from `seed + k`. A value depends only on
its calls and the seed, not on other tensors, and a copy equals its original.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from zerostd.compat import negated, no_modes, version_of
from zerostd.errors import PrepareError

CPU = torch.device("cpu")
HISTORY = "_zerostd_history"  # the attribute of the storage
aten = torch.ops.aten
UNINITIALISED = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default}
UNINITIALISED |= {aten.new_empty.default, aten.new_empty_strided.default, aten.empty_like.default}


@dataclass(eq=False, slots=True)
class StorageHistory:
    """How one storage gets its bytes."""

    num_bytes: int
    device: torch.device  # where the code believes the storage to be
    calls: list[RecordedCall] = field(default_factory=list)  # that write it, in order; the first one makes it
    clock: int = 0  # of the last call that reads or writes it
    stream: int = -1  # which of its context's streams of random numbers it draws from
    pinned: int | None = None  # seed that was used already, because the code asked for a value
    versions: dict[int, int] = field(default_factory=dict)  # id(parameter): its version when the context was left


@dataclass(slots=True)
class DeferredTensor:
    """A deferred tensor as storage and layout; stands for it in recorded calls."""

    history: StorageHistory
    dtype: torch.dtype
    layout: tuple[Any, tuple[int, ...], tuple[int, ...]]  # offset, size, stride
    is_conjugate: bool
    is_negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, history: StorageHistory) -> DeferredTensor:
        """Return the handle that stands for the present values of a tensor."""
        layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return cls(history, tensor.dtype, layout, tensor.is_conj(), tensor.is_neg())

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this layout in a storage that is real."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.layout)
        tensor = tensor.conj() if self.is_conjugate else tensor
        return negated(tensor) if self.is_negative else tensor


@dataclass(eq=False, slots=True)
class RecordedCall:
    """One call to do again. Its clock is above that of every earlier call that touches one of its storages."""

    function: Callable[..., Any]
    operands: tuple[Any, Any]  # args and kwargs, with a DeferredTensor for each deferred tensor
    versions: list[tuple[torch.Tensor, int]]  # of its real operands
    touches: list[StorageHistory]
    clock: int
    draws: StorageHistory | None = None  # whose stream it draws from
    makes: list[tuple[int, DeferredTensor]] = field(default_factory=list)  # place among the results, the new tensor


def history_of(leaf: Any) -> StorageHistory | None:
    """Return the history of a deferred tensor; None of anything else."""
    try:
        return getattr(leaf.untyped_storage(), HISTORY, None) if isinstance(leaf, torch.Tensor) else None
    except (RuntimeError, ValueError):  # sparse tensors and uninitialised parameters have no storage to show
        return None


def is_deferred(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` was made under `empty_init()` and has no values yet."""
    return history_of(tensor) is not None


def calls_for(history: StorageHistory | None) -> list[RecordedCall]:
    """Return the calls to replay, in order, to make the bytes of `history`."""
    needed: dict[RecordedCall, None] = {}
    seen: dict[StorageHistory, int] = {}  # calls on it before this clock were looked at
    todo = [(history, history.clock + 1)] if history else []
    while todo:
        history, before = todo.pop()
        start = seen.get(history, 0)
        seen[history] = max(before, start)
        for call in history.calls if start < before else ():
            if start <= call.clock < before and call not in needed:
                needed[call] = None
                todo += [(touched, call.clock) for touched in call.touches]
    return sorted(needed, key=lambda call: call.clock)


def drawers_of(calls: list[RecordedCall]) -> list[StorageHistory]:
    """Return the storages whose streams of random numbers calls draw from."""
    return list(dict.fromkeys(call.draws for call in calls if call.draws))


def value_of(leaf: Any) -> Any:
    """Return a deferred tensor with the values it has at this point of the code; anything else as it is."""
    if (history := history_of(leaf)) is None:
        return leaf
    # No seed is known yet. Take one from torch's generator; the draws keep to it ever after.
    free = [drawer for drawer in drawers_of(calls_for(history)) if drawer.pinned is None]
    seed = int(torch.randint(2**62, (), device=CPU)) if free else 0
    for drawer in free:
        drawer.pinned = seed + drawer.stream
    return DeferredTensor.of(leaf, history).over(replay(history, 0, CPU))


def replay(history: StorageHistory, seed: int, device: torch.device) -> torch.UntypedStorage:
    """Do the calls of `history` again on `device`; other storages go as soon as no later call needs them."""
    calls = calls_for(history)
    if device.type != "cpu" and any(drawer.pinned is not None for drawer in drawers_of(calls)):
        drawn = torch.empty(0, dtype=torch.uint8, device=CPU).set_(replay(history, seed, CPU))
        return drawn.to(device).untyped_storage()  # another kind of device would draw other numbers than were seen
    uses = [[*call.touches, *(ref.history for _, ref in call.makes)] for call in calls]
    last = {used: step for step, used_now in enumerate(uses) for used in used_now}
    storages: dict[StorageHistory, torch.UntypedStorage] = {}
    states: dict[StorageHistory | None, torch.Tensor] = {}
    device = torch.empty(0, device=device).device  # with its index
    is_cpu = device.type == "cpu"
    generator = torch.default_generator if is_cpu else torch.get_device_module(device).default_generators[device.index]
    before = generator.get_state()
    try:
        for step, call in enumerate(calls):
            if (drawer := call.draws) in states:
                generator.set_state(states[drawer])
            elif drawer is not None:
                generator.manual_seed((seed + drawer.stream) % 2**63 if drawer.pinned is None else drawer.pinned)
            with torch.no_grad(), no_modes():  # those of a context that we may be in
                _do_again(call, storages, device)
            if drawer is not None:
                states[drawer] = generator.get_state()
            for used in uses[step]:
                if last[used] == step and used is not history:
                    storages.pop(used, None)
    finally:
        generator.set_state(before)
    return storages[history]


def _do_again(call: RecordedCall, storages: dict[StorageHistory, torch.UntypedStorage], device: torch.device) -> None:
    """Do one call again, with `device` for all devices in it, and keep the storages it makes."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, DeferredTensor):
            return leaf.over(storages[leaf.history])
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else device if isinstance(leaf, torch.device) else leaf

    for tensor, version in call.versions:
        if version_of(tensor) != version:
            raise PrepareError(f"a tensor {tuple(tensor.shape)} was changed after parameters copied it; pass a clone")
    args, kwargs = tree_map(real, call.operands)
    results = tree_leaves(call.function(*args, **kwargs)) if call.function not in UNINITIALISED else ()
    taken = [leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    for place, ref in call.makes:
        storage = results[place].untyped_storage() if results else None
        if storage and storage.data_ptr() not in taken and DeferredTensor.of(results[place], ref.history) == ref:
            storages[ref.history] = storage
            continue
        # Zeros, not what happens to lie there: ranks must agree on parameters that nobody initialised, too.
        storages[ref.history] = torch.zeros(ref.history.num_bytes, dtype=torch.uint8, device=device).untyped_storage()
        if results:  # laid out in another way than on meta
            ref.over(storages[ref.history]).copy_(results[place])
