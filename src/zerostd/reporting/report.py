"""All that a page shows, as plain data: one object for each run, and what they have not in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from zerostd.reporting.memory import MOST_RANKS, memory
from zerostd.reporting.plans import plans
from zerostd.reporting.reading import Run
from zerostd.reporting.records import Held, Leak, Quality
from zerostd.reporting.resources import MOST_LEAKS, by_rank, leaks, utilisation, waiting
from zerostd.reporting.speeds import MOST_QUALITIES, losses, qualities, speed, steps_of
from zerostd.reporting.thinning import MOST_POINTS
from zerostd.reporting.timeline import timelines

__all__ = ["report_json", "report_of"]

FORMAT = 1  # of the report


def report_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The numbers of one or several runs, as JSON has them."""
    return {
        "format": FORMAT,
        "notices": [notice for notice in (_differences(runs), _machines(runs)) if notice],
        "runs": [_numbers(run) for run in runs],
    }


def report_json(report: dict[str, Any]) -> str:
    """The same as text."""
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _numbers(run: Run) -> dict[str, Any]:
    about, steps = run.about, steps_of(run)
    planned, plan_notices = plans(run, steps)
    made: dict[str, Any] = {
        "name": about.name,
        "about": {
            "model": about.model,
            "parameters": about.parameters,
            "machine": about.machine,
            "world_size": about.world_size,
            "begun": about.begun,
            "command": about.command,
            "zerostd": about.zerostd,
            "settings": dict(about.settings),
        },
        "is_partial": not all(log.has_ended for log in run.ranks),
        "lines": {
            "read": sum(log.num_lines - log.num_unreadable - log.is_torn for log in run.ranks),
            "unreadable": sum(log.num_unreadable for log in run.ranks),
            "torn": sum(log.is_torn for log in run.ranks),
        },
        "speed": speed(steps),
        "losses": losses(steps),
        "quality": qualities(run),
        "memory": memory(run),
        "utilisation": utilisation(run),
        "waiting": waiting(run),
        "ranks": by_rank(run),
        "timeline": timelines(run, steps),
        "plans": planned,
        "leaks": leaks(run),
    }
    made["notices"] = [*run.notices, *plan_notices, *_thinned(run, made)]
    return made


def _thinned(run: Run, made: dict[str, Any]) -> list[str]:
    """What is drawn with less than there is."""
    found = []
    counts = [made["losses"]["count"], *(one["count"] for one in made["quality"])]
    if max(counts) > MOST_POINTS:
        found.append(f"Of {max(counts):,} points of a line, the lowest and the highest of each stretch are drawn.")
    if any(
        len(tier["times"]) < _lines_of(run, rank["rank"]) for rank in made["memory"]["ranks"] for tier in rank["tiers"]
    ):
        found.append(f"Of {made['memory']['lines']:,} moments of memory, the largest of each stretch are drawn.")
    for step in made["timeline"]["steps"]:
        if step["bars"] < step["events"]:
            found.append(
                f"Step {step['step']} has {step['events']:,} events, drawn as {step['bars']:,} bars: neighbours on a "
                "lane are one."
            )
    if len(run.ranks) > MOST_RANKS:
        found.append(f"Charts show {MOST_RANKS} of {len(run.ranks)} ranks; tables count all.")
    names = {one.name for log in run.ranks for one in log.of(Quality)}
    if len(names) > MOST_QUALITIES:
        found.append(f"Of {len(names)} qualities the first {MOST_QUALITIES} are shown.")
    places = {(one.group, one.what, one.where) for log in run.ranks for one in log.of(Leak)}
    if len(places) > MOST_LEAKS:
        found.append(f"Of {len(places):,} leaks the {MOST_LEAKS} largest are shown.")
    if made["losses"]["not_finite"]:
        found.append(
            f"The loss is not finite in {made['losses']['not_finite']:,} of {made['losses']['count']:,} steps."
        )
    return found


def _lines_of(run: Run, rank: int) -> int:
    return next(len(log.of(Held)) for log in run.ranks if log.rank == rank)


def _differences(runs: Sequence[Run]) -> str:
    """What runs side by side do not share."""
    models = dict.fromkeys((run.about.model or "no name", run.about.parameters) for run in runs)
    if len(models) < 2:
        return ""
    names = [name if size is None else f"{name} ({size:,} parameters)" for name, size in models]
    return f"The runs are of different models: {', '.join(names[:8])}. Losses, bytes and speeds do not compare."


def _machines(runs: Sequence[Run]) -> str:
    machines = dict.fromkeys(run.about.machine for run in runs)
    if len(machines) < 2:
        return ""
    return f"The runs are from different machines: {', '.join(name or 'no name' for name in list(machines)[:8])}."
