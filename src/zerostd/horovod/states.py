"""Options of an optimizer, and this rank's shards of whole states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zerostd.horovod.world import rank, size

Groups = list[dict[str, Any]]  # param_groups, or their options alone


def read_options(param_groups: Groups) -> Groups:
    """Return a copy of param_groups without the parameters, which can be sent to any rank."""
    return [on_host({key: value for key, value in group.items() if key != "params"}) for group in param_groups]


@torch.no_grad()
def write_options(param_groups: Groups, options: Groups) -> None:
    """Write options into param_groups. The dicts stay the same ones, and so does an lr that is a tensor."""
    for group, new in zip(param_groups, options, strict=True):
        for key, value in new.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value


def shard_states(whole: dict[str, Any], shards: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Return this rank's shards of whole states, as zerostd's optimizer loads them; options are those of `shards`.
    States of another length than the parameter stay as they are, and zerostd refuses them."""
    states: dict[int, dict[str, Any]] = {}
    for number, (begin, end) in shards["zerostd"]["intervals"].items():
        states[number] = dict(whole["state"].get(number, {}))
        for key, value in states[number].items():
            if torch.is_tensor(value) and value.dim() > 0 and value.numel() == parameters[number].numel():
                states[number][key] = value.reshape(-1)[begin:end]
    return {"state": states, "param_groups": shards["param_groups"], "zerostd": {"rank": rank(), "size": size()}}


def on_host(values: Any) -> Any:
    """Return a copy of nested values with every tensor on the CPU, which can be sent to any rank."""
    return tree_map(lambda value: value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value, values)


def parameters_of(param_groups: Groups) -> list[nn.Parameter]:
    """Return the parameters in the order in which torch numbers them."""
    return [parameter for group in param_groups for parameter in group["params"]]
