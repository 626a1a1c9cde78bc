"""One rank's parameters, buffers and optimizer states to all ranks, before or after DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zerostd import MisuseError
from zerostd.horovod.collectives import allgather_object, broadcast_, broadcast_object
from zerostd.horovod.sharded import ShardedOptimizer
from zerostd.horovod.states import on_host, set_options, take_options
from zerostd.horovod.world import SESSION, check_rank, rank

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]

Params = Mapping[str, Any] | Iterable[Any]


@torch.no_grad()
def broadcast_parameters(params: Params, root_rank: int) -> None:
    """Give all ranks the root's parameters and buffers, in place.

    After DistributedOptimizer the root's are those that it had before: parameters got rank 0's values then.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`.
        root_rank: The rank whose values count.
    """
    check_rank(root_rank)
    tensors = _tensors(params)
    places = {tensor.data_ptr() for tensor in tensors}
    for optimizer in SESSION.optimizers:
        if rank() == root_rank:
            optimizer.put_back(places)
        optimizer.forget_own()
    for tensor in tensors:
        broadcast_(tensor, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Give all ranks the root's optimizer states and options.

    States that were loaded on the root only are cut, and each rank keeps its part. States that training made are
    everybody's already.

    Args:
        optimizer: A torch optimizer, or what DistributedOptimizer returned.
        root_rank: The rank whose states count.
        model: Not needed.
    """
    check_rank(root_rank)
    if not isinstance(optimizer, ShardedOptimizer):
        state = broadcast_object(on_host(optimizer.state_dict()), root_rank)
        if rank() != root_rank:
            optimizer.load_state_dict(state)
        return
    has_loaded = allgather_object(optimizer.loaded is not None)
    if any(has_loaded) and not has_loaded[root_rank]:
        raise MisuseError(
            f"broadcast_optimizer_state(root_rank={root_rank}): rank {has_loaded.index(True)} has loaded a state and "
            f"rank {root_rank} has not; name a rank that has"
        )
    options = broadcast_object(take_options(optimizer.param_groups), root_rank)
    set_options(optimizer.param_groups, options)
    if any(has_loaded):
        optimizer.loaded = broadcast_object(on_host(optimizer.loaded), root_rank)
        optimizer.take_loaded()


def _tensors(params: Params) -> list[torch.Tensor]:
    """In the same order on all ranks."""
    items = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    values = [item[1] if isinstance(item, tuple) else item for item in items]
    for item, value in zip(items, values, strict=True):
        if not isinstance(value, torch.Tensor):
            name = item[0] if isinstance(item, tuple) else "an entry"
            raise MisuseError(
                f"broadcast_parameters: {name!r} is a {type(value).__name__} and no tensor; send it with "
                "hvd.broadcast_object, and leave it out here"
            )
    return values
