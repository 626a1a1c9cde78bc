"""`zerostd top`: a run in the terminal while it goes on, read from its run directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from zerostd.errors import MisuseError
from zerostd.monitoring.texts import rate_text, seconds_text, size_text, value_text
from zerostd.reporting import read_run, report_of

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 48  # points of a line

RUN = "A run directory, as zerostd.track(..., run_dir=...) writes it."
EVERY = "Seconds between updates."
ONCE = "Show the run once and exit."


def top(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help=RUN)],
    every: Annotated[float, typer.Option(metavar="S", help=EVERY)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help=ONCE)] = False,
) -> None:
    """Show a run in the terminal while it trains. It ends with the run, or with Ctrl-C."""
    if not every > 0:
        raise MisuseError(f"--every {every} must be a number of seconds above 0")
    console = Console()
    if once or not console.is_terminal:
        console.print(_view(_numbers(run_dir)))
        return
    run = _numbers(run_dir)
    with Live(_view(run), console=console, auto_refresh=False) as live:
        while run["is_partial"]:
            time.sleep(every)
            run = _numbers(run_dir)
            live.update(_view(run), refresh=True)


def _numbers(run_dir: Path) -> dict[str, Any]:
    return report_of([read_run(run_dir)])["runs"][0]  # type: ignore[no-any-return]


def _view(run: dict[str, Any]) -> Group:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    speed = run["speed"]
    state = "running, or killed" if run["is_partial"] else "ended"
    table.add_row("run", f"{escape(run['name'])}, {state}, {speed['steps']:,} steps")
    if speed["step_s"] is not None:
        table.add_row("step", f"{seconds_text(speed['step_s'])}  {_line(run['step_times']['points'])}")
    for name in ("tokens", "samples"):
        if speed[f"{name}_per_s"] is not None:
            table.add_row(f"{name}/s", rate_text(speed[f"{name}_per_s"]))
    if run["losses"]["count"]:
        table.add_row("loss", f"{value_text(run['losses']['last'] or float('nan'))}  {_line(run['losses']['points'])}")
    for peak in run["memory"]["peaks"]:
        table.add_row(peak["tier"], f"{size_text(peak['total'])} at peak")
    for row in run["waiting"]:
        if row["share"]:
            table.add_row("waiting", f"{100 * row['share']:.1f} % of a step, for {row['cause']}")
    for leak in run["leaks"][:3]:
        table.add_row("leak", escape(f"{size_text(leak['bytes'])} of {leak['what']}, {leak['where']}"))
    return Group(escape(run["verdict"]), table)


def _line(points: Sequence[tuple[int, float | None]]) -> str:
    """Return the last points as a line of blocks."""
    values = [value for _, value in points if value is not None][-WIDTH:]
    low = min(values, default=0.0)
    span = max(values, default=0.0) - low
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1)) if span else 0] for value in values)
