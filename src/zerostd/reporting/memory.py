"""Bytes by tier and kind: over time, rank by rank, and at their peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zerostd.policy import Kind, Tier
from zerostd.reporting.reading import RankLog, Run
from zerostd.reporting.records import Bytes, Held
from zerostd.reporting.thinning import thin_largest

__all__ = ["MOST_RANKS", "Sizes", "device_peak", "largest", "memory", "total"]

MOST_RANKS = 8  # that are drawn

Sizes = dict[Tier, dict[Kind, int]]


def memory(run: Run) -> dict[str, Any]:
    """Peaks of each tier on the rank that holds most, the allocator's, and the series of the first ranks."""
    logs = [log for log in run.ranks if log.of(Held)]
    lines = [line for log in logs for line in log.of(Held)]
    return {
        "peaks": [peak for tier in Tier if (peak := _peak(logs, tier))["total"]],
        "allocated": device_peak(lines),
        "reserved": max((line.reserved for line in lines if line.reserved is not None), default=None),
        "lines": len(lines),
        "ranks": [_series(log) for log in logs[:MOST_RANKS]],
    }


def device_peak(lines: Iterable[Held]) -> int | None:
    """The most that the device's allocator had given out; None: nobody looked."""
    sizes = (size for line in lines for size in (line.allocated, line.most_allocated))
    return max((size for size in sizes if size is not None), default=None)


def largest(books: Iterable[Bytes]) -> Sizes:
    """The most of each kind in each tier."""
    found: Sizes = {}
    for book in books:
        for tier, kinds in book.items():
            row = found.setdefault(tier, {})
            for kind, size in kinds.items():
                row[kind] = max(row.get(kind, 0), size)
    return found


def total(book: Bytes, tier: Tier) -> int:
    """All kinds of a tier."""
    return sum(book.get(tier, {}).values())


def _peak(logs: Sequence[RankLog], tier: Tier) -> dict[str, Any]:
    """Of the rank with most: each kind at its own peak, and their sum, as plans count them."""
    best: dict[str, Any] = {"tier": tier.value, "total": 0, "rank": None, "kinds": {}}
    for log in logs:
        held = largest(book for line in log.of(Held) for book in (line.peak, line.bytes))
        if total(held, tier) > best["total"]:
            kinds = {kind.value: held[tier][kind] for kind in Kind if held[tier].get(kind)}
            best = {"tier": tier.value, "total": total(held, tier), "rank": log.rank, "kinds": kinds}
    return best


def _series(log: RankLog) -> dict[str, Any]:
    lines = sorted(log.of(Held), key=lambda line: line.time)
    tiers = [tier for tier in Tier if any(total(line.bytes, tier) or total(line.peak, tier) for line in lines)]
    return {"rank": log.rank, "tiers": [_tier_series(lines, tier) for tier in tiers]}


def _tier_series(lines: list[Held], tier: Tier) -> dict[str, Any]:
    kept = thin_largest(lines, lambda line: total(line.bytes, tier))
    kinds = [kind for kind in Kind if any(line.bytes.get(tier, {}).get(kind) for line in lines)]
    return {
        "tier": tier.value,
        "kinds": [kind.value for kind in kinds],
        "times": [line.time for line in kept],
        "steps": [line.step for line in kept],
        "bytes": [[line.bytes.get(tier, {}).get(kind, 0) for line in kept] for kind in kinds],
        "peak": [total(line.peak, tier) for line in kept],
        "allocated": [line.allocated for line in kept] if tier is Tier.DEVICE else [],
    }
