"""`zerostd report`: the results of one or several runs, as a page or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerostd.cli.printing import write
from zerostd.errors import MisuseError
from zerostd.reporting import page_of, read_run, report_json, report_of, trace_of, write_scalars

PAGE = Path("report.html")

RUNS = "One or more run directories, compared side by side."
OUTPUT = "The page to write. Default: report.html."
TRACE = "Also write the events of one run as a trace for Chrome or Perfetto."
SCALARS = "Also write the numbers of each step as TensorBoard scalars."
JSON = "Print the page's numbers as JSON; write no page unless -o names one."


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help=RUNS)],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help=OUTPUT)] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON)] = False,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help=TRACE)] = None,
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIR", help=SCALARS)] = None,
) -> None:
    """Write an HTML page about one or several runs.

    It shows what bounds a step, memory over time, the timeline of a step,
    waiting, and the plan beside measurements. It needs no network.
    """
    if trace is not None and len(run_dirs) > 1:
        raise MisuseError(
            f"--trace {trace} takes one run, but {len(run_dirs)} were given: run the command once for each"
        )
    names = [path.resolve().name for path in run_dirs]
    runs = [
        read_run(path, name if names.count(name) == 1 else str(path))  # all of a path where its last part is not unique
        for path, name in zip(run_dirs, names, strict=True)
    ]
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
    for notice in numbers["notices"]:
        typer.echo(notice)
    for shown in numbers["runs"]:
        typer.echo(f"{shown['name']}: {shown['speed']['steps']:,} steps. {shown['verdict']}")
        for notice in shown["notices"]:
            typer.echo(f"  {notice}")
    typer.echo(f"Written: {', '.join(str(path) for path in (output or PAGE, trace, tensorboard) if path is not None)}")
