"""Gathering: groups are gathered before use, released after it, and the next ones are gathered ahead of time.

Hooks say which group is needed in which pass; the group does the work. The order of groups is only a prediction
(order.py): an unexpected group is gathered when it is needed, one expected wrongly is released at the end of the pass.
Results do not depend on the prediction. Ranks that took different branches would meet in different gathers, so all
ranks confirm an unexpected gather before it starts.

[Note: how far ahead] The bytes that are planned for buffers are those of the `NUM_NEIGHBOURS` largest neighbours.
Groups are gathered as far ahead as fits into these bytes, beside the group that computes and the one before it, which
in backward awaits its last gradients. Of equal groups that is the next one. Of small groups in a model with large ones
it is several, so the latency of a wire is paid once for all of them.

[Note: streaming] In a forward without gradients, in a world of one, the link has nothing else to carry. So copies enter
its stream at once, where they wait for events and never for the host. No group awaits gradients, so of equal groups two
are on their way while one computes. The first groups of the next forward follow the last group and stay gathered until
then. So a loop that generates tokens keeps the link busy while it waits for each token.

[Note: short of device memory] A gather that does not fit is tried once more, after the device has done all its work and
its allocator has given back what it keeps. From then on groups are gathered when they are needed. A single rank frees
prefetched groups at once. Several ranks must make the same gathers in the same order, so they stop prefetching
together, at their next agreement.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence

import torch

from zerostd.communication import Control, Wires
from zerostd.compat import is_traced
from zerostd.errors import MisuseError
from zerostd.monitoring.events import LoopPhase, LoopTimer
from zerostd.monitoring.ledger import explain_out_of_memory
from zerostd.parameters import Flat, Group, GroupState
from zerostd.scheduling.order import GroupOrder
from zerostd.scheduling.turns import Turn

NUM_NEIGHBOURS = 3  # groups whose buffers are counted: see [Note: how far ahead]
FARTHEST = 64  # groups that are looked at ahead: those that stay on the device have no buffers

log = logging.getLogger("zerostd")


def largest_neighbours(sizes: Sequence[int], *, repeats: bool) -> int:
    """Return the bytes of the largest neighbours, from those of each group but the root; groups without buffers are
    passed over. With `repeats`, the first groups come again after the last."""
    sizes = [size for size in sizes if size]
    if repeats:
        sizes += sizes[: min(len(sizes), NUM_NEIGHBOURS) - 1]
    return max((sum(sizes[start : start + NUM_NEIGHBOURS]) for start in range(len(sizes))), default=0)


class Gatherer:
    """Decides when groups are gathered and released, and times the waiting."""

    def __init__(self, groups: tuple[Group, ...], wires: Wires, control: Control) -> None:
        self.groups = groups
        self.wires = wires
        self.control = control
        self.timer = LoopTimer(wires.world.device, wires.ledger.events)
        self.turn = Turn()  # to use the model
        self.gathers_ahead = True  # False: only on demand
        self.is_short = False  # of device memory: see [Note: short of device memory]
        self.sequence: list[str] = []  # groups whose gather was started since ranks last compared notes
        num_trained = sum(len(flat.parameters) for group in groups for flat in group.trainable)
        self.control.num_flags = num_trained + 1  # the last one: a rank is short of device memory
        self.order = GroupOrder()
        self._held: dict[Group, None] = {}  # groups whose buffers were allocated here, and not freed
        sizes = [group.gathered_bytes for group in groups[1:]]
        # Bytes of buffers, while streaming or not: see [Note: how far ahead].
        self._room = {repeats: largest_neighbours(sizes, repeats=repeats) for repeats in (False, True)}
        # Else groups are always there, and none is gathered ahead. (A model that sleeps runs no forward.)
        self._moves = any(group.gives_back or group.is_in_slices for group in groups)
        self._kept: list[Group] = []  # that this forward leaves gathered, if it ends with them
        self._is_streaming = False  # see [Note: streaming]
        self._stream: torch.Stream | None = None  # of the last forward: groups that it left were gathered there

    def need(self, group: Group, phase: LoopPhase) -> None:
        """Return when `group` and those it borrows are gathered; by then, the groups expected next are on their way."""
        if not self.order.learn(group, phase) and group.state is GroupState.RELEASED:
            self.control.confirm(f"the gather of group {group.name!r}")
        self.timer.at(group.name)
        for needed in group.needed:
            self.gather(needed)
        for ahead in self._ahead(group, phase) if self._moves else ():
            # A rank by itself does not hold the host up for an update. Several start gathers in the same order.
            if self.wires.is_alone and not all(update.is_done() for update in ahead.updates):
                break
            self.start_gather(ahead, is_ahead=True)

    def _ahead(self, group: Group, phase: LoopPhase) -> Iterator[Group]:
        """Yield the groups that are expected after `group`: the next one, and more if there is room for them. See
        [Note: how far ahead]. Streaming continues with the next forward."""
        held = [each for each in self._held if each.state is not GroupState.RELEASED]
        room = self._room[self._is_streaming] - sum(each.gathered_bytes for each in held)
        if not self._is_streaming and self.order.before not in held:
            room -= (self.order.before or group).gathered_bytes
        is_any_ahead = any(each.state is GroupState.GATHERING for each in held)  # else there is room for one
        following = self.order.after(group, phase, repeats=self._is_streaming)
        for ahead in itertools.islice(following, FARTHEST if self._room[True] else 1):
            if not self.gathers_ahead:
                return
            if ahead not in held and ahead.gives_back:
                room -= ahead.gathered_bytes
                if room < 0 and is_any_ahead:
                    return
                is_any_ahead = True
            yield ahead

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
        if group.gives_back:
            self._held[group] = None

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
        if self.gathers_ahead:
            log.warning("device memory is short: groups are now gathered when they are needed, not ahead of time")
        self.gathers_ahead = False

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
            self._held.pop(group, None)

    def end_use(self, group: Group) -> None:
        """Release a group that a forward used, unless the forward ends with it and backward begins with it."""
        if not (group in self._kept and self.order.is_over()):
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
        self.order.begin(phase)
        self._is_streaming = phase is LoopPhase.FORWARD and not torch.is_grad_enabled() and self.wires.world.size == 1
        if phase is LoopPhase.FORWARD:
            self._begin_forward()
        first = self.order.first(phase)
        if first is not None and self.gathers_ahead:
            self.start_gather(first, is_ahead=True)

    def _begin_forward(self) -> None:
        device = self.wires.world.device
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        if stream != self._stream:  # memory belongs to the stream that it was taken in
            self.drop_kept(self.groups)
        self._stream = stream
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
        first = self.order.first(phase)
        return [] if first is None else [first, *self._ahead(first, phase)]
