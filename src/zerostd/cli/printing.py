"""Results of the commands as tables, JSON and files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from decimal import ROUND_FLOOR, ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerostd.errors import StorageError
from zerostd.monitoring.texts import size_text
from zerostd.planning import MachineProfile, ModelProfile
from zerostd.planning.cluster import ScalingRow, state_bytes
from zerostd.policy import Stage, Tier

WIDTH = 120  # where the output is no terminal
DEGREES = (1, 4, 16, 64, 256, 1024)
PLACES = {10: "0.01", 100: "0.1", math.inf: "1"}  # below 10, below 100, above


def show(title: str, table: Table) -> None:
    """Print a title and a table to stdout."""
    typer.echo(title)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)


def parameters_text(count: int) -> str:
    """Return a number of parameters with its unit."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit} parameters"
    return f"{count} parameters"


def write(path: Path, text: str) -> None:
    """Write a text to a file that the user named; StorageError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; name another file") from error


# -- machines --


def machine_table(profile: MachineProfile) -> Table:
    """Return all that a profile says as a table."""
    table = Table(show_header=False)
    for name, value in _parts(profile):
        table.add_row(name, escape(value))
    return table


def _parts(profile: MachineProfile) -> Iterable[tuple[str, str]]:
    link = profile.link
    disk = profile.disk
    processor = profile.processor
    yield "device", profile.device
    if link is None:
        yield "link", "none: the device is the processor"
    else:
        yield "link", f"{_rate(link.up)} up, {_rate(link.down)} down, {_rate(link.both)} both ways together"
    for threads, ns in sorted(processor.update_ns.items()):
        yield "processor", f"{ns:.3g} ns a parameter with {threads} thread{'s' if threads > 1 else ''}"
    yield "memory", f"{_rate(processor.memory)} with everything busy"
    yield "device's updates", f"{profile.resident_ns:.3g} ns a parameter"
    for dtype, rate in profile.matrix.items():
        yield "matrix products", f"{rate / 1e12:.3g} TFLOP/s in {dtype}"
    if disk is None:
        yield "disk", "not measured"
    else:
        yield (
            "disk",
            f"{_rate(disk.read)} read, {_rate(disk.write)} written, {_rate(disk.both)} each at once: {disk.path}",
        )
    for wire in profile.wires:
        text = f"{_rate(wire.bandwidth)} a rank among {wire.ranks} ({wire.name}), {wire.latency * 1e6:.0f} us"
        yield "wires", text
    if not profile.wires:
        yield "wires", "not measured: one rank"
    for tier, size in profile.free.items():
        yield f"free, {tier}", size_text(size)
    if profile.measured:
        yield "measured", profile.measured


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


# -- scaling --


def scaling_table(rows: Sequence[ScalingRow], sequence: int | None) -> Table:
    """A line for each world size that fits; tokens if it is known how many a sample has."""
    tiers = [tier for tier in Tier if any(row.state.get(tier) for row in rows)]
    table = Table()
    for name in ("ranks", "stage", *(f"state, {tier.value}" for tier in tiers), "sent a step", "step", "of it compute"):
        table.add_column(name, justify="right")
    table.add_column("samples/s" if sequence is None else "tokens/s", justify="right")
    table.add_column("efficiency", justify="right")
    for row in rows:
        if row.stage is None:
            table.add_row(f"{row.world_size:,}", "-", *("-" for _ in tiers), "-", "-", "-", "-", "does not fit")
            continue
        table.add_row(
            f"{row.world_size:,}",
            str(row.stage.value),
            *(size_text(row.state.get(tier, 0)) for tier in tiers),
            size_text(row.sent),
            f"{row.step_s:.3g} s",
            f"{row.compute_s / row.step_s:.0%}",
            _count(row.samples_per_s * (sequence or 1)),
            f"{row.efficiency:.1%}",
        )
    return table


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rows_json(rows: Sequence[ScalingRow], sequence: int | None) -> str:
    """Return the same as a list of objects."""
    objects = []
    for row in rows:
        data: dict[str, Any] = asdict(row)
        data["stage"] = None if row.stage is None else row.stage.value
        data["state"] = {tier.value: size for tier, size in row.state.items()}
        if sequence is not None:
            data["tokens_per_s"] = row.samples_per_s * sequence
        objects.append(data)
    return json.dumps(objects, indent=2) + "\n"


# -- Table 1 of the ZeRO paper --


def state_rows(model: ModelProfile) -> list[dict[str, Any]]:
    """GB of model state on one device at stages 0 to 3, by number of devices, in digits as the paper prints them."""
    return [
        {"devices": degree, **{f"stage_{s.value}": _digits(state_bytes(model, s, degree) / 1e9) for s in Stage}}
        for degree in DEGREES
    ]


def state_table(model: ModelProfile) -> Table:
    """One model's columns of Table 1."""
    table = Table()
    for name in ("devices", "stage 0", "stage 1", "stage 2", "stage 3"):
        table.add_column(name, justify="right")
    for row in state_rows(model):
        table.add_row(*(str(value) for value in row.values()))
    return table


def _digits(gigabytes: float) -> str:
    """Two places below 10, one below 100, and whole numbers, cut off, from there on."""
    value = Decimal(repr(round(gigabytes, 6)))
    place = next(place for below, place in PLACES.items() if gigabytes < below)
    text = str(value.quantize(Decimal(place), ROUND_FLOOR if place == "1" else ROUND_HALF_UP))
    return text.rstrip("0").rstrip(".") if "." in text else text
