"""Gathering: groups are gathered before use, released after it, and the next group is gathered ahead of time.

Hooks say which group is needed in which pass; the group does the work. The order of groups is learnt by watching: for
each group and phase, who came next last time. The order is only a prediction: an unexpected group is gathered when it
is needed, one expected wrongly is released at the end of the pass. Results do not depend on the prediction. Ranks that
took different branches would meet in different gathers, so all ranks confirm an unexpected gather before it starts.

[Note: streaming] In a forward without gradients, in a world of one, the link has nothing else to carry. So copies enter
its stream at once, where they wait for events and never for the host. Two groups are on their way while one computes.
The first groups of the next forward follow the last group and stay gathered until then. So a loop that generates tokens
keeps the link busy while it waits for each token.

[Note: short of device memory] A gather that does not fit is tried once more, after the device has done all its work and
its allocator has given back what it keeps. From then on groups are gathered when they are needed. A single rank frees
prefetched groups at once. Several ranks must make the same gathers in the same order, so they stop prefetching
together, at their next agreement.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch

from zerostd.communication import Control, Wires
from zerostd.compat import is_traced
from zerostd.errors import MisuseError
from zerostd.monitoring.events import LoopPhase, LoopTimer
from zerostd.monitoring.ledger import explain_out_of_memory
from zerostd.parameters import Flat, Group, GroupState
from zerostd.scheduling.turns import Turn

PREFETCH_DEPTH = 1  # groups gathered ahead
STREAM_DEPTH = 2  # the same in a forward without gradients, see [Note: streaming]

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
        self._is_streaming = False  # see [Note: streaming]
        self._stream: torch.Stream | None = None  # of the last forward: groups that it left were gathered there

    def need(self, group: Group, phase: LoopPhase) -> None:
        """Return when `group` and those it borrows are gathered; by then, the groups expected next are on their way."""
        if not self._learn(group, phase) and group.state is GroupState.RELEASED:
            self.control.confirm(f"the gather of group {group.name!r}")
        self.timer.at(group.name)
        for needed in group.needed:
            self.gather(needed)
        for ahead in self._stream_ahead(group) if self._is_streaming else self._ahead(group, phase):
            # A rank by itself does not hold the host up for an update. Several start gathers in the same order.
            if self.wires.is_alone and not all(update.is_done() for update in ahead.updates):
                break
            self.start_gather(ahead, is_ahead=True)

    def _ahead(self, group: Group | None, phase: LoopPhase) -> Iterator[Group]:
        """Yield the groups that are expected next."""
        for _ in range(self.prefetch_depth):
            group = self._next.get((phase, group))
            if group is None:
                return
            yield group

    def _stream_ahead(self, group: Group | None) -> Iterator[Group]:
        """Yield the groups to come that are not gathered, in this forward and then in the next one."""
        current = group
        num_left = STREAM_DEPTH if self.prefetch_depth else 0
        for _ in self.groups:
            group = self._next.get((LoopPhase.FORWARD, group)) or self._next.get((LoopPhase.FORWARD, None))
            if group is None or group is current or not num_left:
                return
            if group.state is not GroupState.GATHERED:
                num_left -= 1
                yield group

    def gather(self, group: Group) -> None:
        """Return when a group is gathered."""
        self.start_gather(group)
        self.wait_gather(group)

    def start_gather(self, group: Group, *, is_ahead: bool = False) -> None:
        """Start gathering a released group; nothing to do for others. A single rank skips a group that does not fit on
        the device, if it is not needed yet."""
        if group.state is not GroupState.RELEASED:
            return
        if group.gives_back and is_traced():
            raise MisuseError(
                f"torch.jit.trace or torch.export of a model whose parameters are sharded (stage 3) or off the device "
                f"would keep the memory of group {group.name!r}, which is given back: trace another model that has "
                "loaded zerostd.full_state_dict(model), or zerostd.release the model first"
            )
        self.wait_updates(group)
        self.sequence.append(group.name)
        with self.wires.world.at(group.gather_name):
            try:
                group.start_gather(at_once=self._is_streaming)
            except torch.OutOfMemoryError:
                self._make_room(group)
                if is_ahead and self.wires.world.size == 1:
                    return
                with explain_out_of_memory(self.wires.ledger):
                    group.start_gather(at_once=self._is_streaming)

    def _make_room(self, group: Group) -> None:
        """Free everything that can be freed on the device; see [Note: short of device memory]."""
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
            log.warning("device memory is short: groups are now gathered when they are needed, not ahead of time")
        self.prefetch_depth = 0

    def wait_gather(self, group: Group) -> None:
        """Wait for a gather that was started; nothing to do for others."""
        if group.state is not GroupState.GATHERING:
            return
        self.wait_updates(group)
        phase = self.timer.mark(LoopPhase.WAITING, "parameters")
        with self.wires.world.at(group.gather_name):
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

    def wait_all(self, *, on_host: bool = False) -> None:
        """Let the stream wait for every gather in flight. With `on_host`, the host waits too, so the parameters' home
        may be written."""
        for group in self.groups:
            self.wait_gather(group)
        device = self.wires.world.device
        if on_host and device.type != "cpu":
            torch.accelerator.synchronize(device)

    def release(self, group: Group) -> None:
        """Free a group's memory, unless the group is kept gathered or someone holds it."""
        if group.is_releasable:
            self.wait_gather(group)
            group.release()

    def end_use(self, group: Group) -> None:
        """Release a group that a forward used, unless the forward ends with it and backward begins with it."""
        is_over = self._next.get((LoopPhase.FORWARD, self._last.get(LoopPhase.FORWARD))) is None
        if not (is_over and group in self._kept):
            self.release(group)

    def release_all(self, *, is_backward: bool, but_kept: bool = False) -> None:
        """End a pass: release all gathered groups; with `but_kept`, except those with which backward begins."""
        for group in self.groups:
            group.end_pass(is_backward=is_backward)
            if but_kept:
                self.end_use(group)
            else:
                self.release(group)

    def renew(self, group: Group) -> None:
        """Let the next use see an update that was started. A group that is kept elsewhere is gathered then. A group
        that is kept here starts to receive the other ranks' slices now."""
        self.check_unpinned([group])
        group.drop_secondary()
        if group.gathers:
            self.wait_gather(group)
        if group.gives_back:
            self.release(group)
        elif group.is_in_slices or group.updates:
            group.expire()
            self.start_gather(group)

    def check_unpinned(self, groups: Iterable[Group]) -> None:
        """Raise if the values of a group to be updated are held."""
        if any(group.num_pins for group in groups):
            raise MisuseError("optimizer.step() inside zerostd.gathered(): leave the context before the step")

    def begin(self, phase: LoopPhase) -> None:
        """Begin a pass. Prefetch the group that was first in the last such pass."""
        self._last[phase] = None
        self._is_streaming = False
        if phase is LoopPhase.FORWARD:
            self._begin_forward()
        first = self._next.get((phase, None))
        if first is not None and self.prefetch_depth:
            self.start_gather(first, is_ahead=True)

    def _begin_forward(self) -> None:
        device = self.wires.world.device
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        if stream != self._stream:  # memory belongs to the stream that it was taken in
            self.drop_kept(self.groups)
        self._stream = stream
        self._is_streaming = not torch.is_grad_enabled() and self.wires.world.size == 1
        # What the pass behind this one has gathered as soon as it begins: releasing it before saves no memory.
        self._kept = self._first_in(LoopPhase.FORWARD if self._is_streaming else LoopPhase.BACKWARD)
        if not (self._is_streaming or torch.is_grad_enabled()):
            self._kept = []

    def drop_kept(self, groups: Iterable[Group]) -> None:
        """Release what a forward has left gathered for the next one."""
        for group in groups:
            if group.is_releasable and not group.in_backward:
                for gather in group.gathers:
                    gather.synchronize()
                self.release(group)

    def _first_in(self, phase: LoopPhase) -> list[Group]:
        """Return the groups that are gathered when a pass begins."""
        first: list[Group] = []
        group: Group | None = None
        for _ in range(1 + (STREAM_DEPTH if self._is_streaming and self.prefetch_depth else self.prefetch_depth)):
            group = self._next.get((phase, group))
            if group is None:
                break
            first.append(group)
        return first

    def in_forward_order(self) -> list[Group]:
        """Return groups in the order of the last forward, followed by those that it did not need."""
        ordered: dict[Group, None] = {}
        group = self._next.get((LoopPhase.FORWARD, None))
        while group is not None and group not in ordered:
            ordered[group] = None
            group = self._next.get((LoopPhase.FORWARD, group))
        return [*ordered, *(group for group in self.groups if group not in ordered)]

    def _learn(self, group: Group, phase: LoopPhase) -> bool:
        """Remember which group followed which; True if it was expected."""
        last = self._last.get(phase)
        if last is group:
            return True
        was_expected = self._next.get((phase, last)) is group
        self._next[phase, last] = group
        self._last[phase] = group
        return was_expected
