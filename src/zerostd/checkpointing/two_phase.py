"""Load in two phases: check everything on all ranks, then apply it on all ranks. `loading` and `importing` use it.

Nothing is changed unless every rank has found everything in order. If a disk fails after that, all ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError, MisuseError
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.parameters import Flat
from zerostd.tiers import TierTensor

UNCHANGED = "Nothing was changed"
IN_PART = (
    "The model is loaded in part, on all ranks, and cannot be trained or saved like this: call zerostd.load again, "
    "with this path or another"
)

T = TypeVar("T")


def load_in_two_phases(
    runtime: Runtime, optimizer: ZeroOptimizer | None, check: Callable[[ExitStack], T], apply: Callable[[T], None]
) -> T:
    """Return what `check` returned, after `apply` has used it and parameters are renewed. All ranks call it.

    1. Wait until nothing is under way, and refuse a call that would lose gradients.
    2. `check(files)` opens files, which are closed at the end, and raises if anything is wrong. It changes nothing.
    3. `apply(checked)` puts values where this rank keeps them. It needs no other rank.
    """
    check_call(runtime, optimizer, "load")
    num_done = runtime.backward.passes.num_done
    if num_done:
        raise MisuseError(
            f"zerostd.load after {num_done} backward pass(es) of a step that is not complete: call it between "
            "optimizer.step() and the next backward"
        )
    if any(group.num_pins for group in runtime.groups):
        raise MisuseError("zerostd.load inside zerostd.gathered(): leave the context first")
    runtime.finish_updates()
    with ExitStack() as files:
        checked = _on_all_ranks(runtime, "zerostd.load()", UNCHANGED, lambda: check(files))
        runtime.gatherer.wait_all()
        _on_all_ranks(runtime, "the end of zerostd.load()", IN_PART, lambda: apply(checked))
    for group in runtime.update_order():
        runtime.renew(group)
    return checked


def check_call(runtime: Runtime, optimizer: ZeroOptimizer | None, call: str) -> None:
    """Wait until nothing is under way; refuse another model's optimizer, and states of which an update has failed."""
    if optimizer is not None and optimizer is not runtime.optimizer:
        raise MisuseError(f"zerostd.{call}: the optimizer is not the one that prepare returned for this model")
    runtime.settle()
    if runtime.optimizer is not None:
        runtime.optimizer.check_consistent(f"zerostd.{call}()")
        runtime.optimizer.synchronize()


def _on_all_ranks(runtime: Runtime, where: str, remark: str, work: Callable[[], T]) -> T:
    """Do `work` and return its result, or raise on all ranks what went wrong on the first that failed."""
    result: Any = None
    cause: Exception | None = None
    message: str | None = None
    try:
        result = work()
    except Exception as error:
        cause = error
        message = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    for rank, said in enumerate(runtime.gatherer.control.meet(where, message)):
        if said is not None:
            who = f"rank {rank}: " if runtime.world.size > 1 else ""
            raise CheckpointError(f"{who}{said}. {remark}") from cause
    done: T = result
    return done


def value_targets(flat: Flat, rank: int) -> Iterator[tuple[str, int, TierTensor, slice]]:
    """Yield where this rank keeps the values of a flat's parameters: name, first element, tensor and part of it.

    Masters are these values where there are any; `flat.publish` rounds them into the parameters.
    """
    if not flat.state_shards:  # frozen: every rank has all of it, or its shard
        mine = flat.layout.shard(rank) if flat.is_sharded else slice(0, flat.layout.numel)
        for piece in flat.layout.pieces(mine):
            name = flat.layout.intervals[piece.index].name
            yield name, piece.start, flat.rest, slice(piece.offset, piece.offset + piece.numel)
        return
    for piece in flat.layout.pieces(flat.region):
        for shard in flat.state_shards:
            overlap = shard.overlap(piece.offset, piece.offset + piece.numel)
            if overlap is not None:
                here, there = overlap
                yield flat.layout.intervals[piece.index].name, piece.start + there.start, shard.master, here
