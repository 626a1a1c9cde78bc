"""Optimizer states to torch's state_dict format and back, parameter by parameter.

Spans are ours; users know parameters. Saving cuts each span's states at parameter boundaries, loading puts them
together again. 16-bit parameters also have `master`, the fp32 values behind the rounded ones. `take_states` and
`replace_states` carry the states of one flat over a move to another home.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from zerostd.communication import World
from zerostd.errors import MisuseError
from zerostd.optimizers.scaling import LossScale
from zerostd.optimizers.spans import UpdateSpan, UpdateSpans
from zerostd.optimizers.updater import Updater
from zerostd.parameters import Flat
from zerostd.parameters.flat import MASTER
from zerostd.policy import Route
from zerostd.sharding import Piece

States = dict[str, Any]
Places = list[tuple[UpdateSpan, Piece]]


def save_states(updater: Updater, world: World, loss_scale: LossScale | None) -> dict[str, Any]:
    """Return the inner optimizer's state_dict as if it had been built on the user's parameters."""
    numbers = {parameter: number for number, parameter in enumerate(updater.parameters())}
    saved: dict[int, States] = {}
    intervals: dict[int, tuple[int, int]] = {}
    for spans in updater.spans.values():
        for parameter, places in spans.by_parameter().items():
            number = numbers[parameter]
            intervals[number] = _interval(places)
            states = _read(spans, places)
            if states:
                saved[number] = {key: _shaped(value, parameter) for key, value in states.items()}
    groups = []
    count = 0
    for group in updater.user_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": list(range(count, count + len(group["params"])))})
        count += len(group["params"])
    ours = {"rank": world.rank, "size": world.size, "intervals": intervals}
    if loss_scale is not None:
        ours["loss_scale"] = asdict(loss_scale)
    return {"state": dict(sorted(saved.items())), "param_groups": groups, "zerostd": ours}


def _interval(places: Places) -> tuple[int, int]:
    """Return the elements of a parameter that this rank updates."""
    return places[0][1].start, places[-1][1].stop


def _read(spans: UpdateSpans, places: Places) -> States:
    """Return the states of one parameter: long ones end to end, scalar ones as they are in the first place."""
    parts = []
    for span, piece in places:
        states = spans.read(span, piece)
        if spans.flat.rest.dtype != span.shard.master.dtype:
            states[MASTER] = span.shard.master.read(span.part_in_shard(span.part_of(piece)))
        parts.append(states)
    if len(parts) == 1:
        return parts[0]
    return {
        key: torch.cat([part[key].to(value.device) for part in parts]) if _is_long(value) else value
        for key, value in parts[0].items()
    }


def _is_long(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _shaped(value: Any, parameter: nn.Parameter) -> Any:
    if _is_long(value) and value.numel() == parameter.numel():
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
    sizes = [len(group["params"]) for group in groups]
    wanted = [len(group["params"]) for group in updater.user_groups]
    if sizes != wanted:
        raise MisuseError(f"param_groups have {sizes} parameters in the state and {wanted} in this optimizer")
    saved = {p: state_dict["state"].get(number, {}) for number, p in enumerate(updater.parameters())}
    for spans in updater.spans.values():
        for parameter, places in spans.by_parameter().items():
            _check_lengths(parameter, places, saved[parameter])
    for user, group in zip(updater.user_groups, groups, strict=True):
        user.update({key: value for key, value in group.items() if key != "params"})
    if loss_scale is not None:
        for key, value in ours.get("loss_scale", {}).items():
            setattr(loss_scale, key, value)
    put_states(updater, saved)


def _check_lengths(parameter: nn.Parameter, places: Places, states: States) -> None:
    start, stop = _interval(places)
    for key, value in states.items():
        if _is_long(value) and value.numel() != stop - start:
            raise MisuseError(
                f"state {key!r} of a parameter of shape {tuple(parameter.shape)} has {value.numel()} elements, "
                f"this rank's interval has {stop - start}: it was saved from another model, stage or world size"
            )


@torch.no_grad()
def put_states(updater: Updater, saved: Mapping[nn.Parameter, States]) -> None:
    """Fill the spans with states by parameter, each either whole or just this rank's interval of it."""
    updater.inner.state.clear()
    saved = {parameter: _with_long(updater, parameter, states) for parameter, states in saved.items()}
    for flat, spans in updater.spans.items():
        _fill(updater, spans, saved)
        flat.round_masters()


def _with_long(updater: Updater, parameter: nn.Parameter, states: States) -> States:
    """Give long states of a parameter that is one number a length: without one they look like scalar states."""
    if parameter.dim():
        return states
    long_names = {*updater.states, MASTER}
    return {key: value.reshape(-1) if key in long_names else value for key, value in states.items()}


@torch.no_grad()
def take_states(updater: Updater, flat: Flat) -> dict[nn.Parameter, States]:
    """Return the states of one flat, long ones as copies on the host, and forget them. The master is the flat's."""
    spans = updater.spans[flat]
    saved = {}
    for parameter, places in spans.by_parameter().items():
        states = _read(spans, places)
        states.pop(MASTER, None)
        saved[parameter] = {key: _copied(value) for key, value in states.items()}
    _forget(updater, flat)
    return saved


@torch.no_grad()
def replace_states(updater: Updater, flat: Flat, saved: Mapping[nn.Parameter, States]) -> None:
    """Make the spans of a flat anew, as it is now, with these states; those from before are forgotten."""
    _forget(updater, flat)
    updater.spans[flat] = updater.make_spans(flat)
    _fill(updater, updater.spans[flat], saved)


def _forget(updater: Updater, flat: Flat) -> None:
    for span in updater.spans[flat]:
        if span.tensor is not None:
            updater.inner.state.pop(span.tensor, None)


def _copied(value: Any) -> Any:
    """Return a copy that does not need the memory it was in."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to("cpu", copy=True) if value.dim() else value.clone()


def _fill(updater: Updater, spans: UpdateSpans, saved: Mapping[nn.Parameter, States]) -> None:
    """Fill the spans of one flat, which have no states yet."""
    spans.cut([_label(saved.get(parameter, {})) for parameter in spans.flat.parameters])
    for span in spans:
        span.scalars = None
    for parameter, places in spans.by_parameter().items():
        first, _ = _interval(places)
        for key, value in saved.get(parameter, {}).items():
            for span, piece in places:
                if _is_long(value):
                    skipped = 0 if value.numel() == parameter.numel() else first
                    part = value.reshape(-1)[piece.start - skipped : piece.stop - skipped]
                    _put_long(updater, span, piece, key, part)
                else:
                    _put_scalar(updater, span, key, value)


def _label(states: States) -> Hashable:
    """Return what must be equal for parameters to share a span: their scalar states."""
    return tuple((key, str(value)) for key, value in states.items() if not _is_long(value))


def _put_long(updater: Updater, span: UpdateSpan, piece: Piece, key: str, values: torch.Tensor) -> None:
    part = span.part_of(piece)
    if key == MASTER:
        span.shard.master.write(span.part_in_shard(part), values)
        return
    if span.tensor is not None:
        states = updater.inner.state[span.tensor]
        if key not in states:
            states[key] = torch.zeros_like(span.tensor, dtype=values.dtype)
        states[key][part].copy_(values)
        return
    if key not in span.shard.tensors:
        raise MisuseError(
            f"the state {key!r} has no place off the device, since the optimizer did not make one in its trial at "
            "prepare: it was saved by another optimizer, or with other options"
        )
    span.scalars = {} if span.scalars is None else span.scalars
    span.shard.tensors[key].write(span.part_in_shard(part), values)


def _put_scalar(updater: Updater, span: UpdateSpan, key: str, value: Any) -> None:
    """Put a scalar state on the device where torch keeps it: with the parameters if the optimizer is fused."""
    scalar = value.clone() if isinstance(value, torch.Tensor) else value
    options = updater.user_groups[span.param_group]
    follows = bool(options.get("fused") or options.get("capturable"))
    if span.tensor is not None:
        if isinstance(scalar, torch.Tensor) and follows:
            scalar = scalar.to(span.tensor.device)
        updater.inner.state[span.tensor][key] = scalar
        return
    if isinstance(scalar, torch.Tensor):
        follows = follows and span.shard.route is Route.STREAMED
        scalar = scalar.to(updater.scratch.device if follows else "cpu")
    span.scalars = {**(span.scalars or {}), key: scalar}
