"""Another plan during training: in each step, states and gradients of a few groups move to other homes, so no step
waits for gigabytes. Parameters do not move. No value changes by a bit.

    beginning     a thread allocates memory off the device for the groups that move first
    each step     their states go straight from the old place to the new one. The thread frees the old memory, and
                  allocates for the groups that move next: as many as the measured rate allows
    end           groups handle their activations as the new plan says, before a forward

A good moment is the beginning of backward. Forward has needed all parameters, so their updates are done, and nothing
has to be waited for. Before a forward, a group's update may not even have begun.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zerostd.engine.runtime import Runtime
from zerostd.engine.settings import Settings
from zerostd.errors import MisuseError
from zerostd.optimizers.states import replace_states, take_states
from zerostd.parameters import Flat, Group
from zerostd.parameters.blueprints import sizes_of
from zerostd.parameters.state_shard import StateShard
from zerostd.planning import Plan
from zerostd.policy import Kind, Tier, Way
from zerostd.preparing.building import begin_backward_updates, make_offload_updater
from zerostd.preparing.groups import Arenas, move_flat, reserve_states
from zerostd.preparing.homes import FlatPlan, plan_flats
from zerostd.preparing.options import check_world, rules_for, ways_for
from zerostd.sharding import Portion
from zerostd.tiers import Done, Transfer, Worker

FIRST_RATE = 5e9  # bytes/s, that states are expected to move at before any have


def move(runtime: Runtime, plan: Plan) -> list[str]:
    """Obey another plan from the next step on, and return the names of the groups that moved. Every rank must call it,
    between two backward passes; where gradients move, after optimizer.zero_grad()."""
    change = HomeMove(runtime, plan)
    change.move_all()
    change.finish()
    return change.names


@dataclass(eq=False)
class _Change:
    """A flat that moves."""

    group: Group
    flat: Flat
    before: FlatPlan
    wanted: FlatPlan
    arenas: Arenas = field(default_factory=dict)  # its memory off the device, once that is taken

    @property
    def num_bytes(self) -> int:
        """Bytes of states that it will hold."""
        return sum(size for (_, kind), size in self.wanted.demand().items() if kind is Kind.OPTIMIZER_STATES)

    @property
    def sizes(self) -> tuple[Counter[Tier], Counter[Tier]]:
        """Bytes of states off the device that it takes, and then gives back."""
        return _states_off(self.wanted), _states_off(self.before)


def can_move(runtime: Runtime, plan: Plan) -> bool:
    """Return whether states can move to another plan and back, flat by flat, inside its limits of host and disk. A flat
    that moves exists twice for a moment."""
    sizes = [change.sizes for change in _changes(runtime, _obeying(runtime, plan))]
    held = Counter(runtime.ledger.held)
    _, goes = _in_order(sizes, held, plan.limits)
    for taken, given in sizes:
        held.update(taken)
        held.subtract(given)
    _, comes_back = _in_order([(given, taken) for taken, given in reversed(sizes)], held, plan.limits)
    return goes and comes_back


def _obeying(runtime: Runtime, plan: Plan) -> Settings:
    settings = runtime.settings.obeying(plan, sizes_of(runtime.blueprints))
    check_world(settings, runtime.world)
    return settings


def _changes(runtime: Runtime, settings: Settings) -> list[_Change]:
    """Return the flats that move, those that leave the device first."""
    plans = [
        plan_flats(runtime.blueprints, rules_for(each, runtime.world, runtime.blueprints))
        for each in (runtime.settings, settings)
    ]
    speculates = settings.plan is not None and settings.plan.speculate
    changes = [
        _Change(group, flat, before, wanted)
        for group, old, new in zip(runtime.groups, *plans, strict=True)
        for flat, before, wanted in zip(group.flats, old, new, strict=True)
        if not _is_as(flat, wanted, speculates=speculates)
    ]
    return sorted(changes, key=_growth_on_device)


def _in_order(
    sizes: Sequence[tuple[Counter[Tier], Counter[Tier]]], held: Counter[Tier], limits: Mapping[Tier, int]
) -> tuple[list[int], bool]:
    """Return an order in which bytes are taken and then given back without passing the limits, as far as there is one;
    and whether there is."""
    held = Counter(held)
    left = list(range(len(sizes)))
    order: list[int] = []
    while left:
        for index in left:
            taken, given = sizes[index]
            if all(held[tier] + size <= limits.get(tier, math.inf) for tier, size in taken.items()):
                break
        else:
            return [*order, *left], False
        left.remove(index)
        order.append(index)
        held.update(taken)
        held.subtract(given)
    return order, True


class HomeMove:
    """A change of plan that is under way. Every rank makes the same one, and advances it in the same steps: before a
    forward or before a backward."""

    def __init__(self, runtime: Runtime, plan: Plan, seconds: float = math.inf) -> None:
        settings = _obeying(runtime, plan)
        self._seconds = seconds  # that moving may take of one step: the same on all ranks
        self.most_bytes = FIRST_RATE * seconds  # that move at once
        self._byte_s = 0.0  # that a byte took, of those that moved last
        self._runtime = runtime
        self._limits = plan.limits
        changes = _changes(runtime, settings)
        order, _ = _in_order([change.sizes for change in changes], runtime.ledger.held, plan.limits)
        self._left = [changes[index] for index in order]
        for change in self._left:
            if change.flat.rest.tier is not change.wanted.parameters:
                raise MisuseError(
                    f"the new plan has the parameters of {change.wanted.owner!r} on the "
                    f"{change.wanted.parameters.value}, but they are on the {change.flat.rest.tier.value}: only states "
                    "and gradients can move during training"
                )
        self._moves_gradients = any(_moves_gradient(change.flat, change.wanted) for change in self._left)
        self._check()
        self._next: list[_Change] = []  # whose memory is being taken
        self._taken: Transfer = Done()
        has_kernels = runtime.world.size > 1 and runtime.world.device.type != "cpu"
        self._is_aside = not has_kernels  # pinning memory while collectives wait for each other can hold them up
        self._ways: dict[str, Way] | None = None  # what groups do with activations in the end; None: as before
        self._worker = Worker("the memory of states that move", runtime.world.device)
        self.names = list(dict.fromkeys(change.group.name for change in self._left))  # of groups that move
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
        wanted = [change.wanted for change in self._left]
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
        if runtime.backward.is_running or (has_gradients and (self._moves_gradients or has_begun)):
            raise MisuseError("the plan cannot change while there are gradients: call optimizer.zero_grad() first")

    @property
    def is_done(self) -> bool:
        """Whether all states have moved: `finish` is next."""
        return not self._left and not self._next

    def take_ahead(self) -> None:
        """Let a thread allocate memory for the flats that move next, up to `most_bytes` or the limits; at least one."""
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
    def advance(self) -> int:
        """Move the groups whose memory was taken, and return the number of bytes. Then take memory for those that are
        next."""
        self._check()
        if not self._next:
            self.take_ahead()
        begun_s = time.perf_counter()
        self._taken.wait()
        moving = self._next
        self._next = []
        for change in moving:
            self._move(change)
        self._renew()
        num_bytes = sum(change.num_bytes for change in moving)
        self._byte_s = (time.perf_counter() - begun_s) / num_bytes if num_bytes else 0.0
        if self._left:
            self.take_ahead()
        return num_bytes

    def keep_pace(self) -> None:
        """Let as many bytes move from now on as the slowest rank can in the seconds that there are. All ranks call it
        together, between two moves."""
        slowest_s: float = max(self._runtime.gatherer.control.collect(self._byte_s))
        if slowest_s:
            self.most_bytes = self._seconds / slowest_s

    def finish(self) -> None:
        """Let groups handle their activations as the new plan says, when all states have moved; before a forward."""
        if self._is_aside:
            self._worker.drain()
        if self._ways is not None:
            self._runtime.backward.activations.change(self._ways)
            self._runtime.hooks.renew()

    def _move(self, change: _Change) -> None:
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
        give_back = move_flat(change.flat, change.wanted, self._runtime.resources, change.arenas)
        replace_states(updater, change.flat, states)
        del states
        self._do_aside(give_back)

    def _renew(self) -> None:
        """Let updates and hooks follow the flats that moved."""
        runtime = self._runtime
        optimizer = runtime.optimizer
        assert optimizer is not None
        updater = optimizer.updater
        if self._moves_gradients:
            runtime.resources.staging.empty()  # fewer gradients may pass from now on, or none
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


def _states_off(plan: FlatPlan) -> Counter[Tier]:
    """Return the bytes of states that a flat has off the device."""
    sizes = plan.demand().items()
    return Counter(
        {tier: size for (tier, kind), size in sizes if kind is Kind.OPTIMIZER_STATES and tier is not Tier.DEVICE}
    )


def _is_as(flat: Flat, wanted: FlatPlan, *, speculates: bool) -> bool:
    """Return whether a flat is as a plan wants it."""
    if flat.rest.tier is not wanted.parameters:
        return False
    if flat.gradient is None:
        return True
    return (
        not _moves_gradient(flat, wanted)
        and tuple(shard.portion for shard in flat.state_shards) == wanted.portions
        and all(bool(shard.spare) == (speculates and shard.tier is Tier.HOST) for shard in flat.state_shards)
    )


def _moves_gradient(flat: Flat, wanted: FlatPlan) -> bool:
    return flat.gradient is not None and flat.gradient.tier is not wanted.gradients


def _spared(way: Way) -> int:
    """Return a rank of the way to handle activations: higher takes less of the device."""
    return 2 if way.tier is not Tier.DEVICE else 1 if way.recomputes else 0


def _growth_on_device(change: _Change) -> int:
    return _on_device(change.wanted.portions) - _on_device(change.flat.state_shards)


def _on_device(parts: Sequence[Portion | StateShard]) -> int:
    return sum(part.numel for part in parts if part.tier is Tier.DEVICE)
