"""Portions: which stretch of each region's optimizer states rests in which tier and is updated by which route.

In: the lengths of all regions in the order forward needs them, and shares. Out: for each region its portions, in
order and without gaps. Tiers are filled from the front of the model, nearest first, so at most one region is cut
where a tier ends: the groups that forward needs first, and whose gradients come last, keep their states on the device.
Inside a region the processor takes the front and the device streams the rest, so that both work on every group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerostd.policy import Route, Tier

__all__ = ["UNIT", "Portion", "assign_tiers", "cut_by_shares", "cut_portions", "default_cpu_share"]

UNIT = 2048  # elements: portions start on a page in every dtype from 16 bits on, so disks and kernels see whole blocks

# Chosen so that 14 threads beside a PCIe 5 x16 link take 0.55, the fastest of four shares measured, and with everything
# on the host 0.75, the fastest of three (docs/log.md).
BYTES_STREAMED = 12  # per element, each way
NS_STREAMED = 0.29  # per element: 24 bytes over the link, both ways at once, while the processor updates too
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


def cut_portions(numels: Sequence[int], shares: Mapping[Tier, float], *, cpu_share: float) -> list[tuple[Portion, ...]]:
    """Portions of every region."""
    ends, total, filled = [], sum(numels), 0.0
    for tier in Tier:
        filled += shares.get(tier, 0.0)
        ends.append((tier, total if filled > 1.0 - 1e-9 else _round(total * filled)))
    found, base = [], 0
    for numel in numels:
        portions: list[Portion] = []
        start = 0
        for tier, end in ends:
            stop = numel if end >= base + numel else min(numel, max(start, _round(end - base)))
            portions += _routes(start, stop, tier, cpu_share)
            start = stop
        found.append(tuple(portions))
        base += numel
    return found


def _routes(start: int, stop: int, tier: Tier, cpu_share: float) -> list[Portion]:
    if start == stop:
        return []
    if tier is Tier.DEVICE:
        return [Portion(start, stop, tier, Route.RESIDENT)]
    middle = stop if cpu_share == 1.0 else start + _round((stop - start) * cpu_share)
    cuts = [(start, min(middle, stop), Route.CPU), (min(middle, stop), stop, Route.STREAMED)]
    return [Portion(low, high, tier, route) for low, high, route in cuts if low < high]


def cut_by_shares(numel: int, shares: Sequence[tuple[Tier, Route, float]]) -> tuple[Portion, ...]:
    """Portions of one region in the order of its shares, which sum to one."""
    portions: list[Portion] = []
    filled, start = 0.0, 0
    for index, (tier, route, share) in enumerate(shares):
        filled += share
        stop = numel if index == len(shares) - 1 else min(numel, max(start, _round(numel * filled)))
        if stop > start:
            portions.append(Portion(start, stop, tier, route))
        start = stop
    return tuple(portions)


def assign_tiers(sizes: Sequence[int], shares: Mapping[Tier, float]) -> list[Tier]:
    """One tier for each whole thing of the given size: nearest tiers first, each cut at the nearest boundary."""
    total, found, base = sum(sizes), [], 0
    tiers = [tier for tier in Tier if shares.get(tier, 0.0) > 0]
    for size in sizes:
        middle, filled = base + size / 2, 0.0
        chosen = tiers[-1]
        for tier in tiers:
            filled += shares[tier]
            if middle <= filled * total:
                chosen = tier
                break
        found.append(chosen)
        base += size
    return found


def default_cpu_share(
    num_threads: int, *, has_link: bool, parameters_off: float = 0.0, gradients_off: float = 0.0
) -> float:
    """What the processor takes of the states off the device, so that it ends together with the link. The link also
    carries the shares of parameters (up for forward and for backward) and of gradients that rest off the device.
    Without a link (the device is the processor) the processor takes all."""
    if not has_link:
        return 1.0
    ns_byte = NS_STREAMED / BYTES_STREAMED
    ns_streamed = NS_STREAMED + 2 * gradients_off * ns_byte
    ns_cpu = max(NS_CPU_BEST, NS_CPU_THREAD / num_threads)
    return round(min(1.0, (ns_streamed + 4 * parameters_off * ns_byte) / (ns_streamed + ns_cpu)), 2)


def _round(value: float) -> int:
    return int(value + UNIT / 2) // UNIT * UNIT
