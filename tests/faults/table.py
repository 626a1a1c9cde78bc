"""Many outcomes as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from faults.drawing import FEATURES, KINDS, MACHINES, RECOVERED
from faults.running import Outcome

HEAD = (
    "| fault | injected | detected | recovered | ended cleanly | hangs | wrong results | guilty rank named | "
    "and no other |"
)


def rows(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of the table, one for each kind and one for all."""
    lines = [HEAD, "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for kind in (*KINDS, *MACHINES):
        mine = [outcome for outcome in outcomes if outcome.fault.kind == kind]
        if mine:
            lines.append(row(kind, mine))
    lines.append(row("**all**", outcomes))
    return lines


def rows_of_features(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the same with a line for each feature of the jobs; nothing if they have none."""
    by_feature = {name: [outcome for outcome in outcomes if outcome.fault.job.feature == name] for name in FEATURES}
    lines = [row(name, mine) for name, mine in by_feature.items() if mine]
    return ["", HEAD.replace("fault", "feature", 1), "|---|--:|--:|--:|--:|--:|--:|--:|--:|", *lines] if lines else []


def row(name: str, outcomes: Sequence[Outcome]) -> str:
    """Return one line of the table."""
    hangs = _count(outcomes, "hangs")
    wrong = _count(outcomes, "wrong values")
    asked = [outcome for outcome in outcomes if outcome.is_named is not None]
    named = f"{sum(bool(outcome.is_named) for outcome in asked)} of {len(asked)}" if asked else ""
    alone = f"{sum(outcome.is_alone for outcome in asked)}" if asked else ""
    recovered = sum(outcome.fault.kind in RECOVERED and not outcome.problems for outcome in outcomes)
    unclean = ("hangs", "was ended by", "raised", "did not finish")
    clean = sum(not any(word in text for word in unclean for text in outcome.problems) for outcome in outcomes)
    detected = sum(outcome.is_detected for outcome in outcomes)
    return f"| {name} | {len(outcomes)} | {detected} | {recovered} | {clean} | {hangs} | {wrong} | {named} | {alone} |"


def _count(outcomes: Iterable[Outcome], word: str) -> int:
    return sum(any(word in problem for problem in outcome.problems) for outcome in outcomes)
