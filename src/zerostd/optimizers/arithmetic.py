"""The arithmetic of an update off the device's own states: a native rule where there is one, else the user's optimizer.

`native_rule` reads torch's options into a rule of `kernels`, whose bits are torch's own. A `Twin` is the user's
optimizer object once more, with parameters and states of its own for the length of one call, so that several threads
and tiles can use it without touching the one the user holds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from zerostd.errors import MisuseError
from zerostd.kernels import Adagrad, Adam, Rule, Sgd
from zerostd.tiers import Transfer

__all__ = ["HostNumber", "Terms", "Twin", "another", "copies", "native_rule", "next_singles", "state_names", "take_new"]

Options = dict[str, Any]


@dataclass(frozen=True)
class HostNumber:
    """A number on its way to the host."""

    memory: torch.Tensor
    arrived: Transfer

    def get(self) -> float:
        """Its value; holds the calling thread until it is there."""
        self.arrived.synchronize()
        return self.memory.item()


@dataclass(frozen=True)
class Terms:
    """What one step says to every update: options as they were when it began, and the factor on all gradients."""

    options: list[Options]
    factor: torch.Tensor | None  # one element, fp32, on the device
    on_host: HostNumber | None  # the same, for the processor
    written: dict[int, Options] = field(default_factory=dict)  # param_groups as an update has left them, by number

    def host_factor(self) -> float:
        """The factor as a number; may hold the calling thread."""
        return 1.0 if self.on_host is None else self.on_host.get()


def another(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer as an object of its own, without hooks; torch's own copy leaves out what a subclass put on
    itself. Parameters and states are still to be given to it."""
    made = object.__new__(type(optimizer))
    made.__dict__ = dict(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler's counter around it
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(made, hooks, {})
    return made


class Twin:
    """The user's optimizer on tensors of ours."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = another(inner)

    def step(
        self, terms: Terms, number: int, master: torch.Tensor, states: dict[str, Any] | None, gradient: torch.Tensor
    ) -> dict[str, Any]:
        """Update `master` in place, and the tensors in `states`, with the options of param_group `number`; None: there
        are no states yet. Returns all states."""
        parameter = master.detach()
        parameter.grad = gradient
        group = {**terms.options[number], "params": [parameter]}
        is_captured = group.get("capturable") and master.device.type == "cpu"
        if is_captured:
            group["capturable"] = False  # torch has it for devices only; here it changes nothing
        self.optimizer.param_groups = [group]
        self.optimizer.state = defaultdict(dict)
        if states is not None:
            self.optimizer.state[parameter] = states
        self.optimizer.step()
        parameter.grad = None
        terms.written[number] = {**group, "capturable": True} if is_captured else group
        return dict(self.optimizer.state[parameter])


def native_rule(
    inner: torch.optim.Optimizer, options: Options, singles: dict[str, Any] | None, *, exact_root: bool
) -> Rule | None:
    """The rule for the step after `singles`, if the kernels have this optimizer with these options. Roots are exact, or
    as torch takes them on a processor."""
    if options.get("differentiable"):
        return None
    common: dict[str, Any] = {
        "lr": float(options.get("lr", 0.0)),
        "weight_decay": float(options.get("weight_decay", 0.0)),
    }
    common["maximize"] = bool(options.get("maximize", False))
    step = 1 if singles is None else int(singles.get("step", 0)) + 1
    kind = type(inner)
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not options.get("amsgrad"):
        beta1, beta2 = (float(beta) for beta in options["betas"])
        decoupled = kind is torch.optim.AdamW or bool(options.get("decoupled_weight_decay", False))
        return Adam(
            beta1=beta1,
            beta2=beta2,
            eps=float(options["eps"]),
            decoupled=decoupled,
            step=step,
            exact_root=exact_root,
            **common,
        )
    if kind is torch.optim.SGD:
        momentum, dampening = float(options["momentum"]), float(options["dampening"])
        nesterov = bool(options["nesterov"])
        return Sgd(momentum=momentum, dampening=dampening, nesterov=nesterov, is_first=singles is None, **common)
    if kind is torch.optim.Adagrad:
        lr_decay, eps = float(options["lr_decay"]), float(options["eps"])
        return Adagrad(lr_decay=lr_decay, eps=eps, step=step, exact_root=exact_root, **common)
    return None


def next_singles(rule: Rule, singles: dict[str, Any] | None) -> dict[str, Any]:
    """What torch would keep beside the long states after a step by `rule`."""
    if isinstance(rule, Sgd):
        return dict(singles or {})
    return {**(singles or {}), "step": torch.tensor(float(rule.step))}


def state_names(rule: Rule) -> tuple[str, ...]:
    """torch's names for a rule's long states, in the order the kernels take them."""
    if isinstance(rule, Adam):
        return ("exp_avg", "exp_avg_sq")
    if isinstance(rule, Adagrad):
        return ("sum",)
    return ("momentum_buffer",) if rule.num_states else ()


def copies(singles: dict[str, Any]) -> dict[str, Any]:
    """States of one value, to be counted on without touching the ones given: every tile counts from the same step."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in singles.items()}


def take_new(made: dict[str, Any], long: dict[str, torch.Tensor]) -> None:
    """Copy long states that the optimizer has made anew to where they rest."""
    for name, value in made.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        if name not in long:
            raise MisuseError(
                f"the optimizer has made a state {name!r} that its trial at prepare did not show, so there is no room "
                "for it off the device: use Placement(optimizer_states='device')"
            )
        if value.data_ptr() != long[name].data_ptr():
            long[name].copy_(value)
