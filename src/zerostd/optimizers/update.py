"""The update of one group, route by route.

Resident states: the user's own optimizer is called with that group's runs in its param_groups, so working memory is one
group's gradient in fp32, and a group's new parameters can leave while the next one is updated. States elsewhere go by
their routes (on_cpu.py, streamed.py, from_disk.py), beside it and beyond it: what is not done yet is left in
`group.updates`. Seen from the optimizer it is one step all the same: options are those the user set, and counters it
keeps in its param_groups move once."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerostd.monitoring import Ledger
from zerostd.optimizers.arithmetic import Terms
from zerostd.optimizers.orders import Order
from zerostd.optimizers.routes import Routes
from zerostd.optimizers.runs import Run, Runs
from zerostd.parameters import Flat, Group
from zerostd.policy import Kind

__all__ = ["Scope", "Updater"]


class Scope(enum.Enum):
    """Which runs of a group an update is of."""

    ALL = "all of them"
    ON_TRIAL = "those whose states have a second copy: into that, for `adopt` to make it count"
    REST = "those without one"


class Updater:
    """Updates groups."""

    inner: torch.optim.Optimizer
    runs: dict[Flat, Runs]
    routes: Routes | None  # for states off the device
    scratch: torch.Tensor  # fp32, as long as the largest group's resident part: gradients as the update reads them

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        groups: tuple[Group, ...],
        device: torch.device,
        ledger: Ledger,
        routes: Routes | None,
        states: Mapping[str, torch.dtype],
    ) -> None:
        self.inner = inner
        self.ledger = ledger
        self.routes = routes
        self.user_groups = inner.param_groups
        flats = [flat for group in groups for flat in group.trainable]
        self.runs = {flat: self.make_runs(flat) for flat in flats}
        self.scratch = torch.empty(0, dtype=torch.float32, device=device)
        self.take_scratch(groups)
        self.num_elements = sum(flat.region.stop - flat.region.start for flat in flats)  # updated by this rank
        self.states = dict(states)  # long states the optimizer will make, as far as known
        self._has_claimed = False
        self._num_counted = self._num_booked = 0  # entries and bytes of states in the ledger

    def make_runs(self, flat: Flat) -> Runs:
        """The runs of a flat as it is now, without states."""
        options = {p: i for i, group in enumerate(self.user_groups) for p in group["params"]}
        return Runs(flat, [options.get(p) for p in flat.parameters], self.inner.state)

    def take_scratch(self, groups: tuple[Group, ...]) -> None:
        """Room for the gradients of the largest group's resident part, as the update reads them."""
        sizes = [sum(_resident_numel(flat) for flat in group.trainable) for group in groups]
        gradients = [flat.gradient for group in groups for flat in group.trainable if flat.gradient is not None]
        needs_cast = any(gradient.dtype.itemsize < 4 or gradient.comes_up for gradient in gradients)
        self.ledger.leave(Kind.BUFFERS, self.scratch.nbytes)
        self.scratch = self.scratch.new_empty(max(sizes, default=0) if needs_cast else 0)
        self.ledger.enter(Kind.BUFFERS, self.scratch.nbytes)

    def moved(self, groups: tuple[Group, ...], routes: Routes | None) -> None:
        """States rest elsewhere now, and there are other routes to them."""
        self.routes, self._has_claimed, self._num_counted = routes, False, -1
        self.take_scratch(groups)
        self._count()

    def update(self, group: Group, terms: Terms, scope: Scope = Scope.ALL, *, is_complete: bool = False) -> None:
        """Start the update of the runs of `group` that have gradients; `is_complete` says that all have."""
        group.pending_save.wait()
        resident: list[Run] = []
        used = 0
        for flat in group.trainable:
            has_gradient = [is_complete or parameter.grad is not None for parameter in flat.parameters]
            if not any(has_gradient):
                continue
            for run in self.runs[flat].active(has_gradient):
                if scope is not Scope.ALL and bool(run.shard.spare) != (scope is Scope.ON_TRIAL):
                    continue
                if run.tensor is not None:
                    used = self._give_gradient(flat, run, terms.factor, used)
                    resident.append(run)
                    continue
                assert self.routes is not None
                order = Order.make(
                    group, flat, run, terms, step=self.ledger.events.step, on_trial=scope is Scope.ON_TRIAL
                )
                group.updates.append(self.routes.launch(order))
            if flat.gradient is not None:
                flat.gradient.drop_overwritten_copy()
            torch.autograd.graph.increment_version(flat.parameters)  # a graph from before must not run on new values
        if resident:
            self._update_resident(group, resident, terms)

    def adopt(self, group: Group) -> None:
        """The updates on trial were right."""
        for flat in group.trainable:
            for run in self.runs[flat].runs:
                run.is_adopted = bool(run.shard.spare)
            for shard in flat.state_shards:
                if shard.spare:
                    shard.adopt_spare()

    def claim(self) -> None:
        """Take the memory that the first update will need, and give it back to the allocator: if there is not enough,
        this raises before anything has changed."""
        if self._has_claimed or self.scratch.device.type == "cpu":
            return
        resident = [run for runs in self.runs.values() for run in runs.runs if run.tensor is not None]
        taken = [
            torch.empty_like(run.tensor, dtype=dtype)
            for run in resident
            if run.tensor is not None and run.tensor not in self.inner.state
            for dtype in self.states.values()
        ]
        del taken
        self._has_claimed = True

    def _update_resident(self, group: Group, runs: list[Run], terms: Terms) -> None:
        events, device = self.ledger.events, self.scratch.device
        with self._only(runs, terms), events.within("update", "compute", group.name, device=device):
            self.inner.step()
        for run in runs:
            assert run.tensor is not None
            run.tensor.grad = None
        for flat in group.trainable:
            flat.round_masters(only_resident=True)
        self._count()

    def _give_gradient(self, flat: Flat, run: Run, factor: torch.Tensor | None, used: int) -> int:
        """Set a resident run's gradient, in the master's dtype and with the factor; returns the scratch used."""
        assert flat.gradient is not None and run.tensor is not None
        gradient = flat.gradient.current[run.region]
        if gradient.dtype != run.tensor.dtype or gradient.device != run.tensor.device:
            gradient = self.scratch[used : used + run.numel]
            flat.gradient.copy_to(gradient, run.region)
            used += run.numel
        if factor is not None:
            gradient.mul_(factor)
        run.tensor.grad = gradient
        return used

    @contextmanager
    def _only(self, runs: list[Run], terms: Terms) -> Iterator[None]:
        """The inner optimizer's param_groups with just these runs. What it writes into them beside the parameters
        is kept: the last group's word counts, and all groups start from the user's values."""
        groups: list[dict[str, Any]] = [
            {**options, "params": [run.tensor for run in runs if run.options == index]}
            for index, options in enumerate(terms.options)
        ]
        self.inner.param_groups = groups
        try:
            yield
        finally:
            self.inner.param_groups = self.user_groups
        terms.written.update({index: group for index, group in enumerate(groups) if group["params"]})

    terms: Terms | None = None  # of the last step

    def options_now(self) -> list[dict[str, Any]]:
        """The user's options as they are, for one step: later changes are the next step's."""
        return [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
            for group in self.user_groups
        ]

    def keep_counters(self) -> None:
        """After all groups: what the optimizer wrote into its param_groups becomes the user's."""
        terms, self.terms = self.terms, None
        for index, group in list(terms.written.items()) if terms is not None else []:  # threads may add to it
            for key, value in group.items():
                if key != "params" and not isinstance(value, torch.Tensor):
                    self.user_groups[index][key] = value

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


def _resident_numel(flat: Flat) -> int:
    return sum(shard.portion.numel for shard in flat.state_shards if shard.is_resident)
