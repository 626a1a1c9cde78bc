"""Ranks with different numbers of batches: a rank that runs out repeats its last batch, without gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

from torch import nn

from zerostd.engine.runtime import runtime_of
from zerostd.errors import MisuseError, check_batches

T = TypeVar("T")
HAS_BATCH = "has a batch"
HAS_NONE_LEFT = "has none left"
HAD_NONE = "had none"


def join(model: nn.Module, batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches of this rank until no rank has any left.

    A rank without batches gets its last batch again, so that it makes the same calls as the others: forward,
    backward and `optimizer.step()`. Its gradients are not counted: a mean is taken over the ranks that still have
    batches. Its losses are those of the repeated batch; leave them out of your averages. Buffers, such as those of
    batch-norm, are rank 0's as always.

    Args:
        model: The module that prepare was called on. It may be used in several loops, one after the other.
        batches: The batches of this rank, for example a DataLoader; at least one.

    Raises:
        MisuseError: A rank has no batch at all. All ranks raise it.
    """
    runtime = runtime_of(model, "join")
    control = runtime.backward.reducer.control
    mine: T | None = None
    state = HAD_NONE
    check_batches(batches, "zerostd.join")
    iterator = iter(batches)
    try:
        while True:
            try:
                mine = next(iterator)
                state = HAS_BATCH
            except StopIteration:
                state = HAD_NONE if state == HAD_NONE else HAS_NONE_LEFT
            states = control.collect_if_any(state, is_different=state != HAS_BATCH, what="zerostd.join()")
            if HAD_NONE in states:
                ranks = [control.world.name(rank) for rank, its_state in enumerate(states) if its_state == HAD_NONE]
                raise MisuseError(
                    f"zerostd.join needs a batch on every rank, but {', '.join(ranks)} had none: give each rank at "
                    "least one, for instance with a DistributedSampler"
                )
            num_present = states.count(HAS_BATCH)
            if num_present == 0:
                return
            share = 1.0 if runtime.settings.reduce == "sum" else len(states) / num_present
            runtime.backward.weight = share if state == HAS_BATCH else 0.0
            yield cast(T, mine)
    finally:
        runtime.backward.weight = 1.0
