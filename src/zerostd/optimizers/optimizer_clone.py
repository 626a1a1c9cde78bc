"""The user's optimizer once more, as an object of ours: same class, same attributes, other parameters and states.

Threads update tiles with a clone, and trial steps at prepare use one, so that the object the user holds is not touched.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from zerostd.errors import MisuseError
from zerostd.optimizers.spans import ScalarStates
from zerostd.optimizers.step_options import StepOptions

__all__ = ["OptimizerClone", "clone_optimizer"]

Tensors = dict[str, torch.Tensor]


def clone_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the same optimizer as an object of its own, without hooks; param_groups and state are still to be set.
    torch's own copy would leave out the attributes of a subclass."""
    clone = object.__new__(type(optimizer))
    clone.__dict__ = dict(optimizer.__dict__)
    clone.__dict__.pop("step", None)  # a scheduler's counter around it
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(clone, hooks, {})
    return clone


class OptimizerClone:
    """A clone that updates one tensor per call, with parameters and states only for the length of the call."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = clone_optimizer(inner)

    def update(
        self,
        options: StepOptions,
        index: int,
        master: torch.Tensor,
        long_states: Tensors,
        scalars: ScalarStates | None,
        gradient: torch.Tensor,
    ) -> ScalarStates:
        """Update `master` and `long_states` in place with the options of param_group `index`. `scalars` are the scalar
        states before, which stay as they are; None: there are no states yet. Returns the scalar states after."""
        parameter = master.detach()
        parameter.grad = gradient
        group = {**options.param_groups[index], "params": [parameter]}
        is_captured = group.get("capturable") and master.device.type == "cpu"
        if is_captured:
            group["capturable"] = False  # torch has it for devices only; here it changes nothing
        self.optimizer.param_groups = [group]
        self.optimizer.state = defaultdict(dict)
        if scalars is not None:
            self.optimizer.state[parameter] = {**_copied(scalars), **long_states}
        self.optimizer.step()
        parameter.grad = None
        options.written[index] = {**group, "capturable": True} if is_captured else group
        states = self.optimizer.state[parameter]
        _store_new(states, long_states)
        return {name: value for name, value in states.items() if name not in long_states}


def _copied(scalars: ScalarStates) -> ScalarStates:
    """Every tile counts from the same step, so the counters given must not move."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in scalars.items()}


def _store_new(states: dict[str, Any], long_states: Tensors) -> None:
    """Copy long states that the optimizer has made anew to where they are kept."""
    for name, value in states.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        if name not in long_states:
            raise MisuseError(
                f"the optimizer has made a state {name!r} that its trial at prepare did not show, so there is no room "
                "for it off the device: use Placement(optimizer_states='device')"
            )
        if value.data_ptr() != long_states[name].data_ptr():
            long_states[name].copy_(value)
