"""Reduce a group's gradients and land them where they rest.

In comes what one backward pass brought for a group; out goes, on every rank, the mean of its region. Groups that shard
gradients pass through one of two staging buffers as large as the largest of them, so the memory this takes does not
grow with the model. Nothing here knows when a pass begins or ends: that is backward.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zerostd.communication import Control, Wires
from zerostd.monitoring import Ledger
from zerostd.monitoring.events import Span
from zerostd.parameters import Flat, Gradient, GradientHandle, Group
from zerostd.policy import Kind
from zerostd.tiers import Transfer

__all__ = ["Arrivals", "Reducer", "Slot"]

NUM_STAGING = 2  # one is on the wire while the other fills


@dataclass(frozen=True, eq=False)
class Slot:
    """One trainable parameter's address, and the handle its user sees."""

    group: Group
    flat: Flat
    index: int  # in the flat's layout
    parameter: nn.Parameter
    handle: GradientHandle


class Arrivals:
    """What one backward pass has brought for one group, so far."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.grads: dict[Flat, list[torch.Tensor | None]] = {
            flat: [None] * len(flat.parameters) for flat in group.trainable
        }
        self.arrived: set[nn.Parameter] = set()
        self.added: set[nn.Parameter] = set()  # autograd added to a gradient that was still wanted
        self.missing = sum(len(flat.parameters) for flat in group.trainable)

    def take(self, slot: Slot, grad: torch.Tensor, *, adds: bool) -> None:
        """One parameter's gradient; a second one of the same pass is summed."""
        row = self.grads[slot.flat]
        earlier = row[slot.index]
        if earlier is not None:
            row[slot.index] = earlier + grad
            return
        row[slot.index] = grad
        self.arrived.add(slot.parameter)
        self.missing -= 1
        if adds:
            self.added.add(slot.parameter)

    def let_go(self) -> None:
        """The gradients were copied to where they go: autograd's own memory is free again."""
        for row in self.grads.values():
            row[:] = [None] * len(row)

    def wanted(self, flat: Flat) -> list[bool]:
        """By parameter: whether the gradient of earlier passes is still wanted. Untouched ones show their handle."""
        return [
            parameter in self.added if parameter in self.arrived else parameter.grad is not None
            for parameter in flat.parameters
        ]


class Reducer:
    """Sends gradients and lands them."""

    def __init__(self, wires: Wires, control: Control, ledger: Ledger) -> None:
        self.wires = wires
        self.control = control
        self.ledger = ledger
        self._staging: list[torch.Tensor] = []
        self._staged: list[Transfer | None] = [None] * NUM_STAGING
        self._turn = 0
        self._in_flight: list[tuple[str, Transfer, Callable[[], None] | None]] = []
        self._spans: list[Span | None] = []  # of those, while events are recorded
        self._landed: list[Group] = []  # sent in the last pass of a step, and not told to have landed

    def reserve(self, groups: tuple[Group, ...]) -> None:
        """Allocate staging and receive buffers for the largest flat, before the first collective."""
        if self.wires.world.size == 1:
            return
        flats = [flat for group in groups for flat in group.trainable]
        sizes = {flat: flat.layout.numel * flat.gradient.dtype.itemsize for flat in flats if flat.gradient}
        self.wires.reserve(max(sizes.values(), default=0))
        passing = max(
            (size for flat, size in sizes.items() if flat.gradient and flat.gradient.whole is None), default=0
        )
        if passing:
            for _ in range(NUM_STAGING):
                self._staging.append(torch.empty(passing, dtype=torch.uint8, device=self.wires.world.device))
                self.ledger.enter(Kind.BUFFERS, passing)

    def launch(self, arrivals: Arrivals, *, sync: bool, is_last: bool = False) -> list[Group]:
        """Start the way of one group's gradients to rest; without `sync`, only sum them up locally. In the last pass
        of a step, what the processor will read goes on to the host. Returns the groups that have landed by now."""
        landed = []
        if self.wires.world.size > 1 and is_last and sync:
            self.settle()  # what was sent before may go on from where it landed
            landed, self._landed = self._landed, []
        for flat in arrivals.group.trainable:
            grads, wanted = arrivals.grads[flat], arrivals.wanted(flat)
            gradient = flat.gradient
            assert gradient is not None
            if self.wires.world.size == 1:  # nothing to reduce, so nothing to put off
                gradient.land_here(grads, accumulate=gradient.prepare_landing(wanted))
                if is_last:
                    gradient.send_host_copy()
            elif not sync:
                gradient.add_unsynced(grads, wanted)
            else:
                with self.control.explain(f"the reduce of group {arrivals.group.name!r}"):
                    self._send(arrivals.group.name, gradient, grads, wanted)
        arrivals.let_go()
        if self.wires.world.size == 1:
            return [arrivals.group]
        if is_last and sync:
            self._landed.append(arrivals.group)
        return landed

    def begin(self) -> None:
        """A pass begins."""
        self._landed = []

    def _send(self, name: str, gradient: Gradient, grads: list[torch.Tensor | None], wanted: list[bool]) -> None:
        size, device = gradient.layout.numel * gradient.dtype.itemsize, self.wires.world.device
        self._spans.append(self.ledger.events.begin("reduce", "wire", name, size, device=device))
        accumulate = gradient.prepare_landing(wanted)
        if gradient.whole is None or gradient.numel < gradient.layout.numel:
            buffer = gradient.whole
            if buffer is None:
                buffer = self._stage(gradient.layout.numel, gradient.dtype)
            gradient.fill(buffer, grads, wanted)
            if gradient.comes_up:
                self.settle()  # one landing place on the device at a time
            target = gradient.open_landing(accumulate=accumulate)
            pending = self.wires.reduce(buffer, target, accumulate=accumulate)
            if gradient.whole is None:
                self._staged[self._turn] = pending
            self._in_flight.append((name, pending, functools.partial(gradient.close_landing, target)))
        else:
            gradient.changed()
            gradient.fill(gradient.whole, grads, wanted)
            pending = self.wires.reduce_everywhere(gradient.whole)
            sums = gradient.current is gradient.sum
            self._in_flight.append(
                (name, pending, functools.partial(gradient.fold, accumulate=accumulate) if sums else None)
            )

    def _stage(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next staging buffer, once what it held has left."""
        self._turn = (self._turn + 1) % NUM_STAGING
        staged = self._staged[self._turn]
        if staged is not None:
            staged.wait()
        return self._staging[self._turn][: numel * dtype.itemsize].view(dtype)

    def settle(self) -> None:
        """Return when every gradient sent has landed."""
        for name, pending, finish in self._in_flight:
            with self.control.explain(f"the reduce of group {name!r}"):
                pending.wait()
            if finish is not None:
                finish()
        for span in self._spans:
            self.ledger.events.end(span, self.wires.world.device)
        self._in_flight.clear()
        self._spans.clear()
