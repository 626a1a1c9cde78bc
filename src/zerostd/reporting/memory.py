"""Bytes by tier and kind: over time, rank by rank, and at their peak; and bytes that leaked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zerostd.policy import Kind, Tier
from zerostd.reporting.reading import RankLog, Run
from zerostd.reporting.records import Bytes, LeakLine, MemoryLine
from zerostd.reporting.thinning import thin_largest

MOST_LEAKS = 200  # rows
MOST_RANKS = 8  # that are drawn


def memory(run: Run) -> dict[str, Any]:
    """Return the peaks of each tier on the rank that holds most, the allocator's, and the series of the first ranks."""
    logs = [log for log in run.ranks if log.of(MemoryLine)]
    lines = [line for log in logs for line in log.of(MemoryLine)]
    books = {log.rank: peaks(log.of(MemoryLine)) for log in logs}
    return {
        "peaks": [_peak(books, tier) for tier in Tier if any(total(book, tier) for book in books.values())],
        "allocated": allocator_peak(lines),
        "reserved": max((line.reserved for line in lines if line.reserved is not None), default=None),
        "lines": len(lines),
        "ranks": [_series(log) for log in logs[:MOST_RANKS]],
    }


def allocator_peak(lines: Iterable[MemoryLine]) -> int | None:
    """Return the most that the device's allocator had given out; None if no line has it."""
    sizes = (size for line in lines for size in (line.allocated, line.most_allocated))
    return max((size for size in sizes if size is not None), default=None)


def peaks(lines: Iterable[MemoryLine]) -> Bytes:
    """Return the most of each kind in each tier, each at its own moment."""
    most: Bytes = {}
    for line in lines:
        for book in (line.peak, line.bytes):
            for tier, kinds in book.items():
                row = most.setdefault(tier, {})
                for kind, size in kinds.items():
                    row[kind] = max(row.get(kind, 0), size)
    return most


def total(book: Bytes, tier: Tier) -> int:
    """Return the bytes of all kinds in a tier."""
    return sum(book.get(tier, {}).values())


def leaks(run: Run) -> list[dict[str, Any]]:
    """Return a row for each group, kind and place that leaked; the largest first."""
    places: dict[tuple[str, str, str], list[tuple[int, LeakLine]]] = {}
    for log in run.ranks:
        for leak in log.of(LeakLine):
            places.setdefault((leak.group, leak.what, leak.where), []).append((log.rank, leak))
    rows: list[dict[str, Any]] = [
        {
            "group": group,
            "what": what,
            "where": where,
            "times": len(lines),
            "bytes": max(leak.bytes for _, leak in lines),
            "first_step": min(leak.step for _, leak in lines),
            "ranks": len({rank for rank, _ in lines}),
        }
        for (group, what, where), lines in places.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def _peak(books: dict[int, Bytes], tier: Tier) -> dict[str, Any]:
    """Return the peaks of the rank that holds most of a tier: each kind at its own, and their sum, as plans count."""
    rank = max(books, key=lambda rank: total(books[rank], tier))
    kinds = {kind.value: books[rank][tier][kind] for kind in Kind if books[rank][tier].get(kind)}
    return {"tier": tier.value, "total": total(books[rank], tier), "rank": rank, "kinds": kinds}


def _series(log: RankLog) -> dict[str, Any]:
    lines = sorted(log.of(MemoryLine), key=lambda line: line.time)
    tiers = [tier for tier in Tier if any(total(line.bytes, tier) or total(line.peak, tier) for line in lines)]
    return {"rank": log.rank, "tiers": [_tier_series(lines, tier) for tier in tiers]}


def _tier_series(lines: Sequence[MemoryLine], tier: Tier) -> dict[str, Any]:
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
