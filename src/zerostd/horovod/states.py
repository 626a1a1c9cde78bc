"""States of an optimizer: whole ones from the ranks' parts, a rank's part of whole ones, and options."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zerostd import MisuseError
from zerostd.horovod.collectives import everyones
from zerostd.horovod.world import rank, size

__all__ = ["check_states", "full_states", "on_host", "own_states", "set_options", "take_options"]

Options = list[dict[str, Any]]


def take_options(param_groups: Options) -> Options:
    """All of param_groups but the parameters: copies that can be sent to any rank."""
    return [on_host({key: value for key, value in group.items() if key != "params"}) for group in param_groups]


@torch.no_grad()
def set_options(param_groups: Options, options: Options) -> None:
    """Options into param_groups, which stay the same dicts; an lr that is a tensor stays the same tensor."""
    for group, new in zip(param_groups, options, strict=True):
        for key, value in new.items():
            held = group.get(key)
            if isinstance(held, torch.Tensor):
                held.copy_(torch.as_tensor(value))
            else:
                group[key] = value


def check_states(state_dict: dict[str, Any], param_groups: Options) -> None:
    """Refuse the states of another model."""
    sizes, wanted = (
        [len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], param_groups)
    )
    if sizes != wanted:
        raise MisuseError(
            f"the state_dict is of param_groups with {sizes} parameters, and this optimizer has {wanted}: it was saved "
            "from another model"
        )
    numels = [parameter.numel() for group in param_groups for parameter in group["params"]]
    for number, states in state_dict["state"].items():
        for key, value in states.items():
            if _is_long(value) and value.numel() != numels[number]:
                raise MisuseError(
                    f"state {key!r} of parameter {number} has {value.numel()} elements and the parameter "
                    f"{numels[number]}: it was saved from another model"
                )


def full_states(mine: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Whole states from what each rank holds, in torch's format. Collective, one parameter at a time."""
    states, intervals = mine["state"], mine["zerostd"]["intervals"]
    found: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        begin = intervals.get(number, (0, 0))[0]
        parts = everyones((begin, on_host(states.get(number, {}))))
        held = sorted((part for part in parts if part[1]), key=lambda part: part[0])
        if held:
            found[number] = {key: _joined([part[key] for _, part in held], parameter) for key in held[0][1]}
    return {"state": found, "param_groups": mine["param_groups"]}


def own_states(whole: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of whole states, as zerostd's optimizer loads it. `mine` says which part that is, and which
    options stay."""
    states: dict[int, dict[str, Any]] = {}
    for number, (begin, end) in mine["zerostd"]["intervals"].items():
        found = whole["state"].get(number, {})
        states[number] = {
            key: value.reshape(-1)[begin:end] if _is_long(value) else value for key, value in found.items()
        }
    return {"state": states, "param_groups": mine["param_groups"], "zerostd": {"rank": rank(), "size": size()}}


def on_host(value: Any) -> Any:
    """A copy with every tensor on the CPU: what can be sent to any rank."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(item) for item in value)
    return value


def _joined(parts: list[Any], parameter: nn.Parameter) -> Any:
    """One state from its parts, in the order of elements; ranks that hold all of it have the same."""
    if not _is_long(parts[0]) or parts[0].numel() == parameter.numel():
        return parts[0]
    return torch.cat([part.reshape(-1) for part in parts]).reshape(parameter.shape)


def _is_long(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
