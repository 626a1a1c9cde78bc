"""Passes of a real model, timed: what a forward and a backward take on this device, and what they leave on it.

A copy runs that shares the model's parameters, or has them in the dtype they will compute in; gradients go as they come
and buffers are its own, so the model is as before. Of what does not fit or cannot run nothing is known: then counts
have to do.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zerostd.measuring.timing import finish
from zerostd.measuring.trial import call, casts_of, copy_of, everything_kept, map_tensors
from zerostd.monitoring.events import Timestamp
from zerostd.parameters.blueprints import Blueprint
from zerostd.policy import Precision

NUM_TIMED = 2  # passes after the first, which finds its kernels; the faster one counts
LONGEST_S = 10.0  # after a first pass of so many seconds there is no other

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """One pass of one batch."""

    forward_s: float
    backward_s: float
    activation_bytes: int | None  # on the device at most, beside the parameters; None where it does not say


def probe_passes(model: nn.Module, blueprints: list[Blueprint], precision: Precision, batch: Any) -> Probe | None:
    """Return what a pass of `batch` takes; None, with a note in the log, if it cannot run for real."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    parameters = list(model.parameters())
    if not tensors or not parameters or any(tensor.is_meta for tensor in (*parameters, *model.buffers(), *tensors)):
        return None
    device = parameters[0].device
    try:
        with everything_kept(device):
            return _run(model, blueprints, precision, batch, device)
    except Exception as error:
        log.info("%s was not tried with its batch (%s: %s)", type(model).__name__, type(error).__name__, error)
        return None
    finally:
        if device.type != "cpu":
            torch.accelerator.empty_cache()


def _run(
    model: nn.Module, blueprints: list[Blueprint], precision: Precision, batch: Any, device: torch.device
) -> Probe:
    dtypes = {id(member.parameter): member.dtype for blueprint in blueprints for member in blueprint.members}
    outside, inside = casts_of(model, precision)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach()
        if not isinstance(tensor, nn.Parameter):
            return value.clone()
        own_parameter = nn.Parameter(value.to(dtypes.get(id(tensor), tensor.dtype)), requires_grad=tensor.requires_grad)
        if own_parameter.requires_grad:
            own_parameter.register_post_accumulate_grad_hook(_drop)
        return own_parameter

    def moved(leaf: torch.Tensor) -> torch.Tensor:
        leaf = leaf.detach().to(device)
        return leaf.to(inside) if leaf.dtype == outside and inside is not None else leaf

    copied, _ = copy_of(model, own)
    inputs = map_tensors(moved, batch)
    first = _pass(copied, inputs, device)
    passes = [first]
    if first.forward_s + first.backward_s < LONGEST_S:
        passes = [_pass(copied, inputs, device) for _ in range(NUM_TIMED)]
    return min(passes, key=lambda probe: probe.forward_s + probe.backward_s)


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _pass(model: nn.Module, batch: Any, device: torch.device) -> Probe:
    finish(device)
    has_own_memory = device.type != "cpu"
    before = torch.accelerator.memory_allocated(device) if has_own_memory else 0
    if has_own_memory:
        torch.accelerator.reset_peak_memory_stats(device)
    begun = Timestamp(device)
    output = call(model, batch)
    between = Timestamp(device)
    ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    ended = Timestamp(device)
    del output, ends
    finish(device)
    peak = torch.accelerator.max_memory_allocated(device) - before if has_own_memory else None
    return Probe(between.since(begun), ended.since(between), peak)
