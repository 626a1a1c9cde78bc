"""The arithmetic of an update off the device's own states: a native rule where there is one, else the user's optimizer.

`native_rule` reads the options of a torch optimizer into a rule of `kernels`, whose bits are torch's own. Where the
kernels have none, a clone of the user's optimizer does it: same class and attributes, other parameters and states, so
that the object the user holds is not touched. Trial steps at prepare use a clone too.
"""

from collections import defaultdict
from typing import Any

import torch

from zerostd.compat import move_step_hooks
from zerostd.errors import MisuseError
from zerostd.kernels import Adagrad, Adam, Rule, Sgd
from zerostd.optimizers.spans import ScalarStates, StepOptions, Tensors, UpdateSpan, copy_values
from zerostd.parameters.state_shard import MASTER


def native_rule(
    inner: torch.optim.Optimizer, options: dict[str, Any], scalars: ScalarStates | None, *, exact_root: bool
) -> Rule | None:
    """Return the rule for the step after `scalars`, if the kernels have this optimizer with these options. Roots are
    exact, or as torch takes them on a CPU."""
    if options.get("differentiable"):
        return None
    lr = float(options.get("lr", 0.0))
    weight_decay = float(options.get("weight_decay", 0.0))
    maximize = bool(options.get("maximize", False))
    step = 1 if scalars is None else int(scalars.get("step", 0)) + 1
    kind = type(inner)
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not options.get("amsgrad"):
        beta1, beta2 = (float(beta) for beta in options["betas"])
        return Adam(
            lr=lr,
            weight_decay=weight_decay,
            maximize=maximize,
            beta1=beta1,
            beta2=beta2,
            eps=float(options["eps"]),
            decoupled=kind is torch.optim.AdamW or bool(options.get("decoupled_weight_decay", False)),
            step=step,
            exact_root=exact_root,
        )
    if kind is torch.optim.SGD:
        return Sgd(
            lr=lr,
            weight_decay=weight_decay,
            maximize=maximize,
            momentum=float(options["momentum"]),
            dampening=float(options["dampening"]),
            nesterov=bool(options["nesterov"]),
            is_first=scalars is None,
        )
    if kind is torch.optim.Adagrad:
        return Adagrad(
            lr=lr,
            weight_decay=weight_decay,
            maximize=maximize,
            lr_decay=float(options["lr_decay"]),
            eps=float(options["eps"]),
            step=step,
            exact_root=exact_root,
        )
    return None


def next_scalars(rule: Rule, scalars: ScalarStates | None) -> ScalarStates:
    """Return the scalar states that torch would keep after a step by `rule`."""
    if isinstance(rule, Sgd):
        return dict(scalars or {})
    return {**(scalars or {}), "step": torch.tensor(float(rule.step))}


def clone_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the same optimizer as an object of its own, without hooks; param_groups and state are still to be set.
    torch's own copy would leave out the attributes of a subclass."""
    clone = object.__new__(type(optimizer))
    clone.__dict__ = dict(optimizer.__dict__)
    clone.__dict__.pop("step", None)  # a scheduler's counter around it
    move_step_hooks(clone)
    return clone


def update_by_clone(
    clone: torch.optim.Optimizer, options: StepOptions, span: UpdateSpan, states: Tensors, gradient: torch.Tensor
) -> ScalarStates:
    """Update `states`, the master and the long states of a part of the span, in place. Returns the scalar states after:
    those of the span stay as they are, since every tile counts from the same step. The clone has parameters and states
    only for the length of the call."""
    index = span.param_group
    long_states = {name: tensor for name, tensor in states.items() if name != MASTER}
    parameter = states[MASTER].detach()
    parameter.grad = gradient
    group = {**options.param_groups[index], "params": [parameter]}
    is_captured = group.get("capturable") and parameter.device.type == "cpu"
    if is_captured:
        group["capturable"] = False  # torch has it for devices only; here it changes nothing
    clone.param_groups = [group]
    clone.state = defaultdict(dict)
    if span.scalars is not None:
        clone.state[parameter] = {**copy_values(span.scalars), **long_states}
    clone.step()
    parameter.grad = None
    options.written[index] = {**group, "capturable": True} if is_captured else group
    after = clone.state[parameter]
    for name, value in after.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        if name not in long_states:
            raise MisuseError(
                f"the optimizer has made a state {name!r} that its trial at prepare did not show, so there is no room "
                "for it off the device: use Placement(optimizer_states='device')"
            )
        if value.data_ptr() != long_states[name].data_ptr():
            long_states[name].copy_(value)  # made anew by the step
    return {name: value for name, value in after.items() if name not in long_states}
