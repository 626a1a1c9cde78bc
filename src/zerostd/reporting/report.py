"""All numbers of a page as plain data for JSON: one object for each run, and the differences.

In: runs, as `read_run` returns them. Out: a dict for `report_json` and `page_of`. The command `report` calls these.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from zerostd.monitoring.texts import plain_seconds, size_text
from zerostd.reporting import numbers
from zerostd.reporting.plans import plans
from zerostd.reporting.records import MemoryLine, QualityLine, Run, tidy_text
from zerostd.reporting.timeline import timelines
from zerostd.reporting.verdict import verdict

FORMAT = 1  # of the report
MOST_LEAKS = 200  # rows


def report_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the numbers of one or several runs."""
    reports = [_run(run) for run in runs]
    for report in reports:
        speed = report["speed"]
        speed["change_percent"] = numbers.percent(speed["step_s"], reports[0]["speed"]["step_s"])
    return {"format": FORMAT, "notices": [*_differences(runs)], "runs": reports}


def report_json(report: dict[str, Any]) -> str:
    """Return a report as JSON."""
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _run(run: Run) -> dict[str, Any]:
    info = run.info
    steps = numbers.steps_of(run)
    planned, plan_notices = plans(run, steps)
    leaks = numbers.leaks(run)
    report: dict[str, Any] = {
        "name": run.name,
        "about": {
            "model": info.model.name,
            "parameters": info.model.parameters,
            "machine": info.machine.name,
            "world_size": info.world_size,
            "begun": info.begun,
            "command": info.command,
            "zerostd": info.zerostd,
            "settings": {name: _setting(value) for name, value in info.settings.items()},
        },
        "is_partial": not all(log.has_ended for log in run.ranks),
        "lines": {
            "read": sum(log.num_lines - log.num_unreadable - log.is_torn for log in run.ranks),
            "unreadable": sum(log.num_unreadable for log in run.ranks),
            "torn": sum(log.is_torn for log in run.ranks),
        },
        "speed": numbers.speed(steps),
        "step_times": numbers.step_times(steps),
        "losses": numbers.losses(steps),
        "curves": numbers.curves(steps),
        "quality": numbers.qualities(run),
        "memory": numbers.memory(run),
        "utilisation": [*numbers.utilisation(run)],
        "waiting": [*numbers.waiting(run)],
        "ranks": [*numbers.ranks(run)],
        "timeline": timelines(run, steps),
        "sent": numbers.sent(run),
        "plans": planned,
        "leaks": leaks[:MOST_LEAKS],
    }
    report["verdict"] = verdict(report)
    report["notices"] = [*run.notices, *plan_notices, *_retried(run), *_coded(run), *_thinned(run, report, len(leaks))]
    return report


def _setting(value: Any) -> str | int | bool | None:
    """Return whole numbers, true, false and null unchanged, and everything else as a text."""
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**53):
        return value
    return tidy_text(value if isinstance(value, str) else repr(value))


def _retried(run: Run) -> Iterator[str]:
    """Yield a notice for reads and writes of files that were made again."""
    counts: Counter[str] = Counter()
    for log in run.ranks:
        for line in log.of(MemoryLine)[-1:]:
            counts.update(line.retries)
    if counts:
        kinds = ", ".join(f"{tidy_text(kind)} {count:,}" for kind, count in sorted(counts.items())[:8])
        yield f"File reads or writes were repeated after errors: {kinds}. Check the drives."


def _coded(run: Run) -> Iterator[str]:
    """Yield a notice for each kind of state that is kept as codes."""
    lines = [line for log in run.ranks for line in log.of(MemoryLine)[-1:]]
    for kind in sorted({kind for line in lines for kind in line.coded}):
        size, held = (sum(line.coded.get(kind, (0, 0))[index] for line in lines) for index in (0, 1))
        what = tidy_text(kind).replace("_", " ").capitalize()
        ratio = f" ({size / held:.2f} to 1)" if held else ""
        yield f"{what} of {size_text(size)} are kept as codes in {size_text(held)}{ratio}."
    if unpacking_s := sum(line.unpacking for line in lines):
        yield f"Unpacking parameters took {plain_seconds(unpacking_s)} of processor time."


def _thinned(run: Run, report: dict[str, Any], num_leaks: int) -> Iterator[str]:
    """Yield a notice for each chart or table that does not show everything."""
    loss = report["losses"]
    num_points = max(curve["count"] for curve in (loss, *report["quality"]))
    if num_points > numbers.MOST_POINTS:
        yield f"A line has {num_points:,} points; the lowest and the highest of each interval are drawn."
    drawn = {rank["rank"] for rank in report["memory"]["ranks"] if rank["tiers"]}
    if any(len(log.of(MemoryLine)) > numbers.MOST_POINTS for log in run.ranks if log.rank in drawn):
        yield f"Memory has {report['memory']['lines']:,} samples; the largest of each interval are drawn."
    for step in report["timeline"]["steps"]:
        if step["bars"] < step["events"]:
            yield (
                f"Step {step['step']} has {step['events']:,} events, drawn as {step['bars']:,} bars: neighbours on a "
                "lane are joined."
            )
    if len(run.ranks) > numbers.MOST_DRAWN:
        yield f"Charts show {numbers.MOST_DRAWN} of {len(run.ranks)} ranks; tables count all."
    names = {line.name for log in run.ranks for line in log.of(QualityLine)}
    if len(names) > numbers.MOST_QUALITIES:
        yield f"The first {numbers.MOST_QUALITIES} of {len(names)} metrics are shown."
    if num_leaks > MOST_LEAKS:
        yield f"The {MOST_LEAKS} largest of {num_leaks:,} leaks are shown."
    if loss["not_finite"]:
        yield f"The loss is NaN or infinite in {loss['not_finite']:,} of {loss['count']:,} steps."


def _differences(runs: Sequence[Run]) -> Iterator[str]:
    models = dict.fromkeys(run.info.model for run in runs)
    if len(models) > 1:
        names = [
            (model.name or "no name") + ("" if model.parameters is None else f" ({model.parameters:,} parameters)")
            for model in models
        ]
        yield f"The runs are of different models: {', '.join(names[:8])}. Do not compare losses, bytes or speeds."
    machines = dict.fromkeys(run.info.machine.name or "no name" for run in runs)
    if len(machines) > 1:
        yield f"The runs are from different machines: {', '.join(list(machines)[:8])}."
