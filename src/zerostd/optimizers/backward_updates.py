"""Updates that begin inside the last backward pass of a step, group by group as their gradients land.

Certain: an update needs no property of all gradients, so it stays, and step() only checks that the options are still
those of the update. Speculative: with clipping, the factor is known only after the last gradient. After steps that were
not clipped, the next one is probably not clipped either. So the update is made with factor one into the spare tensors
of the states. If the factor turns out to be one, they are committed; if not, step() repeats the update from the
untouched tensors. The bits are the same as without speculation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerostd.compat import no_torch_function
from zerostd.errors import MisuseError
from zerostd.monitoring.ledger import explain_out_of_memory
from zerostd.optimizers.gradients import Gradients
from zerostd.optimizers.passing import PassingGradients
from zerostd.optimizers.spans import StepOptions
from zerostd.optimizers.updater import Scope, Updater
from zerostd.parameters import Group
from zerostd.parameters.passing_gradient import REMEDY
from zerostd.parameters.prepared import GRAD

BEGUN = (
    "accumulate= was passed to prepare: call step() first, pass max_grad_norm= to prepare to clip, or leave "
    "accumulate= out to keep gradients until step()"
)
FAILED = (
    "a backward pass failed after {} had begun inside it, so only a part of the model is updated: load the last "
    "checkpoint with zerostd.load(path, model, optimizer). If updates should wait for optimizer.step(), leave "
    "accumulate and keep_gradients out of prepare"
)
NUM_UNCLIPPED = 2  # steps in a row that did not clip before the next one speculates


@dataclass(eq=False)
class BackwardUpdates:
    """Starts updates inside backward for one prepared optimizer."""

    updater: Updater
    gradients: Gradients
    renew: Callable[[Group], None]  # called with each group whose masters have changed
    is_speculative: bool  # what is updated may have to be done again
    is_on: bool = False  # else all updates wait for step(), and only the clipping of steps is learnt
    keeps_gradients: bool = True  # else nothing can be put off to step(), from the first pass on
    passing: PassingGradients = field(default_factory=PassingGradients)  # where they are not kept
    num_speculated: int = 0  # steps
    num_committed: int = 0  # of those
    _options: StepOptions | None = None  # of the step that has begun
    _done: dict[Group, None] = field(default_factory=dict)
    _num_unclipped: int = 0
    _last: StepOptions | None = None  # of a step that did not speculate and has not been looked at

    @property
    def has_begun(self) -> bool:
        """Whether an update has begun inside the backward of this step."""
        return self._options is not None

    def make_room(self, group: Group) -> None:
        """Free gradients that are not kept, so that the gradient of `group` may land."""
        self.passing.make_room(group)

    def updated(self, group: Group) -> None:
        """Free the gradients of a group whose update was started, if they are not kept."""
        self.passing.updated(group)

    @torch.no_grad()
    def start(self, group: Group) -> None:
        """Update a group whose gradient has landed and whose parameters backward no longer needs. Groups whose slices
        are gathered right after the update wait for step(), where all ranks update them in one order."""
        if group.is_in_slices and not group.gives_back:
            return
        if self._options is None:
            if self.is_speculative and not self._is_confident():
                return
            self._options = self.updater.step_options(None)
            self.gradients.locked = (
                BEGUN if self.keeps_gradients else f"keep_gradients is False: call step() first, or {REMEDY}"
            )
        if group in self._done:
            raise MisuseError(FAILED.format(f"the update of group {group.name!r}"))
        with explain_out_of_memory(self.updater.ledger):
            self.updater.check_memory()
            scope: Scope = "speculative" if self.is_speculative else "all"
            self.updater.update(group, self._options, scope, is_complete=True)
        self._done[group] = None
        self.renew(group)

    def abandon(self) -> None:
        """Note that the pass has failed. Speculative updates have written parameters too, so only a load helps."""
        if self.has_begun:
            names = [group.name for group in self._done]
            self.gradients.refusal = FAILED.format(f"the update of group {names[0]!r}" if names else "an update")

    def forget(self) -> None:
        """Forget updates that have begun: they are complete, or their results were replaced."""
        self._options = None
        self._done = {}
        self.gradients.locked = None
        self.gradients.refusal = None

    def finish(self, factor: torch.Tensor | None, order: list[Group]) -> set[Group]:
        """End the step: commit speculative updates if `factor` turned out to be one. Returns the groups that need no
        further update."""
        options = self._options
        if options is None:
            return set()
        if self.gradients.refusal is not None:
            raise MisuseError(self.gradients.refusal)
        self._check(options)
        done = self._done
        self.forget()
        if not self.is_speculative:
            return set(done)
        self.num_speculated += 1
        self._learn(1.0 if factor is None else factor.item())
        if not self._num_unclipped:
            return set()
        self.num_committed += 1
        for group in order:
            if group in done:
                self.updater.commit_speculative(group)
                self.updater.update(group, options, "rest")
                self.renew(group)
        return set(done)

    def watch(self, options: StepOptions) -> None:
        """Learn from a step that did not speculate, as soon as its factor is known."""
        self._last = options if options.host_factor is not None else None

    def look(self) -> None:
        """Learn from the step that was watched, before its factor's memory can be given back."""
        if self._last is not None:
            self._learn(self._last.read_factor())
            self._last = None

    def _is_confident(self) -> bool:
        self.look()
        return self._num_unclipped >= NUM_UNCLIPPED

    def _learn(self, factor: float) -> None:
        self._num_unclipped = self._num_unclipped + 1 if factor == 1.0 else 0

    def _check(self, options: StepOptions) -> None:
        """Refuse a step whose options or gradients have changed since its updates began."""
        if self.updater.has_new_members:
            raise MisuseError(
                "param_groups have other parameters at step() than they had in backward, but the update began inside "
                "backward: change them after step(), or leave accumulate out of prepare"
            )
        for index, (used, group) in enumerate(zip(options.param_groups, self.updater.user_groups, strict=True)):
            for key, value in group.items():
                if key != "params" and not _is_equal(used.get(key), value):
                    raise MisuseError(
                        f"param_groups[{index}][{key!r}] was changed from {used.get(key)!r} to {value!r} between "
                        "backward and step, but the update began inside backward: change options after step(), as "
                        "schedulers do, or leave accumulate out of prepare"
                    )
        for flat in (flat for group in self._done for flat in group.trainable):
            with no_torch_function():
                has_gradient = [GRAD.__get__(parameter) is not None for parameter in flat.parameters]
            for is_there, interval in zip(has_gradient, flat.layout.intervals, strict=True):
                if not is_there:
                    raise MisuseError(
                        f"the gradient of {interval.name!r} is gone at step(), but its update began inside backward: "
                        "it was dropped in between, or backward failed. Leave accumulate out of prepare, so that "
                        "updates wait for step()"
                    )


def _is_equal(before: Any, now: Any) -> bool:
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
        return isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor) and torch.equal(before, now)
    return bool(before == now)
