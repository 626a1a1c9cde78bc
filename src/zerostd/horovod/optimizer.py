"""DistributedOptimizer and the calls around it: join, broadcast_parameters, broadcast_optimizer_state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zerostd import MisuseError, NotSupportedError, PrepareError
from zerostd.horovod import collectives
from zerostd.horovod.collectives import Average, Compression, ReduceOp, Sum
from zerostd.horovod.sharded import Named, ShardedOptimizer
from zerostd.horovod.states import on_host, read_options, write_options
from zerostd.horovod.world import SESSION, rank, size


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Compression = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    *,
    stage: int = 2,
) -> ShardedOptimizer:
    """Shard an optimizer over the ranks; gradients are averaged while backward runs.

    Args:
        optimizer: Any element-wise torch optimizer on fp32 parameters.
        named_parameters: `model.named_parameters()`, for names in messages.
        compression: Compression.fp16 sends gradients in half the bytes, and keeps them so until the step.
        backward_passes_per_step: Passes whose gradients are summed, not divided by their number.
        op: Average or Sum over the ranks.
        gradient_predivide_factor: Without effect: the sum behind an average cannot overflow here.
        num_groups: Refused, as is `groups`: parameters are grouped by size.
        sparse_as_dense: Sparse gradients become dense in either case.
        stage: 1 shards optimizer states, 2 also gradients, 0 nothing.

    Returns:
        The optimizer to use instead of the one passed. Its parameters have rank 0's values on all ranks.

    Raises:
        PrepareError: Nothing was changed; the message says what to do.
    """
    if not isinstance(compression, Compression):
        raise NotSupportedError(f"compression={compression!r}: use hvd.Compression.none or hvd.Compression.fp16")
    if isinstance(backward_passes_per_step, bool) or backward_passes_per_step < 1:
        raise PrepareError(f"backward_passes_per_step={backward_passes_per_step!r} must be a whole number, 1 or more")
    _check_reduction(op, gradient_predivide_factor)
    if num_groups != 0 or groups is not None:
        raise NotSupportedError(
            f"groups={groups if groups is not None else num_groups!r}: parameters are grouped by size, neighbours up "
            "to some MiB; leave groups out"
        )
    if stage == 3:
        raise NotSupportedError(
            "stage=3 shards parameters, and those are gathered by the modules that use them, which an optimizer does "
            "not know: use model, optimizer = zerostd.prepare(model, optimizer, stage=3) instead"
        )
    named = _name_parameters(optimizer, named_parameters)
    _check_parameters(named, compression)
    sharded = ShardedOptimizer(
        optimizer,
        named,
        stage=stage,
        compression=compression,
        max_passes=backward_passes_per_step,
        factor=float(size()) if op == Sum else 1.0,
    )
    SESSION.optimizers.add(sharded)
    return sharded


def join(device: int = -1) -> int:
    """Wait for ranks that still have data, on a rank that has none left. Its gradients count as zero in their averages.
    When every rank is here, all have the same parameters.

    Returns:
        A rank that came last.
    """
    optimizers = list(SESSION.optimizers)
    if len(optimizers) > 1:
        raise NotSupportedError(
            f"hvd.join() with {len(optimizers)} distributed optimizers: a rank without data could not know which one "
            "its peers step. Give all ranks as many batches, or call release() of those that are done"
        )
    if size() == 1:
        return 0
    if not optimizers:
        raise MisuseError(
            "hvd.join() without a distributed optimizer: there is nothing to take part in; use hvd.barrier()"
        )
    last_rank: int = optimizers[0].join()
    return last_rank


@torch.no_grad()
def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Give all ranks the root's parameters and buffers, in place.

    After DistributedOptimizer these are the values that the root had before it, when rank 0's took their place.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`.
        root_rank: The rank whose values count.
    """
    collectives.check_root(root_rank)
    items = sorted(params.items()) if isinstance(params, Mapping) else list(params)  # in one order on all ranks
    named = [item if isinstance(item, tuple) else ("an entry", item) for item in items]
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            raise MisuseError(
                f"broadcast_parameters: {name!r} is a {type(value).__name__} and no tensor; send it with "
                "hvd.broadcast_object, and leave it out here"
            )
    addresses = {tensor.data_ptr() for _, tensor in named}
    for optimizer in SESSION.optimizers:
        for parameter, value in optimizer.replaced.items():
            if rank() == root_rank and parameter.data_ptr() in addresses:
                parameter.copy_(value)
        optimizer.replaced.clear()
    for _, tensor in named:
        collectives.broadcast_(tensor, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Give all ranks the root's optimizer states and options. States that training made are in agreement already.

    Args:
        optimizer: A torch optimizer, or what DistributedOptimizer returned.
        root_rank: The rank whose states count, and the only one that has to load them.
        model: Not needed.
    """
    collectives.check_root(root_rank)
    if not isinstance(optimizer, ShardedOptimizer):
        state = collectives.broadcast_object(on_host(optimizer.state_dict()), root_rank)
        if rank() != root_rank:
            optimizer.load_state_dict(state)
        return
    has_loaded = collectives.allgather_object(optimizer.loaded is not None)
    if any(has_loaded) and not has_loaded[root_rank]:
        raise MisuseError(
            f"broadcast_optimizer_state(root_rank={root_rank}): rank {has_loaded.index(True)} has loaded a state and "
            f"rank {root_rank} has not; name a rank that has"
        )
    write_options(optimizer.param_groups, collectives.broadcast_object(read_options(optimizer.param_groups), root_rank))
    if any(has_loaded):
        optimizer.loaded = collectives.broadcast_object(on_host(optimizer.loaded), root_rank)
        optimizer.take_loaded()


def _check_reduction(op: ReduceOp, predivide: float) -> None:
    if op not in (Average, Sum):
        raise NotSupportedError(f"op={op!r}: gradients are combined by hvd.Average or hvd.Sum")
    if not predivide > 0.0 or (predivide != 1.0 and op != Average):
        raise PrepareError(
            f"gradient_predivide_factor={predivide!r} with op={op!r}: it must be positive, and 1 unless op is Average"
        )


def _name_parameters(optimizer: torch.optim.Optimizer, named_parameters: Iterable[Any] | None) -> Named:
    """Return the optimizer's parameters in the order of the model, with their names."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [(f"parameter.{number}", parameter) for number, parameter in enumerate(parameters)]
    named = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise PrepareError("named_parameters must be pairs (name, parameter), as model.named_parameters() gives them")
    names = [name.replace(".", "/") for name, _ in named]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise PrepareError(f"named_parameters has {repeated[0]!r} more than once: give each parameter its own name")
    known = {id(parameter) for _, parameter in named}
    for number, parameter in enumerate(parameters):
        if id(parameter) not in known:
            raise PrepareError(
                f"parameter {number} of the optimizer, shape {tuple(parameter.shape)}, is not in named_parameters: "
                "pass those of the whole model, or leave named_parameters out"
            )
    wanted = {id(parameter) for parameter in parameters}
    return [(name, parameter) for name, parameter in named if id(parameter) in wanted]


def _check_parameters(named: Named, compression: Compression) -> None:
    """Refuse parameters that cannot be sharded under Horovod's rules."""
    allowed = (torch.float32, torch.float64) if compression is Compression.none else (torch.float32,)
    sharded = {id(parameter) for optimizer in SESSION.optimizers for parameter in optimizer.parameters}
    for name, parameter in named:
        if parameter.requires_grad and parameter.dtype not in allowed:
            raise NotSupportedError(
                f"{name!r} is {parameter.dtype}: parameters that train must be float32 here, with torch.autocast for "
                "16-bit compute; or use zerostd.prepare(model, optimizer, precision='bf16')"
            )
        if id(parameter) in sharded:
            raise PrepareError(
                f"{name!r} is in a distributed optimizer already: call release() of that one first, on all ranks"
            )
