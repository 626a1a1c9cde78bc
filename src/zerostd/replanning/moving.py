"""Another plan during training: in each step, states of a few groups move to other homes, so no step waits for
gigabytes. Parameters do not move. No value changes by a bit.

    beginning     gradients go to their new tiers, if the device then holds fewer bytes of them. A thread allocates
                  memory off the device for activations, and for the groups that move first
    each step     their states go straight from the old place to the new one. The thread frees the old memory, and
                  allocates for the groups that move next: as many as the measured rate allows
    end           gradients go to their new tiers, if they have not yet. Groups handle their activations as the new plan
                  says

A good moment is the beginning of backward. Forward has needed all parameters, so their updates are done, and nothing
has to be waited for. Before a forward, a group's update may not even have begun. But while a group moves, its states
are on the device twice. If there is no room for that beside activations, it moves before the next forward.

All gradients move at once, between two steps, when they have no values. If they moved group by group, the device would
hold gradients of some groups and buffers for those of others: more than under either plan.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from zerostd.engine.runtime import Resources, Runtime
from zerostd.engine.settings import Settings
from zerostd.errors import MisuseError
from zerostd.optimizers.states import replace_states, take_states
from zerostd.planning import Plan
from zerostd.policy import Kind, Tier, Way
from zerostd.preparing.building import begin_backward_updates, make_offload_updater
from zerostd.preparing.groups import move_flat, reserve_states
from zerostd.preparing.options import ways_for
from zerostd.replanning.changes import FlatChange, find_changes, gradients_off, in_order, obeying, speculates
from zerostd.tiers import Done, Transfer, Worker

FIRST_RATE = 5e9  # bytes/s, that states are expected to move at before any have


def move(runtime: Runtime, plan: Plan) -> list[str]:
    """Obey another plan from the next step on, and return the names of the groups that moved. Every rank must call it,
    between two backward passes; where gradients move, after optimizer.zero_grad()."""
    change = HomeMove(runtime, plan)
    change.move_all()
    change.finish()
    return change.names


class HomeMove:
    """A change of plan that is under way. Every rank makes the same one, and advances it in the same steps: before a
    forward or before a backward."""

    def __init__(self, runtime: Runtime, plan: Plan, seconds: float = math.inf) -> None:
        settings = obeying(runtime, plan)
        self._seconds = seconds  # that moving may take of one step: the same on all ranks
        self.most_bytes = FIRST_RATE * seconds  # that move at once
        self._byte_s = 0.0  # that a byte took, of those that moved last
        self._runtime = runtime
        self._limits = plan.limits
        changes, self._come_back = find_changes(runtime, settings)
        for change in changes:
            if change.flat.rest.tier is not change.wanted.parameters:
                raise MisuseError(
                    f"the new plan has the parameters of {change.wanted.owner!r} on the "
                    f"{change.wanted.parameters.value}, but they are on the {change.flat.rest.tier.value}: only states "
                    "and gradients can move during training"
                )
        self._gradients = [replace(each, moves_states=False) for each in changes if each.moves_gradient]  # at once
        self._next: list[FlatChange] = []  # whose memory is being taken
        self._check()
        held = Counter(runtime.ledger.held)
        held.update({} if self._come_back else gradients_off(changes))
        changes = [change for change in changes if not change.has_moved(speculates=speculates(settings))]
        order, _ = in_order([change.sizes for change in changes], held, plan.limits)
        self._left = [changes[index] for index in order]
        self.is_late = False  # there was no room to move in the last backward
        self._taken: Transfer = Done()
        has_kernels = runtime.world.size > 1 and runtime.world.device.type != "cpu"
        self._is_aside = not has_kernels  # pinning memory while collectives wait for each other can hold them up
        self._ways: dict[str, Way] | None = None  # what groups do with activations in the end; None: as before
        self._worker = Worker("the memory of states that move", runtime.world.device)
        moving = {id(change.group): change.group.name for change in (*self._gradients, *self._left)}
        self.names = [moving[id(group)] for group in runtime.groups if id(group) in moving]
        self._obey(settings)

    def _obey(self, settings: Settings) -> None:
        """Let updates begin as the new plan says. Until all has moved, each group handles its activations in the old or
        the new way, whichever takes less of the device, because states move first."""
        runtime = self._runtime
        names = [group.name for group in runtime.groups]
        before = ways_for(runtime.settings, names)
        runtime.settings = settings
        if settings.plan is not None and settings.plan.activations:
            self._ways = ways_for(settings, names)
            between = {name: max(before[name], way, key=_spared) for name, way in self._ways.items()}
            # A group that has most of all may take more if it is recomputed: its inputs, and all the rest at once.
            runtime.backward.activations.change(min((between, before), key=self._activation_bytes))
            if any(way.tier is Tier.HOST for way in self._ways.values()):
                pool = runtime.backward.activations.offloader.copies.pools[Tier.HOST]
                num_bytes = settings.plan.predicted.bytes.get(Tier.HOST, {}).get(Kind.ACTIVATIONS, 0)
                self._do_aside(partial(pool.grow_to, num_bytes))
        wanted = [change.wanted for change in (*self._left, *self._gradients)]
        tiers = {part.tier for plan in wanted for part in plan.portions} | {plan.gradients for plan in wanted}
        allocator = runtime.resources.allocator
        if Tier.DISK in tiers:
            allocator.open_disk(settings.budget, runtime.world.local_size)
        self._renew()

    def _activation_bytes(self, ways: Mapping[str, Way]) -> int:
        """Handle activations in these ways, and return the bytes of the device that they take, as counted."""
        activations = self._runtime.backward.activations
        activations.change(ways)
        return activations.counted().total

    def _check(self) -> None:
        runtime = self._runtime
        if runtime.optimizer is None:
            raise MisuseError("the plan cannot change without the optimizer: pass it to prepare")
        has_gradients = any(trained.parameter.grad is not None for trained in runtime.backward.trained)
        has_begun = runtime.gradients.locked is not None  # updates, inside backward
        moves_gradients = any(change.moves_gradient for change in (*self._gradients, *self._next))
        if runtime.backward.is_running or (has_gradients and (moves_gradients or has_begun)):
            raise MisuseError("the plan cannot change while there are gradients: call optimizer.zero_grad() first")

    @property
    def is_done(self) -> bool:
        """Whether everything has moved: `finish` is next."""
        return not self._left and not self._next and not self._gradients

    def take_ahead(self) -> None:
        """Let a thread allocate memory for the flats that move next, up to `most_bytes` or the limits; at least one. Or
        for all gradients, which come first or last."""
        if self._gradients and not (self._come_back and self._left):
            self._next = self._gradients
            self._gradients = []
            self._taken = self._do_aside(partial(_make_gradients, self._next, self._runtime.resources))
            return
        total = 0
        held = Counter(self._runtime.ledger.held)
        while self._left:
            taken, _ = self._left[0].sizes
            held.update(taken)
            total += self._left[0].num_bytes
            passes = total > self.most_bytes or any(held[tier] > self._limits.get(tier, math.inf) for tier in taken)
            if self._next and passes:
                break
            self._next.append(self._left.pop(0))
        taking = list(self._next)
        allocator = self._runtime.resources.allocator

        def take() -> None:
            for change in taking:
                change.arenas = reserve_states(change.wanted, allocator)

        self._taken = self._do_aside(take) if taking else Done()

    def _do_aside(self, job: Callable[[], None]) -> Transfer:
        """Do a job in the thread, after those before it, or here where a thread could hold up collectives."""
        if self._is_aside:
            return self._worker.submit(job)
        job()
        return Done()

    def move_all(self) -> None:
        """Move everything that is left."""
        self.most_bytes = math.inf
        while not self.is_done:
            self.advance()

    @torch.no_grad()
    def advance(self, room: float = math.inf, *, waits: bool = True) -> int:
        """Move the groups whose memory was taken, and return the number of bytes of states. Then take memory for those
        that are next. Nothing moves that needs more bytes of the device than `room` for a moment, nor, unless it
        `waits`, as long as memory is being taken."""
        self._check()
        if not waits and not self._taken.is_done():
            return 0
        if not self._next:
            self.take_ahead()
        begun_s = time.perf_counter()
        self._taken.wait()
        states = [change for change in self._next if change.moves_states]
        self.is_late = max((change.num_twice for change in states), default=0) > room
        if self.is_late:
            return 0
        for change in states:
            self._move(change)
        if not states:
            for change in self._next:
                change.move_gradient(self._runtime.resources)
            self._runtime.resources.staging.empty()  # fewer gradients may pass from now on, or none
        self._next = []
        self._renew()
        num_bytes = sum(change.num_bytes for change in states)
        self._byte_s = (time.perf_counter() - begun_s) / num_bytes if num_bytes else 0.0
        if not self.is_done:
            self.take_ahead()
        return num_bytes

    def keep_pace(self) -> None:
        """Move what had no room in backward. Let as many bytes move from now on as the slowest rank can in the seconds
        that there are. All ranks call it together, before a forward."""
        if self.is_late:  # now there are no activations
            self.advance()
        slowest_s: float = max(self._runtime.gatherer.control.collect(self._byte_s))
        if slowest_s:
            self.most_bytes = self._seconds / slowest_s

    def finish(self) -> None:
        """Let groups handle their activations as the new plan says, when everything has moved; before a forward."""
        if self._is_aside:
            self._worker.drain()
        if self._ways is not None:
            self._runtime.backward.activations.change(self._ways)
            self._runtime.hooks.renew()

    def _move(self, change: FlatChange) -> None:
        optimizer = self._runtime.optimizer
        assert optimizer is not None
        updater = optimizer.updater
        change.group.wait_updates()
        change.group.wait_readers()
        change.group.commit_edits()
        if updater.offload is not None and any(shard.tier is Tier.DISK for shard in change.flat.state_shards):
            updater.offload.drain()  # what was updated is still being written
        for shard in change.flat.state_shards:
            shard.wait_landed()
        states = take_states(updater, change.flat)
        give_back = move_flat(change.flat, change.with_gradient_as_now, self._runtime.resources, change.arenas)
        replace_states(updater, change.flat, states)
        del states
        self._do_aside(give_back)

    def _renew(self) -> None:
        """Let updates and hooks follow the flats that moved."""
        runtime = self._runtime
        optimizer = runtime.optimizer
        assert optimizer is not None
        updater = optimizer.updater
        offload = updater.offload
        if offload is None:
            offload = make_offload_updater(runtime, updater.inner)
        else:
            offload.follow(runtime.groups)
        is_over = offload is not None and not offload.updaters
        updater.moved(None if is_over else offload)
        begin_backward_updates(runtime, optimizer)
        if offload is not None and is_over:
            offload.close()
        runtime.hooks.renew()
        runtime.backward.order_is_learnt = False


def _make_gradients(changes: Sequence[FlatChange], resources: Resources) -> None:
    """Make new gradients, beside a step: not those on disk, whose windows the step uses."""
    for change in changes:
        if change.wanted.gradients is not Tier.DISK:
            change.make_gradient(resources)


def _spared(way: Way) -> int:
    """Return a rank of the way to handle activations: higher takes less of the device."""
    return 2 if way.tier is not Tier.DEVICE else 1 if way.recomputes else 0
