"""`zerostd doctor`: whether this machine is as training needs it, and what to do where it is not."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from zerostd.cli.checks import Finding, Status, examine
from zerostd.cli.tables import show

__all__ = ["doctor"]

COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "red"}

DiskPath = Annotated[str | None, typer.Option("--disk", metavar="PATH", help="The directory of a disk tier.")]
Json = Annotated[bool, typer.Option("--json", help="Print the findings as JSON, and nothing else.")]


def doctor(disk: DiskPath = None, as_json: Json = False) -> None:
    """Look at what training needs: versions, kernels, accelerator, memory, disk, process group. Takes a few seconds.

    The exit code is 0, or 1 if something does not work. Under torchrun all ranks meet, and the first one speaks.
    """
    found = examine(disk)
    is_healthy = all(finding.status is not Status.FAILURE for finding in found)
    if os.environ.get("RANK", "0") == "0":
        if as_json:
            typer.echo(
                json.dumps({"healthy": is_healthy, "findings": [asdict(finding) for finding in found]}, indent=2)
            )
        else:
            show(_summary(found), _table(found))
    if not is_healthy:
        raise typer.Exit(1)


def _summary(found: list[Finding]) -> str:
    counts = {status: sum(finding.status is status for finding in found) for status in Status}
    return f"{counts[Status.OK]} ok, {counts[Status.WARNING]} to look at, {counts[Status.FAILURE]} broken"


def _table(found: list[Finding]) -> Table:
    table = Table()
    for name in ("", "", "found", "remedy"):
        table.add_column(name, overflow="fold")
    for finding in found:
        status = f"[{COLOURS[finding.status]}]{finding.status.value}[/]"
        table.add_row(finding.name, status, escape(finding.value), escape(finding.remedy))
    return table
