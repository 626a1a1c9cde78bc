"""The update of one group: the user's own optimizer, run on this rank's masters.

The inner optimizer is called once per group with that group's runs in its param_groups, so working memory is one
group's gradient in fp32, and a group's new parameters can leave while the next one is updated. Seen from the
optimizer it is one step all the same: options are those the user set, and counters it keeps in its param_groups move
once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerostd.monitoring import Ledger
from zerostd.optimizers.runs import Run, Runs
from zerostd.parameters import Flat, Group
from zerostd.policy import Kind

__all__ = ["Updater"]


class Updater:
    """Runs the inner optimizer on groups."""

    inner: torch.optim.Optimizer
    runs: dict[Flat, Runs]
    scratch: torch.Tensor  # fp32, as long as the largest group's 16-bit region: gradients as the update reads them

    def __init__(
        self, inner: torch.optim.Optimizer, groups: tuple[Group, ...], device: torch.device, ledger: Ledger
    ) -> None:
        self.inner = inner
        self.ledger = ledger
        self.user_groups = inner.param_groups
        options = {p: i for i, group in enumerate(self.user_groups) for p in group["params"]}
        flats = [flat for group in groups for flat in group.trainable]
        self.runs = {flat: Runs(flat, [options.get(p) for p in flat.parameters], inner.state) for flat in flats}
        sizes = [sum(flat.gradient.numel for flat in group.trainable if flat.gradient) for group in groups]
        needs_cast = any(flat.gradient is not None and flat.gradient.dtype != torch.float32 for flat in flats)
        self.scratch = torch.empty(max(sizes, default=0) if needs_cast else 0, dtype=torch.float32, device=device)
        ledger.enter(Kind.BUFFERS, self.scratch.nbytes)
        self.num_elements = sum(flat.region.stop - flat.region.start for flat in flats)  # updated by this rank
        self._num_counted = self._num_booked = 0  # entries and bytes of states in the ledger

    def update(self, group: Group, factor: torch.Tensor | None) -> None:
        """Update the runs of `group` that have gradients, and publish their masters."""
        runs = list(self._runs_with_gradients(group, factor))
        if not runs:
            return
        with self._only(runs):
            self.inner.step()
        for run in runs:
            run.tensor.grad = None
        for flat in group.trainable:
            flat.publish()
            torch.autograd.graph.increment_version(flat.parameters)  # a graph from before must not run on new values
        self._count()

    def _runs_with_gradients(self, group: Group, factor: torch.Tensor | None) -> Iterator[Run]:
        used = 0
        for flat in group.trainable:
            has_gradient = [parameter.grad is not None for parameter in flat.parameters]
            if not any(has_gradient):
                continue
            assert flat.gradient is not None
            gradient = flat.gradient.current
            if gradient.dtype != torch.float32:
                read = self.scratch[used : used + gradient.numel()]
                used += gradient.numel()
                gradient = read.copy_(gradient) if factor is None else torch.mul(gradient, factor, out=read)
            elif factor is not None:
                gradient.mul_(factor)
            for run in self.runs[flat].active(has_gradient):
                run.tensor.grad = gradient[run.region]
                yield run

    @contextmanager
    def _only(self, runs: list[Run]) -> Iterator[None]:
        """The inner optimizer's param_groups with just these runs. What it writes into them beside the parameters
        is kept: the last group's word counts, and all groups start from the user's values."""
        groups: list[dict[str, Any]] = [
            {**group, "params": [run.tensor for run in runs if run.options == index]}
            for index, group in enumerate(self.user_groups)
        ]
        self.inner.param_groups = groups
        try:
            yield
        finally:
            self.inner.param_groups = self.user_groups
        self.written = groups

    written: list[dict[str, Any]] | None = None  # param_groups as the last call left them

    def keep_counters(self) -> None:
        """After all groups: what the optimizer wrote into its param_groups becomes the user's."""
        written, self.written = self.written, None
        for user, group in zip(self.user_groups, written or [], strict=False):
            for key, value in group.items():
                if key != "params":
                    user[key] = value

    def _count(self) -> None:
        """Enter the memory of states that the inner optimizer made into the ledger; cut runs share theirs."""
        if len(self.inner.state) == self._num_counted:
            return
        self._num_counted = len(self.inner.state)
        sizes = {
            state.untyped_storage().data_ptr(): state.untyped_storage().nbytes()
            for tensor, states in self.inner.state.items()
            for state in states.values()
            if isinstance(state, torch.Tensor) and state.dim()
        }
        total = sum(sizes.values())
        self.ledger.enter(Kind.OPTIMIZER_STATES, total - self._num_booked)
        self._num_booked = total

    def parameters(self) -> list[nn.Parameter]:
        """The user's parameters, group by group."""
        return [parameter for group in self.user_groups for parameter in group["params"]]
