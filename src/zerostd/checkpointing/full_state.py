"""Parameters of a prepared model as a whole, at the precision they are kept in; one flat at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from zerostd.communication import Wires
from zerostd.engine.runtime import Runtime
from zerostd.parameters import Flat, Group

__all__ = ["exact", "full_values"]


def full_values(runtime: Runtime, group: Group) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Every parameter of a group in its original dtype; one flat at a time is whole."""
    runtime.finish_updates()
    runtime.gatherer.complete(group)
    runtime.gatherer.finish(group)
    for flat in group.flats:
        full = exact(flat, runtime.wires)
        for parameter, interval in zip(flat.parameters, flat.layout.intervals, strict=True):
            part = full[interval.offset : interval.end].view(interval.shape)
            yield parameter, part.to(runtime.original_dtypes[parameter])


def exact(flat: Flat, wires: Wires) -> torch.Tensor:
    """All of a flat at the precision it is kept in."""
    mine = flat.exact_values()
    if mine.numel() == flat.layout.numel:
        return mine
    if not flat.is_sharded and mine.dtype == flat.full.dtype:
        return flat.full
    full = torch.empty(flat.layout.numel, dtype=mine.dtype, device=mine.device)
    wires.gather(full, mine).wait()
    return full
