"""How far two states are from each other, in words that name the worst tensor.

A state is an ordinary `state_dict`: names to tensors. The error of a tensor is normwise, `|a - b|_inf / |b|_inf`;
tensors of integers must be equal. `movement_error` sets the distance of two states against the way that the training
went, which is the question in bf16: there a rounding of a large weight may exceed ten small steps of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

State = Mapping[str, Tensor]

TINY = 1e-30


class Worst(NamedTuple):
    """The largest error of a comparison and the tensor that has it."""

    error: float
    name: str


def relative_error(a: Tensor, b: Tensor) -> float:
    """Normwise error of `a` against `b`; infinite where shapes differ, a value is not finite or integers differ."""
    if a.shape != b.shape:
        return float("inf")
    if not b.is_floating_point():
        return 0.0 if torch.equal(a.cpu(), b.cpu()) else float("inf")
    if not b.numel():
        return 0.0
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    error = ((a - b).abs().max() / b.abs().max().clamp_min(TINY)).item()
    return error if error < float("inf") else float("inf")  # NaN compares false


def worst_error(a: State, b: State) -> Worst:
    """The largest relative error over all tensors; the two states must have the same names."""
    assert_same_names(a, b)
    return max((Worst(relative_error(a[name], b[name]), name) for name in b), default=Worst(0.0, "nothing"))


def movement_error(a: State, b: State, start: State) -> Worst:
    """Distance of `a` from `b` over the distance of `b` from `start`, in the 2-norm, and who contributes most.

    All tensors of `start` (a model's parameters) are one vector: a tensor that hardly moves does not dominate.
    """
    apart, moved, worst = 0.0, 0.0, Worst(0.0, "nothing")
    for name in start:
        mine, theirs, before = (state[name].detach().cpu().double() for state in (a, b, start))
        distance = (mine - theirs).square().sum().item()
        if not distance <= worst.error:
            worst = Worst(distance, name)
        apart += distance
        moved += (theirs - before).square().sum().item()
    error = (apart / max(moved, TINY)) ** 0.5
    return Worst(error if error < float("inf") else float("inf"), worst.name)


def assert_same_names(a: State, b: State) -> None:
    assert set(a) == set(b), f"missing names {sorted(set(b) - set(a))}, unexpected names {sorted(set(a) - set(b))}"


def assert_close_states(a: State, b: State, rtol: float, label: str = "") -> None:
    """Raise, naming the worst tensor, unless every tensor of `a` is within `rtol` of that of `b`."""
    worst = worst_error(a, b)
    assert worst.error <= rtol, (
        f"{label or 'states'}: {worst.name} is off by {worst.error:.2e} relative, limit {rtol:.0e}"
    )


def assert_bitwise(a: State, b: State, label: str = "") -> None:
    """Raise, naming the tensors, unless every tensor of `a` has the dtype and the bits of that of `b`."""
    assert_same_names(a, b)
    differing = [name for name in b if not _same_bits(a[name], b[name])]
    assert not differing, f"{label or 'states'}: {len(differing)} of {len(b)} tensors differ in bits: {differing[:8]}"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    mine, theirs = (tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in (a, b))
    return torch.equal(mine, theirs)
