"""An order: update this run, by these terms. What the updater hands to the routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerostd.optimizers.arithmetic import Terms
from zerostd.optimizers.runs import Run, Singles
from zerostd.parameters import Flat, Group
from zerostd.tiers import AllOf, TierTensor, Transfer, record_event

__all__ = ["Order"]


@dataclass(frozen=True, eq=False)
class Order:
    """One run's update, fixed when it was asked for."""

    flat: Flat
    run: Run
    terms: Terms
    group: str
    step: int  # that asks for it, as events count
    place: int  # of its group in forward: what is needed first is done first
    on_trial: bool  # into the second copy of the states
    source: dict[str, TierTensor]
    target: dict[str, TierTensor]
    asked: Transfer  # what the device had to do before: parameters are read no more, and the factor is known

    @classmethod
    def make(cls, group: Group, flat: Flat, run: Run, terms: Terms, *, step: int, on_trial: bool) -> Order:
        """The columns are those of this moment: when it is carried out, others may have taken their places."""
        run.settle()
        target = run.shard.spare if on_trial else run.shard.columns
        asked = record_event(flat.full.device)
        return cls(flat, run, terms, group.name, step, group.place, on_trial, run.shard.columns, target, asked)

    @property
    def options(self) -> dict[str, Any]:
        """Of the run's parameters."""
        return self.terms.options[self.run.options]

    def can_begin(self, gradient: Transfer) -> Transfer:
        """When the gradient is there and the device has come to where the update was asked for. A gradient may be there
        long before: begun then, the update would hold up its lane, and all others behind it."""
        return AllOf(gradient, self.asked)

    def keep(self, singles: Singles | None) -> None:
        """The states of one value after the update."""
        if self.on_trial:
            self.run.tried = singles
        else:
            self.run.singles, self.run.tried = singles, None
