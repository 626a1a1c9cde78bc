"""Changes of plan, flat by flat: what moves, in which order, and whether there is room for it on the way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zerostd.engine.runtime import Resources, Runtime
from zerostd.engine.settings import Settings
from zerostd.parameters import Flat, Group
from zerostd.parameters.blueprints import sizes_of
from zerostd.parameters.gradient import Gradient
from zerostd.parameters.state_shard import StateShard
from zerostd.planning import Plan
from zerostd.policy import Kind, Tier
from zerostd.preparing.accounting import staging_bytes
from zerostd.preparing.groups import Arenas, make_gradient
from zerostd.preparing.homes import FlatPlan, plan_flats
from zerostd.preparing.options import check_world, rules_for
from zerostd.sharding import Portion


@dataclass(eq=False)
class FlatChange:
    """A flat whose states, or whose gradient, moves."""

    group: Group
    flat: Flat
    before: FlatPlan
    wanted: FlatPlan
    arenas: Arenas = field(default_factory=dict)  # its memory off the device, once that is taken
    moves_states: bool = True  # else its gradient
    gradient: Gradient | None = None  # the new one, once it is made

    @property
    def num_bytes(self) -> int:
        """Bytes of states that it will hold."""
        return sum(size for (_, kind), size in self.wanted.demand().items() if kind is Kind.OPTIMIZER_STATES)

    @property
    def sizes(self) -> tuple[Counter[Tier], Counter[Tier]]:
        """Bytes of states off the device that it takes, and then gives back."""
        return _states_off(self.wanted), _states_off(self.before)

    @property
    def num_twice(self) -> int:
        """Bytes of states that it has on the device both before and after it moves: for a moment, twice."""
        return min(plan.demand()[Tier.DEVICE, Kind.OPTIMIZER_STATES] for plan in (self.before, self.wanted))

    @property
    def with_states_as_now(self) -> FlatPlan:
        """The new plan, but for the states."""
        return replace(self.wanted, portions=tuple(shard.portion for shard in self.flat.state_shards))

    @property
    def with_gradient_as_now(self) -> FlatPlan:
        """The new plan, but for the gradient."""
        assert self.flat.gradient is not None
        return replace(self.wanted, gradients=self.flat.gradient.tier)

    @property
    def moves_gradient(self) -> bool:
        """Whether its gradient goes to another tier."""
        return self.flat.gradient is not None and self.flat.gradient.tier is not self.wanted.gradients

    def make_gradient(self, resources: Resources) -> None:
        """Make the new gradient, if it is not made yet."""
        if self.gradient is None:
            self.gradient = make_gradient(self.with_states_as_now, resources)

    def move_gradient(self, resources: Resources) -> None:
        """Let the new gradient take the place of the old one, which has no values now."""
        self.make_gradient(resources)
        assert self.flat.gradient is not None
        self.flat.gradient.close()
        self.flat.gradient = self.gradient

    def has_moved(self, *, speculates: bool) -> bool:
        """Return whether parameters and states are as the new plan wants them."""
        if self.flat.rest.tier is not self.wanted.parameters or self.flat.gradient is None:
            return self.flat.rest.tier is self.wanted.parameters
        shards = self.flat.state_shards
        are_placed = tuple(shard.portion for shard in shards) == self.wanted.portions
        return are_placed and all(bool(shard.spare) == (speculates and shard.tier is Tier.HOST) for shard in shards)


def can_move(runtime: Runtime, plan: Plan) -> bool:
    """Return whether states can move to another plan and back, flat by flat, inside its limits of host and disk. A flat
    that moves exists twice for a moment."""
    changes, come_back = find_changes(runtime, obeying(runtime, plan))
    sizes = [change.sizes for change in changes]
    held = Counter(runtime.ledger.held)
    if not come_back:
        held.update(gradients_off(changes))
    _, goes = in_order(sizes, held, plan.limits)
    for taken, given in sizes:
        held.update(taken)
        held.subtract(given)
    _, comes_back = in_order([(given, taken) for taken, given in reversed(sizes)], held, plan.limits)
    return goes and comes_back


def obeying(runtime: Runtime, plan: Plan) -> Settings:
    settings = runtime.settings.obeying(plan, sizes_of(runtime.blueprints))
    check_world(settings, runtime.world)
    return settings


def find_changes(runtime: Runtime, settings: Settings) -> tuple[list[FlatChange], bool]:
    """Return the flats that move, those that leave the device first; and whether gradients move last, because the
    device will hold more of them and of the buffers that they pass through."""
    plans = [
        plan_flats(runtime.blueprints, rules_for(each, runtime.world, runtime.blueprints))
        for each in (runtime.settings, settings)
    ]
    changes = [
        FlatChange(group, flat, before, wanted)
        for group, old, new in zip(runtime.groups, *plans, strict=True)
        for flat, before, wanted in zip(group.flats, old, new, strict=True)
    ]
    before, after = (_bytes_for_gradients([flat for group in flats for flat in group]) for flats in plans)
    has_spare = speculates(settings)
    moving = [each for each in changes if each.moves_gradient or not each.has_moved(speculates=has_spare)]
    return sorted(moving, key=_growth_on_device), after > before


def in_order(
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


def _states_off(plan: FlatPlan) -> Counter[Tier]:
    """Return the bytes of states that a flat has off the device."""
    sizes = plan.demand().items()
    return Counter(
        {tier: size for (tier, kind), size in sizes if kind is Kind.OPTIMIZER_STATES and tier is not Tier.DEVICE}
    )


def speculates(settings: Settings) -> bool:
    return settings.plan is not None and settings.plan.speculate


def _bytes_for_gradients(plans: Sequence[FlatPlan]) -> int:
    """Return the bytes of the device for gradients, and for the buffers that they pass through."""
    trained = [plan for plan in plans if plan.is_trained]
    kept = sum(plan.demand()[Tier.DEVICE, Kind.GRADIENTS] for plan in trained)
    return kept + (staging_bytes(trained, trained[0].rules) if trained else 0)


def gradients_off(changes: Sequence[FlatChange]) -> Counter[Tier]:
    """Return the bytes off the device that gradients will have where they move."""
    wanted = [change.wanted for change in changes if change.moves_gradient]
    return Counter(
        {tier: sum(plan.demand()[tier, Kind.GRADIENTS] for plan in wanted) for tier in (Tier.HOST, Tier.DISK)}
    )


def _growth_on_device(change: FlatChange) -> int:
    return _on_device(change.wanted.portions) - _on_device(change.flat.state_shards)


def _on_device(parts: Sequence[Portion | StateShard]) -> int:
    return sum(part.numel for part in parts if part.tier is Tier.DEVICE)
