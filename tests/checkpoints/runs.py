"""A small training with everything that a checkpoint has to keep, which can stop at any step and go on elsewhere.

`Net` has dropout, batch-norm, tied, frozen and unused parameters, one that no optimizer has and one of a single number;
the loop draws from the generators of torch, Python and numpy. `Run` is such a training under way.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerostd
from support.side_by_side import data, seeded
from zerostd import Budget, Placement

WIDTH = 24
GROUPS = ["layers.*", "frozen", "tied", "apart"]
PLACEMENTS: dict[str, Placement] = {
    "device": Placement(),
    "host": Placement(optimizer_states="host", cpu_share=1.0),
    "streamed": Placement(optimizer_states="host", cpu_share=0.0),
    "disk": Placement(optimizer_states="disk"),
    "all tiers": Placement(optimizer_states={"device": 0.3, "host": 0.4, "disk": 0.3}, cpu_share=0.5),
    "parameters on host": Placement(parameters="host", gradients="host", optimizer_states="host"),
    "parameters on disk": Placement(parameters="disk", optimizer_states="disk"),
    "different shares": Placement(
        parameters={"device": 0.4, "host": 0.3, "disk": 0.3},
        gradients={"device": 0.3, "host": 0.3, "disk": 0.4},
        optimizer_states={"device": 0.2, "host": 0.5, "disk": 0.3},
    ),
}


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.tied = nn.Linear(width, width, bias=False)
        self.again = nn.Linear(width, width)
        self.again.weight = self.tied.weight
        self.rarely = nn.Linear(width, width)  # in every third step
        self.never = nn.Linear(width, 3)
        self.outlet = nn.Linear(width, 4)
        self.scale = nn.Parameter(torch.ones(1))
        self.alone = nn.Parameter(torch.ones(width))  # no optimizer has it, nor the next one
        self.apart = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        self.seen += len(x)
        self.scratch += 1
        x = self.dropout(F.gelu(self.norm(self.inlet(x))))
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        x = x + self.frozen(x) * self.alone + self.apart(x)
        x = x + self.again(F.gelu(self.tied(x)))
        x = self.rarely(x) if uses_all else x
        return self.outlet(x) * self.scale


def in_optimizer(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if not name.startswith(("alone", "apart")) and p.requires_grad]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    matrices, vectors = ([p for p in in_optimizer(model) if (p.dim() > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=5e-3, **options)


class Paced(torch.optim.Optimizer):
    """A user's own: it counts in its options, and in a state that is no tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "pace": (0.9, None)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["done"] = torch.zeros_like(parameter), 0
                state["done"] += 1
                state["mean"].mul_(group["pace"][0]).add_(parameter.grad.tanh())
                parameter.sub_(state["mean"] / (state["done"] + group["count"]) ** 0.5, alpha=group["lr"])


RULES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "momentum": lambda model: torch.optim.SGD(in_optimizer(model), lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd": lambda model: torch.optim.SGD(in_optimizer(model), lr=0.05),
    "tensor lr": lambda model: torch.optim.AdamW(in_optimizer(model), lr=torch.tensor(5e-3), amsgrad=True),
    "own": lambda model: Paced(in_optimizer(model)),
}


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    rules: str = "adamw"
    precision: str | None = None
    placement: str = "device"
    stage: int = 3
    passes: int = 1  # backward passes in a step
    accumulate: int | None = None  # what prepare is told of that
    max_grad_norm: float | None = None

    def __str__(self) -> str:
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in changed) or "plain"


def scheduled(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)


class Run:
    """A training under way. Two with the same job and folder differ only by their seed."""

    def __init__(self, job: Job, folder: str | Path, *, rank: int = 0, seed: int = 0) -> None:
        self.job, self.rank, self.folder = job, rank, folder
        model = seeded(Net, seed)
        self.model, self.optimizer = zerostd.prepare(
            model,
            RULES[job.rules](model),
            stage=job.stage,
            placement=PLACEMENTS[job.placement],
            precision=job.precision,
            accumulate=job.accumulate,
            max_grad_norm=job.max_grad_norm,
            budget=Budget(disk_path=str(folder)),
            groups=GROUPS,
        )
        self.scheduler = scheduled(self.optimizer)
        self.step = 0
        torch.manual_seed(100 * seed + rank)
        random.seed(100 * seed + rank)
        numpy.random.seed(100 * seed + rank)
        random.gauss(0, 1), numpy.random.randn()  # each keeps a second number for later
        if job.precision == "fp16":
            self.optimizer.loss_scale.value, self.optimizer.loss_scale.growth_interval = 2.0**10, 3

    def train(self, steps: int) -> list[float]:
        losses = []
        for step in range(self.step, self.step + steps):
            losses += [self.one_pass(step, part) for part in range(self.job.passes)]
            self.end_step()
        return losses

    def one_pass(self, step: int, part: int) -> float:
        x = data(6, 8, number=self.job.passes * step + part, rank=self.rank)
        x = x * (1 + 0.1 * random.gauss(0, 1)) + 0.1 * float(numpy.random.randn())
        loss = self.model(x, step % 3 == 2).square().mean()
        loss.backward()
        return loss.item()

    def end_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1

    def save(self, path: str | Path, **options: Any) -> None:
        zerostd.save(path, self.model, self.optimizer, self.extra(), **options)

    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict(), "step": self.step}

    def load(self, path: str | Path) -> None:
        extra = zerostd.load(path, self.model, self.optimizer)
        self.scheduler.load_state_dict(extra["scheduler"])
        self.step = extra["step"]

    def tensors(self) -> dict[str, Tensor]:
        """All numbers of this rank that training has made, by name."""
        found = {f"model: {name}": value for name, value in zerostd.full_state_dict(self.model).items()}
        if self.rank:  # buffers are rank 0's, and the others' until its next forward, as in DDP
            found = {name: value for name, value in found.items() if "running" not in name and "seen" not in name}
        for number, states in self.optimizer.state_dict()["state"].items():
            found |= {f"state {number}: {name}": torch.as_tensor(value) for name, value in states.items()}
        return found | {"generator": torch.get_rng_state()}

    def facts(self) -> dict[str, str]:
        """And all that is no tensor."""
        scale = self.optimizer.loss_scale
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return {
            "options": str(options),
            "scheduler": str(self.scheduler.state_dict()),
            "loss scale": str(scale and dataclasses.asdict(scale)),
            "steps": str(self.model.__dict__["_zerostd"].backward.passes.num_steps),
            "python": str(random.getstate()),
            "numpy": str(numpy.random.get_state()),
        }

    def release(self) -> None:
        zerostd.release(self.model)


def differences(found: Run, expected: Run) -> list[str]:
    """What two trainings differ in, in words; empty if they are the same in every bit. All ranks call it."""
    mine, theirs = found.tensors(), expected.tensors()
    return compared(mine, theirs) + unlike(found.facts(), expected.facts())


def compared(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    wrong = [f"{name} is missing" for name in theirs if name not in mine]
    wrong += [f"{name} is there" for name in mine if name not in theirs]
    both = [name for name in theirs if name in mine]
    return wrong + [f"{name} differs" for name in both if not same_bits(mine[name], theirs[name])]


def unlike(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    return [f"{name} is {mine[name]}, not {theirs[name]}" for name in theirs if mine[name] != theirs[name]]


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(one.detach().cpu().contiguous().flatten().view(torch.uint8) for one in (a, b)))
