"""Reduce a group's gradients, and store them in their home.

The input is the gradients of one backward pass for a group; the output, on every rank, is the mean of its region.
Groups that shard gradients pass through one of two staging buffers as large as the two largest of them, so the memory
this takes does not grow with the model. backward.py decides when a pass begins and ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zerostd.communication import Control, Wires
from zerostd.compat import no_torch_function
from zerostd.monitoring.events import Span
from zerostd.parameters import Flat, Gradient, GradientHandle, Group
from zerostd.parameters.host_gradient import Staging
from zerostd.parameters.prepared import GRAD
from zerostd.policy import Kind, Tier
from zerostd.tiers import Transfer


@dataclass(frozen=True, eq=False)
class TrainedParameter:
    """Where one trained parameter lies, and the handle its user sees as `p.grad`."""

    group: Group
    flat: Flat
    index: int  # in the flat's layout
    parameter: nn.Parameter
    handle: GradientHandle


class GroupGradients:
    """The gradients that one backward pass has brought for one group, so far."""

    def __init__(self, group: Group) -> None:
        self.group = group
        # By parameter of each flat:
        self.grads: dict[Flat, list[torch.Tensor | None]] = {f: [None] * len(f.parameters) for f in group.trainable}
        self.arrived: dict[Flat, list[bool]] = {flat: [False] * len(row) for flat, row in self.grads.items()}
        self.num_missing = sum(len(row) for row in self.grads.values())
        self._added: dict[Flat, set[int]] = {flat: set() for flat in self.grads}  # to a gradient still wanted
        self._skipped: set[TrainedParameter] = set()

    def take(self, trained: TrainedParameter, grad: torch.Tensor, *, adds: bool) -> None:
        """Take one parameter's gradient; a second one of the same pass is summed."""
        row = self.grads[trained.flat]
        earlier = row[trained.index]
        if earlier is not None:
            row[trained.index] = earlier + grad
            return
        row[trained.index] = grad
        self.arrived[trained.flat][trained.index] = True
        self.num_missing -= 1
        if adds:
            self._added[trained.flat].add(trained.index)

    def skip(self, trained: TrainedParameter) -> bool:
        """Stop expecting a gradient of one parameter: it counts as missing. Returns False if that was known already."""
        if trained in self._skipped:
            return False
        self._skipped.add(trained)
        self.num_missing -= 1
        return True

    def drop(self) -> None:
        """Free autograd's own memory: the gradients were copied."""
        for row in self.grads.values():
            row[:] = [None] * len(row)

    def wanted(self, flat: Flat) -> list[bool]:
        """Return for each parameter whether the gradient of earlier passes still counts."""
        added = self._added[flat]
        pairs = enumerate(zip(self.arrived[flat], flat.parameters, strict=True))
        with no_torch_function():
            return [(i in added) if has_arrived else GRAD.__get__(p) is not None for i, (has_arrived, p) in pairs]


class Reducer:
    """Sends gradients and lands them."""

    def __init__(self, wires: Wires, control: Control) -> None:
        self.wires = wires
        self.control = control
        self._staging = Staging()
        self._in_flight: list[tuple[Group, Transfer, Callable[[], None] | None, Span | None]] = []
        self._lost: dict[Gradient, torch.Tensor] = {}  # what coding has lost of each, where wires feed it back
        self._landing: list[Group] = []  # sent in the last pass of a step, and not yet returned as landed

    def reserve(self, groups: tuple[Group, ...]) -> None:
        """Allocate staging and receive buffers for the largest flat, before the first collective."""
        world = self.wires.world
        if self.wires.is_alone:
            return
        gradients = [flat.gradient for group in groups for flat in group.trainable if flat.gradient is not None]
        self.wires.reserve(max(map(_full_bytes, gradients), default=0))
        if self.wires.feeds_back:
            for gradient in gradients:
                self._lost[gradient] = torch.zeros(gradient.layout.numel, dtype=gradient.dtype, device=world.device)
                self.wires.ledger.enter(Kind.BUFFERS, _full_bytes(gradient))
        passing = [_full_bytes(gradient) for gradient in gradients if gradient.whole is None]
        if passing:
            self._staging.reserve(Staging.sizes(passing), world.device, self.wires.ledger)

    def begin(self) -> None:
        """Begin a pass."""
        self._landing = []

    def launch(self, arrivals: GroupGradients, *, sync: bool, is_last: bool = False) -> list[Group]:
        """Start reducing one group's gradients; without `sync`, only sum them locally. In the last pass of a step, the
        parts that the CPU will read continue to the host. Returns the groups that have landed by now."""
        group = arrivals.group
        is_alone = self.wires.is_alone
        landed: list[Group] = []
        if not is_alone and is_last and sync:
            # What was sent before may go on to the host from where it landed. Else one reduce more may be under way.
            landed = self._landing if group.is_updated_later else self._landing[:-1]
            self._wait_for(landed)
            self._landing = [*self._landing[len(landed) :], group]
        for flat in group.trainable:
            grads = arrivals.grads[flat]
            wanted = arrivals.wanted(flat)
            gradient = flat.gradient
            assert gradient is not None
            if is_alone:  # nothing to reduce, so nothing to put off
                gradient.land_here(grads, accumulate=gradient.prepare_landing(wanted))
                if is_last:
                    gradient.send_host_copy()
            elif not sync:
                gradient.add_unsynced(grads, wanted)
            else:
                with self.wires.world.at(f"the reduce of group {group.name!r}"):
                    self._send(group, gradient, grads, wanted)
        arrivals.drop()
        return [group] if is_alone else landed

    def _send(self, group: Group, gradient: Gradient, grads: list[torch.Tensor | None], wanted: list[bool]) -> None:
        device = self.wires.world.device
        span = self.wires.ledger.events.begin("reduce", "wire", group.name, _full_bytes(gradient), device=device)
        accumulate = gradient.prepare_landing(wanted)
        finish: Callable[[], None] | None
        if gradient.whole is not None and gradient.numel == gradient.layout.numel:  # all ranks update all of it
            gradient.changed()
            gradient.fill(gradient.whole, grads, wanted)
            self.wires.feed(gradient.whole, self._lost.get(gradient))
            reduce = self.wires.reduce_everywhere(gradient.whole)
            finish = functools.partial(gradient.fold, accumulate=accumulate) if gradient.is_summed else None
        else:
            number: int | None = None
            buffer = gradient.whole
            if buffer is None:
                number, buffer, free = self._staging.take(gradient.layout.numel, gradient.dtype)
                free.wait()  # what it held has left
            gradient.fill(buffer, grads, wanted)
            if gradient.comes_up:
                self._wait_for(None)  # one landing place on the device at a time
            target = gradient.open_landing(accumulate=accumulate)
            self.wires.feed(buffer, self._lost.get(gradient))
            reduce = self.wires.reduce(buffer, target, accumulate=accumulate)
            finish = functools.partial(gradient.close_landing, target)
            if number is not None:
                self._staging.occupy(number, until=reduce)
        self._in_flight.append((group, reduce, finish, span))
        if gradient.tier is Tier.DISK:
            self._wait_for(None)  # updates of other groups may take the window that it lands in

    def wait(self) -> None:
        """Wait until every gradient that was sent has landed, and free the buffers."""
        self._wait_for(None)
        self._staging.give_back()

    def _wait_for(self, groups: list[Group] | None) -> None:
        """Wait until the gradients of these groups have landed; None: of all."""
        landing = [sent for sent in self._in_flight if groups is None or sent[0] in groups]
        self._in_flight = [sent for sent in self._in_flight if sent not in landing]
        for group, reduce, finish, _ in landing:
            with self.wires.world.at(f"the reduce of group {group.name!r}"):
                reduce.wait()
            if finish is not None:
                finish()
        for _, _, _, span in landing:
            self.wires.ledger.events.end(span, self.wires.world.device)


def _full_bytes(gradient: Gradient) -> int:
    return gradient.layout.numel * gradient.dtype.itemsize
