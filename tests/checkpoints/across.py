"""The same training on any number of ranks: all of them share one batch, so twenty steps are twenty steps.

`begin` trains ten and saves, `go_on` loads what others saved and trains ten more; `reference` is one process that does
twenty. What a rank has of the optimizer's states is joined by `whole`, from the intervals in its state_dict.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerostd
from checkpoints.runs import PLACEMENTS
from support.agreement import BF16, FP32_RANKS
from support.compare import movement_error, worst_error
from support.models import MODELS
from support.processes import doing
from support.reference import Recipe, make_optimizer, rank_and_size
from zerostd import Budget

WORLDS = (1, 2, 3, 4)
STEPS, BATCH = 10, 12  # sequences, of all ranks
CASE = MODELS["gpt"]


@dataclass(frozen=True)
class Setting:
    """Who trains, and how."""

    world_size: int
    stage: int
    placement: str
    rules: str
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"{self.rules} {self.precision} on {self.world_size}, stage {self.stage}, {self.placement}"


SAVED = [
    Setting(1, 0, "device", "adamw"),
    Setting(1, 3, "all tiers", "momentum"),
    Setting(2, 1, "host", "adamw"),
    Setting(2, 2, "streamed", "momentum"),
    Setting(2, 3, "different shares", "adamw", "bf16"),
    Setting(3, 2, "disk", "adamw"),
    Setting(3, 3, "parameters on host", "momentum"),
    Setting(4, 3, "parameters on disk", "adamw"),
    Setting(4, 0, "device", "momentum"),
]


def target_of(one: Setting, world_size: int) -> Setting:
    """Where a checkpoint goes on: every stage and placement has its turn."""
    number = SAVED.index(one)
    stage = (number + 3 * world_size) % 4
    names = list(PLACEMENTS) if stage == 3 else ["device", "host", "disk", "all tiers", "streamed"]
    placement = "device" if stage == 0 else names[(number + 2 * world_size) % len(names)]
    return replace(one, world_size=world_size, stage=stage, placement=placement)


def prepared(one: Setting, folder: str | Path, seed: int) -> tuple[nn.Module, Any]:
    model = CASE.make(seed)
    return zerostd.prepare(
        model,
        make_optimizer(Recipe(optimizer=one.rules), model.named_parameters()),
        stage=one.stage,
        placement=PLACEMENTS[one.placement],
        precision=one.precision,
        budget=Budget(disk_path=str(folder)),
        groups=list(CASE.groups),
    )


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    rank, world_size = rank_and_size()
    for step in steps:
        tokens = torch.randint(48, (BATCH, 13), generator=torch.Generator().manual_seed(step))
        CASE.loss(model, (tokens[rank::world_size],)).backward()
        optimizer.step()
        optimizer.zero_grad()


def begin(rank: int, settings: list[Setting], folder: str) -> list[Any]:
    """Of each: the model, and what this rank has of the optimizer's states, at the moment it was saved."""
    found = []
    for one in settings:
        doing(str(one))
        model, optimizer = prepared(one, folder, 0)
        train(model, optimizer, range(STEPS))
        zerostd.save(Path(folder, str(one)), model, optimizer, {"step": STEPS})
        found.append((zerostd.full_state_dict(model, rank=0), optimizer.state_dict()))
        zerostd.release(model)
    return found


def go_on(rank: int, settings: list[Setting], folder: str, disk: str) -> list[Any]:
    """Of each: the same right after it was loaded, and the model at the end."""
    found = []
    for one in settings:
        target = target_of(one, rank_and_size()[1])
        doing(f"{one} to {target}")
        model, optimizer = prepared(target, disk, 5)
        train(model, optimizer, range(1))
        assert zerostd.load(Path(folder, str(one)), model, optimizer) == {"step": STEPS}
        loaded = zerostd.full_state_dict(model, rank=0), optimizer.state_dict()
        train(model, optimizer, range(STEPS, 2 * STEPS))
        found.append((*loaded, zerostd.full_state_dict(model, rank=0)))
        zerostd.release(model)
    return found


def whole(dicts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The optimizer's states by 'parameter: state', from every rank's part of them."""
    found: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    for one in dicts:
        intervals = one["zerostd"]["intervals"]
        for number, states in one["state"].items():
            start, stop = intervals[number]
            numel = max(other["zerostd"]["intervals"].get(number, (0, 0))[1] for other in dicts)
            for name, value in states.items():
                key = f"{number}: {name}"
                if not isinstance(value, Tensor) or not value.dim():
                    found[key] = torch.as_tensor(value)
                    continue
                found.setdefault(key, torch.zeros(numel, dtype=value.dtype))[start:stop] = value.reshape(-1)
                left.setdefault(key, torch.ones(numel, dtype=torch.bool))[start:stop] = False
    missing = [key for key, places in left.items() if places.any()]
    assert not missing, f"no rank has all of {missing}"
    return found


@functools.cache
def _reference(rules: str, precision: str, disk: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model after all steps in one process, and before: plain torch, or zerostd's masters for 16 bits."""
    start = {name: value.detach().clone() for name, value in CASE.make(0).named_parameters()}
    model: nn.Module = CASE.make(0)
    if precision == "fp32":
        optimizer: Any = make_optimizer(Recipe(optimizer=rules), model.named_parameters())
        train(model, optimizer, range(2 * STEPS))
        return {name: value.detach().clone() for name, value in model.state_dict().items()}, start
    model, optimizer = prepared(Setting(1, 3, "device", rules, precision), disk, 0)
    train(model, optimizer, range(2 * STEPS))
    return zerostd.full_state_dict(model), start


def reference(one: Setting, disk: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return _reference(one.rules, one.precision, str(disk))


def too_far(one: Setting, end: dict[str, Tensor], wanted: tuple[dict[str, Tensor], dict[str, Tensor]]) -> list[str]:
    limits = FP32_RANKS if one.precision == "fp32" else BF16
    expected, start = wanted
    found = {
        "a tensor": (worst_error(end, expected), limits.tensors),
        "the way trained": (movement_error(end, expected, start), limits.movement),
    }
    return [
        f"{what} ({worst.name}) is off by {worst.error:.1e} relative, limit {limit:.0e}"
        for what, (worst, limit) in found.items()
        if not worst.error <= limit
    ]
