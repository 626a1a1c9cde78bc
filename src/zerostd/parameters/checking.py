"""What prepare refuses, before anything is changed. Each error names the parameter and the remedy."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from zerostd.errors import PrepareError

MARK = "_zerostd"  # attribute of a prepared root: what zerostd keeps for it
OWNER = "_zerostd_root"  # attribute of every module of a prepared model: a weak reference to the root
GUARD = "__reduce_ex__"  # attribute of every module of a prepared model: refuses copies


def check_model(model: nn.Module) -> None:
    """Refuse models that cannot be sharded."""
    if not isinstance(model, nn.Module):
        raise PrepareError(f"prepare needs a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if MARK in module.__dict__ or GUARD in module.__dict__:
            where = f"its submodule {name!r}" if name else "it"
            raise PrepareError(f"the model cannot be prepared: {where} is prepared already; zerostd.release it first")
    parameters = list(model.named_parameters())
    if not parameters:
        raise PrepareError("the model has no parameters, so there is nothing to prepare")
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise PrepareError(f"parameter {name!r} is lazy and has no shape yet: run one forward before prepare")
        if parameter.requires_grad and parameter.is_complex():
            raise PrepareError(f"parameter {name!r} is {parameter.dtype}: complex parameters cannot be sharded yet")
    places = {str(p.device): name for name, p in parameters if p.device.type != "meta"}
    if len(places) > 1:
        (first, a), (second, b) = list(places.items())[:2]
        raise PrepareError(
            f"the model lies on two devices: {a!r} on {first} and {b!r} on {second}; move it with model.to(device)"
        )
    _check_shared_storage(parameters)


def _check_shared_storage(parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse two Parameter objects over the same bytes: they would be updated twice."""
    spans = []
    for name, parameter in parameters:
        if parameter.device.type != "meta" and parameter.numel():
            low = parameter.data_ptr()
            spans.append((low, low + parameter.numel() * parameter.element_size(), name, parameter))
    spans.sort(key=lambda span: span[:2])
    for (_, end, first, a), (start, _, second, b) in itertools.pairwise(spans):
        if start >= end:
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


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that were built on something else than this model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PrepareError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    known = set(model.parameters())
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise PrepareError(
                    f"param_groups[{index}]['params'][{position}], shape {tuple(parameter.shape)}, is not a "
                    "parameter of this model: build the optimizer from the model's own parameters, after any "
                    "model.to(...) that replaced them"
                )


def optimizer_options(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[nn.Parameter, int]:
    """Return the param_group of each parameter that will be updated; without an optimizer, 0 for all that train."""
    if optimizer is None:
        return {parameter: 0 for parameter in model.parameters() if parameter.requires_grad}
    return {
        parameter: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.requires_grad
    }


def describe_model(model: nn.Module, options: dict[nn.Parameter, int]) -> list[str]:
    """Return a line per parameter and buffer: what must be the same on all ranks."""
    lines = [
        f"{name} {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')} param_group {options.get(p)}"
        for name, p in model.named_parameters(remove_duplicate=False)
    ]
    return lines + [f"{name} {tuple(b.shape)} buffer" for name, b in model.named_buffers()]


def describe_optimizer(optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Return a line per param_group: what must be the same on all ranks."""
    if optimizer is None:
        return ["no optimizer yet"]
    return [
        f"{type(optimizer).__name__} param_group {index}: "
        + ", ".join(f"{k}={v!r}" for k, v in group.items() if k != "params" and not isinstance(v, torch.Tensor))
        for index, group in enumerate(optimizer.param_groups)
    ]
