"""Which optimizers may run on shards: those that treat each element by itself.

A shard is a stretch of elements without the matrix it was cut from. Optimizers known to need whole tensors are refused
by name with the reason. Any other class, the user's own included, is tried on a few numbers: a tensor updated whole and
the same tensor updated in two pieces must come out equal.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from zerostd.errors import PrepareError
from zerostd.optimizers.arithmetic import clone_optimizer

NEEDS_WHOLE = {
    "LBFGS": "its line search needs dot products over all parameters and calls the loss several times a step",
    "Adafactor": "it factors the second moment by rows and columns of each matrix",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it needs sparse gradients, and shards are dense",
    "LARS": "its trust ratio needs the norm of each whole tensor",
    "LAMB": "its trust ratio needs the norm of each whole tensor",
    "Shampoo": "its preconditioners need whole matrices",
    "SOAP": "its preconditioners need whole matrices",
}


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on other elements."""
    name = type(optimizer).__name__
    for known in type(optimizer).__mro__:
        if known.__name__ in NEEDS_WHOLE:
            raise PrepareError(
                f"optimizer {name} cannot run on shards: {NEEDS_WHOLE[known.__name__]}. Use an element-wise one such "
                "as AdamW, Adam, SGD, Adagrad, RMSprop, Adamax, NAdam or RAdam"
            )
    try:
        whole, _, _ = _trial(optimizer, 0, pieces=False)
        pieces, _, _ = _trial(optimizer, 0, pieces=True)
    except Exception as error:
        raise PrepareError(
            f"optimizer {name} failed on a trial update of a flat tensor, so it cannot run on shards: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not torch.allclose(whole, pieces, rtol=1e-5, atol=1e-7):
        raise PrepareError(
            f"optimizer {name} cannot run on shards: updating a tensor whole and in two pieces gave different results "
            f"(largest difference {(whole - pieces).abs().max().item():.3g}), so it is not element-wise"
        )


def writes_options(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes the optimizer's own param_groups, as those do that count steps there."""
    for index, group in enumerate(optimizer.param_groups):
        if group["params"]:
            _, _, after = _trial(optimizer, index, pieces=False)
            if any(str(group.get(key)) != str(value) for key, value in after.items() if key != "params"):
                return True
    return False


def find_states(optimizer: torch.optim.Optimizer) -> dict[str, torch.dtype]:
    """Return the dtypes of what the optimizer keeps for each element, by name, as two trial steps with each
    param_group's options show."""
    dtypes: dict[str, torch.dtype] = {}
    for index, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            continue
        _, states, _ = _trial(optimizer, index, pieces=False)
        for name, value in states.items():
            if isinstance(value, torch.Tensor) and value.numel() == 24:
                dtypes[name] = value.dtype
    return dtypes


def _trial(
    optimizer: torch.optim.Optimizer, index: int, *, pieces: bool
) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    """Take two steps of a clone of `optimizer` on 24 fixed numbers, as one 4x6 matrix or as flat pieces of 10 and 14.
    Returns the numbers afterwards, the states of the first tensor, and the param_group."""
    numbers = torch.linspace(-1.0, 1.0, 24).sin()
    tensors = [numbers[:10].clone(), numbers[10:].clone()] if pieces else [numbers.reshape(4, 6).clone()]
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    trial = clone_optimizer(optimizer)
    trial.state = defaultdict(dict)
    group: dict[str, Any] = {
        key: copy.deepcopy(value) for key, value in optimizer.param_groups[index].items() if key != "params"
    }
    group |= {"capturable": False} if "capturable" in group else {}  # only devices can be, and this is no device
    trial.param_groups = [{**group, "params": parameters}]
    for step in range(2):
        gradient = (torch.arange(24.0) * (step + 1)).cos()
        for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.reshape(parameter.shape).clone()
        trial.step()
    numbers = torch.cat([parameter.detach().flatten() for parameter in parameters])
    return numbers, dict(trial.state[parameters[0]]), trial.param_groups[0]
