"""What prepare reads from the user's model and optimizer; nothing is changed here.

`check_model` and `check_optimizer` refuse what cannot be sharded; each error names the parameter and the remedy.
`find_blueprints` says which parameters travel together. `describe` lists what must be the same on all ranks.
`named_tensors` and `buffers_of` list what a state_dict has.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from zerostd.communication.dtensors import Spec, check_dtensors, local_values
from zerostd.compat import persistent_buffers, storage_of
from zerostd.errors import PrepareError
from zerostd.policy import Precision
from zerostd.sharding import Node, find_groups, smallest_of

ROOT = "(root)"
MARK = "_zerostd"  # attribute of a prepared root: what zerostd keeps for it
OWNER = "_zerostd_owner"  # attribute of every module of a prepared model: it gives what zerostd keeps for the root
WRAPPERS = {  # of other libraries, by the name of their class, and what they do
    "DistributedDataParallel": "reduces gradients",
    "DataParallel": "replicates the model",
    "FullyShardedDataParallel": "shards parameters",
    "FSDPModule": "shards parameters",
    "DeepSpeedEngine": "shards model state",
}
GUARD = "__reduce_ex__"  # attribute of every module of a prepared model: refuses copies


@dataclass(frozen=True, eq=False)
class Member:
    """One parameter of a planned group."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype  # it will compute in
    options: int | None  # index of its param_group; None if it is not updated
    spec: Spec | None  # of a DTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return tuple(self.parameter.shape) if self.spec is None else self.spec.box.sizes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A planned group."""

    name: str
    references: tuple[weakref.ref[nn.Module], ...]  # to `modules`: a model must be able to go while groups are there
    members: tuple[Member, ...]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose forward needs it, in registration order; the last one ends its use."""
        return [module for reference in self.references if (module := reference()) is not None]

    @property
    def num_bytes(self) -> int:
        """The bytes of its parameters as they compute."""
        return sum(member.numel * member.dtype.itemsize for member in self.members)

    def on_paper(self) -> Blueprint:
        """Return the same without modules, and with parameters without memory."""
        members = []
        for member in self.members:
            values = torch.empty(member.shape, dtype=member.parameter.dtype, device="meta")
            members.append(replace(member, parameter=nn.Parameter(values, False), spec=None))
        return Blueprint(self.name, (), tuple(members))


def sizes_of(blueprints: Sequence[Blueprint]) -> dict[str, float]:
    """Return the number of trained parameters by name of group; of all parameters, if none train."""
    trains = any(member.options is not None for group in blueprints for member in group.members)
    return {
        group.name: float(sum(m.numel for m in group.members if m.options is not None or not trains))
        for group in blueprints
        if group.members
    }


def find_blueprints(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    precision: Precision,
    globs: Sequence[str] | None,
    num_ranks: int = 1,
) -> list[Blueprint]:
    """Return a blueprint for each group of a model that `num_ranks` ranks train. A parameter that several groups
    use belongs to the root. Without an optimizer, all parameters that train are treated as one param_group."""
    param_groups = [{"params": model.parameters()}] if optimizer is None else optimizer.param_groups
    options = {p: index for index, group in enumerate(param_groups) for p in group["params"] if p.requires_grad}
    named = dict(model.named_modules(remove_duplicate=False))
    root = _describe("", model, set())
    tops = find_groups(root, globs=globs, smallest=smallest_of(root.num_bytes, num_ranks))
    homes = {name: index for index, top in enumerate(tops) for name in top}  # of each module: -1 is the root
    uses: dict[nn.Parameter, list[tuple[int, str, torch.dtype]]] = {}  # group, name and dtype, module by module
    for module_name, module in named.items():
        parent, _, _ = module_name.rpartition(".")
        home = homes.setdefault(module_name, homes.get(parent, -1))  # parents come first
        for short, parameter in module._parameters.items():
            if parameter is not None:
                use = (home, f"{module_name}.{short}".lstrip("."), _compute_dtype(module, parameter, precision))
                uses.setdefault(parameter, []).append(use)
    members: dict[int, list[Member]] = {}
    for parameter, ((home, name, dtype), *others) in uses.items():
        if any(use[0] != home for use in others):
            home = -1
        spec = Spec.of(parameter)
        members.setdefault(home, []).append(Member(name, parameter, dtype, options.get(parameter), spec))
    # The root may be empty: it still borrows what forward reads.
    blueprints = [Blueprint(ROOT, (weakref.ref(model),), tuple(members.get(-1, ())))]
    for index, top in enumerate(tops):
        if index in members:
            references = tuple(weakref.ref(named[name]) for name in top)
            blueprints.append(Blueprint(top[0], references, tuple(members[index])))
    return blueprints


def _describe(name: str, module: nn.Module, seen: set[nn.Module | nn.Parameter]) -> Node:
    """Return the module tree for grouping; a shared parameter is counted in the first module that has it."""
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


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise PrepareError(f"prepare needs a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        _check_wrapper(name, module)
        if MARK in module.__dict__ or GUARD in module.__dict__:
            where = f"its submodule {name!r}" if name else "it"
            raise PrepareError(f"the model cannot be prepared: {where} is already prepared; zerostd.release it first")
    parameters = list(model.named_parameters())
    if not parameters:
        raise PrepareError("the model has no parameters, so there is nothing to prepare")
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise PrepareError(f"parameter {name!r} is lazy and has no shape yet: run one forward before prepare")
    check_dtensors(parameters)
    places = {str(p.device): name for name, p in parameters if p.device.type != "meta"}
    if len(places) > 1:
        (first, a), (second, b) = list(places.items())[:2]
        raise PrepareError(
            f"the model is on two devices: {a!r} on {first} and {b!r} on {second}; move it with model.to(device)"
        )
    _check_shared_storage(parameters)
    _check_buffers(model, parameters)


def _check_wrapper(name: str, module: nn.Module) -> None:
    """Refuse a module that takes no hooks, or is a wrapper which reduces gradients or shards parameters itself."""
    where = f"submodule {name!r} of the model" if name else "the model"
    if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
        raise PrepareError(
            f"{where} is a torch.jit.ScriptModule, which takes no hooks: use the module that it was made of, and "
            "script it after zerostd.release"
        )
    wrappers = [base.__name__ for base in type(module).__mro__ if base.__name__ in WRAPPERS]
    if wrappers:
        raise PrepareError(
            f"{where} is wrapped in {wrappers[0]}, which {WRAPPERS[wrappers[0]]} as zerostd does: delete the line that "
            f"wraps it, pass the plain module, and write model instead of model.module. zerostd.prepare replaces "
            f"{wrappers[0]}"
        )


def _shares_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors whose memory overlaps have an element in common: columns that take turns have none."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    start = min(a.data_ptr(), b.data_ptr())
    itemsize = a.element_size()
    marks = torch.zeros(a.untyped_storage().nbytes() // itemsize + 1, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), (a.data_ptr() - start) // itemsize).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), (b.data_ptr() - start) // itemsize).any())


def _check_shared_storage(parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse two Parameter objects over the same bytes: they would be updated twice."""
    spans = []
    for name, whole in parameters:
        parameter = local_values(whole)
        if parameter.device.type != "meta" and parameter.numel():
            low = parameter.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            spans.append((low, low + (int(last) + 1) * parameter.element_size(), name, whole))
    spans.sort(key=lambda span: span[:2])
    for (_, end, first, a), (start, _, second, b) in itertools.pairwise(spans):
        if start >= end or not _shares_elements(local_values(a), local_values(b)):
            continue
        if a.requires_grad != b.requires_grad:
            frozen, trained = (first, second) if b.requires_grad else (second, first)
            raise PrepareError(
                f"{first!r} and {second!r} are tied, but {trained!r} trains and {frozen!r} is frozen: give both the "
                "same requires_grad, and tie them by assigning one Parameter object to both modules"
            )
        if a.requires_grad:
            raise PrepareError(
                f"{first!r} and {second!r} are two Parameter objects over the same memory: tie them by assigning one "
                "Parameter object to both modules"
            )


def _check_buffers(model: nn.Module, parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse a buffer in the memory of a parameter that trains: the parameter gets other memory, so the buffer would
    keep its initial values."""
    buffers: dict[int, list[tuple[str, torch.Tensor]]] = {}  # by storage
    for name, buffer in model.named_buffers():
        if buffer.device.type != "meta" and buffer.layout is torch.strided and buffer.numel():
            buffers.setdefault(storage_of(buffer), []).append((name, buffer))
    for name, whole in parameters if buffers else ():
        parameter = local_values(whole)
        if not whole.requires_grad or parameter.device.type == "meta":
            continue
        for buffer_name, buffer in buffers.get(storage_of(parameter), ()):
            first, second = sorted((buffer, parameter), key=torch.Tensor.data_ptr)
            last = sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True))
            if second.data_ptr() < first.data_ptr() + (int(last) + 1) * first.element_size():
                raise PrepareError(
                    f"buffer {buffer_name!r} is in the memory of parameter {name!r}, which trains: the buffer would "
                    f"keep the values of now. Let the module use the parameter, or register {name}.detach().clone()"
                )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that were not built on this model's parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PrepareError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if type(optimizer).__module__.startswith("horovod."):
        raise PrepareError(
            "the optimizer is Horovod's DistributedOptimizer, which reduces gradients as zerostd does: pass the torch "
            "optimizer; or keep the script and import zerostd.horovod as hvd instead of horovod.torch"
        )
    known = set(model.parameters())
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise PrepareError(
                    f"param_groups[{index}]['params'][{position}], shape {tuple(parameter.shape)}, is not a "
                    "parameter of this model: build the optimizer from the model's own parameters, after any "
                    "model.to(...) that replaced them"
                )


def describe(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, blueprints: Sequence[Blueprint]
) -> Iterator[str]:
    """Yield a line for everything that must be the same on all ranks: param_groups, parameters, buffers and groups."""
    if optimizer is None:
        yield "no optimizer yet"
    for index, group in enumerate(() if optimizer is None else optimizer.param_groups):
        options = {k: v for k, v in group.items() if k != "params" and not isinstance(v, torch.Tensor)}
        yield f"{type(optimizer).__name__} param_group {index}: " + ", ".join(f"{k}={v!r}" for k, v in options.items())
    places = {member.parameter: member.options for blueprint in blueprints for member in blueprint.members}
    for name, p in model.named_parameters(remove_duplicate=False):
        line = f"{name} {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')} param_group {places.get(p)}"
        yield line if (spec := Spec.of(p)) is None else f"{line} {spec.placements}"
    for name, buffer in model.named_buffers():
        yield f"{name} {tuple(buffer.shape)} buffer"
    for blueprint in blueprints:
        yield f"groups: {blueprint.name} with {len(blueprint.members)} parameters"


class RootCasts(NamedTuple):
    """How a root casts the floating-point tensors it is given and returns."""

    taken: frozenset[torch.dtype]  # of inputs that are cast: those of the parameters before prepare
    inside: torch.dtype  # that it computes in
    returned: torch.dtype  # of outputs that were computed in `inside`


def root_casts(precision: Precision, dtypes: Iterable[torch.dtype]) -> RootCasts | None:
    """Return the casts of a root whose parameters had these dtypes; None if nothing is cast. Outputs have the widest of
    them, unless some parameters had the dtype that all of them compute in now."""
    outside = frozenset({dtype for dtype in dtypes if dtype.is_floating_point})
    inside = precision.compute
    if inside is None or outside <= {inside}:
        return None
    widest = functools.reduce(torch.promote_types, outside)
    return RootCasts(outside, inside, inside if inside in outside else widest)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by name, each under the first name of its module."""
    return {
        f"{prefix}.{short}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        for short, buffer in persistent_buffers(module).items()
    }


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, object]]:
    """Yield every name in a state_dict, its tensor and owner: the parameter, or a buffer's module and short name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, parameter
    for prefix, module in model.named_modules(remove_duplicate=False):
        for short, buffer in persistent_buffers(module).items():
            yield f"{prefix}.{short}".lstrip("."), buffer, (module, short)
