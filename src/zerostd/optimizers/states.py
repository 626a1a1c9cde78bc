"""Optimizer states to torch's state_dict format and back, parameter by parameter.

Spans are internal; users know parameters. Saving cuts each span's states at parameter boundaries, loading puts them
together again. 16-bit parameters also have `master`, the fp32 values behind the rounded ones. `take_states` and
`replace_states` carry the states of one flat over a move to another home.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from zerostd.errors import MisuseError, is_number
from zerostd.optimizers.gradients import Gradients
from zerostd.optimizers.loss_scale import LossScale
from zerostd.optimizers.spans import UpdateSpan, UpdateSpans
from zerostd.optimizers.updater import Updater
from zerostd.parameters import Flat
from zerostd.parameters.state_shard import MASTER
from zerostd.policy import Route
from zerostd.sharding import Piece

States = dict[str, Any]
Places = list[tuple[UpdateSpan, Piece]]


def save_states(updater: Updater, gradients: Gradients) -> dict[str, Any]:
    """Return the inner optimizer's state_dict as if it had been built on the user's parameters."""
    numbers = {parameter: number for number, parameter in enumerate(updater.param_group_of)}
    saved: dict[int, States] = {}
    intervals: dict[int, tuple[int, int]] = {}
    for spans in updater.spans.values():
        for parameter, places in spans.by_parameter().items():
            if parameter not in numbers:
                continue  # taken out of param_groups
            number = numbers[parameter]
            intervals[number] = _interval(places)
            states = _read(spans, places, with_master=True)
            if states:
                saved[number] = {key: _shaped(value, parameter) for key, value in states.items()}
    groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in updater.user_groups]
    world = gradients.wires.world
    ours = {"rank": world.rank, "size": world.size, "intervals": intervals}
    if gradients.loss_scale is not None:
        ours["loss_scale"] = asdict(gradients.loss_scale)
    return {"state": dict(sorted(saved.items())), "param_groups": groups, "zerostd": ours}


def _interval(places: Places) -> tuple[int, int]:
    """Return the elements of a parameter that this rank updates."""
    return places[0][1].start, places[-1][1].stop


def _read(
    spans: UpdateSpans,
    places: Places,
    *,
    with_master: bool = False,
    scalars: Mapping[UpdateSpan, States] | None = None,
) -> States:
    """Return the states of one parameter: views of long ones, end to end; scalar ones of the first place, as they are
    in `scalars` or copied."""
    kept = scalars or {}
    parts = [spans.read(span, piece, with_master=with_master, scalars=kept.get(span)) for span, piece in places]
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
    return value.clone() if _is_long(value) else value


def copied(state_dict: Any) -> dict[str, Any]:
    """Return a copy of a state_dict that a user gave; raise MisuseError if it cannot be an optimizer's."""
    try:
        ours = state_dict.get("zerostd", {"rank": 0, "size": 1})
        scale = asdict(LossScale(**ours.get("loss_scale", {})))
        numbers = [ours["rank"], ours["size"], *scale.values(), *(len(g["params"]) for g in state_dict["param_groups"])]
        states = [dict(states) for states in (*state_dict["param_groups"], *state_dict["state"].values())]
        if all(map(is_number, numbers)) and all(isinstance(key, str) for part in states for key in part):
            return dict(state_dict)
        problem = "it lacks numbers and names"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise MisuseError(f"this is not the state_dict of an optimizer: {problem}. Pass what state_dict() returned")


def load_states(updater: Updater, gradients: Gradients, state_dict: dict[str, Any]) -> None:
    """Take over what `save_states` gave on the same rank, states whole or in part; in a world of one also torch's."""
    world = gradients.wires.world
    ours = state_dict.get("zerostd", {"rank": 0, "size": 1})
    groups = state_dict["param_groups"]
    if (ours["rank"], ours["size"]) != (world.rank, world.size):
        raise MisuseError(
            f"this optimizer state was saved by rank {ours['rank']} of {ours['size']} and is being loaded by rank "
            f"{world.rank} of {world.size}: load it on the same rank, with the same number of ranks"
        )
    sizes = [len(group["params"]) for group in groups]
    wanted = [len(group["params"]) for group in updater.user_groups]
    if sizes != wanted:
        raise MisuseError(f"param_groups have {sizes} parameters in the state, but {wanted} in this optimizer")
    saved = {p: state_dict["state"].get(number, {}) for number, p in enumerate(updater.param_group_of)}
    for spans in updater.spans.values():
        for parameter, places in spans.by_parameter().items():
            start, stop = _interval(places)
            if parameter not in saved:
                continue
            _check_keys(updater, parameter, saved[parameter])
            for key, value in saved[parameter].items():
                if _is_long(value) and value.dim() > 1 and value.shape != parameter.shape:
                    raise MisuseError(
                        f"state {key!r} has shape {tuple(value.shape)}, but its parameter {tuple(parameter.shape)}: it "
                        "was saved from another model, or with the parameters in another order"
                    )
                if _is_long(value) and value.numel() not in (stop - start, parameter.numel()):
                    raise MisuseError(
                        f"state {key!r} of a parameter of shape {tuple(parameter.shape)} has {value.numel()} elements, "
                        f"but this rank's shard has {stop - start}: it is from another model, stage or world size"
                    )
    for user, group in zip(updater.user_groups, groups, strict=True):
        user.update({**group, "params": user["params"]})
    if gradients.loss_scale is not None:
        for key, value in ours.get("loss_scale", {}).items():
            setattr(gradients.loss_scale, key, value)
    put_states(updater, saved)


def _check_keys(updater: Updater, parameter: nn.Parameter, states: States) -> None:
    """Refuse states of a parameter if one that every step keeps is missing."""
    missing = [name for name in updater.states if states and not isinstance(states.get(name), torch.Tensor)]
    if missing:
        raise MisuseError(
            f"the state of a parameter of shape {tuple(parameter.shape)} has {sorted(states)} and no tensors "
            f"{missing}: it was saved by another optimizer, or with other options"
        )


@torch.no_grad()
def put_states(updater: Updater, saved: Mapping[nn.Parameter, States]) -> None:
    """Fill the spans with states by parameter, each either whole or just this rank's interval of it."""
    updater.resident.state.clear()
    saved = dict(saved)
    long_names = {*updater.states, MASTER}
    for parameter in [parameter for parameter in saved if not parameter.dim()]:  # long states look like scalar ones
        states = saved[parameter].items()
        saved[parameter] = {key: value.reshape(-1) if key in long_names else value for key, value in states}
    for flat, spans in updater.spans.items():
        _fill(updater, spans, saved)
        flat.round_masters()


@torch.no_grad()
def take_states(updater: Updater, flat: Flat) -> dict[nn.Parameter, States]:
    """Return the states of one flat, long ones where they are, and forget them. The master is the flat's. Parameters of
    a span share its scalar states."""
    spans = updater.spans[flat]
    scalars = {span: spans.scalar_states(span) for span in spans}
    saved = {parameter: _read(spans, places, scalars=scalars) for parameter, places in spans.by_parameter().items()}
    _forget(updater, flat)
    return saved


@torch.no_grad()
def replace_states(updater: Updater, flat: Flat, saved: Mapping[nn.Parameter, States]) -> None:
    """Make new spans for a flat with these states; earlier spans are forgotten."""
    _forget(updater, flat)
    updater.spans[flat] = updater.make_spans(flat)
    _fill(updater, updater.spans[flat], saved)


def _forget(updater: Updater, flat: Flat) -> None:
    for span in updater.spans[flat]:
        if span.tensor is not None:
            updater.resident.state.pop(span.tensor, None)


def _fill(updater: Updater, spans: UpdateSpans, saved: Mapping[nn.Parameter, States]) -> None:
    """Fill the spans of one flat, which have no states yet. Parameters with equal scalar states share a span."""
    states = [saved.get(parameter, {}) for parameter in spans.flat.parameters]
    short = [[(key, value) for key, value in of.items() if not _is_long(value)] for of in states]
    distinct = {id(value): value for pairs in short for _, value in pairs}
    texts = {number: _text_of(value) for number, value in distinct.items()}  # the device is asked once for each
    spans.cut([tuple((key, texts[id(value)]) for key, value in pairs) for pairs in short])
    for span in spans:
        span.scalars = None
    for parameter, places in spans.by_parameter().items():
        numel = spans.flat.layout.intervals[places[0][1].index].numel
        _fill_parameter(updater, spans, places, saved.get(parameter, {}), numel)


def _fill_parameter(updater: Updater, spans: UpdateSpans, places: Places, states: States, numel: int) -> None:
    """Fill the places of one parameter with this many elements, which have no states yet."""
    first, _ = _interval(places)
    for key, value in states.items():
        for span, piece in places:
            if not _is_long(value):
                _put_scalar(updater, span, key, value)
                continue
            skipped = 0 if value.numel() == numel else first
            tensor, origin = spans.make_long_state(span, key, value.dtype)
            values = value.reshape(-1)[piece.start - skipped : piece.stop - skipped]
            place = piece.place_from(origin)
            if key == MASTER:
                values = _exact(tensor.read(place), values, spans.flat.dtype)
            tensor.write(place, values)


def _exact(master: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return masters with the extra bits of `values` where master and value round to the same parameter: as in torch,
    the state of an optimizer does not change parameters."""
    values = values.to(master)
    return torch.where(values.to(dtype) == master.to(dtype), values, master)


def parameters_with_states(spans: UpdateSpans) -> set[nn.Parameter]:
    """Return the parameters of a flat whose states this rank keeps, or a part of them."""
    kept = [span for span in spans if spans.long_states(span) or spans.scalar_states(span)]
    return {spans.flat.parameters[piece.index] for span in kept for piece in span.pieces}


def has_states(spans: UpdateSpans, index: int) -> bool:
    """Return whether this rank keeps states of one parameter, or a part of them."""
    return any(spans.long_states(span) or spans.scalar_states(span) for span, _ in spans.places_of(index))


def read_states(spans: UpdateSpans, index: int) -> tuple[tuple[int, int], States]:
    """Return the elements of a parameter that this rank updates, and copies of their states on the host."""
    places = spans.places_of(index)
    if not places:
        return (0, 0), {}
    states = _read(spans, places)
    return _interval(places), {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for key, value in states.items()
    }


@torch.no_grad()
def write_states(updater: Updater, spans: UpdateSpans, index: int, states: States) -> None:
    """Set the states of one parameter to these whole values."""
    spans.flat.wait_readers()
    places = spans.isolate(index)
    for span, _ in places:
        spans.forget(span)
    if places:
        named = {key: value.reshape(-1) if key in updater.states else value for key, value in states.items()}
        _fill_parameter(updater, spans, places, named, spans.flat.layout.intervals[index].numel)


def _text_of(value: Any) -> str:
    return f"{value.dtype} {value.tolist()!r}" if isinstance(value, torch.Tensor) else str(value)


def _put_scalar(updater: Updater, span: UpdateSpan, key: str, value: Any) -> None:
    """Put a scalar state on the device where torch keeps it: with the parameters if the optimizer is fused. Parameters
    of a span have the same one."""
    kept = updater.resident.state[span.tensor] if span.tensor is not None else span.scalars or {}
    if key in kept:
        return
    options = updater.user_groups[span.param_group]
    if isinstance(value, torch.Tensor):
        device = value.device if span.tensor is not None else torch.device("cpu")
        by_torch = span.shard.route is not Route.CPU and not span.shard.is_coded
        if (options.get("fused") or options.get("capturable")) and by_torch:
            device = updater.resident.device
        value = value.to(device, copy=True)
    if span.tensor is not None:
        updater.resident.state[span.tensor][key] = value
    else:
        span.scalars = {**(span.scalars or {}), key: value}
