"""A plan as a page: the verdict, bytes by tier, what is busy, the simulated step, and other budgets of the device.

In: a plan, and plans for other budgets, as `zerostd plan --html` makes them. Out: one HTML file, with the style of the
report, the script of its timeline and one of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from zerostd.monitoring.texts import seconds_text, short_size
from zerostd.planning.plan import WORDS, Plan
from zerostd.policy import Kind, Tier
from zerostd.reporting.page import SCRIPTS, rendered
from zerostd.reporting.records import EventLine
from zerostd.reporting.timeline import drawn_step

LANES = {  # of the workers of a simulated step: their lanes in recorded ones, and what they do unless a span says it
    "wait": ("loop", "wait"),
    "compute": ("compute", ""),
    "update": ("compute", "update"),
    "resident": ("update", "transfer"),
    "streamed": ("update", "update"),
    "cpu": ("cpu", "update"),
    "disk": ("disk", "update"),
    "land": ("gradients", "transfer"),
    "bring": ("up", "transfer"),
    "return": ("up", "transfer"),
    "send": ("down", "transfer"),
}


def plan_page(title: str, plan: Plan, others: Sequence[Plan]) -> str:
    """Return a plan as HTML; `others` are for other budgets of the device."""
    predicted = plan.predicted
    words = plan.explain().split("\n\n", 1)[-1]  # after the table
    busy = {**predicted.busy, "compute": predicted.compute_s or 0.0} if predicted.step_s else {}
    report: dict[str, Any] = {
        "title": title,
        "tiles": [("stage", str(plan.stage.value)), ("ranks", f"{plan.world_size:,}"), *_cost(plan)],
        "sentences": words.splitlines(),
        "tiers": [_tier(plan, tier) for tier in Tier if predicted.total(tier)],
        "busy": [
            {"name": WORDS.get(name, name), "share": seconds / (predicted.step_s or 1.0), "text": seconds_text(seconds)}
            for name, seconds in sorted(busy.items(), key=lambda item: -item[1])
        ],
        "others": [
            dict(_cost(other)) | {"limit": short_size(other.limits[Tier.DEVICE])} for other in _by_limit(others)
        ],
        "chosen": sum(other.limits[Tier.DEVICE] < plan.limits[Tier.DEVICE] for other in _by_limit(others)),
        "timeline": _simulated(plan),
    }
    data = {"others": report["others"], "runs": [{"timeline": {"steps": report["timeline"]}}]}
    return rendered("plan.html", report, json.dumps(data), (*SCRIPTS, "plan.js"))


def _simulated(plan: Plan) -> list[dict[str, Any]]:
    """Return the simulated step as a report has a recorded one; nothing where no time is known."""
    events = []
    for worker, what, group, start, end in plan.spans:
        lane, usual = LANES[worker]
        events.append(EventLine(0, what or usual, lane, start, end, group))
    return [drawn_step({0: events}, {})] if events else []


def _by_limit(plans: Sequence[Plan]) -> list[Plan]:
    return sorted((plan for plan in plans if plan.predicted.step_s), key=lambda plan: plan.limits[Tier.DEVICE])


def _cost(plan: Plan) -> list[tuple[str, str]]:
    step = [("step", seconds_text(plan.predicted.step_s))] if plan.predicted.step_s else []
    sizes = [(tier.value, short_size(plan.predicted.total(tier))) for tier in Tier if plan.predicted.total(tier)]
    return [*step, *sizes]


def _tier(plan: Plan, tier: Tier) -> dict[str, Any]:
    """Return the parts of a tier's bar: kinds, as shares of its limit or of what is used."""
    held = plan.predicted.bytes.get(tier, {})
    total = plan.predicted.total(tier)
    limit = plan.limits.get(tier)
    whole = max(total, limit or 0)
    kinds = [kind for kind in Kind if held.get(kind)]
    return {
        "tier": tier.value,
        "text": short_size(total) + ("" if limit is None else f" of {short_size(limit)}"),
        "kinds": [
            {
                "name": kind.value.replace("_", " "),
                "colour": list(Kind).index(kind),
                "share": held[kind] / whole,
                "text": short_size(held[kind]),
            }
            for kind in kinds
        ],
    }
