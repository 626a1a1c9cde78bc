"""What a model needs, as plain data: its groups in the order forward needs them.

Read from a module by `measuring`, or made from a few numbers for a model that does not exist yet. A sample is one row
of the batch: an image, a sequence, a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from zerostd.policy import Way

WAYS = tuple(way.in_plan for way in (Way.DEVICE, Way.RECOMPUTE, Way.HOST))  # that plans choose among


@dataclass(frozen=True)
class GroupProfile:
    """One group, whole: what a rank holds of it follows from the stage."""

    name: str
    trained: int  # parameters that are updated
    frozen: int = 0  # parameters that are not
    forward_flops: float = 0.0  # of one sample; backward takes twice that
    kept_bytes: float = 0.0  # of activations that one sample leaves for backward
    boundary_bytes: float = 0.0  # of them when the group is recomputed: its inputs
    peak_bytes: float = 0.0  # most that one sample needs beside what is kept, while the group runs
    stays: bool = False  # its activations are kept, whatever others do with theirs
    again_flops: float | None = None  # when it is recomputed, up to the last tensor that is saved; None: all

    @property
    def again(self) -> float:
        """Part of its forward that recomputing does."""
        if self.again_flops is None or not self.forward_flops:
            return 1.0
        return self.again_flops / self.forward_flops


@dataclass(frozen=True)
class ModelProfile:
    """A model and how it is to be trained."""

    name: str
    groups: tuple[GroupProfile, ...]
    parameter_bytes: int = 2  # of one parameter, as it computes
    gradient_bytes: int = 2  # of one gradient, as it rests when a step is one pass
    state_bytes: int = 12  # of one parameter's master and optimizer states
    master_bytes: int = 0  # more off the device, where a parameter on it is its own master
    dtype: str = "bfloat16"  # of the matrix products
    samples: int | None = None  # in one pass on one rank; None: not known, so neither is the time to compute
    recomputes: bool = False  # blocks keep only their inputs
    recomputed: float = 0.0  # of forward, by the model itself: what it keeps is in the groups already
    forward_s: float | None = None  # of one pass, if measured
    backward_s: float | None = None
    activation_bytes: int | None = None  # on the device at most, beside model state, if measured

    @property
    def trained(self) -> int:
        """Parameters that are updated."""
        return sum(group.trained for group in self.groups)

    @property
    def numel(self) -> int:
        """All parameters."""
        return sum(group.trained + group.frozen for group in self.groups)

    def activations(self) -> int:
        """Return the bytes of activations on one rank at their peak, measured or estimated; 0 without samples."""
        return int(self._estimate()) if self.activation_bytes is None else self.activation_bytes

    def with_twice_the_samples(self) -> ModelProfile:
        """Return the same model with twice the samples in a pass, as far as anything is known of a pass."""
        return replace(
            self,
            samples=None if self.samples is None else 2 * self.samples,
            forward_s=None if self.forward_s is None else 2 * self.forward_s,
            backward_s=None if self.backward_s is None else 2 * self.backward_s,
            activation_bytes=None if self.activation_bytes is None else 2 * self.activation_bytes,
        )

    @cached_property
    def knows_activations(self) -> bool:
        """Whether it is known what a pass leaves for backward in each group."""
        return self.samples is not None and any(group.kept_bytes for group in self.groups)

    @cached_property
    def measured_groups(self) -> tuple[GroupProfile, ...]:
        """The groups with activations that add up to what was measured. If that is less than the estimate, all are in
        proportion less. What is more is needed for a moment only: what is kept was seen, what an operation needs beside
        its output was not."""
        estimate = self._estimate()
        measured = self.activation_bytes
        if measured is None or not estimate:
            return self.groups
        most = (self.samples or 0) * max(group.peak_bytes for group in self.groups)
        more = measured - estimate
        if more <= 0 or not most or self.recomputes:
            part = measured / estimate
            return tuple(
                replace(
                    group,
                    kept_bytes=part * group.kept_bytes,
                    boundary_bytes=part * group.boundary_bytes,
                    peak_bytes=part * group.peak_bytes,
                )
                for group in self.groups
            )
        return tuple(replace(group, peak_bytes=(1 + more / most) * group.peak_bytes) for group in self.groups)

    def _estimate(self) -> float:
        if self.samples is None:
            return 0.0
        kept = sum(group.boundary_bytes if self.recomputes else group.kept_bytes for group in self.groups)
        inside = max((g.kept_bytes + g.peak_bytes if self.recomputes else g.peak_bytes for g in self.groups), default=0)
        return self.samples * (kept + inside)
