"""Rules of the native kernels for torch's optimizers, with torch's own bits.

`native_rule` reads the options of a torch optimizer into a rule of `kernels`; None means that the kernels do not have
it, and a clone of the user's optimizer does the arithmetic instead (optimizer_clone.py).
"""

from __future__ import annotations

from typing import Any

import torch

from zerostd.kernels import Adagrad, Adam, Rule, Sgd
from zerostd.optimizers.spans import ScalarStates

__all__ = ["native_rule", "next_scalars", "state_names"]


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


def state_names(rule: Rule) -> tuple[str, ...]:
    """Return torch's names for a rule's long states, in the order the kernels take them."""
    if isinstance(rule, Adam):
        return ("exp_avg", "exp_avg_sq")
    if isinstance(rule, Adagrad):
        return ("sum",)
    return ("momentum_buffer",) if rule.num_states else ()
