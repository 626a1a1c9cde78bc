"""How a flat buffer is divided: into parameters, into slices of ranks, and into portions of optimizer states.

Parameters lie one after another, without gaps unless each has to start aligned; the end is padded, so that every rank's
slice has the same length and starts aligned. Each parameter keeps its name and its interval, so resharding is 1-D
interval arithmetic.

Portions follow each other in a region without gaps; each has its tier and its route. Tiers are filled from the front of
the model, nearest first, so at most one region is cut where a tier ends: the groups that forward needs first, and whose
gradients come last, keep their states on the device. Inside a region the CPU takes the front and the device streams the
rest, so that both work on every group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Self

from zerostd.policy import Route, Tier

ALIGNMENT = 64  # elements: a slice starts on a cache line in every dtype, and kernels see whole vectors
UNIT = 2048  # elements: portions start on a page in every dtype from 16 bits on, so disks and kernels see whole blocks

# Chosen so that 14 threads beside a PCIe 5 x16 link take 0.55, the fastest of four shares measured, and with everything
# on the host 0.75, the fastest of three (docs/log.md).
BYTES_STREAMED = 12  # per element, each way
NS_STREAMED = 0.29  # per element: 24 bytes over the link, both ways at once, while the CPU updates too
NS_CPU_THREAD = 3.3  # per element and thread, until memory is the limit
NS_CPU_BEST = 0.23


@dataclass(frozen=True)
class Interval:
    """One parameter's place in the flat buffer, in elements."""

    name: str
    offset: int
    shape: tuple[int, ...]
    whole: tuple[int, ...] | None = None  # shape of the tensor that this is a box of; None: it is whole
    origin: tuple[int, ...] = ()  # where the box begins

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, of which the parameter may be a box."""
        return self.shape if self.whole is None else self.whole

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of one parameter inside a region: elements [start, stop) of the parameter, at `offset` of the region."""

    index: int  # of the parameter in its layout
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.numel)  # of the region

    def place_from(self, origin: int) -> slice:
        """Return its place in something that begins at element `origin` of the region."""
        return slice(self.offset - origin, self.offset - origin + self.numel)

    def within(self, start: int, stop: int) -> Self | None:
        """Return the part of it that lies in [start, stop) of the region; None if nothing does."""
        low = max(self.offset, start)
        high = min(self.offset + self.numel, stop)
        if low >= high:
            return None
        first = self.start + low - self.offset
        return type(self)(self.index, first, first + high - low, low)


@dataclass(frozen=True)
class Layout:
    """Intervals of one flat buffer over `num_shards` equal slices."""

    intervals: tuple[Interval, ...]
    numel: int  # with the padding, elements that belong to no parameter
    num_shards: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.num_shards

    @cached_property
    def gaps(self) -> tuple[slice, ...]:
        """The elements that belong to no parameter: behind those that do not end aligned, and at the end."""
        ends = [0, *[interval.end for interval in self.intervals]]
        starts = [*[interval.offset for interval in self.intervals], self.numel]
        return tuple([slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start])

    @property
    def padding(self) -> int:
        return self.numel - sum(interval.numel for interval in self.intervals)

    def shard(self, rank: int) -> slice:
        """Return the slice that `rank` owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def piece_of(self, index: int, region: slice) -> Piece | None:
        """Return the part of one parameter inside `region`; None if it has no elements there."""
        interval = self.intervals[index]
        low = max(interval.offset, region.start)
        high = min(interval.end, region.stop)
        if low >= high:
            return None
        return Piece(index, low - interval.offset, high - interval.offset, low - region.start)

    def pieces(self, region: slice) -> tuple[Piece, ...]:
        """Return the parts of all parameters that have elements inside `region`, in order."""
        return tuple(piece for index in range(len(self.intervals)) if (piece := self.piece_of(index, region)))


def make_layout(
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    num_shards: int,
    itemsize: int,
    *,
    num_replicas: int = 1,
    alignment: int = 1,
) -> Layout:
    """Lay parameters of `itemsize` bytes per element out, each from a multiple of `alignment` elements on. Parameters
    whose length keeps the next one on a 16-byte boundary come first, in the given order, so that matrices start
    aligned. A slice is a multiple of `num_replicas` long: replicas average it in equal parts."""
    per_boundary = max(1, 16 // itemsize)
    ordered = sorted(parameters, key=lambda item: math.prod(item[1]) % per_boundary != 0)
    intervals = []
    offset = 0
    for name, shape in ordered:
        intervals.append(Interval(name, offset, tuple(shape)))
        offset = -(-intervals[-1].end // alignment) * alignment
    unit = ALIGNMENT * num_shards * num_replicas
    return Layout(tuple(intervals), -(-offset // unit) * unit, num_shards)


@dataclass(frozen=True)
class Portion:
    """A stretch of one region, in elements of the region."""

    start: int
    stop: int
    tier: Tier
    route: Route

    @property
    def numel(self) -> int:
        return self.stop - self.start


def cut_portions(
    numels: Sequence[int], shares: Mapping[Tier, float], *, cpu_share: float, finest: int = 1
) -> list[tuple[Portion, ...]]:
    """Return the portions of every region. `cpu_share` is the CPU's part of states off the device. Portions consist of
    whole units. In a small model they consist of fewer elements, at least `finest`."""
    total = sum(numels)
    unit = next(unit for unit in (UNIT, ALIGNMENT, 1) if total >= 50 * unit or unit <= finest)  # shares to 1 %
    filled = 0.0
    ends = []  # of each tier, counted over all regions
    for tier in Tier:
        filled += shares.get(tier, 0.0)
        ends.append((tier, total if filled > 1.0 - 1e-9 else _round(total * filled, unit)))
    regions = []
    base = 0
    for numel in numels:
        portions: list[Portion] = []
        start = 0
        for tier, end in ends:
            stop = numel if end >= base + numel else min(numel, max(start, _round(end - base, unit)))
            middle = stop if cpu_share == 1.0 else min(stop, start + _round((stop - start) * cpu_share, unit))
            cuts = [(start, middle, Route.CPU), (middle, stop, Route.STREAMED)]
            if tier is Tier.DEVICE:
                cuts = [(start, stop, Route.RESIDENT)]
            portions += [Portion(low, high, tier, route) for low, high, route in cuts if low < high]
            start = stop
        regions.append(tuple(portions))
        base += numel
    return regions


def cut_by_shares(numel: int, shares: Sequence[tuple[Tier, Route, float]]) -> tuple[Portion, ...]:
    """Return the portions of one region in the order of its shares, which sum to one."""
    portions: list[Portion] = []
    filled = 0.0
    start = 0
    for index, (tier, route, share) in enumerate(shares):
        filled += share
        stop = numel if index == len(shares) - 1 else min(numel, max(start, _round(numel * filled)))
        if stop > start:
            portions.append(Portion(start, stop, tier, route))
        start = stop
    return tuple(portions)


def assign_tiers(sizes: Sequence[int], shares: Mapping[Tier, float]) -> list[Tier]:
    """Return one tier per buffer, which cannot be cut: nearest tiers first, each filled to the nearest boundary."""
    tiers = [tier for tier in Tier if shares.get(tier, 0.0) > 0]
    ends = [end * sum(sizes) for end in accumulate(shares[tier] for tier in tiers)]
    chosen = []
    base = 0
    for size in sizes:
        middle = base + size / 2
        chosen.append(next((tier for tier, end in zip(tiers, ends, strict=True) if middle <= end), tiers[-1]))
        base += size
    return chosen


def shares_off(sizes: Sequence[int], tiers: Sequence[Tier], shares: Mapping[Tier, float]) -> dict[Tier, float]:
    """Return by how much each tier exceeds its share of buffers of these sizes, as a part of the whole."""
    total = sum(sizes)
    held = {tier: sum(size for size, home in zip(sizes, tiers, strict=True) if home is tier) for tier in shares}
    return {tier: held[tier] / total - share if total else 0.0 for tier, share in shares.items()}


def cuts_at_shares(sizes: Sequence[Sequence[int]], shares: Mapping[Tier, float]) -> list[list[int]]:
    """Return for each buffer where to cut it, as numbers of its parameters, so that whole buffers come as near to the
    shares as whole parameters allow. `sizes` are those of the parameters of each buffer."""
    total = sum(map(sum, sizes))
    ends = [end * total for end in accumulate(shares[tier] for tier in Tier if tier in shares)][:-1]
    cuts = []
    base = 0
    for row in sizes:
        bounds = [base, *(base + size for size in accumulate(row))]
        nearest = {min(range(len(bounds)), key=lambda k: abs(bounds[k] - end)) for end in ends}
        cuts.append(sorted(k for k in nearest if 0 < k < len(row)))
        base = bounds[-1]
    return cuts


def default_cpu_share(
    num_threads: int,
    *,
    has_link: bool,
    parameters_off: float = 0.0,
    gradients_off: float = 0.0,
    state_bytes: float = BYTES_STREAMED,
) -> float:
    """Return the CPU's share of the states off the device, so that it ends together with the link. Each way, the link
    carries `state_bytes` of an element; and the shares of parameters (up for forward and for backward) and of gradients
    that are kept off the device. Without a link (the device is the CPU) the CPU takes all."""
    if not has_link:
        return 1.0
    ns_byte = NS_STREAMED / BYTES_STREAMED
    ns_streamed = (state_bytes + 2 * gradients_off) * ns_byte
    ns_cpu = max(NS_CPU_BEST, NS_CPU_THREAD / num_threads)
    return round(min(1.0, (ns_streamed + 4 * parameters_off * ns_byte) / (ns_streamed + ns_cpu)), 2)


def _round(value: float, unit: int = UNIT) -> int:
    return int(value + unit / 2) // unit * unit
