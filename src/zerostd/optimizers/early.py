"""Updates that begin inside the last backward pass of a step, group by group as their gradients land.

Certain: nothing has to be known of all gradients first, so what is updated stays updated, and step() only checks that
the options are still those it was updated with. On trial: with clipping, the factor is known only after the last
gradient. Steps that were not clipped tend to be followed by others: the update is made with factor one into a second
copy of the states. If the norm agrees, the copies trade places; if not, step() updates once more from the untouched
ones. Results are the same bits as without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from zerostd.errors import MisuseError
from zerostd.monitoring.ledger import explain_out_of_memory
from zerostd.optimizers.arithmetic import HostNumber, Terms
from zerostd.optimizers.gradients import Gradients
from zerostd.optimizers.update import Scope, Updater
from zerostd.parameters import Group

__all__ = ["Early"]

NUM_UNCLIPPED = 2  # steps in a row that did not clip before the next one is tried


class Renews(Protocol):
    """What tells the schedule that a group's parameters are changing."""

    def renew(self, group: Group) -> None: ...


class Early:
    """Early updates of one prepared optimizer."""

    is_on_trial: bool  # whether what is updated early may have to be done again
    num_tried: int
    num_kept: int  # of those tried

    def __init__(
        self,
        updater: Updater,
        gradients: Gradients,
        schedule: Renews,
        make_terms: Callable[[torch.Tensor | None], Terms],
        *,
        is_on_trial: bool,
    ) -> None:
        self.updater = updater
        self.gradients = gradients
        self.schedule = schedule
        self.make_terms = make_terms
        self.is_on_trial = is_on_trial
        self.num_tried = self.num_kept = 0
        self._terms: Terms | None = None
        self._done: dict[Group, None] = {}
        self._num_unclipped = 0
        self._last_factor: HostNumber | None = None

    @torch.no_grad()
    def start(self, group: Group) -> None:
        """A group's gradient has landed and backward needs its parameters no more. Groups whose slices ranks gather
        right after the update wait for step(), where all ranks go through them in one order."""
        if group.is_in_slices and not group.gives_back:
            return
        if self._terms is None:
            if self.is_on_trial and not self._is_confident():
                return
            self._terms = self.make_terms(None)
            self.gradients.taken = (
                "the update has begun inside backward, since prepare was told with accumulate= how many passes make a "
                "step"
            )
        if group in self._done:
            raise MisuseError(
                f"a backward pass failed after the update of group {group.name!r} had begun inside it, and another one "
                "would update it twice: load the last checkpoint into a new model, or leave accumulate out of prepare, "
                "so that updates wait for optimizer.step()"
            )
        scope = Scope.ON_TRIAL if self.is_on_trial else Scope.ALL
        with explain_out_of_memory(self.updater.ledger):
            self.updater.claim()
            self.updater.update(group, self._terms, scope, is_complete=True)
        self._done[group] = None
        self.schedule.renew(group)

    def finish(self, factor: torch.Tensor | None, order: list[Group]) -> set[Group]:
        """step() was called: the groups that need nothing more."""
        terms, done = self._terms, self._done
        if terms is not None:
            self._check_options(terms.options)
            self._check_gradients()
        self._terms, self._done, self.gradients.taken = None, {}, None
        if terms is None:
            return set()
        if not self.is_on_trial:
            return set(done)
        self.num_tried += 1
        self._num_unclipped = self._num_unclipped + 1 if factor is None or factor.item() == 1.0 else 0
        if not self._num_unclipped:
            return set()
        self.num_kept += 1
        for group in order:
            if group in done:
                self.updater.adopt(group)
                self.updater.update(group, terms, Scope.REST)
                self.schedule.renew(group)
        return set(done)

    def learn(self, factor: HostNumber | None) -> None:
        """The factor of a step that was not tried, when it is known."""
        self._last_factor = factor

    def _is_confident(self) -> bool:
        last, self._last_factor = self._last_factor, None
        if last is not None:
            self._num_unclipped = self._num_unclipped + 1 if last.get() == 1.0 else 0
        return self._num_unclipped >= NUM_UNCLIPPED

    def _check_options(self, used: list[dict[str, Any]]) -> None:
        for index, (before, now) in enumerate(zip(used, self.updater.options_now(), strict=True)):
            for key, value in now.items():
                if not _equal(before.get(key), value):
                    raise MisuseError(
                        f"param_groups[{index}][{key!r}] was changed from {before.get(key)!r} to {value!r} between "
                        "backward and step, but the update began inside backward: change options after step(), as "
                        "schedulers do, or leave accumulate out of prepare"
                    )

    def _check_gradients(self) -> None:
        for flat in (flat for group in self._done for flat in group.trainable):
            for parameter, interval in zip(flat.parameters, flat.layout.intervals, strict=True):
                if parameter.grad is None:
                    raise MisuseError(
                        f"the gradient of {interval.name!r} is gone at step(), but its update began inside backward: "
                        "it was dropped in between, or backward failed. Leave accumulate out of prepare, so that "
                        "updates wait for step()"
                    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)
