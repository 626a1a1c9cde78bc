"""`zerostd report`: what came of one or several runs, as a page or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zerostd.cli.printing import write
from zerostd.errors import MisuseError
from zerostd.reporting import page_of, read_run, report_json, report_of, trace_of, write_scalars

PAGE = Path("report.html")

Runs = Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Directories of runs, side by side.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page to write. Default: report.html.")
]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write the events of one run as a trace for Chrome or Perfetto."),
]
Scalars = Annotated[
    Path | None,
    typer.Option("--tensorboard", metavar="DIR", help="Also write the numbers of each step as TensorBoard's scalars."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the page's numbers as JSON; no page unless -o names one.")]


def report(
    run_dirs: Runs, output: Output = None, as_json: Json = False, trace: Trace = None, tensorboard: Scalars = None
) -> None:
    """Write a page about one run or several: memory, time, waiting, the plan against what happened, quality.

    The page is one HTML file that needs no network.
    """
    if trace is not None and len(run_dirs) > 1:
        raise MisuseError(f"--trace {trace} is of one run, and {len(run_dirs)} are named: ask for one after the other")
    runs = [read_run(path, name) for path, name in zip(run_dirs, _names(run_dirs), strict=True)]
    numbers = report_of(runs)
    if trace is not None:
        write(trace, trace_of(runs[0]))
    if tensorboard is not None:
        for run in runs:
            write_scalars(run, tensorboard)
    if output is not None or not as_json:
        write(output or PAGE, page_of(numbers))
    if as_json:
        typer.echo(report_json(numbers), nl=False)
        return
    for line in _lines(numbers):
        typer.echo(line)
    typer.echo(f"Written: {', '.join(str(path) for path in (output or PAGE, trace, tensorboard) if path is not None)}")


def _names(paths: list[Path]) -> list[str]:
    """Return the last part of each path, or all of it where that is not unique."""
    short = [path.resolve().name for path in paths]
    return [name if short.count(name) == 1 else str(path) for name, path in zip(short, paths, strict=True)]


def _lines(numbers: dict[str, Any]) -> list[str]:
    lines = [*numbers["notices"]]
    for run in numbers["runs"]:
        lines.append(f"{run['name']}: {run['speed']['steps']:,} steps, {run['lines']['read']:,} lines")
        lines += [f"  {notice}" for notice in run["notices"]]
    return lines
