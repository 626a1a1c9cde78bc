"""ShardedOptimizer, which DistributedOptimizer returns: zerostd's optimizer with Horovod's calls.

It knows the parameters and not the model, so they are prepared in a container module of their own. Their hooks see
gradients arrive, whichever forward these belong to. Parameters are kept whole (stages 0 to 2), and are whole again when
step() returns. Ranks announce each call in a CallAgreement, so that all make the same ones.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import zerostd
from zerostd import MisuseError, NotSupportedError
from zerostd.horovod.agreement import Call, Event
from zerostd.horovod.collectives import Compression, broadcast_object
from zerostd.horovod.states import check_states, full_states, own_states, read_options, write_options
from zerostd.horovod.world import SESSION, agreement, size

Named = list[tuple[str, nn.Parameter]]


class _Parameters(nn.Module):
    """The parameters of a script, in one child each: grouping then packs neighbours by size alone."""

    def __init__(self, named: Named) -> None:
        super().__init__()
        for name, parameter in named:
            self.add_module("model/" + name.replace(".", "/"), nn.ParameterList([parameter]))

    def forward(self) -> None:
        """Compute nothing: the script's own modules do."""


class ShardedOptimizer(torch.optim.Optimizer):
    """The optimizer that DistributedOptimizer returns."""

    container: nn.Module  # has the parameters, and was prepared
    parameters: list[nn.Parameter]
    replaced: dict[nn.Parameter, torch.Tensor]  # values that this rank had where rank 0 had others
    loaded: dict[str, Any] | None  # whole states, until this rank takes its shards of them
    max_passes: int  # backward passes per step

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Named,
        *,
        stage: int,
        compression: Compression,
        max_passes: int,
        factor: float,
    ) -> None:
        self._is_built = False
        self.parameters = [parameter for _, parameter in named]
        self.max_passes = max_passes
        self._num_passes = [0] * len(named)  # since the last step, by parameter
        self._num_announced = 0  # passes since the last step that the other ranks know of
        self._follows = False  # in join
        self.loaded = optimizer.state_dict() if optimizer.state else None
        own = {parameter: parameter.detach().clone() for parameter in self.parameters} if size() > 1 else {}
        self._hooks = self._watch(factor)  # before those of prepare: a pass is announced before its first reduce
        try:
            self.container, self._zero = _prepare(_Parameters(named), optimizer, stage, compression)
        except BaseException:
            self._unwatch()
            raise
        self.replaced = {parameter: value.cpu() for parameter, value in own.items() if not parameter.equal(value)}
        super().__init__(self._zero.param_groups, self._zero.defaults)
        self.param_groups = self._zero.param_groups
        self.state = self._zero.state
        self._is_built = True
        if size() == 1:
            self.take_loaded()

    # -- the loop --

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient on any rank. A closure is called once, before the update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._announce(Event.STEP, zlib.crc32(repr(read_options(self.param_groups)).encode()))
        self._step(agreement().receive())
        return loss

    def _step(self, calls: list[Call]) -> None:
        """Do what ranks in join follow."""
        if len({call.first for call in calls if call.event is Event.STEP}) > 1:
            raise MisuseError(
                "ranks have different options in param_groups, such as lr, and each updates a part of the model: give "
                "schedulers the same numbers on all ranks, or call hvd.broadcast_optimizer_state(optimizer, 0)"
            )
        if agreement().num_joined:
            write_options(self.param_groups, agreement().share(read_options(self.param_groups)))
        self._take_loaded_with(calls)
        self._zero.step()
        self._wait_until_whole()
        self.replaced.clear()
        self._forget_passes()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.container()  # as at the start of a forward: a backward that raised is forgotten
        self._zero.zero_grad(set_to_none)
        self._forget_passes()

    def synchronize(self) -> None:
        """Wait until `p.grad` stands for averaged gradients, which are sharded. Clip then with
        torch.nn.utils.clip_grad_norm_, or without synchronize() with `optimizer.clip_grad_norm_`, which is faster."""
        agreement().receive()
        num_joined = agreement().num_joined
        if num_joined:
            raise NotSupportedError(
                f"optimizer.synchronize() while {num_joined} rank(s) are in hvd.join(): they hold a part of the "
                "gradients and cannot follow what is done with p.grad. Clip with optimizer.clip_grad_norm_(max_norm), "
                "without synchronize(): they follow that"
            )

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Do nothing: `step()` after `synchronize()` does nothing twice."""
        yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients to a global norm, exactly; return the norm before. Every rank must call it."""
        self._announce(Event.CLIP, max_norm, norm_type)
        agreement().receive()
        norm: torch.Tensor = self._zero.clip_grad_norm_(max_norm, norm_type)
        return norm

    # -- gradients as they arrive --

    def _watch(self, factor: float) -> list[Any]:
        hooks = []
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                arrived = functools.partial(_arrived, weakref.ref(self), index)
                hooks.append(parameter.register_post_accumulate_grad_hook(arrived))
                if factor != 1.0:
                    hooks.append(parameter.register_hook(functools.partial(torch.mul, other=factor)))
        return hooks

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def arrived(self, index: int, *, adds: bool) -> None:
        """Count a gradient of one parameter. With `adds`, autograd has added it to an earlier one."""
        if self._follows:
            return
        self._num_passes[index] += 1
        if self._num_passes[index] > self.max_passes:
            raise MisuseError(
                f"backward pass {self._num_passes[index]} since the last step, but backward_passes_per_step="
                f"{self.max_passes}: say how many there are, call optimizer.step() after so many, or "
                "optimizer.zero_grad() after a pass that failed"
            )
        if self._num_passes[index] > self._num_announced:
            self._num_announced += 1
            self._announce(Event.BACKWARD, index, adds)

    def _forget_passes(self) -> None:
        self._num_passes = [0] * len(self.parameters)
        self._num_announced = 0

    # -- agreement --

    def _announce(self, event: Event, first: float = 0.0, second: float = 0.0) -> None:
        agreement().announce(Call(event, self.loaded is not None, first, second))

    def join(self) -> int:
        """Follow the steps of ranks that still have data, with zeros, until none has; see `hvd.join`."""
        self._follows = True
        try:
            while True:
                self._announce(Event.JOIN)
                calls = agreement().receive()
                active = [call for call in calls if call.event is not Event.JOIN]
                if not active:
                    return agreement().last_rank
                self._follow(active[0], calls)
        finally:
            self._follows = False
            self._forget_passes()

    def _follow(self, active: Call, calls: list[Call]) -> None:
        match active.event:
            case Event.BACKWARD:
                adds = bool(active.second)
                if not adds:
                    self._zero.zero_grad()
                parameter = self.parameters[int(active.first)]
                torch.autograd.backward([parameter], [torch.zeros_like(parameter)])
            case Event.CLIP:
                self._zero.clip_grad_norm_(active.first, active.second)
            case Event.STEP:
                self._step(calls)
            case Event.STATE:
                self._gather_states(calls)

    # -- states --

    def state_dict(self) -> dict[str, Any]:
        """Return whole states in torch's format, as the wrapped optimizer would. Every rank must call it."""
        self._announce(Event.STATE)
        return self._gather_states(agreement().receive())

    def _gather_states(self, calls: list[Call]) -> dict[str, Any]:
        self._take_loaded_with(calls)
        in_order = [parameter for group in self.param_groups for parameter in group["params"]]
        return full_states(self._zero.state_dict(), in_order)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options now, and states before the next step, or in `hvd.broadcast_optimizer_state` if only one rank
        has them."""
        check_states(state_dict, self.param_groups)
        write_options(self.param_groups, read_options(state_dict["param_groups"]))
        self.loaded = state_dict
        if size() == 1:
            self.take_loaded()

    def take_loaded(self) -> None:
        """Keep this rank's shards of loaded states. All ranks have some, or none."""
        if self.loaded is not None:
            self._zero.load_state_dict(own_states(self.loaded, self._zero.state_dict()))
            self.loaded = None
            self._wait_until_whole()

    def _take_loaded_with(self, calls: list[Call]) -> None:
        if len({call.has_loaded for call in calls}) > 1:
            raise MisuseError(
                "optimizer.load_state_dict() was called on some ranks only: call "
                "hvd.broadcast_optimizer_state(optimizer, root_rank) with a rank that loaded, on all ranks"
            )
        self.take_loaded()

    def _wait_until_whole(self) -> None:
        for _ in self.container.parameters():  # reading them waits
            pass

    # -- the rest of an optimizer --

    def memory(self) -> zerostd.Memory:
        """Return bytes of this rank by kind, now and at peak, as `zerostd.memory` does."""
        return zerostd.memory(self.container)

    def release(self) -> None:
        """Make the parameters ordinary ones again; this optimizer cannot step any more. Every rank must call it."""
        zerostd.release(self.container)
        self._unwatch()
        SESSION.optimizers.discard(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse it: shards are laid out when the optimizer is made."""
        if self._is_built:
            raise MisuseError(
                "add_param_group on a distributed optimizer: its shards are laid out already. Put all parameters into "
                "the optimizer before hvd.DistributedOptimizer; those that train later can have lr=0 until then"
            )
        self.param_groups.append(param_group)  # by torch's own __init__

    def __repr__(self) -> str:
        return f"hvd.DistributedOptimizer({self._zero.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError("a distributed optimizer cannot be copied or pickled: use its state_dict(), on all ranks")


def _prepare(
    container: nn.Module, optimizer: torch.optim.Optimizer, stage: int, compression: Compression
) -> tuple[nn.Module, Any]:
    """Shard the parameters, with rank 0's values on all ranks. The optimizer's options stay this rank's own."""
    is_compressed = compression.value is not None and size() > 1
    precision = zerostd.Precision("compressed", None, compression.value) if is_compressed else None
    options = read_options(optimizer.param_groups)
    states = dict(optimizer.state)
    write_options(optimizer.param_groups, broadcast_object(options, 0))  # ranks may differ until they broadcast
    optimizer.state.clear()  # likewise: taken when all ranks have them
    try:
        return zerostd.prepare(container, optimizer, stage=stage, placement=zerostd.Placement(), precision=precision)
    except BaseException:
        optimizer.state.update(states)
        raise
    finally:
        write_options(optimizer.param_groups, options)


def _arrived(reference: weakref.ref[ShardedOptimizer], index: int, parameter: nn.Parameter) -> None:
    """Tell the optimizer of a gradient. Parameters keep this hook where Python's collector does not look, so it holds
    the optimizer weakly."""
    optimizer = reference()
    if optimizer is not None:
        optimizer.arrived(index, adds=type(parameter.grad) is not torch.Tensor)
