"""Optimizer states to torch's state_dict format and back, parameter by parameter.

Runs are ours; users know parameters. Saving cuts each run's states at parameter boundaries, loading puts them together
again. 16-bit runs also carry `master`, the fp32 truth behind the rounded parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from zerostd.communication import World
from zerostd.errors import MisuseError
from zerostd.optimizers.runs import Run, slice_states
from zerostd.optimizers.scaling import LossScale
from zerostd.optimizers.update import Updater
from zerostd.parameters import Flat
from zerostd.sharding import Piece

__all__ = ["load_states", "put_states", "save_states"]


def _places(updater: Updater) -> Iterator[tuple[nn.Parameter, Flat, Run, Piece]]:
    for flat, runs in updater.runs.items():
        for run in runs.runs:
            for piece in run.pieces:
                yield flat.parameters[piece.index], flat, run, piece


def save_states(updater: Updater, world: World, loss_scale: LossScale | None) -> dict[str, Any]:
    """The inner optimizer's state_dict as if it had been built on the user's parameters."""
    numbers = {parameter: number for number, parameter in enumerate(updater.parameters())}
    states: dict[int, dict[str, Any]] = {}
    intervals: dict[int, tuple[int, int]] = {}
    for parameter, flat, run, piece in _places(updater):
        number = numbers[parameter]
        intervals[number] = (piece.start, piece.stop)
        low = piece.offset - run.region.start
        part = slice(low, low + piece.numel)
        found = slice_states(updater.inner.state.get(run.tensor, {}), run.tensor, part)
        if flat.master is not None and flat.master.dtype != flat.full.dtype:
            found["master"] = run.tensor[part]
        if found:
            whole = piece.numel == parameter.numel()
            states[number] = {key: _shaped(value, piece, parameter, whole=whole) for key, value in found.items()}
    groups, count = [], 0
    for group in updater.user_groups:
        kept = {key: value for key, value in group.items() if key != "params"}
        groups.append({**kept, "params": list(range(count, count + len(group["params"])))})
        count += len(group["params"])
    ours = {"rank": world.rank, "size": world.size, "intervals": intervals}
    if loss_scale is not None:
        ours["loss_scale"] = asdict(loss_scale)
    return {"state": dict(sorted(states.items())), "param_groups": groups, "zerostd": ours}


def _shaped(value: Any, piece: Piece, parameter: nn.Parameter, *, whole: bool) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == (piece.numel,) and whole:
        return value.reshape(parameter.shape).clone()
    return value.clone() if isinstance(value, torch.Tensor) else value


def load_states(updater: Updater, world: World, loss_scale: LossScale | None, state_dict: dict[str, Any]) -> None:
    """Take over what `save_states` gave on the same rank, or a plain torch state_dict in a world of one."""
    ours = state_dict.get("zerostd", {"rank": 0, "size": 1})
    groups = state_dict["param_groups"]
    if (ours["rank"], ours["size"]) != (world.rank, world.size):
        raise MisuseError(
            f"this optimizer state was saved by rank {ours['rank']} of {ours['size']} and is being loaded by rank "
            f"{world.rank} of {world.size}: load it on the same rank of as many ranks"
        )
    sizes, wanted = [len(g["params"]) for g in groups], [len(g["params"]) for g in updater.user_groups]
    if sizes != wanted:
        raise MisuseError(f"param_groups have {sizes} parameters in the state and {wanted} in this optimizer")
    saved = {p: state_dict["state"].get(number, {}) for number, p in enumerate(updater.parameters())}
    for parameter, _, _, piece in _places(updater):
        for key, value in saved[parameter].items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() != piece.numel:
                raise MisuseError(
                    f"state {key!r} of a parameter of shape {tuple(parameter.shape)} has {value.numel()} elements, "
                    f"this rank's interval has {piece.numel}: it was saved from another model, stage or number of ranks"
                )
    for user, group in zip(updater.user_groups, groups, strict=True):
        user.update({key: value for key, value in group.items() if key != "params"})
    if loss_scale is not None:
        for key, value in ours.get("loss_scale", {}).items():
            setattr(loss_scale, key, value)
    put_states(updater, saved)


@torch.no_grad()
def put_states(updater: Updater, saved: dict[nn.Parameter, dict[str, Any]]) -> None:
    """Fill the runs with states by parameter, each either whole or just this rank's interval of it."""
    for flat, runs in updater.runs.items():
        runs.cut([_label(saved.get(parameter, {})) for parameter in flat.parameters])
    updater.inner.state.clear()
    for parameter, _, run, piece in list(_places(updater)):
        low = piece.offset - run.region.start
        part = slice(low, low + piece.numel)
        for key, value in saved.get(parameter, {}).items():
            _put(updater.inner.state[run.tensor], key, value, run.tensor, part, piece)
    for flat in updater.runs:
        flat.publish()


def _label(states: dict[str, Any]) -> Hashable:
    """What must be equal for parameters to share a run: the states that are one value for all elements."""
    single = (not isinstance(value, torch.Tensor) or value.dim() == 0 for value in states.values())
    return tuple((key, str(value)) for (key, value), one in zip(states.items(), single, strict=True) if one)


def _put(states: dict[str, Any], key: str, value: Any, whole: torch.Tensor, part: slice, piece: Piece) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        states[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return
    flat = value.flatten()
    interval = flat if flat.numel() == piece.numel else flat[piece.start : piece.stop]
    if key == "master":
        whole[part].copy_(interval)
        return
    if key not in states:
        states[key] = torch.zeros_like(whole, dtype=value.dtype)
    states[key][part].copy_(interval)
