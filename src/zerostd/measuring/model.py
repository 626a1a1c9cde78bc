"""The needs of a model, read from the module: the groups that prepare will make, and the cost of a sample in each.

In: a module, real or without memory, and a batch to try. Out: a ModelProfile. A real model can be timed as well. For a
model that does not fit or cannot run, only counts are known.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zerostd.errors import PrepareError
from zerostd.measuring.rates import finish
from zerostd.measuring.trial import ForwardCost, call, copy_of, everything_kept, map_tensors, try_forward
from zerostd.monitoring.events import Timestamp
from zerostd.optimizers.elementwise import check_elementwise, find_states
from zerostd.parameters.blueprints import (
    ROOT,
    Blueprint,
    Member,
    check_model,
    check_optimizer,
    find_blueprints,
    root_casts,
)
from zerostd.planning.profiles import GroupProfile, ModelProfile
from zerostd.policy import Precision, splits_masters

ASSUMED_STATES = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}  # AdamW's, while there is no optimizer
NUM_TIMED = 2  # passes after the first, which finds its kernels; the faster one counts
HOOKS = 0.15  # of the launches of a pass: the time of our hooks, where the device waits for both
LONGEST_S = 10.0  # after a first pass of so many seconds there is no other

log = logging.getLogger(__name__)


def profile_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    precision: str | Precision | None = None,
    groups: Sequence[str] | None = None,
    batch: Any = None,
    probe: bool = False,
    num_ranks: int = 1,
) -> ModelProfile:
    """Return what `model` needs; the model, the optimizer and the random states stay as they are.

    FLOPs are those of matrix products, convolutions, attention (not halved where it is causal) and recurrent layers.
    What is kept is what autograd saves in the model's forward, each storage once and in the group that saves it first,
    parameters and buffers left out; a loss outside of the model is not seen. The peak is the largest output of an
    operation in the group, and, where the model itself uses torch.utils.checkpoint, what it saves inside.

    Model, optimizer, precision and groups are as for prepare; without an optimizer all parameters with requires_grad
    are trained, with the states of AdamW. `batch` is what forward takes: a tensor, a tuple of arguments or a dict of
    keywords, also without memory; the first dimension of its first tensor is the number of samples. With `probe` a few
    passes are run for real, if model and batch are, and timed. Small models on `num_ranks` ranks have smaller groups.

    Groups are in the order in which forward first needs them, those without parameters and work left out. If forward
    could not be run, a warning is logged and `samples` is None. Raises PrepareError for what prepare would refuse; a
    real forward that fails raises its own error.
    """
    check_model(model)
    states: Mapping[str, torch.dtype] = ASSUMED_STATES
    if optimizer is not None:
        check_optimizer(model, optimizer)
        check_elementwise(optimizer)
        states = find_states(optimizer)
    checked = Precision.parse(precision)
    blueprints = find_blueprints(model, optimizer, checked, groups, num_ranks)
    profile = replace(untried_profile(blueprints, checked, states), name=type(model).__name__)
    num_samples = _num_samples(batch)
    counter = None if batch is None else try_forward(model, blueprints, checked, batch)
    has_members = {blueprint.name for blueprint in blueprints if blueprint.members}  # also those without elements
    if counter is None:
        return replace(profile, groups=tuple(group for group in profile.groups if group.name in has_members))
    order = dict.fromkeys([*counter.order, *range(len(blueprints))])
    costs = counter.costs
    tried = [_with_cost(profile.groups[index], costs[index], num_samples) for index in order]
    idle = GroupProfile(ROOT, 0, stays=True, again_flops=0.0)  # the one group that may have no parameters
    profile = replace(
        profile,
        groups=tuple(group for group in tried if group != idle or ROOT in has_members),
        samples=num_samples,
        recomputed=sum(cost.recomputed for cost in costs) / max(1, sum(cost.flops for cost in costs)),
    )
    probed = _probe(model, blueprints, checked, batch) if probe else None
    return profile if probed is None else _as_timed(profile, probed)


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Return a context in which nothing of a model trains: a forward keeps nothing for backward."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _num_samples(batch: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if tensors and not tensors[0].shape[0]:
        raise PrepareError(f"batch has no samples: its first tensor has shape {tuple(tensors[0].shape)}")
    return tensors[0].shape[0] if tensors else 1


def _with_cost(group: GroupProfile, cost: ForwardCost, num_samples: int) -> GroupProfile:
    return replace(
        group,
        forward_flops=cost.flops / num_samples,
        kept_bytes=cost.kept / num_samples,
        boundary_bytes=cost.boundary / num_samples,
        peak_bytes=(cost.largest + cost.inside) / num_samples,
        stays=group.name == ROOT,
        again_flops=cost.again / num_samples,
    )


def untried_profile(
    blueprints: Sequence[Blueprint], precision: Precision, states: Mapping[str, torch.dtype]
) -> ModelProfile:
    """Return the profile of a model that is known without running a forward.

    Counts of parameters are exact. Bytes of one parameter, gradient and state are those of the dtype that most
    parameters have (for gradients and states: most of the trained ones), by the rules of preparing/homes.py.
    """
    groups = []
    for blueprint in blueprints:
        numel = sum(member.numel for member in blueprint.members)
        trained = sum(member.numel for member in blueprint.members if member.options is not None)
        groups.append(GroupProfile(blueprint.name, trained, numel - trained))
    members = [member for blueprint in blueprints for member in blueprint.members]
    dtype = _most([member for member in members if member.options is not None] or members)
    master = dtype if dtype.itemsize >= 4 else torch.float32
    is_cast = dtype.itemsize < 4 or (precision.compute is None and dtype is torch.float32)
    gradient = precision.reduce if is_cast and precision.reduce is not None else dtype
    kept = [(master if state == torch.float32 else state).itemsize for state in states.values()]
    computes = [member for member in members if member.dtype.is_floating_point] or members
    return ModelProfile(
        "model",
        tuple(groups),
        parameter_bytes=_most(members).itemsize,
        gradient_bytes=gradient.itemsize,
        state_bytes=sum(kept) + (0 if dtype == master else master.itemsize),
        master_bytes=master.itemsize if dtype == master else 0,
        shared_bytes=dtype.itemsize if splits_masters(dtype) else 0,
        dtype=str(_most(computes)).removeprefix("torch."),
    )


def blueprints_of(model: ModelProfile, precision: Precision) -> list[Blueprint]:
    """Return the groups of a model that is only numbers, without modules: each has one parameter of all that train, and
    one of those that do not. The first group is the root."""
    dtype = precision.compute or getattr(torch, model.dtype)
    blueprints = []
    for group in model.groups:
        members = []
        for name, numel, options in (("trained", group.trained, 0), ("frozen", group.frozen, None)):
            if numel:
                parameter = nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))
                members.append(Member(f"{group.name}.{name}", parameter, dtype, options, None))
        blueprints.append(Blueprint(group.name, (), tuple(members)))
    return blueprints


def _most(members: list[Member]) -> torch.dtype:
    numels = Counter[torch.dtype]()
    for member in members:
        numels[member.dtype] += member.numel
    return numels.most_common(1)[0][0]


# -- passes, timed --


@dataclass(frozen=True)
class TimedPass:
    """The seconds of one pass, also those of its groups, and the bytes that it took."""

    forward_s: float
    backward_s: float
    activation_bytes: int | None  # on the device at most, where it says
    launches: float  # part of forward in which the host launched kernels
    groups: Mapping[str, tuple[float, float]]  # seconds of forward and backward, by name; what is left is the root's


class GroupClock:
    """Times the groups of a model while it runs: launches, host syncs and all."""

    def __init__(self, model: nn.Module, copied: nn.Module, blueprints: Sequence[Blueprint]) -> None:
        self._device = next(copied.parameters()).device
        self._begun: dict[tuple[str, bool], list[Timestamp]] = {}  # by group, and whether it is backward
        self._ended: dict[tuple[str, bool], list[Timestamp]] = {}
        names = {module: name for name, module in model.named_modules()}
        for blueprint in blueprints:
            for module in blueprint.modules if blueprint.name != ROOT else ():
                timed = copied.get_submodule(names[module])
                before = functools.partial(self._before, blueprint.name)
                timed.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                timed.register_forward_hook(functools.partial(self._after, blueprint.name))

    def start(self) -> None:
        """Begin a pass."""
        self._begun.clear()
        self._ended.clear()

    def _mark(self, marks: dict[tuple[str, bool], list[Timestamp]], key: tuple[str, bool]) -> None:
        marks.setdefault(key, []).append(Timestamp(self._device))

    def _before(self, group: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda grad: self._mark(self._ended, (group, True)))
                break
        self._mark(self._begun, (group, False))

    def _after(self, group: str, module: nn.Module, args: Any, output: Any) -> None:
        self._mark(self._ended, (group, False))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda grad: self._mark(self._begun, (group, True)))
                break

    def seconds(self, end: Timestamp) -> dict[str, tuple[float, float]]:
        """Return the seconds of groups in forward and backward; one whose inputs get no gradient ends with `end`."""
        spent: dict[str, list[float]] = {}
        for (group, is_backward), begun in self._begun.items():
            ended = self._ended.get((group, is_backward), [])
            if is_backward:  # the last call comes back first; calls of one group that overlap count once
                pairs = list(zip(begun, [*ended, *([end] * (len(begun) - len(ended)))], strict=False))
            else:
                pairs = list(zip(begun, ended, strict=False))
            spent.setdefault(group, [0.0, 0.0])[is_backward] = sum(max(0.0, b.since(a)) for a, b in pairs)
        return {group: (forward_s, backward_s) for group, (forward_s, backward_s) in spent.items()}


def _as_timed(profile: ModelProfile, timed: TimedPass) -> ModelProfile:
    """Return a profile with measured seconds: each group's own, unless they come to more than the pass took. Where the
    device waits for launches, the hooks of a prepared model, which the pass did not have, make it longer."""
    totals = (timed.forward_s, timed.backward_s)
    spent = [sum(seconds[index] for seconds in timed.groups.values()) for index in (0, 1)]
    groups = profile.groups
    if all(0.0 < part <= total for part, total in zip(spent, totals, strict=True)):
        rest = tuple(total - part for part, total in zip(spent, totals, strict=True))
        parts = [timed.groups.get(group.name, rest if group.name == ROOT else (0.0, 0.0)) for group in groups]
        groups = tuple(
            replace(group, forward_part=forward_s / totals[0], backward_part=backward_s / totals[1])
            for group, (forward_s, backward_s) in zip(groups, parts, strict=True)
        )
    longer = max(1.0, timed.launches * (1.0 + HOOKS))
    return replace(
        profile,
        groups=groups,
        forward_s=timed.forward_s * longer,
        backward_s=timed.backward_s * longer,
        activation_bytes=timed.activation_bytes,
        launches=timed.launches,
    )


def _probe(model: nn.Module, blueprints: list[Blueprint], precision: Precision, batch: Any) -> TimedPass | None:
    """Return what a pass of `batch` takes; None, with a note in the log, if it cannot run for real.

    The pass runs on a copy that shares the model's parameters, or has them in the compute dtype. Gradients are freed as
    they come and the buffers are copies, so the model does not change.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    parameters = list(model.parameters())
    if not tensors or not parameters or any(tensor.is_meta for tensor in (*parameters, *model.buffers(), *tensors)):
        return None
    device = parameters[0].device
    try:
        with everything_kept(device):
            return _run(model, blueprints, precision, batch, device)
    except Exception as error:
        log.info("%s could not be run with the batch (%s: %s)", type(model).__name__, type(error).__name__, error)
        return None
    finally:
        if device.type != "cpu":
            torch.accelerator.empty_cache()


def _run(
    model: nn.Module, blueprints: list[Blueprint], precision: Precision, batch: Any, device: torch.device
) -> TimedPass:
    dtypes = {id(member.parameter): member.dtype for blueprint in blueprints for member in blueprint.members}
    casts = root_casts(precision, (p.dtype for p in model.parameters()))

    def drop_gradient(parameter: torch.Tensor) -> None:
        parameter.grad = None

    def own(tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach()
        if not isinstance(tensor, nn.Parameter):
            return value.clone()
        parameter = nn.Parameter(value.to(dtypes.get(id(tensor), tensor.dtype)), requires_grad=tensor.requires_grad)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop_gradient)
        return parameter

    def moved(leaf: torch.Tensor) -> torch.Tensor:
        leaf = leaf.detach().to(device)
        return leaf.to(casts.inside) if casts is not None and leaf.dtype in casts.taken else leaf

    copied, _ = copy_of(model, own)
    inputs = map_tensors(moved, batch)
    clock = GroupClock(model, copied, blueprints)
    passes = [_pass(copied, inputs, device, clock)]
    if passes[0].forward_s + passes[0].backward_s < LONGEST_S:
        passes = [_pass(copied, inputs, device, clock) for _ in range(NUM_TIMED)]
    return min(passes, key=lambda timed: timed.forward_s + timed.backward_s)


def _pass(model: nn.Module, batch: Any, device: torch.device, clock: GroupClock) -> TimedPass:
    finish(device)
    clock.start()
    has_own_memory = device.type != "cpu"
    before = torch.accelerator.memory_allocated(device) if has_own_memory else 0
    if has_own_memory:
        torch.accelerator.reset_peak_memory_stats(device)
    begun = Timestamp(device)
    begun_s = time.perf_counter()
    output = call(model, batch)
    launched_s = time.perf_counter() - begun_s
    between = Timestamp(device)
    ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if ends:  # else nothing trains
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    ended = Timestamp(device)
    del output, ends
    finish(device)
    peak = torch.accelerator.max_memory_allocated(device) - before if has_own_memory else None
    forward_s = between.since(begun)
    launches = min(1.0, launched_s / forward_s) if has_own_memory and forward_s else 0.0
    return TimedPass(forward_s, ended.since(between), peak, launches, clock.seconds(ended))
