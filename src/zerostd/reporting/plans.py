"""Plans against what happened: each with the steps it was in force for, its errors in percent, its words, its prices.

An error is how far the plan was off: +8 % is 8 % more than was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from zerostd.errors import ZerostdError
from zerostd.planning.plan import Plan
from zerostd.policy import Kind, Tier
from zerostd.reporting.memory import Sizes, device_peak, largest, total
from zerostd.reporting.reading import Run
from zerostd.reporting.records import Fields, Held, Replanned, Step, tidy_text
from zerostd.reporting.speeds import step_seconds
from zerostd.reporting.thinning import finite

__all__ = ["plans"]

GIB = 2**30
MOST_PLANS = 20
MOST_SENTENCES = 60
WITHOUT = "without activations"  # a part of the device's bytes
BUSY = {"device": "compute"}  # a run's word for a resource: the plan's


@dataclass(frozen=True)
class _Phase:
    """A plan and the steps it was in force for: first, and the one after the last (None: to the end)."""

    plan: Plan
    reason: str
    first: int
    stop: int | None

    def has(self, step: int) -> bool:
        return self.first <= step and (self.stop is None or step < self.stop)


def plans(run: Run, steps: Mapping[int, Mapping[int, Step]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Each plan with what came of it, in order; and notices of those that cannot be read."""
    notices: list[str] = []
    found: list[tuple[Plan, str, int]] = []
    for source, raw, reason, first in _said(run):
        try:
            found.append((_checked(raw, source), reason, first))
        except ZerostdError as error:
            notices.append(f"{tidy_text(str(error))}.")
    ends = [*(first for _, _, first in found[1:]), None]
    phases = [_Phase(plan, why, first, stop) for (plan, why, first), stop in zip(found, ends, strict=False)]
    if len(phases) > MOST_PLANS:
        notices.append(f"Of {len(phases)} plans the first {MOST_PLANS} are shown.")
    return [_compared(run, steps, phase) for phase in phases[:MOST_PLANS]], notices


def _said(run: Run) -> Iterator[tuple[str, Any, str, int]]:
    """(where it stands, the plan, the reason, its first step), of run.json and of the first rank that tells plans."""
    if run.about.plan is not None:
        yield "the plan of run.json", run.about.plan, "at the start", 0
    log = next((log for log in run.ranks if log.of(Replanned)), None)
    for one in sorted(log.of(Replanned), key=lambda one: one.step) if log else ():
        yield f"the plan of step {one.step}", one.plan, one.reason or "no reason was written", one.step


def _checked(raw: Any, source: str) -> Plan:
    """A plan whose numbers are numbers, and that can say itself."""
    try:
        if not isinstance(raw, dict):
            raise ValueError("it is no object")
        predicted = Fields(Fields(raw).table("predicted"))
        for name in ("step_s", "compute_s", "clipped_s"):
            predicted.count(name)
        predicted.seconds("busy"), predicted.seconds("prices")
        predicted.bytes("bytes")
        if not all(isinstance(note, str) for note in raw.get("notes", ())):
            raise ValueError("its notes are not all texts")
        plan = Plan.from_json(json.dumps(raw), source)
        plan.explain()
        return plan
    except ZerostdError:
        raise
    except (ValueError, TypeError, ArithmeticError, AttributeError, LookupError, RecursionError) as error:
        raise ZerostdError(f"{source} cannot be read: {error}") from error


def _compared(run: Run, steps: Mapping[int, Mapping[int, Step]], phase: _Phase) -> dict[str, Any]:
    here = {number: ranks for number, ranks in steps.items() if phase.has(number)}
    plan = phase.plan
    rows = [*_time_rows(run, here, phase), *_byte_rows(run, phase)]
    return {
        "reason": phase.reason,
        "first_step": min(here, default=phase.first),
        "last_step": max(here, default=None),
        "steps": len(here),
        "stage": plan.stage.value,
        "rows": rows,
        "sentences": _sentences(plan),
        "prices": [_price(plan, tier) for tier in Tier if tier in plan.predicted.prices or tier in plan.limits],
    }


def _sentences(plan: Plan) -> list[str]:
    """What the plan says in words; the table before it is shown as one."""
    words = plan.explain().split("\n\n", 1)[-1]
    return [tidy_text(line) for line in words.splitlines() if line.strip()][:MOST_SENTENCES]


def _price(plan: Plan, tier: Tier) -> dict[str, Any]:
    price = plan.predicted.prices.get(tier)
    gain = None if price is None else price * GIB
    return {"tier": tier.value, "limit": plan.limits.get(tier), "saved_s_per_gib": gain}


# -- seconds --


def _time_rows(run: Run, steps: Mapping[int, Mapping[int, Step]], phase: _Phase) -> Iterator[dict[str, Any]]:
    predicted = phase.plan.predicted
    seconds = [step_seconds(ranks) for ranks in steps.values()]
    yield _row("step", "", "s", predicted.step_s, median(seconds) if seconds else None)
    said = {**predicted.busy, **({} if predicted.compute_s is None else {"compute": predicted.compute_s})}
    lines = [line.seconds for log in run.ranks for line in log.seconds("busy") if phase.has(line.step)]
    for name in dict.fromkeys(name for line in lines for name in line):
        if BUSY.get(name, name) in said:
            measured = median(line.get(name, 0.0) for line in lines)
            yield _row("busy", name, "s", said[BUSY.get(name, name)], measured)


# -- bytes --


def _byte_rows(run: Run, phase: _Phase) -> Iterator[dict[str, Any]]:
    """Tier by tier, of the rank that holds most there: the sum, then each kind. The ledger does not see activations
    that stay on the device: they are what its allocator gave out beside, and where it has none, nobody knows."""
    books = [(_peaks(lines), device_peak(lines)) for lines in _lines(run, phase)]
    for tier in Tier:
        sizes, peak = max(books, key=lambda one: _held(one, tier), default=(Sizes(), None))
        planned = {kind: size for kind, size in phase.plan.predicted.bytes.get(tier, {}).items() if size}
        measured = {kind: size for kind, size in sizes.get(tier, {}).items() if size}
        if not planned and not measured:
            continue
        unknown = set[Kind]()
        if sizes and tier is Tier.DEVICE and Kind.ACTIVATIONS in planned and Kind.ACTIVATIONS not in measured:
            if peak is None:
                unknown = {Kind.ACTIVATIONS}
            else:
                measured[Kind.ACTIVATIONS] = max(0, peak - sum(measured.values()))
        known = sum(size for kind, size in planned.items() if kind not in unknown)
        yield _row(tier.value, WITHOUT if unknown else "", "bytes", known, sum(measured.values()) if sizes else None)
        for kind in [kind for kind in Kind if kind in planned or kind in measured]:
            found = measured.get(kind, 0) if sizes and kind not in unknown else None
            yield _row(tier.value, kind.value, "bytes", planned.get(kind, 0), found)


def _peaks(lines: list[Held]) -> Sizes:
    return largest(book for line in lines for book in (line.peak, line.bytes))


def _held(book: tuple[Sizes, int | None], tier: Tier) -> int:
    sizes, peak = book
    return max(total(sizes, tier), (peak or 0) if tier is Tier.DEVICE else 0)


def _lines(run: Run, phase: _Phase) -> Iterator[list[Held]]:
    """What each rank wrote about its memory while the plan was in force."""
    for log in run.ranks:
        yield [line for line in log.of(Held) if phase.has(line.step)]


def _row(what: str, part: str, unit: str, predicted: float | None, measured: float | None) -> dict[str, Any]:
    off = None if predicted is None or not measured else finite((predicted - measured) / measured * 100)
    return {
        "what": what,
        "part": part,
        "unit": unit,
        "predicted": predicted,
        "measured": measured,
        "error_percent": off,
    }
