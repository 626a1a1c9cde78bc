"""Portions: which stretch of each region's optimizer states is kept in which tier and updated by which route.

In: the lengths of all regions in the order forward needs them, and shares. Out: for each region its portions, in
order and without gaps. Tiers are filled from the front of the model, nearest first, so at most one region is cut
where a tier ends: the groups that forward needs first, and whose gradients come last, keep their states on the device.
Inside a region the CPU takes the front and the device streams the rest, so that both work on every group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zerostd.policy import Route, Tier
from zerostd.sharding.layout import ALIGNMENT

UNIT = 2048  # elements: portions start on a page in every dtype from 16 bits on, so disks and kernels see whole blocks

# Chosen so that 14 threads beside a PCIe 5 x16 link take 0.55, the fastest of four shares measured, and with everything
# on the host 0.75, the fastest of three (docs/log.md).
BYTES_STREAMED = 12  # per element, each way
NS_STREAMED = 0.29  # per element: 24 bytes over the link, both ways at once, while the CPU updates too
NS_CPU_THREAD = 3.3  # per element and thread, until memory is the limit
NS_CPU_BEST = 0.23


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
