"""Columns in any tier, filled from a checkpoint. Those on disk are written in long pieces, past the page cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from zerostd.checkpointing.storage.manifest import TensorEntry
from zerostd.checkpointing.storage.reading import Checkpoint
from zerostd.tiers import Done, TierTensor, Transfer
from zerostd.tiers.pages import PAGE, aligned

__all__ = ["Target", "fill_columns"]

ON_DISK = 16 << 20  # bytes that are written to disk at a time
NUM_BUFFERS = 3  # one is read, two are written

Target = tuple[TensorEntry, int, TierTensor, slice]  # from which element on, and where to
OnBytes = Callable[[int], None]


@dataclass
class _Buffer:
    memory: torch.Tensor
    free: Transfer = field(default_factory=Done)


def fill_columns(checkpoint: Checkpoint, targets: Sequence[Target], on_bytes: OnBytes) -> None:
    """Put what a checkpoint has where it rests, in whichever tier that is."""
    in_memory = ((e, low, c.tensor[part]) for e, low, c, part in targets if c.tensor is not None)
    checkpoint.fill(in_memory, on_bytes)
    _fill_disk(checkpoint, [target for target in targets if target[2].tensor is None], on_bytes)


def _fill_disk(checkpoint: Checkpoint, targets: Sequence[Target], on_bytes: OnBytes) -> None:
    """Neighbours together, in long pieces: one is read while others are written."""
    buffers = [_Buffer(aligned(ON_DISK)) for _ in range(NUM_BUFFERS)] if targets else []
    for turn, (column, low, high, parts) in enumerate(_pieces(targets)):
        buffer = buffers[turn % NUM_BUFFERS]
        buffer.free.wait()
        values = buffer.memory.view(column.dtype)[: high - low]
        checkpoint.fill(((entry, first, values[start:stop]) for entry, first, start, stop in parts), on_bytes)
        per_page = PAGE // column.dtype.itemsize
        if low % per_page == 0 and (high % per_page == 0 or high == column.numel):
            buffer.free = column.start_write(low, values)
            continue
        for other in buffers:  # a page of it is a neighbour's, too
            other.free.wait()
        column.write(slice(low, high), values)
    for buffer in buffers:
        buffer.free.wait()


def _pieces(
    targets: Iterable[Target],
) -> Iterator[tuple[TierTensor, int, int, list[tuple[TensorEntry, int, int, int]]]]:
    """Stretches of columns, no longer than a buffer: column, from, to, and of each entry in it the first element and
    its place in the stretch."""
    runs: list[list[Target]] = []
    for target in targets:
        last = runs[-1][-1] if runs else None
        if last is not None and last[2] is target[2] and last[3].stop == target[3].start:
            runs[-1].append(target)
        else:
            runs.append([target])
    for run in runs:
        column, begin, end = run[0][2], run[0][3].start, run[-1][3].stop
        step = ON_DISK // column.dtype.itemsize
        for low, high in pairwise([begin, *range((begin // step + 1) * step, end, step), end]):
            parts = []
            for entry, first, _, part in run:
                start, stop = max(low, part.start), min(high, part.stop)
                if start < stop:
                    parts.append((entry, first + start - part.start, start - low, stop - low))
            yield column, low, high, parts
