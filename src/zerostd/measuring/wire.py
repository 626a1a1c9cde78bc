"""What the wires can do: gather and reduce by size among all ranks, as latency and bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy
import torch

from zerostd.communication import Wires, World
from zerostd.measuring.rates import TrialSizes, finish
from zerostd.monitoring.ledger import Ledger
from zerostd.planning.profiles import Wire
from zerostd.tiers import Transfer

SMALLEST_BYTES = 16 << 10
GROWTH = 16  # of the buffer from size to size
MOST_SECONDS = 3.0  # for one size, in units of what one number may take
ALIGNMENT = 64  # elements a rank, as in a flat

Point = tuple[float, float]  # bytes that one rank sends, seconds


def wire_rates(world: World, sizes: TrialSizes) -> tuple[Wire, ...]:
    """Return one wire among all ranks, which call this together; none in a world of one."""
    if world.size == 1:
        return ()
    wires = Wires(world, Ledger())
    least = ALIGNMENT * world.size
    full = torch.ones(max(least, sizes.wire // 2 // least * least), dtype=torch.bfloat16, device=world.device)
    land = torch.empty(full.numel() // world.size, dtype=full.dtype, device=world.device)
    wires.reserve(full.nbytes)
    points: list[Point] = []
    numel = min(full.numel(), max(1, SMALLEST_BYTES // 2 // least) * least)
    while True:
        both = _both_verbs(wires, full[:numel], land[: numel // world.size], sizes.turns)
        points += both
        spent = sum(seconds for _, seconds in both) * (1 + sizes.turns)
        if numel == full.numel() or GROWTH * spent > MOST_SECONDS * sizes.seconds:
            break
        numel = min(full.numel(), GROWTH * numel)
    latency, bandwidth = fit(points)
    return (Wire("world", world.size, bandwidth, latency),)


def _both_verbs(wires: Wires, full: torch.Tensor, land: torch.Tensor, num_turns: int) -> list[Point]:
    world = wires.world
    mine = full.view(world.size, -1)[world.rank]
    verbs: list[Callable[[], Transfer]] = [lambda: wires.gather(full, mine), lambda: wires.reduce(full, land)]
    return [(float(mine.nbytes * (world.size - 1)), _collective_s(wires, verb, num_turns)) for verb in verbs]


def _collective_s(wires: Wires, start: Callable[[], Transfer], num_turns: int) -> float:
    """Return seconds on the slowest rank: the same number on all, so that all go on or stop together."""
    turns = []
    for _ in range(1 + num_turns):
        begin = time.perf_counter()
        start().wait()
        finish(wires.world.device)
        turns.append(time.perf_counter() - begin)
    mine = torch.tensor([median(turns[1:])], device=wires.world.device)
    return max(float(wires.largest(mine)), 1e-9)


def fit(points: Sequence[Point]) -> tuple[float, float]:
    """Return latency and bandwidth, neither below 0, so that latency + bytes / bandwidth comes nearest the seconds."""
    sizes, seconds = numpy.array(points).T
    if len(set(sizes)) > 1:
        slope, latency = numpy.polyfit(sizes, seconds, 1, w=1 / seconds)
        if latency >= 0 and slope > 0:
            return float(latency), float(1 / slope)
    size, longest = max(points)  # one size only, or too much noise: the longest says most
    rate = size / longest
    return max(0.0, min(s - size / rate for size, s in points)), rate
