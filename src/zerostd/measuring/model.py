"""What a model needs, read from the module: the groups that prepare will make, and what one sample costs in each.

In: a module, real or without memory, and a batch to try. Out: a ModelProfile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zerostd.errors import PrepareError
from zerostd.measuring.probe import Probe, probe_passes
from zerostd.measuring.trial import ForwardCost, try_forward
from zerostd.optimizers.elementwise import check_elementwise, find_states
from zerostd.parameters.blueprints import ROOT, Blueprint, Member, check_model, check_optimizer, find_blueprints
from zerostd.planning.model import GroupProfile, ModelProfile
from zerostd.policy import Precision

ASSUMED_STATES = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}  # AdamW's, while there is no optimizer


def profile_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    precision: str | Precision | None = None,
    groups: Sequence[str] | None = None,
    batch: Any = None,
    samples: int | None = None,
    probe: bool = False,
) -> ModelProfile:
    """Return what `model` needs; the model, the optimizer and the random states stay as they are.

    Counts of parameters are exact. Bytes of one parameter, gradient and state are those of the dtype that most
    parameters have (for gradients and states: most of the trained ones); a model of several dtypes is told as if all
    had it. FLOPs are those of matrix products, convolutions, attention (not halved where it is causal) and recurrent
    layers. What is kept is what autograd saves in the model's forward, each storage once and in the group that saves it
    first, parameters and buffers left out; a loss outside of the model is not seen. The peak is the largest output
    of an operation in the group, and, where the model itself uses torch.utils.checkpoint, what it saves inside.

    Args:
        model: Any module that prepare takes, also on the meta device or built under `zerostd.empty_init()`.
        optimizer: As for prepare. None: all parameters with requires_grad are trained, with the states of AdamW.
        precision: As for prepare: 'fp32', 'bf16', 'fp16' or None.
        groups: As for prepare: globs of module names.
        batch: What forward takes: a tensor, a tuple of arguments or a dict of keywords. The first dimension of its
            first tensor is the number of samples. Values do not matter, so tensors on the meta device will do. None:
            nothing is run, and costs of a sample are 0.
        samples: In one pass on one rank, if it is not the number in `batch`.
        probe: Run a few passes for real, if model and batch are, and take time and memory from them.

    Returns:
        Groups in the order in which forward first needs them (without a batch: in the model's order), those without
        parameters and work left out. If forward could not be run, a warning is logged and `samples` is None.

    Raises:
        PrepareError: What prepare would refuse. A real forward that fails raises its own error.
    """
    check_model(model)
    states = _states_of(model, optimizer)
    checked = Precision.parse(precision)
    blueprints = find_blueprints(model, optimizer, checked, groups)
    num_samples = _check_samples(batch, samples)
    tried = None if batch is None else try_forward(model, blueprints, checked, batch)
    costs = tried.costs if tried is not None else [ForwardCost() for _ in blueprints]
    order = list(dict.fromkeys([*(tried.order if tried is not None else ()), *range(len(blueprints))]))
    profiles = [_profile(blueprints[index], costs[index], num_samples) for index in order]
    profiles = [group for group in profiles if group != GroupProfile(group.name, 0, stays=group.stays, again_flops=0.0)]
    probed = probe_passes(model, blueprints, checked, batch) if probe and tried is not None else None
    profile = ModelProfile(
        type(model).__name__,
        tuple(profiles),
        samples=(samples or num_samples) if tried is not None else None,
        recomputed=sum(cost.recomputed for cost in costs) / max(1, sum(cost.flops for cost in costs)),
        **state_widths([member for blueprint in blueprints for member in blueprint.members], checked, states),
    )
    return profile if probed is None else _with_probe(profile, probed)


def _with_probe(profile: ModelProfile, probed: Probe) -> ModelProfile:
    return replace(
        profile,
        forward_s=probed.forward_s,
        backward_s=probed.backward_s,
        activation_bytes=probed.activation_bytes,
    )


def _states_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Mapping[str, torch.dtype]:
    if optimizer is None:
        return ASSUMED_STATES
    check_optimizer(model, optimizer)
    check_elementwise(optimizer)
    return find_states(optimizer)


def _profile(blueprint: Blueprint, cost: ForwardCost, num_samples: int) -> GroupProfile:
    trained = sum(m.parameter.numel() for m in blueprint.members if m.options is not None)
    return GroupProfile(
        blueprint.name,
        trained=trained,
        frozen=sum(m.parameter.numel() for m in blueprint.members) - trained,
        forward_flops=cost.flops / num_samples,
        kept_bytes=cost.kept / num_samples,
        boundary_bytes=cost.boundary / num_samples,
        peak_bytes=(cost.largest + cost.inside) / num_samples,
        stays=blueprint.name == ROOT,
        again_flops=cost.again / num_samples,
    )


def state_widths(members: list[Member], precision: Precision, states: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """Return the bytes of each kind for one parameter, by the rules of parameters/homes.py."""
    trained = [member for member in members if member.options is not None] or members
    dtype = _most(trained)
    master = dtype if dtype.itemsize >= 4 else torch.float32
    is_cast = dtype.itemsize < 4 or (precision.compute is None and dtype is torch.float32)
    gradient = precision.reduce if is_cast and precision.reduce is not None else dtype
    kept = [(master if state == torch.float32 else state).itemsize for state in states.values()]
    computes = [member for member in members if member.dtype.is_floating_point] or members
    return {
        "parameter_bytes": _most(members).itemsize,
        "gradient_bytes": gradient.itemsize,
        "state_bytes": sum(kept) + (0 if dtype == master else master.itemsize),
        "master_bytes": master.itemsize if dtype == master else 0,
        "dtype": str(_most(computes)).removeprefix("torch."),
    }


def _most(members: list[Member]) -> torch.dtype:
    """Return the dtype of most parameters."""
    numels = Counter[torch.dtype]()
    for member in members:
        numels[member.dtype] += member.parameter.numel()
    return numels.most_common(1)[0][0]


def _check_samples(batch: Any, samples: int | None) -> int:
    """Return how many samples the batch has."""
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        raise PrepareError(f"samples={samples!r} must be a whole number, 1 or more: those of one pass on one rank")
    if samples is not None and batch is None:
        raise PrepareError(f"samples={samples} needs batch=: without one nothing is known of what a sample takes")
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if tensors and not tensors[0].shape[0]:
        raise PrepareError(f"batch has no samples: its first tensor has shape {tuple(tensors[0].shape)}")
    return tensors[0].shape[0] if tensors else 1
