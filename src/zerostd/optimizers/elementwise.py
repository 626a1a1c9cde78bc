"""Which optimizers may run on shards, and how their arithmetic is done off the device.

A shard is a stretch of elements without the matrix it was cut from, so an optimizer must treat each element by itself.
Those known to need whole tensors are refused by name with the reason. Any other class, the user's own included, is
tried on a few numbers: a tensor updated whole and the same tensor updated in two pieces must come out equal.

Off the device a rule of `kernels` does the arithmetic, with torch's own bits, where there is one. Otherwise a clone of
the user's optimizer does it, as in the trials: the clone has the same class and attributes but other parameters and
states, so the user's object is not touched.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerostd.compat import move_step_hooks, plain_step
from zerostd.errors import MisuseError, PrepareError
from zerostd.kernels import Adagrad, Adam, KernelCall, Rule, Sgd, Split, adam_on
from zerostd.optimizers.spans import Options, ScalarStates, StepOptions, Tensors, UpdateSpan, copy_values
from zerostd.parameters.state_shard import MASTER

Trial = tuple[torch.Tensor, dict[str, Any], Options]  # numbers, states and param_group afterwards
NEEDS_WHOLE = {
    "LBFGS": "its line search needs dot products over all parameters and calls the loss several times a step",
    "Adafactor": "it factors the second moment by rows and columns of each matrix",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it needs sparse gradients, and shards are dense",
    "LARS": "its trust ratio needs the norm of each whole tensor",
    "AdamP": "it projects updates by the direction of each whole tensor",
    "SGDP": "it projects updates by the direction of each whole tensor",
    "LAMB": "its trust ratio needs the norm of each whole tensor",
    "Shampoo": "its preconditioners need whole matrices",
    "SOAP": "its preconditioners need whole matrices",
}
ELEMENTWISE = "Use an element-wise optimizer such as AdamW, Adam, SGD, Adagrad, RMSprop, Adamax, NAdam or RAdam"
NO_KIND = ("params", "param_names", "lr", "initial_lr")  # options that no optimizer chooses its arithmetic by


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on other elements."""
    name = type(optimizer).__name__
    for known in type(optimizer).__mro__:
        if known.__name__ in NEEDS_WHOLE:
            raise PrepareError(f"optimizer {name} cannot run on shards: {NEEDS_WHOLE[known.__name__]}. {ELEMENTWISE}")
    for index in _distinct(optimizer):
        try:
            whole, _, _ = _trial(optimizer, index, is_warm=True)
            pieces, _, _ = _trial(optimizer, index, lengths=(10, 14), is_warm=True)
        except Exception as error:
            raise PrepareError(
                f"optimizer {name} failed on a trial update of a flat tensor with the options of param_groups[{index}],"
                f" so it cannot run on shards: {type(error).__name__}: {error}"
            ) from error
        if not torch.allclose(whole, pieces, rtol=1e-5, atol=1e-7, equal_nan=True):
            raise PrepareError(
                f"optimizer {name} cannot run on shards: with the options of param_groups[{index}], updating a tensor "
                "whole and in two pieces gave different results (largest difference "
                f"{(whole - pieces).abs().max().item():.3g}), so it is not element-wise. {ELEMENTWISE}"
            )


def _distinct(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the first param_group of each kind of options: groups that differ in the learning rate are of one kind."""
    kinds = {
        str([(key, value) for key, value in group.items() if key not in NO_KIND]): index
        for index, group in reversed(list(enumerate(optimizer.param_groups)))
    }
    return sorted(kinds.values())


def written_options(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the options in param_groups that a step of the optimizer itself changes, such as a count of steps."""
    return {
        key
        for group, (_, _, after) in _trials(optimizer)
        for key, value in after.items()
        if key != "params" and str(group.get(key)) != str(value)
    }


def find_states(optimizer: torch.optim.Optimizer) -> dict[str, torch.dtype]:
    """Return by name the dtypes of the states that the optimizer keeps for each element, found by two trial steps with
    each param_group's options."""
    return {
        name: value.dtype
        for _, (_, states, _) in _trials(optimizer)
        for name, value in states.items()
        if isinstance(value, torch.Tensor) and value.numel() == 24
    }


def _trials(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Options, Trial]]:
    """Yield each param_group that has parameters, with its trial."""
    for index, group in enumerate(optimizer.param_groups):
        if group["params"]:
            yield group, _trial(optimizer, index)


def _trial(
    optimizer: torch.optim.Optimizer, index: int, lengths: Sequence[int] = (), *, is_warm: bool = False
) -> Trial:
    """Take steps of a clone of `optimizer` on 24 fixed numbers, as one 4x6 matrix or as flat pieces of `lengths`.
    If `is_warm`, a learning rate of 0, with which warm-ups begin, is replaced: it would change no number. And there are
    more steps than two, until averages of gradients and gradients have different signs.
    Returns the numbers afterwards, the states of the first tensor, and the param_group."""
    numbers = torch.linspace(-1.0, 1.0, 24, dtype=torch.float32).sin()
    tensors = numbers.split(list(lengths)) if lengths else [numbers.reshape(4, 6)]
    parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
    options = optimizer.param_groups[index].items()
    group: Options = {key: copy.deepcopy(value) for key, value in options if key != "params"}
    if is_warm and not group.get("lr", 1.0):
        group["lr"] = 0.01
    if "capturable" in group:
        group["capturable"] = False  # only devices can be, and this is no device
    trial = clone_optimizer(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": parameters}]
    for step in range(6 if is_warm else 2):
        gradient = (torch.arange(24, dtype=torch.float32) * (step + 1)).cos()
        for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.reshape(parameter.shape).clone()
        plain_step(trial)
    after = torch.cat([parameter.detach().flatten() for parameter in parameters])
    return after, dict(trial.state[parameters[0]]), trial.param_groups[0]


def native_rule(
    inner: torch.optim.Optimizer, options: dict[str, Any], scalars: ScalarStates | None, *, exact_root: bool
) -> Rule | None:
    """Return the rule for the step after `scalars`, if the kernels have this optimizer with these options. Roots are
    exact, or as torch takes them on a CPU."""
    if options.get("differentiable"):
        return None
    step = 1 if scalars is None else int(scalars.get("step", 0)) + 1
    shared = (
        float(options.get("lr", 0.0)),
        float(options.get("weight_decay", 0.0)),
        bool(options.get("maximize")),
    )
    kind = type(inner)
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not options.get("amsgrad"):
        decoupled = kind is torch.optim.AdamW or bool(options.get("decoupled_weight_decay", False))
        beta1, beta2 = (float(beta) for beta in options["betas"])
        eps = float(options["eps"])
        return Adam(*shared, beta1, beta2, eps, decoupled, step, exact_root)
    if kind is torch.optim.SGD:
        momentum = float(options["momentum"])
        dampening = float(options["dampening"])
        return Sgd(*shared, momentum, dampening, bool(options["nesterov"]), is_first=scalars is None)
    if kind is torch.optim.Adagrad:
        return Adagrad(*shared, float(options["lr_decay"]), float(options["eps"]), step, exact_root)
    return None


@dataclass(frozen=True)
class DeviceUpdate:
    """Adam on a device in one pass."""

    rule: Adam
    step: torch.Tensor  # the count of steps before this one
    states: list[torch.Tensor]

    def make(self, gradient: torch.Tensor, factor: torch.Tensor | None, master: Split, high: torch.Tensor) -> None:
        """Count the step, and update master and states in place. New parameters go to `high`."""
        self.step.add_(1)
        kernel = adam_on(gradient.device.type)
        assert kernel is not None
        kernel.adam(self.rule, self.step, gradient, factor, master, high, self.states)

    def call(
        self, gradient: torch.Tensor, factor: torch.Tensor | None, master: Split, high: torch.Tensor
    ) -> KernelCall | None:
        """Count the step, and return what `make` would launch, for native code; None if that cannot launch it."""
        self.step.add_(1)
        kernel = adam_on(gradient.device.type)
        if kernel is None or self.step.device.type != "cpu":
            return None
        call: KernelCall | None = kernel.call(self.rule, self.step, gradient, factor, master, high, self.states)
        return call


def device_update(
    inner: torch.optim.Optimizer, options: dict[str, Any], states: Mapping[str, Any], device: torch.device
) -> DeviceUpdate | None:
    """Return the update of a split master and these states in one pass on a device; None if torch's optimizer has to
    make it, because the optimizer is not Adam, has other options, or has not made its states yet."""
    names = Adam.state_names
    if adam_on(device.type) is None or states.keys() != {"step", *names}:
        return None
    if any(isinstance(value, torch.Tensor) for value in (options.get("lr"), *options.get("betas", ()))):
        return None
    rule = native_rule(inner, options, None, exact_root=True)
    if not isinstance(rule, Adam) or any(states[name].dtype is not torch.float32 for name in names):
        return None
    return DeviceUpdate(rule, states["step"], [states[name] for name in names])


def coded_rule(inner: torch.optim.Optimizer, options: dict[str, Any], scalars: ScalarStates | None) -> Rule:
    """Return the rule for the step after `scalars` where states are kept as codes."""
    rule = native_rule(inner, options, scalars, exact_root=True)
    if not isinstance(rule, Adam):
        raise MisuseError(
            f"optimizer {type(inner).__name__} can no longer update states that are kept as codes: set amsgrad and "
            "differentiable back to False, as they were at prepare, or leave the codec out"
        )
    return rule


def next_scalars(rule: Rule, scalars: ScalarStates | None) -> ScalarStates:
    """Return the scalar states that torch would keep after a step by `rule`."""
    if isinstance(rule, Sgd):
        return dict(scalars or {})
    return {**(scalars or {}), "step": torch.tensor(float(rule.step))}


def clone_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class and attributes, without hooks; param_groups and state are still to be
    set. torch's own copy would leave out the attributes of a subclass."""
    clone = object.__new__(type(optimizer))
    clone.__dict__ = dict(optimizer.__dict__)
    clone.__dict__.pop("step", None)  # a scheduler's counter around it
    move_step_hooks(clone)
    return clone


def update_by_clone(
    clone: torch.optim.Optimizer, options: StepOptions, span: UpdateSpan, states: Tensors, gradient: torch.Tensor
) -> ScalarStates:
    """Update `states`, the master and the long states of a part of the span, in place. Returns the scalar states after
    the update. Those of the span do not change, since every tile counts from the same step. The clone has parameters
    and states only for the length of the call."""
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
        scalars = copy_values(span.scalars)
        if group.get("fused") or group.get("capturable"):  # then torch wants the count of steps beside the parameter
            scalars = {k: v.to(parameter.device) if isinstance(v, torch.Tensor) else v for k, v in scalars.items()}
        clone.state[parameter] = {**scalars, **long_states}
    plain_step(clone)
    parameter.grad = None
    if is_captured:
        group["capturable"] = True
    options.written[index] = group
    after = clone.state[parameter]
    for name, value in after.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        if name not in long_states:
            raise MisuseError(
                f"the optimizer made a state {name!r} that it did not make in its trial at prepare, so there is no "
                "room for it off the device: use Placement(optimizer_states='device')"
            )
        if value.data_ptr() != long_states[name].data_ptr():
            long_states[name].copy_(value)  # made anew by the step
    return {name: value for name, value in after.items() if name not in long_states}
