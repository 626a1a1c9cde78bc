"""From a module to groups of flat buffers, each holding what this rank should.

Reading the module and deciding (`describe`, `assign`) changes nothing; `make_group` then moves one group at a time,
so the extra memory is one group's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zerostd.monitoring import Ledger
from zerostd.parameters.flat import Flat
from zerostd.parameters.gradient import Gradient
from zerostd.parameters.group import Group
from zerostd.policy import Kind, Precision, Stage, shards
from zerostd.sharding import Node, find_groups, make_layout

__all__ = ["ROOT", "Blueprint", "Ground", "Member", "blueprints", "describe_groups", "make_group"]

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


def blueprints(
    model: nn.Module, options: dict[nn.Parameter, int], precision: Precision, globs: Sequence[str] | None
) -> list[Blueprint]:
    """Which parameters travel together. A parameter that several groups use belongs to the root."""
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
    found = [Blueprint(ROOT, (model,), tuple(members.get(-1, ())))]  # may be empty: it still borrows what forward reads
    for index, top in enumerate(tops):
        if index in members:
            found.append(Blueprint(top[0], tuple(named[name] for name in top), tuple(members[index])))
    return found


def describe_groups(found: list[Blueprint]) -> list[str]:
    """A line per group: what must be the same on all ranks."""
    return [f"groups: {blueprint.name} with {len(blueprint.members)} parameters" for blueprint in found]


def _is_inside(name: str, top: str) -> bool:
    return name == top or name.startswith(top + ".")


def _describe(name: str, module: nn.Module, seen: set[nn.Module | nn.Parameter]) -> Node:
    """The module tree for grouping; what is shared is counted where it comes first."""
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
    """16-bit runs leave batch-norm's sort alone: a module with floating-point buffers and only vectors for parameters
    keeps running statistics, which need its own dtype, and computes with mixed inputs."""
    if precision.compute is None or not parameter.is_floating_point():
        return parameter.dtype
    keeps_statistics = any(b is not None and b.is_floating_point() for b in module._buffers.values())
    only_vectors = all(p is None or p.dim() <= 1 for p in module._parameters.values())
    if precision.compute.itemsize < 4 and keeps_statistics and only_vectors:
        return parameter.dtype
    return precision.compute


@dataclass(frozen=True)
class Ground:
    """What groups are built on: this rank's place, the stage, the device."""

    rank: int
    size: int
    stage: Stage
    device: torch.device
    reduce_dtype: torch.dtype | None  # for gradients of 16-bit parameters; None: the parameter's own
    ledger: Ledger

    def shards(self, kind: Kind) -> bool:
        """Whether this kind is spread over ranks here; in a world of one nothing is."""
        return self.size > 1 and shards(self.stage, kind)


def make_group(blueprint: Blueprint, index: int, ground: Ground, value_of: Callable[[Member], torch.Tensor]) -> Group:
    """Flatten, take this rank's part, and let the rest go. `value_of` gives a parameter's first values."""
    sorts: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in blueprint.members:
        sorts.setdefault((member.dtype, member.options is not None), []).append(member)
    flats = [_make_flat(members, ground, value_of) for members in sorts.values()]
    return Group(blueprint.name, index, blueprint.modules, flats)


def _make_flat(members: list[Member], ground: Ground, value_of: Callable[[Member], torch.Tensor]) -> Flat:
    dtype, is_trained = members[0].dtype, members[0].options is not None
    ordered = sorted(members, key=lambda member: -1 if member.options is None else member.options)
    layout = make_layout([(m.name, tuple(m.parameter.shape)) for m in ordered], ground.size, dtype.itemsize)
    by_name = {member.name: member for member in ordered}
    in_layout = [by_name[interval.name] for interval in layout.intervals]
    flat = Flat(layout, [m.parameter for m in in_layout], dtype, ground.device, ground.ledger)
    flat.choose_region(ground.rank, shard_states=ground.shards(Kind.OPTIMIZER_STATES), has_master=is_trained)
    for position, member in enumerate(in_layout):
        flat.take(position, value_of(member))
    flat.settle(ground.rank, shard_parameters=ground.shards(Kind.PARAMETERS))
    if is_trained:
        rests_in = ground.reduce_dtype if ground.reduce_dtype is not None and dtype.itemsize < 4 else dtype
        keep_whole = ground.size > 1 and not ground.shards(Kind.GRADIENTS)
        flat.gradient = Gradient(
            layout, flat.region, keep_whole=keep_whole, dtype=rests_in, device=ground.device, ledger=ground.ledger
        )
    return flat
