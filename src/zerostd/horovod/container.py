"""The parameters of a script in a module of their own, since an optimizer is all that is known of the model.

In: an optimizer and names. Out: a module that holds the same Parameter objects, prepared, with zerostd's optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import zerostd
from zerostd import NotSupportedError, PrepareError
from zerostd.horovod.collectives import Compression, broadcast_object
from zerostd.horovod.states import set_options, take_options
from zerostd.horovod.world import SESSION, size

__all__ = ["Named", "check_parameters", "name_parameters", "prepare_parameters"]

Named = Iterable[tuple[str, nn.Parameter]]


class _Parameters(nn.Module):
    """The parameters of a script, one module for each: grouping then packs neighbours by size alone."""

    def forward(self) -> None:
        """Nothing: the script's own modules compute."""


class _Holder(nn.Module):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.tensor = parameter


def prepare_parameters(
    named: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, stage: int, compression: Compression
) -> tuple[nn.Module, Any]:
    """Shard them, with rank 0's values on all ranks; the optimizer's options stay this rank's own."""
    container = _Parameters()
    for name, parameter in named:
        container.add_module("model/" + name.replace(".", "/"), _Holder(parameter))
    precision = zerostd.Precision("compressed", None, compression.value) if compression.value and size() > 1 else None
    own, states = take_options(optimizer.param_groups), dict(optimizer.state)
    set_options(optimizer.param_groups, broadcast_object(own, 0))  # they may differ until they are broadcast
    optimizer.state.clear()  # likewise: taken when all ranks have them
    try:
        return zerostd.prepare(container, optimizer, stage=stage, placement=zerostd.Placement(), precision=precision)
    except BaseException:
        optimizer.state.update(states)
        raise
    finally:
        set_options(optimizer.param_groups, own)


def name_parameters(optimizer: torch.optim.Optimizer, named_parameters: Named | None) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters in the order of the model, with their names."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return [(f"parameter.{number}", parameter) for number, parameter in enumerate(held)]
    named = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise PrepareError("named_parameters must be pairs (name, parameter), as model.named_parameters() gives them")
    names = [name.replace(".", "/") for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PrepareError(f"named_parameters has {twice[0]!r} more than once: give every parameter a name of its own")
    wanted, known = {id(p) for p in held}, {id(p) for _, p in named}
    for position, parameter in enumerate(held):
        if id(parameter) not in known:
            raise PrepareError(
                f"parameter {position} of the optimizer, shape {tuple(parameter.shape)}, is not in named_parameters: "
                "pass those of the whole model, or leave named_parameters out"
            )
    return [(name, parameter) for name, parameter in named if id(parameter) in wanted]


def check_parameters(named: list[tuple[str, nn.Parameter]], compression: Compression) -> None:
    """Refuse parameters that cannot be sharded under Horovod's rules."""
    allowed = (torch.float32,) if compression is not Compression.none else (torch.float32, torch.float64)
    for name, parameter in named:
        if parameter.requires_grad and parameter.dtype not in allowed:
            raise NotSupportedError(
                f"{name!r} is {parameter.dtype}: parameters that train must be float32 here, with torch.autocast for "
                "16-bit compute; or use zerostd.prepare(model, optimizer, precision='bf16')"
            )
        for other in SESSION.optimizers:
            if any(parameter is held for held in other.parameters):
                raise PrepareError(
                    f"{name!r} is in a distributed optimizer already: call release() of that one first, on all ranks"
                )
