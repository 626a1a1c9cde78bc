"""The options of one prepared model, checked and complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from zerostd.communication.meshes import Mesh
from zerostd.planning import Plan
from zerostd.policy import Budget, Placement, Precision, Stage


@dataclass(frozen=True)
class Settings:
    """The options of prepare. Stage and placement are None until a plan decides them."""

    stage: Stage | None = None
    precision: Precision = field(default_factory=lambda: Precision.parse(None))
    placement: Placement | None = None
    budget: Budget = field(default_factory=Budget)
    accumulate: int | None = None
    max_grad_norm: float | None = None
    globs: Sequence[str] | None = None  # of the names of modules whose parameters travel together
    plan: Plan | None = None  # obeyed instead of a placement
    mesh: Mesh = None  # of the ranks that train the model
    codable: frozenset[str] = frozenset()  # what a plan may code with a loss; empty: results are exact
    reduce: str = "mean"  # or "sum" of the gradients of all ranks
    servers: int | None = None  # the last ranks, which hold masters and states and run no forward
    states: Mapping[str, torch.dtype] = field(default_factory=dict)  # long states of the optimizer, by name
    device: torch.device | None = None  # to compute on; None: where the model lies
    has_optimizer: bool = True  # False: there are no states, and no masters where parameters keep their own dtype

    @property
    def exact(self) -> bool:
        """Whether nothing may change results."""
        return not self.codable

    def describe(self) -> list[str]:
        """Return the options that must be the same on all ranks, a line each."""
        return [
            f"stage {None if self.stage is None else self.stage.value}",
            f"precision {self.precision.name}",
            f"compute {self.precision.compute}, reduce {self.precision.reduce}, scales {self.precision.scales_loss}",
            f"placement {self.placement}",
            f"plan {None if self.plan is None else self.plan.to_json()}",
            f"accumulate {self.accumulate}",
            f"max_grad_norm {self.max_grad_norm}",
            f"reduce {self.reduce}",
            f"exact {self.exact}",
            f"servers {self.servers}",
        ]

    def obeying(self, plan: Plan, sizes: Mapping[str, float]) -> Settings:
        """Return the same with everything that a plan decides, for groups of these sizes."""
        return replace(self, plan=plan, stage=plan.stage, placement=plan.placement(sizes))

    @property
    def decided(self) -> tuple[Stage, Placement]:
        """Stage and placement, once they are known."""
        assert self.stage is not None and self.placement is not None
        return self.stage, self.placement
