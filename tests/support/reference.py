"""Reference trainings, and the same training through zerostd.

All take a `Case` (model and data) and a `Recipe` (how to train) and give a `Trained`. Micro-batch `m` of step `s` is
the case's batch number `s * accumulate + m`; the loss of each is divided by `accumulate`.

* `train_plain`: torch in one process, on one rank's data or on that of several ranks joined.
* `train_ddp`: torch's DistributedDataParallel, called on every rank of a process group. fp32.
* `train_by_hand`: data parallel spelled out, for any precision and world size. In bf16 the model computes in bf16,
  gradients are cast to fp32 before anything is added to them, and the optimizer works on fp32 masters.
* `train_zerostd`: the loop of `train_plain` around `zerostd.prepare`.

A parameter without gradient on every rank is left alone by the optimizer, no decay, no state; one with a gradient on
some rank gets the mean over all ranks, where a missing gradient counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from support.models import Case

Named = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Recipe:
    """How a case is trained."""

    steps: int = 10
    optimizer: str = "adamw"
    precision: str = "fp32"
    accumulate: int = 1  # backward passes in a step
    max_norm: float | None = None
    seed: int = 0
    lr_factors: tuple[float, ...] = ()  # of a LambdaLR that steps after each step; the last one stays

    def __str__(self) -> str:
        clip = "no clip" if self.max_norm is None else f"clip {self.max_norm:g}"
        return f"{self.optimizer} {self.precision} accumulate {self.accumulate} {clip}"


@dataclass
class Trained:
    """What a training leaves."""

    state: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)  # of this rank's micro-batches
    norms: list[float] = field(default_factory=list)  # before clipping, where there is clipping
    masters: dict[str, Tensor] | None = None  # fp32, of the parameters, under all names


# -- optimizers --


class WarmMomentum(torch.optim.Optimizer):
    """A user's own optimizer: momentum whose pace depends on how often `step` was called, counted per param group."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            pace = group["lr"] * group["k"] / (group["k"] + 3)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["drift"] = torch.zeros_like(parameter)
                    state["drift"].mul_(0.8).add_(parameter.grad).add_(parameter, alpha=group["weight_decay"])
                    parameter.add_(state["drift"], alpha=-pace)


# Where an optimizer divides by the size of the gradient, eps is about the size of these models' gradients and not
# torch's 1e-8. A gradient that is rounding noise then stays put instead of moving by lr in a random direction, and one
# of the wrong scale shows, where Adam would divide the factor away.
EPS = 1e-2

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=5e-3, eps=EPS),
    "adam": partial(torch.optim.Adam, lr=5e-3, eps=EPS),
    "amsgrad": partial(torch.optim.AdamW, lr=5e-3, eps=EPS, amsgrad=True, betas=(0.5, 0.6)),
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, lr_decay=0.01, eps=EPS),
    "rmsprop": partial(torch.optim.RMSprop, lr=2e-3, eps=EPS),
    "rmsprop centered": partial(torch.optim.RMSprop, lr=2e-3, eps=EPS, centered=True, momentum=0.5, alpha=0.9),
    "adamax": partial(torch.optim.Adamax, lr=5e-3, eps=EPS),
    "nadam": partial(torch.optim.NAdam, lr=5e-3, eps=EPS),
    "radam": partial(torch.optim.RAdam, lr=5e-3, eps=EPS),
    "user's own": WarmMomentum,
}


def make_optimizer(recipe: Recipe, named: Named) -> torch.optim.Optimizer:
    """The recipe's optimizer with two param groups: decay for matrices, none for vectors."""
    matrices, vectors = [], []
    for _, parameter in named:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    param_groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return OPTIMIZERS[recipe.optimizer](param_groups)


def _scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR | None:
    factors = recipe.lr_factors
    if not factors:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[min(step, len(factors) - 1)])


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


# -- plain torch and DDP --


def train_plain(case: Case, recipe: Recipe, *, of_world: int = 1, dtype: torch.dtype = torch.float32) -> Trained:
    """One process; with `of_world` n, on the joined batches of n ranks."""
    assert recipe.precision == "fp32"

    def batch(index: int) -> Any:
        return case.join([case.batch(index, rank, of_world, dtype) for rank in range(of_world)])

    model = case.make(recipe.seed).to(dtype)
    return _train_fp32(case, recipe, model, batch)


def train_ddp(case: Case, recipe: Recipe) -> Trained:
    """This rank's part of a data-parallel training with torch's DDP; the state is the same on all ranks but buffers."""
    assert recipe.precision == "fp32"
    rank, world_size = rank_and_size()
    model = DistributedDataParallel(case.make(recipe.seed), find_unused_parameters=case.some_unused)
    return _train_fp32(case, recipe, model, lambda index: case.batch(index, rank, world_size, torch.float32))


def _train_fp32(case: Case, recipe: Recipe, model: nn.Module, batch: Callable[[int], Any]) -> Trained:
    ddp = isinstance(model, DistributedDataParallel)
    optimizer = make_optimizer(recipe, model.named_parameters())
    scheduler = _scheduler(recipe, optimizer)
    trained = Trained({})
    for step in range(recipe.steps):
        for micro in range(recipe.accumulate):
            last = micro == recipe.accumulate - 1
            with nullcontext() if last or not ddp else model.no_sync():
                loss = case.loss(model, batch(step * recipe.accumulate + micro))
                (loss / recipe.accumulate).backward()
            trained.losses.append(loss.item())
        if recipe.max_norm is not None:
            trained.norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm).item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    trained.state = _snapshot(model.module if ddp else model)
    return trained


# -- data parallel by hand, any precision --


def keeps_fp32(module: nn.Module) -> bool:
    """Whether a module stays in fp32 in a bf16 model: it owns floating-point buffers and vectors only (batch-norm)."""
    parameters = list(module.parameters(recurse=False))
    floating = any(buffer.is_floating_point() for buffer in module.buffers(recurse=False))
    return floating and all(parameter.dim() == 1 for parameter in parameters)


def lower_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters to `dtype`; the model still takes and gives fp32."""
    for module in model.modules():
        if not keeps_fp32(module):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)

    def cast(value: Any, to: torch.dtype) -> Any:
        return value.to(to) if isinstance(value, Tensor) and value.is_floating_point() else value

    model.register_forward_pre_hook(lambda _, inputs: tuple(cast(value, dtype) for value in inputs))
    model.register_forward_hook(lambda _, inputs, output: cast(output, torch.float32))


class _MeanGradients:
    """fp32 sums of a step's gradients by name, then their mean over the ranks."""

    def __init__(self, model: nn.Module, reduce_dtype: torch.dtype | None) -> None:
        self.model = model
        self.reduce_dtype = reduce_dtype  # None: as accurate as fp32 is
        self.sums: dict[str, Tensor] = {}

    def add(self) -> None:
        """Take over the gradients of one backward pass."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.float()
                self.sums[name] = self.sums[name] + grad if name in self.sums else grad
                parameter.grad = None

    def mean(self) -> dict[str, Tensor]:
        """The mean over the ranks of what was added, without the names that no rank has; starts anew."""
        _, world_size = rank_and_size()
        named = list(self.model.named_parameters())
        used = torch.tensor([float(name in self.sums) for name, _ in named])
        device = named[0][1].device
        flat = torch.cat([self.sums.get(name, torch.zeros(p.shape, device=device)).flatten() for name, p in named])
        if self.reduce_dtype is not None:
            flat = flat.to(self.reduce_dtype)
        if world_size > 1:
            dist.all_reduce(used)
            dist.all_reduce(flat)
        self.sums = {}
        pieces = (flat.float() / world_size).split([parameter.numel() for _, parameter in named])
        return {
            name: piece.view(parameter.shape)
            for (name, parameter), piece, users in zip(named, pieces, used.tolist(), strict=True)
            if users
        }


def train_by_hand(
    case: Case, recipe: Recipe, *, reduce_dtype: torch.dtype | None = None, grad_factor: float = 1.0
) -> Trained:
    """This rank's part of a data-parallel training, or the whole of it without a process group.

    `reduce_dtype` rounds what travels, to learn how much that matters; `grad_factor` is a mistake to be found.
    """
    rank, world_size = rank_and_size()
    model = case.make(recipe.seed)
    masters = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in model.named_parameters()}
    if recipe.precision == "bf16":
        lower_precision(model, torch.bfloat16)
    optimizer = make_optimizer(recipe, masters.items())
    scheduler = _scheduler(recipe, optimizer)
    gradients = _MeanGradients(model, reduce_dtype)
    trained = Trained({})
    for step in range(recipe.steps):
        for micro in range(recipe.accumulate):
            batch = case.batch(step * recipe.accumulate + micro, rank, world_size, torch.float32)
            loss = case.loss(model, batch)
            (loss / recipe.accumulate).backward()
            gradients.add()
            trained.losses.append(loss.item())
        means = gradients.mean()
        for name, master in masters.items():
            master.grad = means[name] * grad_factor if name in means else None
        if recipe.max_norm is not None:
            trained.norms.append(nn.utils.clip_grad_norm_(masters.values(), recipe.max_norm).item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    trained.state = _snapshot(model)
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    trained.masters = {
        name: masters[first_names[parameter]].detach().cpu()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    return trained


# -- zerostd --


def train_zerostd(
    case: Case,
    recipe: Recipe,
    stage: int,
    *,
    accumulate_by: str = "declaring",
    clip_by: str = "declaring",
    **prepare_kwargs: Any,
) -> Trained:
    """The same training through zerostd; what it does not know goes to `prepare`.

    `accumulate_by`: "declaring" passes `accumulate=` to `prepare`, "backward" only calls backward several times,
    "no_sync" does so inside `zerostd.no_sync`. `clip_by`: "declaring" passes `max_grad_norm=`, "calling" calls
    `optimizer.clip_grad_norm_` before each step.
    """
    import zerostd  # not at the top: the reference trainings do without

    assert accumulate_by in ("declaring", "backward", "no_sync")
    assert clip_by in ("declaring", "calling")
    rank, world_size = rank_and_size()
    model = case.make(recipe.seed)
    options: dict[str, Any] = {"stage": stage, "precision": recipe.precision, "groups": list(case.groups)}
    if recipe.accumulate > 1 and accumulate_by == "declaring":
        options["accumulate"] = recipe.accumulate
    if recipe.max_norm is not None and clip_by == "declaring":
        options["max_grad_norm"] = recipe.max_norm
    options.update(prepare_kwargs)
    model, optimizer = zerostd.prepare(model, make_optimizer(recipe, model.named_parameters()), **options)
    scheduler = _scheduler(recipe, optimizer)
    trained = Trained({})
    for step in range(recipe.steps):
        for micro in range(recipe.accumulate):
            last = micro == recipe.accumulate - 1
            with zerostd.no_sync(model) if accumulate_by == "no_sync" and not last else nullcontext():
                loss = case.loss(model, case.batch(step * recipe.accumulate + micro, rank, world_size, torch.float32))
                assert loss.dtype == torch.float32, f"a model that was fp32 gave a loss in {loss.dtype}"
                (loss / recipe.accumulate).backward()
            trained.losses.append(loss.item())
        if recipe.max_norm is not None and clip_by == "calling":
            trained.norms.append(float(optimizer.clip_grad_norm_(recipe.max_norm)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    trained.state = {name: tensor.clone() for name, tensor in zerostd.full_state_dict(model).items()}
    zerostd.release(model)  # its channels would otherwise stay until the garbage is collected
    return trained
