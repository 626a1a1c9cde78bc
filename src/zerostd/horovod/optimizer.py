"""DistributedOptimizer, zerostd's optimizer with Horovod's calls, and the calls that take it or its parameters.

The optimizer knows the parameters and not the model, so they are prepared in a container module of their own. Their
hooks see gradients arrive, whichever forward these belong to. Parameters are kept whole (stages 0 to 2), and are whole
again when step() returns. Ranks announce each call to the session, so that all make the same ones.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import zerostd
from zerostd import MisuseError, NotSupportedError, PrepareError
from zerostd.horovod import collectives
from zerostd.horovod.collectives import Average, Compression, ReduceOp, Sum, broadcast_object, on_all_ranks
from zerostd.horovod.world import Call, Event, rank, session, size

Named = list[tuple[str, nn.Parameter]]
Groups = list[dict[str, Any]]  # param_groups, or their options alone


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer that is sharded over the ranks; gradients are averaged, or summed, while backward runs.

    It takes any element-wise torch optimizer on fp32 parameters, which get rank 0's values on all ranks. Gradients of
    `backward_passes_per_step` passes are summed and not divided. Compression.fp16 sends them in half the bytes, and
    keeps them so until the step. Stage 1 shards optimizer states, 2 also gradients, 0 nothing. If PrepareError is
    raised, nothing was changed.
    """

    @on_all_ranks
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        compression: torch.dtype | None = Compression.none,
        backward_passes_per_step: int = 1,
        op: ReduceOp = Average,
        *,
        sparse_as_dense: bool = False,
        stage: int = 2,
    ) -> None:
        _check_options(compression, backward_passes_per_step, op, stage)
        named = _name_parameters(optimizer, named_parameters)
        _check_parameters(named, compression)
        self.parameters = [parameter for _, parameter in named]
        self._max_passes = backward_passes_per_step
        self._forget_passes()
        self._follows = False  # in join
        self.loaded = optimizer.state_dict() if optimizer.state else None  # until this rank takes its shards of it
        with contextlib.ExitStack() as hooks:
            # before those of prepare: a pass is announced before its first reduce
            for index, parameter in enumerate(self.parameters):
                if parameter.requires_grad:
                    arrived = functools.partial(self._arrived, weakref.ref(self), index)
                    hooks.callback(parameter.register_post_accumulate_grad_hook(arrived).remove)
            self.container, self._zero = _prepare(named, optimizer, stage, compression, op)
            self._zero.compares_options = False  # a rank in join takes those of the others in each step; see _agree
            self._hooks = hooks.pop_all()
        # not __init__, which would add groups of parameters: these are the ones of the other optimizer
        self.__setstate__({name: getattr(self._zero, name) for name in ("defaults", "param_groups", "state")})
        session().optimizers.add(self)
        if size() == 1:
            self.take_loaded()

    # -- the loop --

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient on any rank. A closure is called once, before the update."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._announce(Event.STEP)
        self._step(session().receive())
        return loss

    def _step(self, calls: list[Call]) -> None:
        self._agree(calls)
        if session().num_joined:
            write_options(self.param_groups, session().share(read_options(self.param_groups)))
        self._zero.step()
        list(self.container.parameters())  # reading them waits until they are whole
        self._forget_passes()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.container(None)  # as at the start of a forward: a backward that raised is forgotten
        self._zero.zero_grad(set_to_none)
        self._forget_passes()

    def synchronize(self) -> None:
        """Make `p.grad` the averaged gradient, for torch.nn.utils.clip_grad_norm_; `clip_grad_norm_` is faster."""
        session().check_present("optimizer.synchronize()")

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: `step()` after `synchronize()` does nothing twice."""
        return contextlib.nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients to a global norm, exactly; return the norm before. Every rank must call it."""
        session().announce(Event.CLIP, max_norm, norm_type)
        session().receive()
        norm: torch.Tensor = self._zero.clip_grad_norm_(max_norm, norm_type)
        return norm

    @staticmethod
    def _arrived(reference: weakref.ref[DistributedOptimizer], index: int, parameter: nn.Parameter) -> None:
        """Count a gradient of one parameter. Parameters keep this hook where Python's collector does not look, so it
        holds the optimizer weakly."""
        optimizer = reference()
        if optimizer is None or optimizer._follows:
            return
        optimizer._num_passes[index] += 1
        num_passes = optimizer._num_passes[index]
        if num_passes > optimizer._max_passes:
            raise MisuseError(
                f"backward pass {num_passes} since the last step, but backward_passes_per_step={optimizer._max_passes}:"
                " set the actual number, or call optimizer.zero_grad() after a pass that failed"
            )
        if num_passes > optimizer._num_announced:
            optimizer._num_announced += 1
            adds = type(parameter.grad) is not torch.Tensor  # autograd has added it to an earlier one
            session().announce(Event.BACKWARD, index, adds)

    def _forget_passes(self) -> None:
        self._num_passes = [0] * len(self.parameters)  # since the last step, by parameter
        self._num_announced = 0  # passes since the last step that other ranks know of

    def join(self) -> int:
        """Follow the steps of ranks that still have data, with zeros, until none has; see `hvd.join`."""
        self._follows = True
        try:
            while True:
                self._announce(Event.JOIN)
                calls = session().receive()
                match next((call for call in calls if call[0] is not Event.JOIN), None):
                    case None:
                        return session().last_rank
                    case Event.BACKWARD, index, adds:
                        if not adds:
                            self._zero.zero_grad()
                        parameter = self.parameters[int(index)]
                        torch.autograd.backward([parameter], [torch.zeros_like(parameter)])
                    case Event.CLIP, max_norm, norm_type:
                        self._zero.clip_grad_norm_(max_norm, norm_type)
                    case Event.STEP, *_:
                        self._step(calls)
        finally:
            self._follows = False
            self._forget_passes()

    def _announce(self, event: Event) -> None:
        """Announce a call for which `_agree` compares the ranks."""
        options = zlib.crc32(repr(read_options(self.param_groups)).encode())
        session().announce(event, options, self.loaded is not None)

    def _agree(self, calls: list[Call]) -> None:
        """Refuse a call if ranks differ. Otherwise keep this rank's shards of loaded states."""
        options = {checksum for event, checksum, _ in calls if event is not Event.JOIN}
        has_loaded = {is_loaded for *_, is_loaded in calls}
        if len(options) > 1 or len(has_loaded) > 1:
            raise MisuseError(
                "ranks have different options in param_groups, such as lr, or load_state_dict() was called on some "
                "ranks only: call hvd.broadcast_optimizer_state(optimizer, root_rank) with the right rank"
            )
        self.take_loaded()

    # -- states --

    def state_dict(self) -> dict[str, Any]:
        """Return whole states in torch's format, as the wrapped optimizer would. Every rank must call it."""
        self._announce(Event.STATE)
        session().check_present("optimizer.state_dict()")
        self._agree(session().receive())
        packed = super().state_dict()
        whole = {number: on_host(state.read()) for number, state in sorted(packed["state"].items())}
        return {**packed, "state": whole}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options now, and states before the next step, or in `hvd.broadcast_optimizer_state` if only one rank
        has them."""
        counts = [len(group["params"]) for group in state_dict["param_groups"]]
        expected = [len(group["params"]) for group in self.param_groups]
        if counts != expected:
            raise MisuseError(
                f"the state_dict has param_groups with {counts} parameters, but this optimizer has {expected}: load "
                "a state_dict of the same model"
            )
        write_options(self.param_groups, read_options(state_dict["param_groups"]))
        self.loaded = state_dict
        if size() == 1:
            self.take_loaded()

    def take_loaded(self) -> None:
        """Keep this rank's shards of loaded states. All ranks have some, or none."""
        if self.loaded is not None:
            own = {"rank": rank(), "size": size()}
            whole = {"state": self.loaded["state"], "param_groups": self.param_groups, "zerostd": own}
            self._zero.load_state_dict(whole)
            self.loaded = None
            list(self.container.parameters())  # reading them waits until they are whole

    def release(self) -> None:
        """Make the parameters ordinary again; this optimizer can no longer step. Every rank must call it."""
        zerostd.release(self.container)
        self._hooks.close()
        session().optimizers.discard(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error: shards are laid out when the optimizer is made."""
        raise MisuseError("add_param_group after DistributedOptimizer: shards are laid out already; call it before")

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError("a distributed optimizer cannot be copied or pickled: use its state_dict(), on all ranks")


def join(device: int = -1) -> int:
    """Wait, on a rank without data, for the ranks that still have data, and return a rank that joined last.

    Gradients of this rank count as zero in their averages. When every rank is here, all have the same parameters.
    """
    if size() == 1:
        return 0
    optimizers: list[DistributedOptimizer] = list(session().optimizers)
    if len(optimizers) != 1:
        raise NotSupportedError(
            f"hvd.join() with {len(optimizers)} distributed optimizers: a rank without data follows the steps of one. "
            "Use hvd.barrier(), give all ranks equally many batches, or call release() of optimizers that are done"
        )
    return optimizers[0].join()


@on_all_ranks
@torch.no_grad()
def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Give all ranks the root's `model.state_dict()`, `model.named_parameters()` or `model.parameters()`, in place."""
    if root_rank != 0 and session().optimizers:
        raise NotSupportedError(
            f"broadcast_parameters(root_rank={root_rank}) after hvd.DistributedOptimizer, which has given all ranks "
            "rank 0's values: call it before, or with root_rank=0"
        )
    items = sorted(params.items()) if isinstance(params, Mapping) else list(params)  # in one order on all ranks
    for item in items:
        name, value = item if isinstance(item, tuple) else ("an entry", item)
        if not isinstance(value, torch.Tensor):
            raise MisuseError(
                f"broadcast_parameters: {name!r} is a {type(value).__name__}, not a tensor; send it with "
                "hvd.broadcast_object, and leave it out here"
            )
        collectives.broadcast_(value, root_rank)


@on_all_ranks
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Give all ranks the root's optimizer states and options; the root is the only rank that has to load them."""
    # the optimizer itself, or the one that was made of it: both have the same groups
    distributed = [own for own in session().optimizers if own.param_groups is optimizer.param_groups]
    if not distributed:
        state = broadcast_object(on_host(optimizer.state_dict()), root_rank)
        if rank() != root_rank:
            optimizer.load_state_dict(state)
    for own in distributed:
        mine = (read_options(own.param_groups), on_host(own.loaded))
        options, own.loaded = broadcast_object(mine, root_rank)
        write_options(own.param_groups, options)
        own.take_loaded()


def read_options(param_groups: Groups) -> Groups:
    """Return a copy of param_groups without the parameters, which can be sent to any rank."""
    return [on_host({key: value for key, value in group.items() if key != "params"}) for group in param_groups]


@torch.no_grad()
def write_options(param_groups: Groups, options: Groups) -> None:
    """Write options into param_groups. The dicts stay the same ones, and so does an lr that is a tensor."""
    for group, new in zip(param_groups, options, strict=True):
        for key, value in new.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value


def on_host(values: Any) -> Any:
    """Return a copy of nested values with every tensor on the CPU, which can be sent to any rank."""
    return tree_map(lambda value: value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value, values)


def _check_options(compression: torch.dtype | None, num_passes: int, op: ReduceOp, stage: int) -> None:
    if compression not in (Compression.none, Compression.fp16):
        raise NotSupportedError(f"compression={compression!r}: use hvd.Compression.none or hvd.Compression.fp16")
    if isinstance(num_passes, bool) or num_passes < 1:
        raise PrepareError(f"backward_passes_per_step={num_passes!r} must be a whole number, 1 or more")
    if op not in (Average, Sum):
        raise NotSupportedError(f"op={op!r}: gradients are combined by hvd.Average or hvd.Sum")
    if stage == 3:
        raise NotSupportedError(
            "stage=3 shards parameters, which the modules that use them must gather, but an optimizer does not know "
            "the modules: use model, optimizer = zerostd.prepare(model, optimizer, stage=3) instead"
        )


def _name_parameters(optimizer: torch.optim.Optimizer, named_parameters: Iterable[Any] | None) -> Named:
    """Return the optimizer's parameters in the order of the model, with their names."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [(f"parameter.{number}", parameter) for number, parameter in enumerate(parameters)]
    everything = list(named_parameters)
    missing = set(parameters) - {parameter for _, parameter in everything}
    names = {name.replace(".", "/") for name, _ in everything}
    if missing or len(names) < len(everything):
        raise PrepareError(
            f"named_parameters has {len(names)} names for {len(everything)} parameters, and lacks {len(missing)} of "
            "the optimizer's: pass model.named_parameters(), or leave named_parameters out"
        )
    wanted = set(parameters)
    return [(name, parameter) for name, parameter in everything if parameter in wanted]


def _check_parameters(named: Named, compression: torch.dtype | None) -> None:
    """Refuse parameters that cannot be sharded under Horovod's rules."""
    allowed = (torch.float32, torch.float64) if compression is None else (torch.float32,)
    sharded = {parameter for optimizer in session().optimizers for parameter in optimizer.parameters}
    for name, parameter in named:
        if parameter.requires_grad and parameter.dtype not in allowed:
            raise NotSupportedError(
                f"{name!r} is {parameter.dtype}: trained parameters must be float32 here, with torch.autocast for "
                "16-bit compute; or use zerostd.prepare(model, optimizer, precision='bf16')"
            )
        if parameter in sharded:
            raise PrepareError(
                f"{name!r} is already in a distributed optimizer: call its release() first, on all ranks"
            )


def _prepare(
    named: Named, optimizer: torch.optim.Optimizer, stage: int, compression: torch.dtype | None, op: ReduceOp
) -> tuple[nn.Module, Any]:
    """Shard the parameters, with rank 0's values on all ranks. The optimizer's options stay this rank's own."""
    container = nn.Identity()  # computes nothing: the script's own modules do
    for name, parameter in named:  # in one child each: grouping then packs neighbours by size alone
        container.add_module("model/" + name.replace(".", "/"), nn.ParameterList([parameter]))
    precision = zerostd.Precision("compressed", None, compression) if compression and size() > 1 else None
    options = read_options(optimizer.param_groups)
    own = dict(optimizer.state)
    write_options(optimizer.param_groups, broadcast_object(options, 0))  # ranks may differ until they broadcast
    optimizer.state.clear()  # likewise: taken when all ranks have them
    try:
        reduce = "sum" if op == Sum else "mean"
        kept = zerostd.Placement()
        return zerostd.prepare(container, optimizer, stage=stage, placement=kept, precision=precision, reduce=reduce)
    except BaseException:
        optimizer.state.update(own)
        raise
    finally:
        write_options(optimizer.param_groups, options)
