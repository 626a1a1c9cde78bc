"""Recomputes a module's forward in backward, as torch.utils.checkpoint does without reentrant autograd, with less to do
for each tensor.

    forward    autograd saves a number for each tensor that it would save, and the inputs are kept
    backward   the first tensor that is needed runs the forward again, up to the last tensor that was saved. Autograd
               then takes the tensors by their numbers, each once

A transformer's block saves some fifty tensors. Where launching kernels takes longer than running them, work for each of
them counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerostd.compat import current_backward, in_backward, in_checkpoint, in_transform, version_of
from zerostd.errors import MisuseError
from zerostd.monitoring.events import NOTHING
from zerostd.scheduling.tensors import map_tensors

GiveBack = Callable[[], torch.Tensor]  # what autograd holds instead of a saved tensor
Keep = Callable[[torch.Tensor], GiveBack]  # for the inputs of a forward that is recomputed
Counting = Callable[[], contextlib.AbstractContextManager[None]]  # looks on while a group saves its activations
Kind = tuple[torch.Size, torch.dtype, torch.device]  # of a tensor that autograd saves


def recompute(
    group: str, module: nn.Module, device: torch.device, keep: Keep, counting: Counting
) -> Callable[[], None]:
    """Replace a module's forward by one that is recomputed in backward; return a function that puts it back."""
    forward = module.forward
    had_own = "forward" in module.__dict__
    own = [(m._parameters, name, parameter) for m in module.modules() for name, parameter in m._parameters.items()]
    changing: set[str] = {name for name, _ in module.named_buffers()}  # buffers that a forward may change

    def recomputed(*args: Any, **kwargs: Any) -> Any:  # a function, since torch.compile looks into those
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        is_functional = any(parameters.get(name) is not parameter for parameters, name, parameter in own)
        if not torch.is_grad_enabled() or in_backward() or in_transform() or in_checkpoint() or is_functional:
            return forward(*args, **kwargs)
        run = _run_twice(module, forward, keep, args, kwargs, changing, counting)
        return RecomputedForward(group, device, run).first()

    def undo() -> None:
        if had_own:
            module.forward = forward
        else:
            del module.forward

    module.forward = recomputed
    return undo


class _Complete(Exception):
    """All tensors that were saved have been computed again."""


class RecomputedForward:
    """One call of a forward that backward repeats. `run` calls the forward, each time with the same inputs."""

    def __init__(self, group: str, device: torch.device, run: Callable[[], Any]) -> None:
        self._group = group  # for messages
        self._device = device
        self._run = run
        self._saved: list[Kind] = []  # by autograd in the first run, in order
        self._values: dict[int, torch.Tensor] = {}  # of these, until autograd takes them
        self._backward = -1  # for which they were computed
        self._random: list[torch.Tensor] | None = None  # states before the first run, if it used them
        self._autocasts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in {"cpu", device.type}
            if torch.is_autocast_enabled(kind)
        ]

    def first(self) -> Any:
        """Run the forward for the first time."""
        before = self._random_states()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            output = self._run()
        if not all(map(torch.equal, before, self._random_states())):
            self._random = before
        return output

    def _pack(self, tensor: torch.Tensor) -> int:
        self._saved.append((tensor.shape, tensor.dtype, tensor.device))
        return len(self._saved) - 1

    def _unpack(self, number: int) -> torch.Tensor:
        backward = current_backward()
        if backward != self._backward or number not in self._values:
            self._again(backward)
        return self._values.pop(number)

    def _again(self, backward: int) -> None:
        """Run the forward again, and keep the tensors that autograd would save."""
        values: dict[int, torch.Tensor] = {}
        num_saved = len(self._saved)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            # Not the method of a prepared parameter, which takes longer and returns the same here.
            value = torch.Tensor.detach(tensor) if tensor.requires_grad else tensor
            values[len(values)] = value
            if len(values) == num_saved:
                raise _Complete
            return value

        self._values.clear()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _same)
        as_first = self._as_first() if self._autocasts or self._random is not None else NOTHING
        with contextlib.suppress(_Complete), as_first, torch.enable_grad(), hooks:
            self._run()
        kinds: list[Kind] = [(value.shape, value.dtype, value.device) for value in values.values()]
        if kinds != self._saved:
            raise MisuseError(self._explain(kinds))
        self._values = values
        self._backward = backward

    @contextlib.contextmanager
    def _as_first(self) -> Iterator[None]:
        """Return a context with the autocast and the random states of the first run."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, is_cached in self._autocasts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=is_cached))
            if self._random is None:
                yield
                return
            now = self._random_states()
            self._set_random_states(self._random)
            try:
                yield
            finally:
                self._set_random_states(now)

    def _random_states(self) -> list[torch.Tensor]:
        """Return the random state of the CPU, and of the device if that is another one."""
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def _set_random_states(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)

    def _explain(self, kinds: list[Kind]) -> str:
        """Return how the second run differed."""
        what = f"saved {len(self._saved)} tensors for backward, and {len(kinds)} when it ran again"
        if len(kinds) == len(self._saved):
            both = list(zip(self._saved, kinds, strict=True))
            index = next(index for index, (first, again) in enumerate(both) if first != again)
            first, again = (f"{tuple(shape)} of {dtype} on {device}" for shape, dtype, device in both[index])
            what = f"saved tensor {index} as {first}, and as {again} when it ran again"
        return (
            f"group {self._group!r} is recomputed, but its forward {what}: it must do the same each time. Keep its "
            f"activations, as with Placement(activations={{{self._group!r}: 'device'}})"
        )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _run_twice(
    module: nn.Module,
    forward: Callable[..., Any],
    keep: Keep,
    args: Any,
    kwargs: Any,
    changing: set[str],
    counting: Counting,
) -> Callable[[], Any]:
    """Return one call of a forward, which uses its inputs the first time and the kept inputs afterwards. Buffers that
    it changes, such as statistics, change only once; `changing` collects their names."""
    kept: dict[int, tuple[GiveBack, bool]] = {}  # by placeholder; whether it gets a gradient
    first = [(args, kwargs)]
    buffers: dict[str, torch.Tensor] = {}  # as the first call found them, if it changed them

    def put(tensor: torch.Tensor) -> torch.Tensor:
        placeholder = tensor.new_empty(0)
        kept[id(placeholder)] = (keep(tensor), tensor.requires_grad)
        return placeholder

    def take(placeholder: torch.Tensor) -> torch.Tensor:
        give_back, requires_grad = kept[id(placeholder)]
        return give_back().detach().requires_grad_(requires_grad)

    structure = map_tensors((args, kwargs), put)

    def run() -> Any:
        if not first:
            args, kwargs = map_tensors(structure, take)
            with _buffers_of_before(module, buffers) if buffers else NOTHING:
                return forward(*args, **kwargs)
        args, kwargs = first.pop()
        named = dict(module.named_buffers()) if changing else {}
        before = {name: (named[name], version_of(named[name]), named[name].clone()) for name in changing}
        with counting():
            output = forward(*args, **kwargs)
        named = dict(module.named_buffers()) if changing else {}
        for name, (buffer, version, copy) in before.items():
            owner = module.get_submodule(name.rpartition(".")[0])
            keeps_statistics = getattr(owner, "track_running_stats", False)  # torch writes them without counting it
            if keeps_statistics or named[name] is not buffer or version_of(buffer) != version:
                buffers[name] = copy
        changing.intersection_update(buffers)
        return output

    return run


@contextlib.contextmanager
def _buffers_of_before(module: nn.Module, before: dict[str, torch.Tensor]) -> Iterator[None]:
    """Give a module copies of its earlier buffers inside the context."""
    owners = [(module.get_submodule(name.rpartition(".")[0])._buffers, name.rpartition(".")[2]) for name in before]
    originals = [buffers[short] for buffers, short in owners]
    for (buffers, short), value in zip(owners, before.values(), strict=True):
        buffers[short] = value.clone()
    try:
        yield
    finally:
        for (buffers, short), original in zip(owners, originals, strict=True):
            buffers[short] = original
