"""Facts that must be equal on all ranks in a step: the number of steps, the options, the clipping, the gradients.

Ranks compare a checksum of these facts in the message that ends each backward pass, so a rank with another learning
rate is named before the step is applied. Changes between backward and step() are compared in a separate message before
the step is applied; a rank that changed nothing notices at the end of its next backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zerostd.communication.peers import STEP
from zerostd.optimizers.elementwise import written_options
from zerostd.optimizers.gradients import Gradients
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.parameters.observing import StepObserver
from zerostd.scheduling.backward import Backward

PLAIN = (bool, int, float, complex, str, type(None))


class StepAgreement(StepObserver):
    """The facts of one prepared model that ranks compare."""

    _optimizer: ZeroOptimizer | None  # None: not known yet
    _written: set[str]  # options that the optimizer changes by itself, on ranks that have a shard of the group
    _agreed: list[str]  # at the end of the last backward pass
    _last: list[str]  # about clipping, passes and gradients in the last step

    def __init__(self, backward: Backward, gradients: Gradients) -> None:
        self._optimizer = None
        self._written = set()
        self._backward = backward
        self._gradients = gradients
        self._agreed = []
        self._last = []

    def include(self, optimizer: ZeroOptimizer) -> None:
        """Compare the options of an optimizer from now on."""
        self._optimizer = optimizer
        self._written = written_options(optimizer.inner)

    def facts(self) -> list[str]:
        """Return the options of the next step, a line each."""
        self._agreed = list(self._describe())
        return self._agreed

    def check_step(self, num_gradients: int) -> None:
        """Raise on all ranks if the facts of the step that begins now have changed since ranks agreed, and differ
        between ranks. `num_gradients` parameters have a gradient."""
        backward = self._backward
        options = list(self._describe())
        step = [
            f"backward passes in this step: {backward.passes.num_done}",
            f"clip_grad_norm_({self._gradients.clip_norm})",
        ]
        if num_gradients != backward.num_gradients:
            step.append(f"gradients of {num_gradients} parameters, and backward left {backward.num_gradients}")
        if options == self._agreed and step == self._last:
            return
        before = {*self._agreed, *self._last}
        changes = [fact for fact in (*options, *step) if fact not in before]
        self._last = step
        backward.gatherer.control.confirm(f"{STEP} with {'; '.join(changes)}" if changes else STEP, changes)

    def _describe(self) -> Iterator[str]:
        yield f"steps taken: {self._backward.passes.num_steps}"
        if self._gradients.loss_scale is not None:
            yield f"loss scale: {self._gradients.loss_scale.value}"
        if self._optimizer is None or not self._optimizer.compares_options:
            return
        yield f"max_grad_norm={self._optimizer.max_grad_norm}"
        for index, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                text = None if name == "params" or name in self._written else _plain(value)
                if text is not None:
                    yield f"param_groups[{index}][{name!r}] = {text}"


def _plain(value: Any) -> str | None:
    """Return a value as text that is the same in all processes; None if that is not known, or not without waiting."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        value = value.item()
    is_plain = isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(v, PLAIN) for v in value))
    return repr(value) if is_plain else None
