"""`zerostd measure`: what this machine can do, tried out now or taken from what was kept of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from zerostd.cli.printing import machine_table, show, write
from zerostd.measuring import load_or_measure
from zerostd.monitoring.progress import ProgressBar
from zerostd.planning import MachineProfile
from zerostd.tiers.limits import check_disk

DiskPath = Annotated[str | None, typer.Option(metavar="DIR", help="The directory that a disk tier would use.")]
Again = Annotated[bool, typer.Option("--again", help="Measure, whatever was kept of this machine.")]
Json = Annotated[bool, typer.Option("--json", help="Print the profile as JSON, and nothing else.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Save the profile there too.")]


def measure(disk_path: DiskPath = None, again: Again = False, as_json: Json = False, output: Output = None) -> None:
    """Measure this machine: its link, processor, memory, matrix products, disk. Takes less than half a minute.

    The profile is kept, and measured again when the machine or the versions change. Under torchrun the wires between
    the ranks are measured too.
    """
    profile = measured(disk_path, again=again)
    if not _is_first():
        return
    if output is not None:
        write(output, profile.to_json())
    if as_json:
        typer.echo(profile.to_json(), nl=False)
    else:
        show(profile.name, machine_table(profile))


def measured(disk_path: str | None = None, *, again: bool = False) -> MachineProfile:
    """The profile of this machine, with a bar on stderr while it is measured."""
    if disk_path is not None:
        check_disk(0, disk_path)  # before anything takes its time
    columns = (BarColumn(bar_width=30), TextColumn("{task.description}"), TimeElapsedColumn())
    with ProgressBar(*columns, total=1.0, is_shown=_is_first()) as bar:
        return load_or_measure(disk_path=disk_path, on_progress=lambda what, done: bar.update(done, what), again=again)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"
