"""Walk over what of a prepared model is saved: flats and their parameters, persistent buffers, extra states.

`full_values` gives whole parameters, one flat at a time; `full_state_dict` and `release` use it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from zerostd.communication import Wires
from zerostd.compat import persistent_buffers
from zerostd.engine.runtime import Runtime
from zerostd.parameters import Flat, Group
from zerostd.sharding import Interval


def flats_of(runtime: Runtime) -> list[Flat]:
    """Return all flats, in order."""
    return [flat for group in runtime.groups for flat in group.flats]


def parameters_of(runtime: Runtime) -> Iterator[tuple[Flat, nn.Parameter, Interval]]:
    """Yield every parameter with its flat and its interval there, which has its name."""
    for flat in flats_of(runtime):
        for parameter, interval in zip(flat.parameters, flat.layout.intervals, strict=True):
            yield flat, parameter, interval


def walk_buffers(model: nn.Module, *, all_names: bool) -> Iterator[tuple[tuple[nn.Module, str], str, torch.Tensor]]:
    """Yield what a state_dict has of buffers: module and short name, name in the model, buffer. A module with several
    names comes once for each of them, or under its first only."""
    for prefix, module in model.named_modules(remove_duplicate=not all_names):
        for short, buffer in persistent_buffers(module).items():
            yield (module, short), f"{prefix}.{short}".lstrip("."), buffer


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by name, each under the first name of its module."""
    return {name: buffer for _, name, buffer in walk_buffers(model, all_names=False)}


def modules_with_own(model: nn.Module, method: str) -> dict[str, nn.Module]:
    """Return the modules that override a method of nn.Module, by name."""
    inherited = getattr(nn.Module, method)
    return {name: module for name, module in model.named_modules() if getattr(type(module), method) is not inherited}


def full_values(runtime: Runtime, group: Group) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield every parameter of a group in its original dtype. All ranks call it."""
    runtime.finish_updates()
    runtime.gatherer.wait_updates(group)
    runtime.gatherer.wait_gather(group)
    for flat in group.flats:
        full = _gather_exact(flat, runtime.wires)
        for parameter, interval in zip(flat.parameters, flat.layout.intervals, strict=True):
            values = full[interval.offset : interval.end].view(interval.shape)
            yield parameter, values.to(runtime.original_dtypes[parameter])


def _gather_exact(flat: Flat, wires: Wires) -> torch.Tensor:
    """Return all of a flat at the precision it is kept in."""
    mine = flat.exact_values()
    if mine.numel() == flat.layout.numel:
        return mine
    if not flat.is_sharded and mine.dtype == flat.full.dtype:
        return flat.full
    full = torch.empty(flat.layout.numel, dtype=mine.dtype, device=mine.device)
    wires.gather(full, mine).wait()
    return full
