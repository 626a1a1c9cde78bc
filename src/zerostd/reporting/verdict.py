"""The verdict on a run, in two or three sentences: what bounds a step, what more memory would save, what to try."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerostd.monitoring.texts import percent_text

BOUND_BY = {
    "device": "compute on the device",
    "cpu": "updates on the CPU",
    "update": "updates",
    "up": "the link to the device",
    "down": "the link from the device",
    "gradients": "gradient transfers to the host",
    "disk": "the disk",
    "wire": "communication between ranks",
}
TRY = {  # by what the loop waits for
    "updates": "Try more tokens per step, accumulate=, or a share of the states on the device.",
    "parameters": "Try larger groups, or more tokens per step.",
    "parameters off the device": "Try parameters on the device, or larger groups.",
    "gradients off the device": "Try gradients on the device.",
}
WORTH_SAYING = 0.05  # of a step


def verdict(run: dict[str, Any]) -> str:
    """Return the sentences about a run, from its numbers."""
    if not run["speed"]["steps"]:
        return "No step was recorded."
    return " ".join([*_bound(run), *_more_memory(run), *_trouble(run)])


def _bound(run: dict[str, Any]) -> Iterator[str]:
    busy = {row["name"]: row["share"] or 0.0 for row in run["utilisation"]}
    waits = {row["cause"]: row["share"] or 0.0 for row in run["waiting"]}
    if not busy:
        yield f"{run['speed']['steps']:,} steps were recorded, but no events."
        return
    first = max(busy, key=lambda name: busy[name])
    yield f"Bound by {BOUND_BY.get(first, first)}, busy {percent_text(min(1.0, busy[first]))} of a step."
    cause = max(waits, key=lambda name: waits[name], default="")
    if (waited := sum(waits.values())) >= WORTH_SAYING:
        is_off = any(peak["tier"] != "device" and peak["kinds"].get(cause) for peak in run["memory"]["peaks"])
        advice = TRY.get(f"{cause} off the device" if is_off else cause, "")
        yield f"The loop waits {percent_text(min(1.0, waited))} of a step, mostly for {cause}. {advice}".rstrip()
    elif first == "device":
        yield "The loop hardly waits for transfers or updates."


def _more_memory(run: dict[str, Any]) -> Iterator[str]:
    step_s = run["speed"]["step_s"]
    prices = run["plans"][-1]["prices"] if run["plans"] else []
    savings = {row["tier"]: (row["saved_s_per_gib"] or 0.0) / step_s for row in prices if step_s}
    tier = max(savings, key=lambda name: savings[name], default=None)
    if tier is not None and savings[tier] >= WORTH_SAYING / 5:
        yield f"One more GiB of {tier} memory would save about {percent_text(min(1.0, savings[tier]))} of a step."


def _trouble(run: dict[str, Any]) -> Iterator[str]:
    if run["losses"]["not_finite"]:
        yield f"The loss was NaN or infinite in {run['losses']['not_finite']:,} steps."
    if run["leaks"]:
        yield f"Memory leaks in {len(run['leaks'])} place{'s' if len(run['leaks']) > 1 else ''}; see Leaks below."
