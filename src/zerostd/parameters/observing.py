"""The moments of training at which others may look on: the adapter, the recorder, a checkpoint on its way."""

from __future__ import annotations


class StepObserver:
    """Called by the engine at three moments, on the thread that trains, in the order in which observers were added.

    1. `before_forward`: a forward of training begins; the model's parameters may move.
    2. `before_backward`: a backward pass begins; gradients are about to change.
    3. `after_step`: `optimizer.step()` has started or skipped its updates.

    A subclass overrides the moments it needs.
    """

    def before_forward(self) -> None:
        """A forward of training begins."""

    def before_backward(self) -> None:
        """A backward pass begins."""

    def after_step(self) -> None:
        """A step was taken, or skipped."""
