"""A trial forward: what each group computes, what it saves for backward, and its working memory.

In: a module, its groups to be and a batch. Out: a ForwardCounter with the costs. The forward runs on a copy of the
module whose tensors have shapes and no memory; the copy is thrown away. A forward that asks for values (`.item()`,
`nonzero`) cannot run that way: it runs on the real parameters if there are any.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from zerostd.compat import fake_mode, written_by
from zerostd.measuring.identity import device_of
from zerostd.parameters.blueprints import Blueprint, root_casts
from zerostd.policy import Precision

log = logging.getLogger(__name__)
Make = Callable[[torch.Tensor], torch.Tensor]
Ref = StorageWeakRef | None  # of a tensor's storage; None: it has none


@dataclass
class ForwardCost:
    """Costs of one batch in one group."""

    flops: int = 0
    recomputed: int = 0  # of these, in what torch.utils.checkpoint will recompute
    again: int = 0  # of these, before the last tensor is saved: recomputing ends there
    kept: float = 0.0  # bytes
    boundary: float = 0.0
    largest: float = 0.0  # output of an operation
    inside: float = 0.0  # saved in what will be recomputed


def try_forward(
    model: nn.Module, blueprints: list[Blueprint], precision: Precision, batch: Any
) -> ForwardCounter | None:
    """Count the costs of `batch` in a forward on tensors without memory or, if it needs values, on real ones."""
    device = device_of(model)
    with everything_kept(device):
        try:
            return _without_memory(model, blueprints, precision, batch, device)
        except Exception as error:
            name = type(model).__name__
            cause = error.__cause__ or error
            leaves = [*model.parameters(), *model.buffers(), *tree_leaves(batch)]
            if (why := _why_not_real(error, leaves)) is not None:
                log.warning(
                    "FLOPs and activations of %s are unknown: %s (%s: %s)", name, why, type(cause).__name__, cause
                )
                return None
            log.info("running %s with values, since it failed without them (%s: %s)", name, type(cause).__name__, cause)
            del cause  # it holds this frame, which holds the model
        return _with_memory(model, blueprints, precision, batch, device)


def _why_not_real(reason: Exception, leaves: list[Any]) -> str | None:
    """Return why the real forward would not help either, or None if it may."""
    if isinstance(reason, copy.Error):
        return "copy.deepcopy of it fails, and only a copy may be run"
    if "saved tensor hooks" in str(reason):
        return "its forward uses torch.func, where saved tensors cannot be counted"
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
        return "its forward needs values, or fails; pass a model and a batch that are not on the meta device"
    return None


def _without_memory(
    model: nn.Module, blueprints: list[Blueprint], precision: Precision, batch: Any, device: torch.device
) -> ForwardCounter:
    fake = fake_mode()
    dtypes = {id(m.parameter): m.dtype for blueprint in blueprints for m in blueprint.members}
    casts = root_casts(precision, (p.dtype for p in model.parameters()))

    def shape_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        with fake:
            if tensor.layout != torch.strided:
                return fake.from_tensor(tensor)
            dtype = dtype or dtypes.get(id(tensor), tensor.dtype)
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(shape, requires_grad=tensor.requires_grad)
        return shape.requires_grad_(tensor.requires_grad)

    copied, copies = copy_of(model, shape_of)
    inside = None if casts is None else casts.inside
    inputs = map_tensors(lambda leaf: shape_of(leaf, inside if leaf.is_floating_point() else None), batch)
    counter = ForwardCounter(blueprints, copies, {})
    with fake:
        output = counter.run(copied, inputs)
        if casts is not None:  # as the root will do
            with counter:
                map_tensors(lambda leaf: leaf.to(casts.returned) if leaf.dtype == casts.inside else leaf, output)
    return counter


def _with_memory(
    model: nn.Module, blueprints: list[Blueprint], precision: Precision, batch: Any, device: torch.device
) -> ForwardCounter:
    """Run in the model's own dtype; bytes of it are scaled to the dtype it will compute in."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()

    copied, copies = copy_of(model, own)
    casts = root_casts(precision, (p.dtype for p in model.parameters()))
    scale = {} if casts is None else {dtype: casts.inside.itemsize / dtype.itemsize for dtype in casts.taken}
    counter = ForwardCounter(blueprints, copies, scale)
    try:
        counter.run(copied, map_tensors(lambda leaf: leaf.detach().to(device, copy=True), batch))
    finally:
        for storage, before in counter.overwritten.values():
            storage.copy_(before)
    return counter


def call(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch as users give it: keywords, a tuple of arguments, or the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def map_tensors(function: Make, tree: Any) -> Any:
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def copy_of(model: nn.Module, make: Make) -> tuple[nn.Module, dict[int, Any]]:
    """Return a copy with `make(tensor)` for every tensor that a module holds, and what stands for what, by id."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for leaf in tree_leaves(dict(vars(module))):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in copies:
                copies[id(leaf)] = make(leaf)
    try:
        return copy.deepcopy(model, copies), copies
    except Exception as error:
        raise copy.Error from error


@contextlib.contextmanager
def everything_kept(device: torch.device) -> Iterator[None]:
    """Restore random states afterwards; inside, gradients are on and nothing is compiled."""
    devices = [] if device.type == "cpu" else [device]
    numbers = random.getstate()
    arrays = numpy.random.get_state()
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    try:
        draws = torch.random.fork_rng(devices, device_type=device.type)
        with draws, eager, torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        random.setstate(numbers)
        numpy.random.set_state(arrays)


# -- counting --


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])


def _recurrent_on_cpu(x: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * (inner.numel() + outer.numel())


def _recurrent(x: torch.Tensor, weights: Sequence[torch.Tensor], *_: Any, **__: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * sum(weight.numel() for weight in weights if weight.dim() == 2)


# [Note: why not FlopCounterMode] These are its formulas, and it knows no groups; the hooks that it puts on every module
# make a forward fail that calls torch.autograd.grad, as models of forces do.
FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_on_cpu,
    torch.ops.aten._cudnn_rnn: _recurrent,
}


@dataclass
class _ModuleCall:
    """A call of a module, while its forward runs."""

    index: int  # of its group
    is_entry: bool  # to the group
    hooks: saved_tensors_hooks | None = None  # ours, where somebody else's would see what is saved
    inside: float = 0.0


class ForwardCounter(TorchDispatchMode):
    """Count what a forward does, for the group whose module runs."""

    supports_higher_order_operators = True

    def __init__(
        self, blueprints: list[Blueprint], copies: Mapping[int, Any], scale: Mapping[torch.dtype, float]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs = [ForwardCost() for _ in blueprints]
        self.order: dict[int, None] = {}  # groups as they are first used
        self.overwritten: dict[Ref, tuple[Any, Any]] = {}  # parameters' storages: what they held before
        self._groups: dict[nn.Module, int] = {}
        self._owners: dict[Ref, int | None] = {}  # parameters by group; buffers have none
        self._scale = scale
        self._counted: dict[str, set[Ref]] = {"kept": set(), "boundary": set(), "inside": set()}
        self._calls = [_ModuleCall(0, True)]
        self._num_packed = 0
        for index, blueprint in enumerate(blueprints):
            self._groups |= {copies[id(module)]: index for module in blueprint.modules}
            self._owners |= {_ref(copies[id(member.parameter)]): index for member in blueprint.members}

    def run(self, model: nn.Module, batch: Any) -> Any:
        self._owners = {**dict.fromkeys(map(_ref, model.buffers())), **self._owners, None: None}
        for module in model.modules():
            index = self._groups.get(module)
            module.register_forward_pre_hook(functools.partial(self._before, index), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after, always_call=True)
        with self, saved_tensors_hooks(self._keep, lambda tensor: tensor):
            self._probe = torch.empty(0, requires_grad=True)
            try:
                return call(model, batch)
            finally:
                self._groups.clear()  # the modules' hooks hold this, and they shall go with the copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if (index := self._owners.get(_ref(leaf))) is not None:
                self.order.setdefault(index)
        for tensor in written_by(func, args, kwargs):
            ref = _ref(tensor)
            if ref not in self.overwritten and self._owners.get(ref) is not None:
                storage = tensor.untyped_storage()
                self.overwritten[ref] = storage, storage.clone()
        result = func(*args, **kwargs)
        cost = self.costs[self._calls[-1].index]
        if (formula := FORMULAS.get(getattr(func, "overloadpacket", func))) is not None:
            flops = formula(*args, **kwargs, out_val=result)
            cost.flops += flops
            cost.recomputed += flops if any(frame.hooks is not None for frame in self._calls) else 0
        for leaf in tree_leaves(result):
            if _ref(leaf) not in self._owners:
                cost.largest = max(cost.largest, self._size(leaf))
        return result

    def _size(self, tensor: torch.Tensor) -> float:
        return tensor.untyped_storage().nbytes() * self._scale.get(tensor.dtype, 1.0)

    def _before(self, index: int | None, module: nn.Module, args: Any, kwargs: Any) -> None:
        is_entry = index is not None
        frame = _ModuleCall(self._calls[-1].index if index is None else index, is_entry)
        self._calls.append(frame)
        if is_entry:
            self.order.setdefault(frame.index)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad and self._is_new(leaf, "boundary"):
                    self.costs[frame.index].boundary += self._size(leaf)
        num_packed = self._num_packed
        _ = self._probe * self._probe
        if self._num_packed == num_packed:  # it was saved with other hooks: those of torch.utils.checkpoint
            frame.hooks = saved_tensors_hooks(functools.partial(self._keep_inside, frame), lambda tensor: tensor)
            frame.hooks.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        frame = self._calls.pop()
        cost = self.costs[frame.index]
        if frame.hooks is not None:
            frame.hooks.__exit__()
        if frame.is_entry or frame.index == 0:  # at the root, which holds many blocks, the largest one counts
            cost.inside = max(cost.inside, frame.inside)
        else:
            self._calls[-1].inside += frame.inside

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._num_packed += 1
        cost = self.costs[self._calls[-1].index]
        cost.again = cost.flops
        if self._is_new(tensor, "kept"):
            cost.kept += self._size(tensor)
        return tensor.detach()  # itself would hold the graph that holds it

    def _keep_inside(self, frame: _ModuleCall, tensor: torch.Tensor) -> torch.Tensor:
        self._num_packed += 1
        if _ref(tensor) not in self._counted["kept"] and self._is_new(tensor, "inside"):
            frame.inside += self._size(tensor)
        return tensor.detach()

    def _is_new(self, tensor: torch.Tensor, what: str) -> bool:
        """Return whether a storage is no parameter's or buffer's, and was not counted as `what` yet."""
        ref = _ref(tensor)
        if ref in self._owners or ref in self._counted[what]:
            return False
        self._counted[what].add(ref)
        return True


def _ref(leaf: Any) -> Ref:
    try:
        return StorageWeakRef(leaf.untyped_storage()) if isinstance(leaf, torch.Tensor) else None
    except (RuntimeError, NotImplementedError):  # sparse tensors have no storage to show
        return None
