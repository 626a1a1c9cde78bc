"""Which parameters travel together, read from the module; nothing is changed here.

In: a module, the options its optimizer has for each parameter, the precision. Out: a blueprint for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zerostd.policy import Precision
from zerostd.sharding import Node, find_groups

ROOT = "(root)"


@dataclass(frozen=True, eq=False)
class Member:
    """One parameter of a group to be."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype  # it will compute in
    options: int | None  # index of its param_group; None if it is not updated


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A group to be."""

    name: str
    modules: tuple[nn.Module, ...]
    members: tuple[Member, ...]


def find_blueprints(
    model: nn.Module, options: dict[nn.Parameter, int], precision: Precision, globs: Sequence[str] | None
) -> list[Blueprint]:
    """Return a blueprint for each group. A parameter that several groups use belongs to the root."""
    node = _describe("", model, set())
    named = dict(model.named_modules())
    tops = find_groups(node, globs=globs)
    homes: dict[nn.Parameter, set[int]] = {}
    names: dict[nn.Parameter, str] = {}
    dtypes: dict[nn.Parameter, torch.dtype] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        home = next((i for i, top in enumerate(tops) if any(_is_inside(module_name, name) for name in top)), -1)
        for short, parameter in module._parameters.items():
            if parameter is not None:
                homes.setdefault(parameter, set()).add(home)
                names.setdefault(parameter, f"{module_name}.{short}".lstrip("."))
                dtypes.setdefault(parameter, _compute_dtype(module, parameter, precision))
    members: dict[int, list[Member]] = {}
    for parameter, where in homes.items():
        home = next(iter(where)) if len(where) == 1 else -1
        member = Member(names[parameter], parameter, dtypes[parameter], options.get(parameter))
        members.setdefault(home, []).append(member)
    root = Blueprint(ROOT, (model,), tuple(members.get(-1, ())))  # may be empty: it still borrows what forward reads
    blueprints = [root]
    for index, top in enumerate(tops):
        if index in members:
            blueprints.append(Blueprint(top[0], tuple(named[name] for name in top), tuple(members[index])))
    return blueprints


def describe_groups(blueprints: list[Blueprint]) -> list[str]:
    """Return a line per group: what must be the same on all ranks."""
    return [f"groups: {blueprint.name} with {len(blueprint.members)} parameters" for blueprint in blueprints]


def _is_inside(name: str, top: str) -> bool:
    return name == top or name.startswith(top + ".")


def _describe(name: str, module: nn.Module, seen: set[nn.Module | nn.Parameter]) -> Node:
    """Return the module tree for grouping; what is shared is counted where it comes first."""
    seen.add(module)
    own = [p for p in module._parameters.values() if p is not None and p not in seen]
    seen.update(own)
    children = [
        _describe(f"{name}.{short}".lstrip("."), child, seen)
        for short, child in module._modules.items()
        if child is not None and child not in seen
    ]
    return Node(name, sum(p.numel() * p.element_size() for p in own), type(module), tuple(children))


def _compute_dtype(module: nn.Module, parameter: nn.Parameter, precision: Precision) -> torch.dtype:
    """Return the dtype that a parameter computes in. 16-bit runs leave modules such as batch-norm alone: one with
    floating-point buffers and only vectors for parameters keeps running statistics, which need their own dtype."""
    if precision.compute is None or not parameter.is_floating_point():
        return parameter.dtype
    keeps_statistics = any(b is not None and b.is_floating_point() for b in module._buffers.values())
    only_vectors = all(p is None or p.dim() <= 1 for p in module._parameters.values())
    if precision.compute.itemsize < 4 and keeps_statistics and only_vectors:
        return parameter.dtype
    return precision.compute
