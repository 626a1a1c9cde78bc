"""All that a page shows, as plain data that JSON can hold: one object for each run, and how they differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from zerostd.reporting.memory import MOST_LEAKS, MOST_RANKS, leaks, memory
from zerostd.reporting.plans import plans
from zerostd.reporting.reading import Run
from zerostd.reporting.records import MemoryLine, QualityLine, tidy_text
from zerostd.reporting.speeds import MOST_QUALITIES, losses, qualities, ranks, speed, steps_of, utilisation, waiting
from zerostd.reporting.thinning import MOST_POINTS
from zerostd.reporting.timeline import timelines

FORMAT = 1  # of the report


def report_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the numbers of one or several runs."""
    return {
        "format": FORMAT,
        "notices": [*_different_models(runs), *_different_machines(runs)],
        "runs": [_numbers(run) for run in runs],
    }


def report_json(report: dict[str, Any]) -> str:
    """Return a report as JSON."""
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _numbers(run: Run) -> dict[str, Any]:
    steps = steps_of(run)
    planned, plan_notices = plans(run, steps)
    all_leaks = leaks(run)
    numbers: dict[str, Any] = {
        "name": run.name,
        "about": _about(run),
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
        "ranks": ranks(run),
        "timeline": timelines(run, steps),
        "plans": planned,
        "leaks": all_leaks[:MOST_LEAKS],
    }
    numbers["notices"] = [*run.notices, *plan_notices, *_thinned(run, numbers, len(all_leaks))]
    return numbers


def _about(run: Run) -> dict[str, Any]:
    info = run.info
    return {
        "model": info.model.name,
        "parameters": info.model.parameters,
        "machine": info.machine.name,
        "world_size": info.world_size,
        "begun": info.begun,
        "command": info.command,
        "zerostd": info.zerostd,
        "settings": {name: _setting(value) for name, value in info.settings.items()},
    }


def _setting(value: Any) -> str | int | bool | None:
    """Return whole numbers, true, false and null as they are, and everything else as a text."""
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**53):
        return value
    return tidy_text(value if isinstance(value, str) else repr(value))


def _thinned(run: Run, numbers: dict[str, Any], num_leaks: int) -> Iterator[str]:
    """Yield a notice for whatever is drawn with less than there is."""
    loss = numbers["losses"]
    num_points = max(series["count"] for series in (loss, *numbers["quality"]))
    if num_points > MOST_POINTS:
        yield f"Of {num_points:,} points of a line, the lowest and the highest of each stretch are drawn."
    moments = {log.rank: len(log.of(MemoryLine)) for log in run.ranks}
    drawn = [(rank["rank"], tier) for rank in numbers["memory"]["ranks"] for tier in rank["tiers"]]
    if any(len(tier["times"]) < moments[rank] for rank, tier in drawn):
        yield f"Of {numbers['memory']['lines']:,} moments of memory, the largest of each stretch are drawn."
    for step in numbers["timeline"]["steps"]:
        if step["bars"] < step["events"]:
            yield (
                f"Step {step['step']} has {step['events']:,} events, drawn as {step['bars']:,} bars: neighbours on a "
                "lane are one."
            )
    if len(run.ranks) > MOST_RANKS:
        yield f"Charts show {MOST_RANKS} of {len(run.ranks)} ranks; tables count all."
    names = {line.name for log in run.ranks for line in log.of(QualityLine)}
    if len(names) > MOST_QUALITIES:
        yield f"Of {len(names)} qualities the first {MOST_QUALITIES} are shown."
    if num_leaks > MOST_LEAKS:
        yield f"Of {num_leaks:,} leaks the {MOST_LEAKS} largest are shown."
    if loss["not_finite"]:
        yield f"The loss is not finite in {loss['not_finite']:,} of {loss['count']:,} steps."


def _different_models(runs: Sequence[Run]) -> Iterator[str]:
    models = dict.fromkeys(run.info.model for run in runs)
    if len(models) > 1:
        names = [
            (model.name or "no name") + ("" if model.parameters is None else f" ({model.parameters:,} parameters)")
            for model in models
        ]
        yield f"The runs are of different models: {', '.join(names[:8])}. Losses, bytes and speeds do not compare."


def _different_machines(runs: Sequence[Run]) -> Iterator[str]:
    machines = dict.fromkeys(run.info.machine.name or "no name" for run in runs)
    if len(machines) > 1:
        yield f"The runs are from different machines: {', '.join(list(machines)[:8])}."
