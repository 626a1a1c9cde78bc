"""Optimizer states to torch's state_dict format and back, parameter by parameter.

Runs are ours; users know parameters. Saving cuts each run's states at parameter boundaries, loading puts them together
again. 16-bit runs also carry `master`, the fp32 truth behind the rounded parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from zerostd.communication import World
from zerostd.errors import MisuseError
from zerostd.optimizers.runs import Run, Runs
from zerostd.optimizers.scaling import LossScale
from zerostd.optimizers.update import Updater
from zerostd.parameters import Flat
from zerostd.parameters.state_shard import MASTER
from zerostd.policy import Route
from zerostd.sharding import Piece

__all__ = ["carry_states", "fill_flat", "load_states", "put_states", "save_states"]


Place = tuple[Runs, Run, Piece]


def _places(many: Iterable[Runs]) -> dict[nn.Parameter, list[Place]]:
    """Where the states of each parameter are, in the order of its elements: one place, or one for each portion."""
    found: dict[nn.Parameter, list[Place]] = {}
    for runs in many:
        for run in runs.runs:
            for piece in run.pieces:
                found.setdefault(runs.flat.parameters[piece.index], []).append((runs, run, piece))
    for places in found.values():
        places.sort(key=lambda place: place[2].start)
    return found


def _interval(places: list[Place]) -> tuple[int, int]:
    """The elements of a parameter that this rank updates."""
    return places[0][2].start, places[-1][2].stop


def _part(run: Run, piece: Piece) -> slice:
    low = piece.offset - run.region.start
    return slice(low, low + piece.numel)


def save_states(updater: Updater, world: World, loss_scale: LossScale | None) -> dict[str, Any]:
    """The inner optimizer's state_dict as if it had been built on the user's parameters."""
    numbers = {parameter: number for number, parameter in enumerate(updater.parameters())}
    states: dict[int, dict[str, Any]] = {}
    intervals: dict[int, tuple[int, int]] = {}
    for parameter, places in _places(updater.runs.values()).items():
        number = numbers[parameter]
        intervals[number] = _interval(places)
        found = _joined([_read(runs, run, piece) for runs, run, piece in places])
        if found:
            states[number] = {key: _shaped(value, parameter) for key, value in found.items()}
    groups, count = [], 0
    for group in updater.user_groups:
        kept = {key: value for key, value in group.items() if key != "params"}
        groups.append({**kept, "params": list(range(count, count + len(group["params"])))})
        count += len(group["params"])
    ours = {"rank": world.rank, "size": world.size, "intervals": intervals}
    if loss_scale is not None:
        ours["loss_scale"] = asdict(loss_scale)
    return {"state": dict(sorted(states.items())), "param_groups": groups, "zerostd": ours}


def _read(runs: Runs, run: Run, piece: Piece) -> dict[str, Any]:
    part = _part(run, piece)
    found = runs.read(run, part)
    if runs.flat.rest.dtype != run.shard.master.dtype:
        found["master"] = runs.master(run, part)
    return found


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """States of neighbouring parts as one: long ones end to end, single values as they are in the first part."""
    if len(parts) == 1:
        return parts[0]
    found = dict(parts[0])
    for key, value in found.items():
        if isinstance(value, torch.Tensor) and value.dim():
            found[key] = torch.cat([part[key].to(value.device) for part in parts])
    return found


def _shaped(value: Any, parameter: nn.Parameter) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() and value.numel() == parameter.numel():
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
    for parameter, places in _places(updater.runs.values()).items():
        start, stop = _interval(places)
        for key, value in saved[parameter].items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() != stop - start:
                raise MisuseError(
                    f"state {key!r} of a parameter of shape {tuple(parameter.shape)} has {value.numel()} elements, "
                    f"this rank's interval has {stop - start}: it was saved from another model, stage or world size"
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
    updater.inner.state.clear()
    saved = {parameter: _with_long(updater, parameter, states) for parameter, states in saved.items()}
    for flat, runs in updater.runs.items():
        fill_flat(updater, runs, saved)
        flat.round_masters()


def _with_long(updater: Updater, parameter: nn.Parameter, states: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter that is one number, states as long as it is look like states of one value: they get a length."""
    if parameter.dim():
        return states
    is_long = {*updater.states, MASTER}
    return {key: value.reshape(-1) if key in is_long else value for key, value in states.items()}


def fill_flat(updater: Updater, runs: Runs, saved: dict[nn.Parameter, dict[str, Any]]) -> None:
    """Fill the runs of one flat, which have no states yet."""
    runs.cut([_label(saved.get(parameter, {})) for parameter in runs.flat.parameters])
    for run in runs.runs:
        run.singles = None
    for parameter, places in _places([runs]).items():
        first = _interval(places)[0]
        for _, run, piece in places:
            for key, value in saved.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    flat_value = value.reshape(-1)
                    skip = 0 if flat_value.numel() == parameter.numel() else first
                    _put(updater, run, key, flat_value[piece.start - skip : piece.stop - skip], _part(run, piece))
                else:
                    _put_single(updater, run, key, value)


@torch.no_grad()
def carry_states(updater: Updater, flat: Flat, move: Callable[[], None]) -> None:
    """The states of one flat through `move`, which changes where they rest."""
    saved = {}
    for parameter, places in _places([updater.runs[flat]]).items():
        found = _joined([_read(runs, run, piece) for runs, run, piece in places])
        found.pop(MASTER, None)  # goes with the flat
        saved[parameter] = {key: _apart(value) for key, value in found.items()}
    for run in updater.runs[flat].runs:
        if run.tensor is not None:
            updater.inner.state.pop(run.tensor, None)
    move()
    updater.runs[flat] = updater.make_runs(flat)
    fill_flat(updater, updater.runs[flat], saved)


def _apart(value: Any) -> Any:
    """A copy that does not go with the memory it was in: long ones on the host."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to("cpu", copy=True) if value.dim() else value.clone()


def _label(states: dict[str, Any]) -> Hashable:
    """What must be equal for parameters to share a run: the states that are one value for all elements."""
    single = (not isinstance(value, torch.Tensor) or value.dim() == 0 for value in states.values())
    return tuple((key, str(value)) for (key, value), one in zip(states.items(), single, strict=True) if one)


def _put(updater: Updater, run: Run, key: str, values: torch.Tensor, part: slice) -> None:
    """A long state of one piece."""
    place = slice(run.part.start + part.start, run.part.start + part.stop)
    if key == MASTER:
        run.shard.master.write(place, values)
        return
    if run.tensor is not None:
        states = updater.inner.state[run.tensor]
        if key not in states:
            states[key] = torch.zeros_like(run.tensor, dtype=values.dtype)
        states[key][part].copy_(values)
        return
    if key not in run.shard.columns:
        raise MisuseError(
            f"the state {key!r} has no place off the device, since the optimizer did not make one in its trial at "
            "prepare: it was saved by another optimizer, or with other options"
        )
    run.singles = {} if run.singles is None else run.singles
    run.shard.columns[key].write(place, values)


def _put_single(updater: Updater, run: Run, key: str, value: Any) -> None:
    """A state of one value, on the device where torch keeps it: with the parameters if the optimizer is fused."""
    copied = value.clone() if isinstance(value, torch.Tensor) else value
    options = updater.user_groups[run.options]
    follows = bool(options.get("fused") or options.get("capturable"))
    if run.tensor is not None:
        if isinstance(copied, torch.Tensor) and follows:
            copied = copied.to(run.tensor.device)
        updater.inner.state[run.tensor][key] = copied
        return
    if isinstance(copied, torch.Tensor):
        follows = follows and run.shard.portion.route is Route.STREAMED
        copied = copied.to(updater.scratch.device if follows else "cpu")
    run.singles = {**(run.singles or {}), key: copied}
