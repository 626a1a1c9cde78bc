"""The moments of training at which observers are called: the adapter, the recorder, pending checkpoints."""

from __future__ import annotations


class StepObserver:
    """Called by the engine on the thread that trains, in the order in which observers were added. A subclass overrides
    the moments it needs."""

    def before_forward(self) -> None:
        """Called when a forward of training begins; the model's parameters may move."""

    def before_backward(self) -> None:
        """Called when a backward pass begins; gradients are about to change."""

    def after_backward(self) -> None:
        """Called when a backward pass has ended; its activations are gone."""

    def facts(self) -> list[str]:
        """Return a line for each fact that must be the same on all ranks when a backward pass ends."""
        return []

    def after_step(self) -> None:
        """Called when `optimizer.step()` has started or skipped its updates."""

    def after_release(self) -> None:
        """Called when `zerostd.release` has made the model an ordinary one again."""
