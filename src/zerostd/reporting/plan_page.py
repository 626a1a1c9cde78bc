"""A plan as a page: the verdict, bytes by tier, what is busy, and the step time for other budgets of the device.

In: a plan, and plans for other budgets, as `zerostd plan --html` makes them. Out: one HTML file, with the style of the
report and a script of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from zerostd.monitoring.texts import seconds_text, short_size
from zerostd.planning.plan import WORDS, Plan
from zerostd.policy import Kind, Tier
from zerostd.reporting.page import rendered


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
    }
    return rendered("plan.html", report, json.dumps(report["others"]), ("plan.js",))


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
