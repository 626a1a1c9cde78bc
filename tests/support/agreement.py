"""When two trainings count as the same: the project's limits, and a list of what exceeds them.

fp32. Only the order of sums may differ. After ten steps of these models two correct orders are 1.4e-6 apart at most
(plain torch on the joined batch against DDP), so the promised limits of 1e-6 on one rank, where there is nothing to
reorder, and 1e-5 on several leave room.

bf16. Gradients have 8 significant bits, and an implementation may round their mean over the ranks to bf16 (half the
bytes to send) or may not. The reference does not. The same reference with gradients rounded on their way is, at most,
0.019 of the way trained apart from it in the 2-norm, 0.026 of the largest entry in any tensor (small biases that began
at zero; else one step of a bf16 number, 2**-7), 0.2 % in the norms and 0.15 % in the losses. The limits are two to
five times that. A gradient off by a factor of two is 0.26 of the way apart or more, and twice the norm where it is
clipped: `tests/parity/test_oracles.py` holds that rounding passes and such a mistake does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from support.compare import State, Worst, movement_error, relative_error, worst_error
from support.models import Case
from support.reference import Recipe, Trained, rank_and_size


class Limits(NamedTuple):
    """The largest relative errors that count as the same training."""

    tensors: float  # each tensor, normwise
    movement: float  # all parameters, of the way trained
    losses: float
    norms: float


FP32_ONE_RANK = Limits(tensors=1e-6, movement=1e-4, losses=1e-6, norms=1e-6)
FP32_RANKS = Limits(tensors=1e-5, movement=1e-3, losses=1e-5, norms=1e-5)
BF16 = Limits(tensors=0.06, movement=0.05, losses=5e-3, norms=1e-2)


def limits(recipe: Recipe) -> Limits:
    """What holds for this recipe on this number of ranks."""
    if recipe.precision != "fp32":
        return BF16
    _, world_size = rank_and_size()
    return FP32_ONE_RANK if world_size == 1 else FP32_RANKS


def disagreements(case: Case, recipe: Recipe, trained: Trained, reference: Trained) -> list[str]:
    """What exceeds the limits, on this rank, in words; empty if the two are the same training."""
    rank, _ = rank_and_size()
    bound = limits(recipe)
    found = {
        "a loss": (_series_error(trained.losses, reference.losses), bound.losses),
        "a gradient norm": (
            _series_error(trained.norms, reference.norms) if trained.norms else Worst(0.0, "none"),
            bound.norms,
        ),
    }
    if rank == 0:  # buffers are rank 0's in both
        expected = _in_the_precision_of(trained.state, reference)
        start = {name: parameter.cpu() for name, parameter in case.make(recipe.seed).named_parameters()}
        found["a tensor"] = (worst_error(trained.state, expected), bound.tensors)
        found["the way trained"] = (movement_error(trained.state, expected, start), bound.movement)
    return [
        f"{what} ({worst.name}) is off by {worst.error:.1e} relative, limit {limit:.0e}"
        for what, (worst, limit) in found.items()
        if not worst.error <= limit
    ]


def agree(answers: Iterable[list[str]]) -> None:
    """Raise with all the ranks' disagreements, if there are any."""
    failures = [text for failures in answers for text in failures]
    assert not failures, f"{len(failures)} disagreements\n" + "\n".join(failures)


def _series_error(a: list[float], b: list[float]) -> Worst:
    if len(a) != len(b):
        return Worst(float("inf"), f"{len(a)} values instead of {len(b)}")
    errors = [relative_error(torch.tensor(x), torch.tensor(y)) for x, y in zip(a, b, strict=True)]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return Worst(errors[worst], f"number {worst}")


def _in_the_precision_of(state: State, reference: Trained) -> State:
    """The reference's state, with its masters where `state` has fp32 and the model has fewer bits."""
    masters = reference.masters or {}
    return {
        name: masters[name] if name in masters and name in state and state[name].dtype == torch.float32 else tensor
        for name, tensor in reference.state.items()
    }
