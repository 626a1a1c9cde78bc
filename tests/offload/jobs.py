"""Small trainings under any placement, and how to tell that two of them are the same in every bit.

A `Job` says what is trained and how the loop goes; `train` does it. Tiles are made short, so that even these models are
updated in several of them.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zerostd
from support.compare import assert_bitwise
from support.models import MODELS, Case
from support.side_by_side import data, seeded
from zerostd import Placement
from zerostd.optimizers import cpu_updater, streamed_updater
from zerostd.sharding.layout import UNIT
from zerostd.tiers.debug import DEBUG

THIRDS = {"device": 0.3, "host": 0.4, "disk": 0.3}
PLACEMENTS: dict[str, Placement] = {
    "states on host": Placement(optimizer_states="host", cpu_share=1.0),
    "states on host, streamed": Placement(optimizer_states="host", cpu_share=0.0),
    "states on host, half streamed": Placement(optimizer_states="host", cpu_share=0.5),
    "states on disk": Placement(optimizer_states="disk", cpu_share=1.0),
    "states on disk, streamed": Placement(optimizer_states="disk", cpu_share=0.0),
    "states on all tiers": Placement(optimizer_states=THIRDS, cpu_share=0.5),
    "parameters and states on host": Placement(parameters="host", optimizer_states="host"),
    "everything on host": Placement(parameters="host", gradients="host", optimizer_states="host", cpu_share=0.5),
    "parameters and states on disk": Placement(parameters="disk", optimizer_states="disk"),
    "different shares": Placement(
        parameters={"device": 0.4, "host": 0.3, "disk": 0.3},
        gradients={"device": 0.6, "host": 0.4},
        optimizer_states={"device": 0.2, "host": 0.5, "disk": 0.3},
    ),
    "gradients on disk": Placement(gradients="disk", optimizer_states=THIRDS, cpu_share=0.5),
}
HALF = PLACEMENTS["states on host, half streamed"]


def every(step: int, first: int, names: Sequence[Any] = tuple(PLACEMENTS)) -> pytest.MarkDecorator:
    """Parametrize with names of placements. `make test` takes each `step`-th name, from number `first` on; `make
    test-all` takes all of them. Tests pass different numbers."""
    marks = [() if index % step == first else pytest.mark.full for index, _ in enumerate(names)]
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=mark) for name, mark in zip(names, marks, strict=True)]
    )


class Drift(torch.optim.Optimizer):
    """A user's own: element-wise, with a long state, a counter that is no tensor and an attribute."""

    def __init__(self, params: Any, lr: float = 1e-3, pace: float = 0.9) -> None:
        super().__init__(params, {"lr": lr})
        self.pace = pace

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["count"] = torch.zeros_like(parameter), 0
                state["count"] += 1
                state["mean"].mul_(self.pace).add_(parameter.grad.tanh())
                parameter.sub_(state["mean"] / (1.0 + state["count"] ** 0.5), alpha=group["lr"])


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def two_groups(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW whose matrices and vectors have options of their own."""
    matrices, vectors = ([p for p in _trained(model) if (p.dim() > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=5e-3, **options)


Rules = Callable[[nn.Module], torch.optim.Optimizer]
RULES: dict[str, Rules] = {
    "adamw": two_groups,
    "amsgrad": lambda model: torch.optim.Adam(_trained(model), lr=5e-3, amsgrad=True, weight_decay=0.02),
    "sgd": lambda model: torch.optim.SGD(_trained(model), lr=0.05, weight_decay=0.01),
    "dampened": lambda model: torch.optim.SGD(_trained(model), lr=0.05, momentum=0.9, dampening=0.3, maximize=True),
    "nesterov": lambda model: torch.optim.SGD(_trained(model), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda model: torch.optim.Adagrad(_trained(model), lr=0.02, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda model: torch.optim.RMSprop(_trained(model), lr=1e-3, momentum=0.5, centered=True),
    "nadam": lambda model: torch.optim.NAdam(_trained(model), lr=5e-3),
    "own": lambda model: Drift(_trained(model), lr=5e-3),
}


class Adapted(nn.Module):
    """Frozen layers with small trained ones beside them, and one that some steps do not use."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(width, 40, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(40, width, bias=False) for _ in range(3))
        self.sometimes = nn.Linear(width, width)
        self.outlet = nn.Linear(width, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = x + torch.tanh(frozen(x) + up(down(x)))
        return self.outlet(self.sometimes(x) if uses_all else x)


def _adapted_batch(index: int, rank: int, world_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    uses_all = torch.tensor(index % 3 != 1)
    return data(8, 64, number=index, rank=rank).to(dtype), data(8, 4, number=index + 90, rank=rank).to(dtype), uses_all


def _adapted_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, wanted, uses_all = batch
    return F.mse_loss(model(inputs, bool(uses_all)), wanted)


BUMPS = (4, 9, 10)  # micro-batches of "bumpy" whose gradients are twenty times as large


def _bumpy_batch(index: int, rank: int, world_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    size = torch.tensor(20.0 if index in BUMPS else 1.0)
    return *MODELS["gpt"].batch(index, rank, world_size, dtype), size


def _bumpy_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return MODELS["gpt"].loss(model, batch[:1]) * batch[1]


CASES: dict[str, Case] = {
    **MODELS,
    "bumpy": replace(MODELS["gpt"], name="bumpy", batch=_bumpy_batch, loss=_bumpy_loss),
    "adapted": Case(
        "adapted",
        lambda seed: seeded(Adapted, seed),
        _adapted_batch,
        _adapted_loss,
        lambda batches: batches[0],
        ("frozen.*", "down.*", "up.*", "sometimes"),
        some_unused=True,
    ),
}


@dataclass(frozen=True)
class Job:
    """What is trained, and how the loop goes."""

    case: str = "gpt"
    rules: str = "adamw"
    passes: int = 1  # backward passes in a step
    accumulate: int | None = None  # what prepare is told of that
    max_grad_norm: float | None = None
    precision: str | None = None
    stage: int = 3
    steps: int = 4
    overflows: bool = False  # fp16: the first step is skipped
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    groups: tuple[str, ...] | None = None
    delay_s: float = 0.0  # how long updates are held up in every pass, so that they go on behind the loop


@dataclass
class Trained:
    """What came out, and some of what happened."""

    losses: list[float]
    weights: dict[str, Tensor]
    states: dict[str, Any]  # the optimizer's state_dict
    norms: list[float] = field(default_factory=list)
    num_speculated: int = 0
    num_committed: int = 0


@contextlib.contextmanager
def short_tiles() -> Iterator[None]:
    """Updates off the device in several tiles. Nothing prepared inside may be used after it."""
    with (
        mock.patch.object(cpu_updater, "TILE_NUMEL", 3001),
        mock.patch.object(cpu_updater, "DISK_TILE_NUMEL", 2 * UNIT),
        mock.patch.object(streamed_updater, "TILE_NUMEL", 2 * UNIT),
    ):
        yield


@contextlib.contextmanager
def debugging(*, is_serial: bool = False, poisons: bool = False, is_late: bool = False) -> Iterator[None]:
    """ZEROSTD_DEBUG for a while."""
    before = set(DEBUG)
    DEBUG.clear()
    DEBUG.update(["serial"] * is_serial, ["poison"] * poisons, ["late"] * is_late)
    try:
        yield
    finally:
        DEBUG.clear()
        DEBUG.update(before)


def prepared(job: Job, placement: Placement | None, folder: Any, seed: int = 0) -> tuple[Any, Any]:
    """A model and its optimizer under a placement."""
    case = CASES[job.case]
    model = case.make(seed)
    return zerostd.prepare(
        model,
        RULES[job.rules](model),
        stage=job.stage,
        placement=placement,
        precision=job.precision,
        accumulate=job.accumulate,
        max_grad_norm=job.max_grad_norm,
        budget=zerostd.Budget(disk_path=str(folder)),
        groups=list(job.groups or case.groups),
    )


def loss_of(job: Job, model: nn.Module, index: int, rank: int = 0) -> Tensor:
    case = CASES[job.case]
    return case.loss(model, case.batch(index, rank, 1, torch.float32))


def hold_up(optimizer: Any, seconds: float) -> None:
    """Keep the threads that update busy for a while: what is asked of them now is done later."""
    offload = optimizer.updater.offload
    for updater in offload.updaters.values() if offload is not None else ():
        updater.worker.submit(lambda: time.sleep(seconds), place=-1)


def run_steps(job: Job, model: Any, optimizer: Any, numbers: range, rank: int = 0) -> tuple[list[float], list[float]]:
    """Losses and norms of some steps."""
    losses, norms = [], []
    scheduler = job.schedule(optimizer) if job.schedule is not None else None
    for number in numbers:
        for part in range(job.passes):
            loss = loss_of(job, model, number * job.passes + part, rank)
            losses.append(loss.item())
            if job.delay_s:
                hold_up(optimizer, job.delay_s)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.max_grad_norm is not None:
            norms.append(optimizer.grad_norm.item())
        if scheduler is not None:
            scheduler.step()
    return losses, norms


def train(job: Job, placement: Placement | None, folder: Any, rank: int = 0) -> Trained:
    """The whole job. The model is released at its end."""
    model, optimizer = prepared(job, placement, folder)
    losses, norms, first = [], [], 0
    if job.overflows:
        optimizer.loss_scale.value, first = 2.0**40, 1
        losses, norms = run_steps(job, model, optimizer, range(first), rank)
        optimizer.loss_scale.value = 2.0**10
    more = run_steps(job, model, optimizer, range(first, job.steps), rank)
    losses, norms = losses + more[0], norms + more[1]
    assert not job.overflows or optimizer.loss_scale.num_skipped == 1, "one step should have overflowed"
    trained = Trained(losses, zerostd.full_state_dict(model), copy.deepcopy(optimizer.state_dict()), norms)
    if optimizer.backward_updates is not None:
        trained.num_speculated = optimizer.backward_updates.num_speculated
        trained.num_committed = optimizer.backward_updates.num_committed
    zerostd.release(model)
    return trained


def tensors_of(states: dict[str, Any]) -> dict[str, Tensor]:
    """An optimizer's states by 'parameter/state', numbers as tensors."""
    return {
        f"{number}/{name}": torch.as_tensor(value)
        for number, found in states["state"].items()
        for name, value in found.items()
    }


def assert_same(one: Trained, other: Trained, label: str = "") -> None:
    """Raise unless losses, weights, states and options are the same in every bit."""
    assert one.losses == other.losses, f"{label}: losses {one.losses} instead of {other.losses}"
    assert str(one.norms) == str(other.norms), f"{label}: norms {one.norms} instead of {other.norms}"  # some are NaN
    assert_bitwise(one.weights, other.weights, f"{label}: weights")
    assert_bitwise(tensors_of(one.states), tensors_of(other.states), f"{label}: optimizer states")
    assert one.states["param_groups"] == other.states["param_groups"], f"{label}: options"
    assert one.states["zerostd"] == other.states["zerostd"], f"{label}: intervals"
