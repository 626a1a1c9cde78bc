"""Decide what is kept where, before anything is allocated: pure arithmetic on blueprints, stage and placement.

In: the planned groups. Out: a plan for each flat buffer, with the tiers of its parameters, its gradient and each
portion of its optimizer states, and the bytes they take. `groups.py` follows these plans.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zerostd.errors import PrepareError
from zerostd.kernels import MOMENT_CODECS, Adam, Moment, column_bytes
from zerostd.monitoring.texts import percent_text
from zerostd.parameters.blueprints import Blueprint, Member
from zerostd.parameters.state_shard import HIGH, LOW, MASTER
from zerostd.policy import Homes, Kind, Placement, Route, Stage, Tier, is_at_hand, shards, splits_masters
from zerostd.sharding import Layout, Portion, make_layout
from zerostd.sharding.layout import UNIT, assign_tiers, cut_by_shares, cut_portions, cuts_at_shares, shares_off
from zerostd.tiers.host import padded

log = logging.getLogger("zerostd")

Demand = Counter[tuple[Tier, Kind]]  # bytes
CLOSE = 0.05  # of a kind: whole flats this far from the shares that were asked for are not cut
FEWEST = 1 << 15  # elements: of smaller models whole flats are kept, since any transfer is all latency
FAR = 0.1  # of a kind: shares that whole parameters miss by more are refused
Columns = dict[str, torch.dtype | Moment]  # by name, each as long as its portion
PACKED = (2, 4)  # bytes of a number: others are kept as they are


def moments_of(placement: Placement) -> dict[str, Moment]:
    """Return how a placement keeps optimizer states as codes, by name; empty if it does not."""
    codec = placement.codec.get("optimizer_states")
    return dict(zip(Adam.state_names, MOMENT_CODECS[codec], strict=True)) if codec else {}


@dataclass(frozen=True)
class Rules:
    """Decide how much of a model this rank holds, and where."""

    rank: int  # of the ranks that share the model state
    size: int
    stage: Stage
    placement: Placement
    cpu_share: float
    reduce_dtype: torch.dtype | None  # for gradients of 16-bit parameters; None: the parameter's own
    states: Mapping[str, torch.dtype]  # what the optimizer keeps for each element beside the master; empty: unknown
    has_own_memory: bool  # the device's memory is not the host's
    sums_gradients: bool  # several passes make a step
    homes: Mapping[str, Homes] | None = None  # by name of group, instead of the placement's shares of the whole
    reduces_all: bool = False  # `reduce_dtype` is for gradients of fp32 parameters too
    num_replicas: int = 1  # of the model state
    has_optimizer: bool = True  # whose states are placed too
    num_servers: int = 0  # that update the model state: this rank is a worker, and updates nothing
    node_size: int = 1  # ranks of a node that keep secondary shards; 1: none are kept

    @property
    def moments(self) -> dict[str, Moment]:
        """How optimizer states are kept as codes, by name; empty if they are not."""
        return moments_of(self.placement)

    @property
    def coded_block(self) -> int:
        """Elements of states that are coded together."""
        return max((moment.block for moment in self.moments.values()), default=1)

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether gradients have a buffer for all of them, to be reduced in place."""
        return bool(self.num_servers) or (self.size > 1 and not self.shards(Kind.GRADIENTS))

    def shards(self, kind: Kind) -> bool:
        """Return whether this kind is spread over ranks here; in a world of one nothing is."""
        return self.size > 1 and shards(self.stage, kind)


@dataclass(frozen=True, eq=False)
class FlatPlan:
    """The plan of one flat buffer."""

    rules: Rules
    members: tuple[Member, ...]  # in the layout's order
    layout: Layout
    region: slice
    parameters: Tier = Tier.DEVICE
    gradients: Tier = Tier.DEVICE
    portions: tuple[Portion, ...] = ()  # of the region; empty if frozen

    @property
    def owner(self) -> str:
        """The name of its memory in the tiers: that of its first parameter."""
        return self.members[0].name

    @property
    def is_trained(self) -> bool:
        return self.members[0].options is not None

    @property
    def has_masters(self) -> bool:
        """Whether this rank keeps what an update needs. Without an optimizer only parameters that compute in another
        dtype than they had have masters: their exact values are nowhere else."""
        is_cast = any(member.dtype != member.parameter.dtype for member in self.members)
        return self.is_trained and (self.rules.has_optimizer or is_cast)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that parameters compute in."""
        return self.members[0].dtype

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype that they are updated in."""
        return self.dtype if self.dtype.itemsize >= 4 else torch.float32

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which gradients travel and are kept."""
        is_cast = self.dtype.itemsize < 4 or (self.rules.reduces_all and self.dtype is torch.float32)
        return self.rules.reduce_dtype if is_cast and self.rules.reduce_dtype is not None else self.dtype

    @property
    def rest_numel(self) -> int:
        """Parameters this rank holds while the group is released."""
        return self.layout.shard_numel if self.rules.shards(Kind.PARAMETERS) else self.layout.numel

    @property
    def gives_back(self) -> bool:
        """Whether releasing the group gives memory back."""
        return self.rules.shards(Kind.PARAMETERS) or self.parameters is not Tier.DEVICE

    @property
    def secondary_numel(self) -> int:
        """Elements of the secondary shard that this rank keeps."""
        keeps = self.rules.node_size > 1 and self.rules.shards(Kind.PARAMETERS)
        return self.layout.numel // self.rules.node_size if keeps else 0

    @property
    def packed_bytes(self) -> int:
        """The bytes of a number as which parameters are packed; 0 if they are kept as they are."""
        has_codec = "parameters" in self.rules.placement.codec
        is_packed = has_codec and not self.is_trained and self.parameters is Tier.DISK
        return self.dtype.itemsize if is_packed and self.dtype.itemsize in PACKED else 0

    @property
    def is_split(self) -> bool:
        """Whether masters are kept as two halves."""
        return self.is_trained and splits_masters(self.dtype)

    def holds_parameters(self, portion: Portion) -> bool:
        """Return whether the parameter is its own master, or the upper half of it: the numbers are the same, the update
        can read them, and no speculative copy is needed."""
        if self.rules.placement.speculate and portion.tier is not Tier.DEVICE:
            return False
        if self.is_split:
            return is_at_hand(self.parameters, portion.route, has_own_memory=self.rules.has_own_memory)
        is_as_wide = self.master_dtype == self.dtype
        return is_as_wide and portion.tier is self.parameters and portion.tier is not Tier.DISK

    def columns(self, portion: Portion, *, is_spare: bool = False) -> Columns:
        """Return the columns that are allocated beforehand in the portion's tier: its master, unless that is the
        parameter, and states that are off the device or coded. Spare columns include a separate master."""
        shares = self.holds_parameters(portion) and not is_spare
        master: Columns = {} if shares else {MASTER: self.master_dtype}
        if self.is_split:
            master = {LOW: torch.int16} if shares else {HIGH: self.dtype, LOW: torch.int16}
        has_states = portion.tier is not Tier.DEVICE or bool(self.rules.moments)
        return master | self._state_dtypes() if has_states else master

    def staged(self, portion: Portion) -> Columns:
        """Return the columns that pass through the device if the portion is streamed."""
        if not self.is_split:
            return {MASTER: self.master_dtype, **self._state_dtypes()}
        is_there = not self.rules.has_own_memory or (self.parameters is Tier.DEVICE and self.holds_parameters(portion))
        upper = {} if is_there else {HIGH: self.dtype}
        return {**upper, LOW: torch.int16, **self._state_dtypes()}

    def _state_dtypes(self) -> Columns:
        """Return how states are kept: as wide as the master where the optimizer makes them like the parameter."""
        if self.rules.moments:
            return dict(self.rules.moments)
        states = self.rules.states.items()
        return {name: self.master_dtype if dtype == torch.float32 else dtype for name, dtype in states}

    @property
    def numel(self) -> int:
        """Elements of the region."""
        return int(self.region.stop - self.region.start)

    def demand(self) -> Demand:
        """Return the bytes of model state that it takes of each tier on this rank."""
        rules = self.rules
        need = Demand()
        need[self.parameters, Kind.PARAMETERS] += _taken(self.parameters, self.rest_numel * self.dtype.itemsize)
        if not self.is_trained or not (
            self.rules.has_optimizer or self.has_masters or self.gradients is not Tier.DEVICE
        ):
            return need
        dtype = self.gradient_dtype
        itemsize = max(4, dtype.itemsize) if rules.sums_gradients else dtype.itemsize
        keeps_whole = rules.keeps_whole_gradients
        is_kept = rules.placement.keep_gradients
        if is_kept and (not keeps_whole or rules.sums_gradients):
            need[self.gradients, Kind.GRADIENTS] += self.numel * itemsize
        # For the wire; what this rank updates is a part of it, unless several passes are summed.
        if is_kept and keeps_whole:
            need[Tier.DEVICE, Kind.GRADIENTS] += self.layout.numel * dtype.itemsize
        for portion in self.portions:
            self._add_portion(need, portion, itemsize)
        return need

    def _add_portion(self, need: Demand, portion: Portion, itemsize: int) -> None:
        rules = self.rules
        columns = self._state_dtypes() | self.columns(portion)
        copies = 2 if rules.placement.speculate and portion.tier is Tier.HOST else 1
        sizes = [_taken(portion.tier, column_bytes(dtype, portion.numel)) for dtype in columns.values()]
        need[portion.tier, Kind.OPTIMIZER_STATES] += copies * sum(sizes)
        if rules.has_own_memory and portion.route is Route.CPU and self.gradients is Tier.DEVICE:
            need[Tier.HOST, Kind.BUFFERS] += padded(portion.numel * itemsize)
        if portion.tier is Tier.HOST and self.is_split:
            return  # new parameters are upper halves, which have a place already
        is_as_wide = itemsize == self.dtype.itemsize
        lands_on_gradient = self.gradients is Tier.DEVICE and is_as_wide and not rules.placement.speculate
        goes_up = rules.has_own_memory and self.parameters is Tier.DEVICE and not lands_on_gradient
        if portion.route is Route.CPU and goes_up:  # new parameters, on their way
            need[Tier.HOST, Kind.BUFFERS] += padded(portion.numel * self.dtype.itemsize)


def plan_flats(blueprints: Sequence[Blueprint], rules: Rules) -> list[list[FlatPlan]]:
    """Return the plans of the flats of every group, in the groups' order."""
    groups = [_lay_out(blueprint, rules) for blueprint in blueprints]
    if rules.homes is None:
        for kind in (Kind.PARAMETERS, Kind.GRADIENTS):
            groups = _cut_at_shares(groups, kind, rules)
    flats = [flat for group in groups for flat in group]
    sizes = [flat.layout.numel * flat.dtype.itemsize for flat in flats]
    numels = [flat.numel if flat.is_trained else 0 for flat in flats]
    if rules.homes is None:
        placement = rules.placement
        parameters = assign_tiers(sizes, placement.shares(Kind.PARAMETERS))
        gradients = assign_tiers(numels, placement.shares(Kind.GRADIENTS))
        # Where parameters are on disk, two portions must not share a page of them: each writes its own.
        finest = UNIT if Tier.DISK in placement.shares(Kind.PARAMETERS) else rules.coded_block
        states = placement.shares(Kind.OPTIMIZER_STATES)
        portions = cut_portions(numels, states, cpu_share=rules.cpu_share, finest=finest)
    else:
        names = [blueprint.name for blueprint, group in zip(blueprints, groups, strict=True) for _ in group]
        homes = [rules.homes[name] for name in names]
        parameters = [home.parameters for home in homes]
        gradients = [home.gradients for home in homes]
        portions = [cut_by_shares(numel, home.states) for numel, home in zip(numels, homes, strict=True)]
    for index, flat in enumerate(flats):
        flats[index] = replace(flat, portions=portions[index] if flat.has_masters else ())
        if sizes[index]:  # there is no arena of no bytes: what has no elements is on the device
            flats[index] = replace(flats[index], parameters=parameters[index], gradients=gradients[index])
    placed = iter(flats)
    return [[next(placed) for _ in group] for group in groups]


def _lay_out(blueprint: Blueprint, rules: Rules) -> list[FlatPlan]:
    """Return the flats of a group, without homes: one for each dtype, and for trained and frozen parameters."""
    by_sort: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in blueprint.members:
        by_sort.setdefault((member.dtype, member.options is not None), []).append(member)
    flats = []
    for (dtype, _), members in by_sort.items():
        members.sort(key=lambda member: -1 if member.options is None else member.options)
        flats.append(_make_plan(members, dtype, rules))
    return flats


def _make_plan(members: Sequence[Member], dtype: torch.dtype, rules: Rules) -> FlatPlan:
    """Return one flat of these members, without homes."""
    by_name = {member.name: member for member in members}
    shapes = [(name, member.shape) for name, member in by_name.items()]
    num_shards = rules.num_servers or rules.size
    alignment = rules.coded_block if members[0].options is not None else 1
    layout = make_layout(shapes, num_shards, dtype.itemsize, num_replicas=rules.num_replicas, alignment=alignment)
    specs = [by_name[interval.name].spec for interval in layout.intervals]
    intervals = [
        interval if spec is None else replace(interval, whole=spec.shape, origin=spec.box.offsets)
        for interval, spec in zip(layout.intervals, specs, strict=True)
    ]
    layout = replace(layout, intervals=tuple(intervals))
    region = layout.shard(rules.rank) if rules.shards(Kind.OPTIMIZER_STATES) else slice(0, layout.numel)
    if rules.num_servers:
        region = slice(0, 0)
    return FlatPlan(rules, tuple(by_name[interval.name] for interval in layout.intervals), layout, region)


def _cut_at_shares(groups: list[list[FlatPlan]], kind: Kind, rules: Rules) -> list[list[FlatPlan]]:
    """Return the groups with flats cut between two parameters where a share ends inside one, if whole flats are not
    near to the shares. Raise PrepareError where whole parameters are not near either. Very small models keep whole
    flats, and the log says so."""
    shares = rules.placement.shares(kind)
    if len(shares) == 1 or _is_near(groups, kind, shares, CLOSE):
        return groups
    if sum(flat.layout.numel for group in groups for flat in group) < FEWEST:
        if rules.rank == 0:
            log.warning("%s, or a model of %s elements at least", _explain_far(groups, kind, rules.placement), FEWEST)
        return groups
    sizes = [_sizes(flat, kind) for group in groups for flat in group]
    cuts = iter(cuts_at_shares(sizes, shares))
    cut_groups: list[list[FlatPlan]] = []
    for group in groups:
        cut_groups.append([])
        for flat in group:
            ends = [*next(cuts), len(flat.members)]
            starts = [0, *ends[:-1]]
            parts = [flat.members[start:end] for start, end in zip(starts, ends, strict=True)]
            cut_groups[-1] += [_make_plan(part, flat.dtype, rules) for part in parts] if len(parts) > 1 else [flat]
    if not _is_near(cut_groups, kind, shares, FAR):
        raise PrepareError(_explain_far(cut_groups, kind, rules.placement))
    return cut_groups


def _sizes(flat: FlatPlan, kind: Kind) -> list[int]:
    """Return what each parameter of a flat counts in the shares of a kind: bytes, or elements that train."""
    width = flat.dtype.itemsize if kind is Kind.PARAMETERS else int(flat.is_trained)
    return [interval.numel * width for interval in flat.layout.intervals]


def _differences(groups: list[list[FlatPlan]], kind: Kind, shares: Mapping[Tier, float]) -> dict[Tier, float]:
    sizes = [sum(_sizes(flat, kind)) for group in groups for flat in group]
    return shares_off(sizes, assign_tiers(sizes, shares), shares)


def _is_near(groups: list[list[FlatPlan]], kind: Kind, shares: Mapping[Tier, float], most: float) -> bool:
    return all(abs(difference) <= most for difference in _differences(groups, kind, shares).values())


def _explain_far(groups: list[list[FlatPlan]], kind: Kind, placement: Placement) -> str:
    shares = placement.shares(kind)
    nearest = {tier.value: round(shares[tier] + off, 2) for tier, off in _differences(groups, kind, shares).items()}
    sizes = {
        interval.name: size
        for group in groups
        for flat in group
        for interval, size in zip(flat.layout.intervals, _sizes(flat, kind), strict=True)
    }
    largest = max(sizes, key=lambda name: sizes[name])
    part = sizes[largest] / sum(sizes.values())
    return (
        f"Placement({kind.value}={getattr(placement, kind.value)!r}) is not possible: whole parameters stay in one "
        f"tier, and {largest!r} alone is {percent_text(part)} of the {kind.value}. The nearest is {nearest}: use that, "
        "or one tier"
    )


def demand(plans: Sequence[Sequence[FlatPlan]]) -> Demand:
    """Return the bytes of model state that flats take of each tier on this rank; buffers of fixed size are left out."""
    need = Demand()
    for plan in (plan for group in plans for plan in group):
        need.update(plan.demand())
    return need


def _taken(tier: Tier, num_bytes: int) -> int:
    """Return the bytes that a column takes: off the device whole pages of an arena."""
    return num_bytes if tier is Tier.DEVICE else padded(num_bytes)
