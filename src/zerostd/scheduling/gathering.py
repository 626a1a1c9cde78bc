"""Gather before use, release after, and start the next one ahead of time.

The order of groups is learnt by watching: for each group and phase, who came next last time. It is a prediction only: a
group that was not foretold is gathered when it is needed, one foretold wrongly is released at the end of the pass.
Prefetching moves the moment a gather starts and nothing else, so results do not depend on it. Ranks that go their own
ways would meet in different gathers: one that was not expected is confirmed by all ranks before it starts.
"""

from __future__ import annotations

import enum

from zerostd.communication import Control, Wires
from zerostd.errors import MisuseError
from zerostd.monitoring.events import Span
from zerostd.monitoring.loop_timer import LoopPhase, LoopTimer
from zerostd.parameters import Flat, Group, GroupState
from zerostd.tiers import Transfer, Uploader

__all__ = ["PREFETCH_DEPTH", "Gatherer", "Phase"]


PREFETCH_DEPTH = 1  # groups gathered ahead


class Phase(enum.Enum):
    """A pass over the model."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Gatherer:
    """Moves groups between RELEASED and GATHERED."""

    groups: tuple[Group, ...]
    sequence: list[str]  # groups whose gather was started since ranks last compared notes
    prefetch_depth: int  # groups started ahead; 0 gathers only on demand

    def __init__(self, groups: tuple[Group, ...], wires: Wires, control: Control, uploader: Uploader) -> None:
        self.groups = groups
        self.wires = wires
        self.uploader = uploader
        self.control = control
        self.events = wires.ledger.events
        self.timer = LoopTimer(wires.world.device, self.events)
        self.prefetch_depth = PREFETCH_DEPTH
        self.sequence = []
        self._num_trained = sum(len(flat.parameters) for group in groups for flat in group.trainable)
        self._next: dict[tuple[Phase, Group | None], Group] = {}
        self._last: dict[Phase, Group | None] = {phase: None for phase in Phase}
        self._gathers: dict[Group, Span | None] = {}  # under way, while events are recorded

    def need(self, group: Group, phase: Phase) -> None:
        """Return when `group` is gathered; those expected next are on their way then."""
        if not self._learn(group, phase) and group.state is GroupState.RELEASED and self.wires.world.size > 1:
            self.control.confirm(group.name, self._num_trained)
        self.timer.at(group.name)
        for needed in (group, *group.borrowed.values()):
            self.start(needed)
            self.finish(needed)
        ahead: Group | None = group
        for _ in range(self.prefetch_depth):
            ahead = self._next.get((phase, ahead))
            if ahead is None or self._would_block(ahead):
                break
            self.start(ahead)

    def start(self, group: Group) -> None:
        """Begin gathering a released group."""
        if group.state is not GroupState.RELEASED:
            return
        self.complete(group)
        self.sequence.append(group.name)
        self.wires.ledger.work_on(group.name)
        if self.events.is_on and self.wires.world.size > 1:
            size, device = sum(flat.full.nbytes for flat in group.flats), self.wires.world.device
            self._gathers[group] = self.events.begin("gather", "wire", group.name, size, device=device)
        with self.control.explain(f"the gather of group {group.name!r}"):
            for flat in group.flats:
                group.pending.append(self._start(flat, group.name))
        group.state = GroupState.GATHERING

    def _start(self, flat: Flat, name: str) -> Transfer:
        """From where it rests to the device, from there to all ranks."""
        flat.open()
        rank = self.wires.world.rank
        if self.wires.world.size == 1:
            return self.uploader.upload(flat.rest, flat.full, name)
        mine = flat.rest.tensor if flat.is_sharded else flat.full[flat.layout.shard(rank)]
        if mine is None or mine.device != flat.full.device:
            mine = flat.place(rank)
            self.uploader.upload(flat.rest, mine, name).wait()
        return self.wires.gather(flat.full, mine)

    def _would_block(self, group: Group) -> bool:
        """Whether starting it now would hold the host up for an update. Only a rank by itself may do as it likes:
        several must start their gathers in the same order."""
        return self.wires.world.size == 1 and not all(update.is_done() for update in group.updates)

    def complete(self, group: Group) -> None:
        """Return when the group's parameters are updated."""
        if not group.updates:
            return
        doing = self.timer.mark(LoopPhase.WAITING, "updates")
        for update in group.updates:
            update.wait()
        group.updates.clear()
        self.timer.mark(doing)

    def finish(self, group: Group) -> None:
        """Wait for a gather that was started; nothing to do for a gathered group."""
        if group.state is not GroupState.GATHERING:
            return
        self.complete(group)
        doing = self.timer.mark(LoopPhase.WAITING, "parameters")
        with self.control.explain(f"the gather of group {group.name!r}"):
            for pending in group.pending:
                pending.wait()
        group.pending.clear()
        self.events.end(self._gathers.pop(group, None), self.wires.world.device)
        for flat in group.flats:
            flat.show()
        group.state = GroupState.GATHERED
        self.timer.mark(doing)

    def release(self, group: Group) -> None:
        """Give a sharded group's memory back; one that rests gathered or that someone holds stays."""
        if not group.gives_back or group.num_pins or group.state is GroupState.RELEASED:
            return
        self.finish(group)
        self.wires.ledger.work_on(group.name)
        if self.events.is_on:
            size, device = sum(flat.full.nbytes for flat in group.flats), self.wires.world.device
            self.events.end(self.events.begin("release", "compute", group.name, size, device=device), device)
        for flat in group.flats:
            flat.hide()
        group.state = GroupState.RELEASED

    def renew(self, group: Group) -> None:
        """The update changes this rank's slice. If it rests elsewhere, the next use gathers it. If not, but ranks
        update slices of it, the other slices start coming in now. Parameters show NaN until all is there."""
        if group.num_pins:
            raise MisuseError("optimizer.step() inside zerostd.gathered(): leave the context before the step")
        if group.pending:
            self.finish(group)
        if group.gives_back:
            self.release(group)
        elif group.is_in_slices or group.updates:
            for flat in group.flats:
                flat.hide()
            group.state = GroupState.GATHERING
            if group.is_in_slices:
                group.state = GroupState.RELEASED
                self.start(group)

    def finish_all(self) -> None:
        """Wait for every gather in flight."""
        for group in self.groups:
            self.finish(group)

    def release_all(self) -> None:
        """End of a pass: whatever is still gathered goes."""
        for group in self.groups:
            group.in_backward = False
            group.num_inputs_awaited = None
            self.release(group)

    def begin(self, phase: Phase) -> None:
        """A pass begins: the next group needed is its first, and what was learnt to be first may start."""
        self._last[phase] = None
        first = self._next.get((phase, None))
        if first is not None and self.prefetch_depth:
            self.start(first)

    def in_forward_order(self) -> list[Group]:
        """Groups as the last forward needed them, those it did not need behind."""
        ordered: dict[Group, None] = {}
        group = self._next.get((Phase.FORWARD, None))
        while group is not None and group not in ordered:
            ordered[group] = None
            group = self._next.get((Phase.FORWARD, group))
        return [*ordered, *(group for group in self.groups if group not in ordered)]

    def _learn(self, group: Group, phase: Phase) -> bool:
        """Remember who came after whom; True if it was expected."""
        last = self._last[phase]
        if last is group:
            return True
        was_expected = self._next.get((phase, last)) is group
        self._next[phase, last] = group
        self._last[phase] = group
        return was_expected
