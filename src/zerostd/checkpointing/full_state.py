"""Give a prepared model's whole parameters: as an ordinary state_dict on host memory, or back to the model, of which
`zerostd.release` removes everything of zerostd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zerostd.checkpointing.saving import finish_saves
from zerostd.communication import World
from zerostd.communication.dtensors import Spec
from zerostd.engine.runtime import Runtime
from zerostd.errors import MisuseError
from zerostd.parameters import Group


def full_values(runtime: Runtime, group: Group) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield every parameter of a group in its original dtype, when updates are finished: local values of DTensors. All
    ranks call it."""
    runtime.gatherer.wait_updates(group)
    runtime.gatherer.wait_gather(group)
    for flat in group.flats:
        mine = flat.exact_values()
        if mine.numel() == flat.layout.numel:
            full = mine
        elif not flat.is_sharded and mine.dtype == flat.full.dtype:
            full = flat.full
        else:
            full = torch.empty(flat.layout.numel, dtype=mine.dtype, device=mine.device)
            with runtime.world.at(f"the gather of group {group.name!r}"):
                runtime.wires.gather(full, mine).wait()
        for parameter, interval in zip(flat.parameters, flat.layout.intervals, strict=True):
            values = full[interval.offset : interval.end].view(interval.shape)
            yield parameter, values.to(runtime.original_dtypes[parameter])


def full_state(runtime: Runtime, rank: int | None) -> dict[str, Any]:
    """Return an ordinary state_dict on host memory; with `rank` the other ranks return an empty one. All call it."""
    if runtime.optimizer is not None:
        runtime.optimizer.check_consistent("full_state_dict()")
    check_rank(rank, runtime.world)
    runtime.gatherer.control.confirm("zerostd.full_state_dict()")
    keep = rank is None or rank == runtime.world.rank
    runtime.finish_updates()
    values: dict[torch.Tensor, torch.Tensor] = {}
    for group in runtime.groups:
        for parameter, value in full_values(runtime, group):
            spec = Spec.of(parameter)
            value = value if spec is None else spec.whole(value)
            if keep:
                values[parameter] = value.to("cpu", copy=True)
    if not keep:
        return {}
    runtime.guards.is_open = True
    try:
        state = runtime.model.state_dict(keep_vars=True)
    finally:
        runtime.guards.is_open = False
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            state[key] = values[value] if value in values else value.detach().to("cpu", copy=True)
    return state


def check_rank(rank: int | None, world: World) -> None:
    """Refuse a rank for `full_state_dict` that is not in the world."""
    if rank is not None and (not isinstance(rank, int) or rank not in range(world.size)):
        raise MisuseError(f"full_state_dict(rank={rank!r}): use 0 to {world.size - 1}, or None for all")


@torch.no_grad()
def release_model(runtime: Runtime) -> None:
    """Make the model an ordinary one again, with parameters in the dtypes they had."""
    with runtime.turn:
        runtime.wait_gradients()
        runtime.gradients.check_unlocked("zerostd.release()")
        runtime.gatherer.control.confirm("zerostd.release()")
        finish_saves(runtime)
        runtime.hooks.remove()
        runtime.guards.remove()
        runtime.finish_updates()
        values = {p: value.clone() for group in runtime.groups for p, value in full_values(runtime, group)}
        runtime.access.remove()
        for group in runtime.groups:
            for flat in group.flats:
                for index, parameter in enumerate(flat.parameters):
                    flat.set_values(index, values.pop(parameter))
        for parameter in runtime.model.parameters():
            parameter.grad = None
        if runtime.late_optimizer is not None:
            runtime.late_optimizer.end()
        if runtime.optimizer is not None:
            runtime.optimizer.retire()
        runtime.disown()
