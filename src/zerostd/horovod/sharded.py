"""The optimizer that DistributedOptimizer gives: zerostd's own, with Horovod's calls, on parameters alone.

Gradients come by the parameters' hooks, whoever's forward they belong to. Parameters rest whole (stages 0 to 2), and
are whole again when step() returns. What ranks do is told at the door, so that all do the same.
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
from zerostd import MisuseError, NotSupportedError, PrepareError
from zerostd.horovod.collectives import Compression
from zerostd.horovod.container import prepare_parameters
from zerostd.horovod.door import Call, Door, Event
from zerostd.horovod.states import check_states, full_states, own_states, set_options, take_options
from zerostd.horovod.world import SESSION, size

__all__ = ["Passes", "ShardedOptimizer", "check_passes"]


class Passes:
    """Backward passes since the last step, by parameter."""

    num_told: int  # passes that the other ranks know of

    def __init__(self, limit: int, num_parameters: int) -> None:
        self.limit = limit
        self.counts = [0] * num_parameters
        self.num_told = 0

    def clear(self) -> None:
        """A step was taken, or gradients were dropped."""
        self.counts = [0] * len(self.counts)
        self.num_told = 0

    def count(self, index: int) -> int:
        """One more for a parameter; how many that makes."""
        self.counts[index] += 1
        if self.counts[index] > self.limit:
            raise MisuseError(
                f"backward pass {self.counts[index]} since the last step, but backward_passes_per_step={self.limit}: "
                "say how many there are, call optimizer.step() after so many, or optimizer.zero_grad() after a pass "
                "that failed"
            )
        return self.counts[index]


class ShardedOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer gives: the optimizer of zerostd with Horovod's calls."""

    loaded: dict[str, Any] | None  # whole states that came with the optimizer or by load_state_dict, not taken yet
    container: nn.Module  # what was prepared
    parameters: list[nn.Parameter]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: list[tuple[str, nn.Parameter]],
        stage: int,
        compression: Compression,
        *,
        passes: int,
        factors: tuple[float, float],
    ) -> None:
        self._is_built = False
        self.parameters = [parameter for _, parameter in named]
        self._passes = Passes(passes, len(named))
        self._factors = factors  # that gradients are multiplied by before they are sent, and afterwards
        self._is_scaled = self._follows = False
        self.loaded = optimizer.state_dict() if optimizer.state else None
        mine = [parameter.detach().clone() for parameter in self.parameters] if size() > 1 else []
        self._hooks = self._watch()  # before those of prepare, so that a pass is told before its first reduce
        try:
            self.container, self._zero = prepare_parameters(named, optimizer, stage, compression)
        except BaseException:
            self._unwatch()
            raise
        self._replaced = {  # what this rank had where rank 0 had something else
            p: value.cpu() for p, value in zip(self.parameters, mine, strict=False) if not torch.equal(p, value)
        }
        self._door = Door() if size() > 1 else None
        super().__init__(self._zero.param_groups, self._zero.defaults)
        self.param_groups = self._zero.param_groups
        self.state = self._zero.state
        self._is_built = True
        if size() == 1:
            self.take_loaded()

    # the loop

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient on any rank. A closure is called once, before the update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._door is not None:
            told = zlib.crc32(repr(take_options(self.param_groups)).encode())
            self._door.tell(Call(Event.STEP, told, float(self.loaded is not None)))
        self._step()
        return loss

    def _step(self) -> None:
        """The part of a step that ranks in join follow."""
        if self._door is not None:
            self._check_step(self._door)
            if self._door.num_joined:
                set_options(self.param_groups, self._door.share(take_options(self.param_groups)))
        if self.loaded is not None:
            self.take_loaded()
        self._scale()
        self._zero.step()
        for _ in self.container.parameters():  # reading them waits until they are whole
            pass
        self._is_scaled = False
        self._replaced.clear()
        self._passes.clear()

    def _check_step(self, door: Door) -> None:
        calls = door.hear()
        if len({call.first for call in calls if call.event is Event.STEP}) > 1:
            raise MisuseError(
                "ranks have different options in param_groups, such as lr, and each updates a part of the model: give "
                "schedulers the same numbers on all ranks, or call hvd.broadcast_optimizer_state(optimizer, 0)"
            )
        _check_loaded(calls)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.container()  # the door of a forward: a backward that ended with an exception is forgotten
        self._zero.zero_grad(set_to_none)
        self._is_scaled = False
        self._passes.clear()

    def synchronize(self) -> None:
        """Gradients are averaged when this returns, as far as `p.grad` shows: what it stands for is sharded. Clip then
        with torch.nn.utils.clip_grad_norm_, or with `optimizer.clip_grad_norm_`, which is quicker."""
        if self._door is not None:
            self._door.hear()
        if self.num_joined:
            raise NotSupportedError(
                f"optimizer.synchronize() while {self.num_joined} rank(s) are in hvd.join(): they hold a part of the "
                "gradients and cannot follow what is done with p.grad. Clip with optimizer.clip_grad_norm_(max_norm), "
                "without synchronize(): they follow that"
            )
        self._scale()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For `step()` after `synchronize()`. Nothing would be done twice without it."""
        yield

    def _scale(self) -> None:
        """The second half of gradient_predivide_factor."""
        if self._factors[1] != 1.0 and not self._is_scaled:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._factors[1])
        self._is_scaled = True

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients to a global norm, exactly; returns the norm before. Every rank must call it."""
        if self._door is not None:
            self._door.tell(Call(Event.CLIP, max_norm, norm_type))
            self._door.hear()
        return self._clip(max_norm, norm_type)

    def _clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        self._scale()
        norm: torch.Tensor = self._zero.clip_grad_norm_(max_norm, norm_type)
        return norm

    # gradients as they come

    def _watch(self) -> list[Any]:
        hooks = []
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                arrived = functools.partial(_arrived, weakref.ref(self), index)
                hooks.append(parameter.register_post_accumulate_grad_hook(arrived))
                if self._factors[0] != 1.0:
                    hooks.append(parameter.register_hook(functools.partial(torch.mul, other=self._factors[0])))
        return hooks

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def arrived(self, index: int, *, adds: bool) -> None:
        """A pass has brought a gradient of one parameter, and autograd has added it to an earlier one if `adds`."""
        if self._follows:
            return
        count = self._passes.count(index)
        if adds and count == 1 and self._factors[1] != 1.0:
            raise MisuseError(
                f"gradient_predivide_factor={self._factors[1]} with gradients of the last step still there: they were "
                "multiplied already. Call optimizer.zero_grad() after each step"
            )
        if count > self._passes.num_told:
            self._passes.num_told = count
            if self._door is not None:
                self._door.tell(Call(Event.PASS, index, float(adds)))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """So many from the next step on."""
        check_passes(passes)
        self._passes.limit = passes

    # ranks without data

    @property
    def num_joined(self) -> int:
        """Ranks in join, as far as this one has heard."""
        return 0 if self._door is None else self._door.num_joined

    def join(self) -> int:
        """Take part in the steps of ranks that still have data, with zeros, until no rank has; see `hvd.join`."""
        door = self._door
        if door is None:
            return 0
        self._follows = True
        try:
            while True:
                door.tell(Call(Event.JOINED, second=float(self.loaded is not None)))
                active = [call for call in door.hear() if call.event is not Event.JOINED]
                if not active:
                    return door.last_rank
                self._follow(active[0])
        finally:
            self._follows = False
            self._passes.clear()

    def _follow(self, call: Call) -> None:
        if call.event is Event.PASS:
            if not call.second:
                self._zero.zero_grad()
            parameter = self.parameters[int(call.first)]
            torch.autograd.backward([parameter], [torch.zeros_like(parameter)])
        elif call.event is Event.CLIP:
            self._clip(call.first, call.second)
        elif call.event is Event.STEP:
            self._step()
        else:
            self._gathered_states()

    # states

    def state_dict(self) -> dict[str, Any]:
        """torch's format, with whole states, as the optimizer would give that was passed. Every rank must call it."""
        if self._door is not None:
            self._door.tell(Call(Event.STATE, 0.0, float(self.loaded is not None)))
        return self._gathered_states()

    def _gathered_states(self) -> dict[str, Any]:
        if self._door is not None:
            _check_loaded(self._door.hear())
        if self.loaded is not None:
            self.take_loaded()
        return full_states(self._zero.state_dict(), self._in_order())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Options at once; states before the next step, or in `hvd.broadcast_optimizer_state` if only one rank has
        them."""
        check_states(state_dict, self.param_groups)
        set_options(self.param_groups, take_options(state_dict["param_groups"]))
        self.loaded = state_dict
        if size() == 1:
            self.take_loaded()

    def take_loaded(self) -> None:
        """Keep this rank's part of what was loaded. All ranks do, or none."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        self._zero.load_state_dict(own_states(loaded, self._zero.state_dict()))
        for _ in self.container.parameters():  # as after a step
            pass

    def _in_order(self) -> list[nn.Parameter]:
        """Parameters as state_dict counts them."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def put_back(self, places: set[int]) -> None:
        """Give parameters at these addresses the values that this rank had before rank 0's took their place."""
        with torch.no_grad():
            for parameter, value in self._replaced.items():
                if parameter.data_ptr() in places:
                    parameter.copy_(value)

    def forget_own(self) -> None:
        """All ranks have what they shall have."""
        self._replaced.clear()

    # the rest of an optimizer

    def memory(self) -> zerostd.Memory:
        """Bytes of this rank by kind, now and at peak, as of `zerostd.memory`."""
        return zerostd.memory(self.container)

    def release(self) -> None:
        """Parameters are ordinary ones again; this optimizer cannot step any more. Every rank must call it."""
        zerostd.release(self.container)
        self._unwatch()
        SESSION.optimizers.discard(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: shards are laid out when the optimizer is made."""
        if not self._is_built:
            self.param_groups.append(param_group)
            return
        raise MisuseError(
            "add_param_group on a distributed optimizer: its shards are laid out already. Put all parameters into the "
            "optimizer before hvd.DistributedOptimizer; those that train later can have lr=0 until then"
        )

    def __repr__(self) -> str:
        return f"hvd.DistributedOptimizer({self._zero.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError("a distributed optimizer cannot be copied or pickled: use its state_dict(), on all ranks")


def _arrived(optimizer: weakref.ref[ShardedOptimizer], index: int, parameter: nn.Parameter) -> None:
    """A parameter's hook. Parameters hold it where Python's collector does not look, so it holds nothing."""
    found = optimizer()
    if found is not None:
        found.arrived(index, adds=type(parameter.grad) is not torch.Tensor)


def check_passes(passes: int) -> None:
    """Refuse what is no number of passes."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise PrepareError(f"backward_passes_per_step={passes!r} must be a whole number, 1 or more")


def _check_loaded(calls: list[Call]) -> None:
    if len({call.second for call in calls}) > 1:
        raise MisuseError(
            "optimizer.load_state_dict() was called on some ranks only: call "
            "hvd.broadcast_optimizer_state(optimizer, root_rank) with a rank that loaded, on all ranks"
        )
