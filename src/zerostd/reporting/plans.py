"""Plans compared with measurements: the steps in which each was used, its errors in percent, its words, its prices.

An error is how far the plan was off: +8 % is 8 % more than was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Any

from zerostd.errors import ZerostdError
from zerostd.planning.plan import Plan
from zerostd.policy import Kind, Tier
from zerostd.reporting.numbers import Steps, allocator_peak, finite, peaks, step_seconds, total
from zerostd.reporting.records import MemoryLine, PlanLine, Run, tidy_text

GIB = 2**30
LARGEST = 1e19  # seconds and bytes
LAST_STEP = 2**63
MOST_PLANS = 20
MOST_SENTENCES = 60
WITHOUT = "without activations"  # a part of the device's bytes


def plans(run: Run, steps: Steps) -> tuple[list[dict[str, Any]], list[str]]:
    """Return each plan with its measured results, in order; and notices about those that cannot be read."""
    recorded = next((log.of(PlanLine) for log in run.ranks if log.of(PlanLine)), [])  # of the first rank with plans
    written = [(f"the plan of step {line.step}", line) for line in sorted(recorded, key=lambda line: line.step)]
    if run.info.plan is not None:
        written.insert(0, ("the plan of run.json", PlanLine(0, run.info.plan, "at the start")))
    notices: list[str] = []
    readable: list[tuple[Plan, PlanLine]] = []
    for source, line in written:
        try:
            readable.append((_checked(line.plan, source), line))
        except ZerostdError as error:
            notices.append(f"{tidy_text(str(error))}.")
    if len(readable) > MOST_PLANS:
        notices.append(f"The first {MOST_PLANS} of {len(readable)} plans are shown.")
    stops = [*(line.step for _, line in readable[1:]), LAST_STEP]
    rows = [
        {"reason": line.reason or "no reason recorded", **_compared(run, steps, plan, range(line.step, stop))}
        for (plan, line), stop in zip(readable, stops, strict=False)
    ]
    return rows[:MOST_PLANS], notices


def _checked(data: Any, source: str) -> Plan:
    """Return a plan whose numbers can be shown and that can be put into words."""
    what = f"{source} cannot be read"
    try:
        plan = Plan.from_json(json.dumps(data), what)
        predicted = plan.predicted
        numbers = [predicted.step_s, predicted.compute_s, predicted.clipped_s]
        numbers += [*predicted.busy.values(), *predicted.prices.values()]
        numbers += [size for kinds in predicted.bytes.values() for size in kinds.values()]
        if not all(number is None or 0 <= number <= LARGEST for number in numbers):  # nan is not
            raise ZerostdError(f"{what}: a number of its prediction is negative or too large")
        plan.explain()
    except (ArithmeticError, RecursionError) as error:
        raise ZerostdError(f"{what}: {error}") from error
    return plan


def _compared(run: Run, steps: Steps, plan: Plan, in_force: range) -> dict[str, Any]:
    measured = {number: step for number, step in steps.items() if number in in_force}
    words = plan.explain().split("\n\n", 1)[-1]  # after the table, which the page has as rows
    savings = {tier: price * GIB for tier, price in plan.predicted.prices.items()}
    return {
        "first_step": min(measured, default=in_force.start),
        "last_step": max(measured, default=None),
        "steps": len(measured),
        "stage": plan.stage.value,
        "rows": [*_time_rows(run, measured, plan, in_force), *_byte_rows(run, plan, in_force)],
        "sentences": [tidy_text(line) for line in words.splitlines() if line.strip()][:MOST_SENTENCES],
        "prices": [
            {"tier": tier.value, "limit": plan.limits.get(tier), "saved_s_per_gib": savings.get(tier)}
            for tier in Tier
            if tier in savings or tier in plan.limits
        ],
    }


def _time_rows(run: Run, steps: Steps, plan: Plan, in_force: range) -> Iterator[dict[str, Any]]:
    seconds = [step_seconds(step) for step in steps.values()]
    yield _row("step", "", "s", plan.predicted.step_s, median(seconds) if seconds else None)
    planned = {**plan.predicted.busy, "device": plan.predicted.compute_s}
    lines = [line.seconds for log in run.ranks for line in log.seconds("busy") if line.step in in_force]
    for name in dict.fromkeys(name for line in lines for name in line):
        if planned.get(name) is not None:
            yield _row("busy", name, "s", planned[name], median(line.get(name, 0.0) for line in lines))


def _byte_rows(run: Run, plan: Plan, in_force: range) -> Iterator[dict[str, Any]]:
    """Yield, of the rank that holds most of a tier, the sum and then each kind.

    The ledger does not see activations that stay on the device: they are what the allocator gave out beside it. Without
    an allocator their bytes are unknown.
    """
    books = []
    for log in run.ranks:
        lines = [line for line in log.of(MemoryLine) if line.step in in_force]
        books.append((peaks(lines), allocator_peak(lines)))
    for tier in Tier:
        on_device = tier is Tier.DEVICE
        held = [max(total(book, tier), (allocated or 0) if on_device else 0) for book, allocated in books]
        book, allocated = books[held.index(max(held))]
        planned = {kind: size for kind, size in plan.predicted.bytes.get(tier, {}).items() if size}
        measured = {Kind(kind): size for kind, size in book.get(tier, {}).items() if size}
        unknown = set[Kind]()
        if book and on_device and Kind.ACTIVATIONS in planned and Kind.ACTIVATIONS not in measured:
            if allocated is None:
                unknown.add(Kind.ACTIVATIONS)
            else:
                measured[Kind.ACTIVATIONS] = max(0, allocated - sum(measured.values()))
        kinds = [kind for kind in Kind if kind in planned or kind in measured]
        if not kinds:
            continue
        known = sum(size for kind, size in planned.items() if kind not in unknown)
        yield _row(tier.value, WITHOUT if unknown else "", "bytes", known, sum(measured.values()) if book else None)
        for kind in kinds:
            size = measured.get(kind, 0) if book and kind not in unknown else None
            yield _row(tier.value, kind.value, "bytes", planned.get(kind, 0), size)


def _row(what: str, part: str, unit: str, predicted: float | None, measured: float | None) -> dict[str, Any]:
    error = None if predicted is None or not measured else finite((predicted - measured) / measured * 100)
    return {
        "what": what,
        "part": part,
        "unit": unit,
        "predicted": predicted,
        "measured": measured,
        "error_percent": error,
    }
