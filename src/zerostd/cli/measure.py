"""`zerostd measure`: the rates of this machine, measured now or read from the saved profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from zerostd.cli.printing import is_first_rank, show, write
from zerostd.measuring import load_or_measure
from zerostd.monitoring.progress import ProgressBar
from zerostd.monitoring.texts import rate_text, size_text
from zerostd.planning import MachineProfile
from zerostd.tiers.scratch_files import check_disk

DISK = "The directory that a disk tier would use."


def measure(
    disk_path: Annotated[str | None, typer.Option(metavar="DIR", help=DISK)] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure even if this machine has a saved profile.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON and nothing else.")] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Also save the profile to this file.")] = None,
) -> None:
    """Measure this machine: its link, CPU, memory, matrix products and disk.

    It takes less than half a minute. The profile is kept until the machine or
    versions change. Under torchrun it also measures the wires between ranks.
    """
    profile, is_kept = measure_here(disk_path, again=again)
    if not is_first_rank():
        return
    if output is not None:
        write(output, profile.to_json())
    if as_json:
        typer.echo(profile.to_json(), nl=False)
    else:
        table = Table(show_header=False)
        for name, value in _parts(profile):
            table.add_row(name, escape(value))
        show(profile.name, table)
        if is_kept:
            typer.echo(f"Saved profile, measured on {profile.measured}. To measure again: `zerostd measure --again`.")


def measured(disk_path: str | None = None) -> MachineProfile:
    """Return the profile of this machine, with a bar on stderr while it is measured."""
    return measure_here(disk_path, again=False)[0]


def measure_here(disk_path: str | None, *, again: bool) -> tuple[MachineProfile, bool]:
    """Return the profile of this machine, and whether it was measured before and kept."""
    if disk_path is not None:
        check_disk(0, disk_path)  # before anything takes its time
    parts: list[str] = []
    columns = (BarColumn(bar_width=30), TextColumn("{task.description}"), TimeElapsedColumn())
    with ProgressBar(*columns, total=1.0, is_shown=is_first_rank()) as bar:

        def show_part(what: str, done: float) -> None:
            parts.append(what)
            bar.update(done, what)

        profile = load_or_measure(disk_path=disk_path, on_progress=show_part, again=again)
    return profile, not parts


def _parts(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    """Yield all that a profile says, as rows of a table."""
    link = profile.link
    disk = profile.disk
    yield "device", profile.device
    if link is None:
        yield "link", "none: the device is the CPU"
    else:
        yield "link", f"{_rate(link.up)} up, {_rate(link.down)} down, {_rate(link.both)} both ways together"
    for threads, ns in sorted(profile.processor.update_ns.items()):
        yield "CPU update", f"{rate_text(ns)} ns per parameter with {threads} thread{'s' if threads > 1 else ''}"
    yield "host memory", f"{_rate(profile.processor.memory)} with everything busy"
    yield "device update", f"{rate_text(profile.resident_ns)} ns per parameter"
    for dtype, rate in profile.matrix.items():
        unit, size = ("TFLOP/s", 1e12) if rate >= 1e12 else ("GFLOP/s", 1e9)
        yield "matrix products", f"{rate_text(rate / size)} {unit} in {dtype}"
    if disk is None:
        yield "disk", "not measured"
    else:
        rates = f"{_rate(disk.read)} read, {_rate(disk.write)} written, {_rate(disk.both)} each at the same time"
        yield "disk", f"{rates} ({disk.path})"
    for wire in profile.wires:
        coded = f", {_rate(wire.coded)} as 8-bit codes" if wire.coded else ""
        rates = f"{_rate(wire.bandwidth)}{coded} per rank among {wire.ranks}"
        yield "wires", f"{rates} ({wire.name}), {wire.latency * 1e6:.0f} us"
    if not profile.wires:
        yield "wires", "not measured: one rank"
    for tier, size in profile.free.items():
        yield f"free, {tier}", size_text(size)
    if profile.measured:
        yield "measured", profile.measured


def _rate(rate: float) -> str:
    return f"{rate_text(rate / 1e9)} GB/s"
