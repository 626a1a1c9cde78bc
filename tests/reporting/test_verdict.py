"""The verdict on a run names what the reader can change."""

from __future__ import annotations

from typing import Any

import pytest

from zerostd.reporting.verdict import verdict


def run(cause: str, tier: str, kind: str) -> dict[str, Any]:
    """A run that waits a tenth of each step for `cause`, and keeps `kind` in `tier`."""
    return {
        "speed": {"steps": 3, "step_s": 1.0},
        "utilisation": [{"name": "device", "share": 0.9}],
        "waiting": [{"cause": cause, "share": 0.1}],
        "memory": {"peaks": [{"tier": "device", "kinds": {"parameters": 8}}, {"tier": tier, "kinds": {kind: 8}}]},
        "plans": [],
        "losses": {"not_finite": 0},
        "leaks": [],
    }


@pytest.mark.parametrize(
    ("cause", "tier", "kind", "advice"),
    [
        ("parameters", "host", "optimizer_states", "Try larger groups, or more tokens per step."),
        ("parameters", "host", "parameters", "Try parameters on the device, or larger groups."),
        ("gradients", "disk", "gradients", "Try gradients on the device."),
        ("gradients", "host", "parameters", "mostly for gradients."),
        ("updates", "host", "optimizer_states", "or a share of the states on the device."),
    ],
)
def test_advice_is_not_what_the_run_has_already(cause: str, tier: str, kind: str, advice: str) -> None:
    text = verdict(run(cause, tier, kind))
    assert text.startswith("Bound by compute on the device, busy 90 % of a step.") and text.endswith(advice)
