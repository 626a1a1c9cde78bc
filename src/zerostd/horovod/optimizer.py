"""DistributedOptimizer and join, as Horovod's users call them."""

from __future__ import annotations

from typing import Any

import torch

from zerostd import MisuseError, NotSupportedError, PrepareError
from zerostd.horovod.collectives import Average, Compression, Op, Sum
from zerostd.horovod.container import Named, check_parameters, name_parameters
from zerostd.horovod.sharded import ShardedOptimizer, check_passes
from zerostd.horovod.world import SESSION, ProcessSet, check_process_set, global_process_set, size

__all__ = ["DistributedOptimizer", "join"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Named | None = None,
    compression: Compression = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
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
        gradient_predivide_factor: Gradients are divided by it before they are sent and multiplied by it afterwards.
        num_groups: Refused, as is `groups`: what travels together is found by size.
        sparse_as_dense: Sparse gradients become dense in either case.
        process_set: All processes.
        stage: 1 shards optimizer states, 2 also gradients, 0 nothing.

    Returns:
        The optimizer to use instead of the one passed. Its parameters have rank 0's values on all ranks.

    Raises:
        PrepareError: Nothing was changed; the message says what to do.
    """
    check_process_set(process_set)
    _check_options(compression, backward_passes_per_step, op, gradient_predivide_factor, stage)
    if num_groups != 0 or groups is not None:
        raise NotSupportedError(
            f"groups={groups if groups is not None else num_groups!r}: what travels together is found by size, "
            "neighbours up to some MiB; leave groups out"
        )
    named = name_parameters(optimizer, named_parameters)
    check_parameters(named, compression)
    before = float(size()) if op is Sum else 1.0 / gradient_predivide_factor
    wrapped = ShardedOptimizer(
        optimizer,
        named,
        stage,
        compression,
        passes=backward_passes_per_step,
        factors=(before, gradient_predivide_factor),
    )
    SESSION.optimizers.add(wrapped)
    return wrapped


def join(device: int = -1) -> int:
    """For a rank that has no data left: its peers go on, its gradients count as zero in their averages, and it returns
    when every rank is here. All then have the same parameters.

    Returns:
        A rank that came last.
    """
    alive = list(SESSION.optimizers)
    if len(alive) > 1:
        raise NotSupportedError(
            f"hvd.join() with {len(alive)} distributed optimizers: a rank without data could not know which one its "
            "peers step. Give all ranks as many batches, or call release() of those that are done"
        )
    if size() == 1:
        return 0
    if not alive:
        raise MisuseError(
            "hvd.join() without a distributed optimizer: there is nothing to take part in; use hvd.barrier()"
        )
    joined: int = alive[0].join()
    return joined


def _check_options(compression: Compression, passes: int, op: Op, predivide: float, stage: int) -> None:
    if not isinstance(compression, Compression):
        raise NotSupportedError(f"compression={compression!r}: use hvd.Compression.none or hvd.Compression.fp16")
    check_passes(passes)
    if op not in (Average, Sum):
        raise NotSupportedError(f"op={op!r}: gradients are combined by hvd.Average or hvd.Sum")
    if not predivide > 0.0 or (predivide != 1.0 and op is not Average):
        raise PrepareError(
            f"gradient_predivide_factor={predivide!r} with op={op!r}: it must be positive, and 1 unless op is Average"
        )
    if stage == 3:
        raise NotSupportedError(
            "stage=3 shards parameters, and those are gathered by the modules that use them, which an optimizer does "
            "not know: use model, optimizer = zerostd.prepare(model, optimizer, stage=3) instead"
        )
