"""When groups are gathered and released: before use, after use, and the next one ahead of time.

Hooks say which group is needed in which pass; the group does the work. The order of groups is learnt by watching: for
each group and phase, who came next last time. It is a prediction only: a group that was not expected is gathered when
it is needed, one expected wrongly is released at the end of the pass. Results do not depend on it. Ranks that took
different branches would meet in different gathers, so all confirm a gather that was not expected before it starts.

[Note: short of device memory] A gather that does not fit is tried once more, after the device has done all its work and
its allocator has given back what it keeps. From then on groups are gathered when they are needed. A rank by itself
gives back at once what it gathered ahead; several take the same gathers in the same order, so they stop gathering ahead
together, when they agree next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from zerostd.communication import Control, Wires
from zerostd.errors import MisuseError
from zerostd.monitoring.events import LoopPhase, LoopTimer
from zerostd.monitoring.ledger import explain_out_of_memory
from zerostd.parameters import Flat, Group, GroupState
from zerostd.scheduling.turns import Turn

PREFETCH_DEPTH = 1  # groups gathered ahead

log = logging.getLogger("zerostd")


class Gatherer:
    """Decides when groups are gathered and released, and times the waiting."""

    def __init__(self, groups: tuple[Group, ...], wires: Wires, control: Control) -> None:
        self.groups = groups
        self.wires = wires
        self.control = control
        self.timer = LoopTimer(wires.world.device, wires.ledger.events)
        self.turn = Turn()  # to use the model
        self.prefetch_depth = PREFETCH_DEPTH  # groups started ahead; 0 gathers only on demand
        self.is_short = False  # of device memory: see [Note: short of device memory]
        self.sequence: list[str] = []  # groups whose gather was started since ranks last compared notes
        num_trained = sum(len(flat.parameters) for group in groups for flat in group.trainable)
        self.control.num_flags = num_trained + 1  # the last one: a rank is short of device memory
        self._next: dict[tuple[LoopPhase, Group | None], Group] = {}  # by phase and group; None: the first
        self._last: dict[LoopPhase, Group | None] = {}  # the group needed last, in forward and in backward
        self._kept: list[Group] = []  # that this forward leaves gathered, if it ends with them

    def need(self, group: Group, phase: LoopPhase) -> None:
        """Return when `group` and those it borrows are gathered; the groups expected next are on their way then."""
        if not self._learn(group, phase) and group.state is GroupState.RELEASED:
            self.control.confirm(f"the gather of group {group.name!r}")
        self.timer.at(group.name)
        for needed in group.needed:
            self.gather(needed)
        ahead: Group | None = group
        for _ in range(self.prefetch_depth):
            ahead = self._next.get((phase, ahead))
            if ahead is None:
                break
            # A rank by itself does not hold the host up for an update. Several start gathers in the same order.
            if self.wires.world.size == 1 and not all(update.is_done() for update in ahead.updates):
                break
            self.start_gather(ahead, is_ahead=True)

    def gather(self, group: Group) -> None:
        """Return when a group is gathered."""
        self.start_gather(group)
        self.wait_gather(group)

    def start_gather(self, group: Group, *, is_ahead: bool = False) -> None:
        """Start gathering a released group; nothing to do for others. A rank by itself leaves one that does not fit
        on the device, if nobody needs it yet."""
        if group.state is not GroupState.RELEASED:
            return
        self.wait_updates(group)
        self.sequence.append(group.name)
        with self.wires.world.at(f"the gather of group {group.name!r}"):
            try:
                group.start_gather()
            except torch.OutOfMemoryError:
                self._make_room(group)
                if is_ahead and self.wires.world.size == 1:
                    return
                with explain_out_of_memory(self.wires.ledger):
                    group.start_gather()

    def _make_room(self, group: Group) -> None:
        """Give back what can be given back on the device; see [Note: short of device memory]."""
        device = self.wires.world.device
        self.wires.ledger.retries.count("gathering", "out of device memory", f"group {group.name!r}")
        self.is_short = True
        if self.wires.world.size == 1:
            self.gather_on_demand()
            for other in self.groups:
                if other.state is GroupState.GATHERING and other.is_releasable and not other.num_pins:
                    self.release(other)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
            torch.accelerator.empty_cache()

    def gather_on_demand(self) -> None:
        """Gather nothing ahead of time any more: memory is short on some rank."""
        if self.prefetch_depth:
            log.warning("device memory is short: groups are gathered when they are needed, no longer ahead of time")
        self.prefetch_depth = 0

    def wait_gather(self, group: Group) -> None:
        """Wait for a gather that was started; nothing to do for others."""
        if group.state is not GroupState.GATHERING:
            return
        self.wait_updates(group)
        phase = self.timer.mark(LoopPhase.WAITING, "parameters")
        with self.wires.world.at(f"the gather of group {group.name!r}"):
            group.wait_gather()
        self.timer.mark(phase)

    def copy(self, group: Group) -> dict[Flat, torch.Tensor]:
        """Return a copy of a group's values. Every rank must call it, for the same group."""
        self.wait_updates(group)
        self.control.confirm(f"the gather of group {group.name!r}")
        with self.wires.world.at(f"the gather of group {group.name!r}"):
            return group.copy()

    def wait_updates(self, group: Group) -> None:
        """Wait until a group's parameters are updated."""
        if group.updates:
            phase = self.timer.mark(LoopPhase.WAITING, "updates")
            group.wait_updates()
            self.timer.mark(phase)

    def wait_all(self) -> None:
        """Wait for every gather in flight."""
        for group in self.groups:
            self.wait_gather(group)

    def release(self, group: Group) -> None:
        """Give a group's memory back; one that rests gathered or that someone holds stays."""
        if group.is_releasable:
            self.wait_gather(group)
            group.release()

    def end_use(self, group: Group) -> None:
        """Release a group that a forward used, unless the forward ends with it and backward begins with it."""
        is_over = self._next.get((LoopPhase.FORWARD, self._last.get(LoopPhase.FORWARD))) is None
        if not (is_over and group in self._kept):
            self.release(group)

    def release_all(self, *, is_backward: bool, but_kept: bool = False) -> None:
        """End a pass: release whatever is still gathered, but what backward begins with if `but_kept`."""
        for group in self.groups:
            group.end_pass(is_backward=is_backward)
            if but_kept:
                self.end_use(group)
            else:
                self.release(group)

    def renew(self, group: Group) -> None:
        """Let the next use see an update that was started. A group that rests elsewhere is gathered then. The other
        slices of one that rests here start coming in now."""
        self.check_unpinned([group])
        if group.gathers:
            self.wait_gather(group)
        if group.gives_back:
            self.release(group)
        elif group.is_in_slices or group.updates:
            group.expire()
            self.start_gather(group)

    def check_unpinned(self, groups: Iterable[Group]) -> None:
        """Raise if somebody holds the values of a group that is to be updated."""
        if any(group.num_pins for group in groups):
            raise MisuseError("optimizer.step() inside zerostd.gathered(): leave the context before the step")

    def begin(self, phase: LoopPhase) -> None:
        """Begin a pass: the next group needed is its first, and the one that was first last time may start."""
        self._last[phase] = None
        first = self._next.get((phase, None))
        if first is not None and self.prefetch_depth:
            self.start_gather(first, is_ahead=True)
        if phase is LoopPhase.FORWARD:
            self._kept = self._first_in_backward() if torch.is_grad_enabled() else []

    def _first_in_backward(self) -> list[Group]:
        """Return the groups that backward has gathered as soon as it begins: releasing them before saves no memory."""
        first: list[Group] = []
        group: Group | None = None
        for _ in range(1 + self.prefetch_depth):
            group = self._next.get((LoopPhase.BACKWARD, group))
            if group is None:
                break
            first.append(group)
        return first

    def in_forward_order(self) -> list[Group]:
        """Return groups as the last forward needed them, those it did not need behind."""
        ordered: dict[Group, None] = {}
        group = self._next.get((LoopPhase.FORWARD, None))
        while group is not None and group not in ordered:
            ordered[group] = None
            group = self._next.get((LoopPhase.FORWARD, group))
        return [*ordered, *(group for group in self.groups if group not in ordered)]

    def _learn(self, group: Group, phase: LoopPhase) -> bool:
        """Remember who came after whom; True if it was expected."""
        last = self._last.get(phase)
        if last is group:
            return True
        was_expected = self._next.get((phase, last)) is group
        self._next[phase, last] = group
        self._last[phase] = group
        return was_expected
