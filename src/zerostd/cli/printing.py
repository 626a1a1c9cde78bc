"""Results of the commands as tables, JSON and files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from decimal import ROUND_FLOOR, ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Column, Table

from zerostd.errors import StorageError
from zerostd.monitoring.texts import count_text, rate_text, seconds_text, short_size
from zerostd.planning import ModelProfile
from zerostd.policy import Stage, Tier
from zerostd.preparing.scaling import ScalingRow, state_bytes

WIDTH = 80  # where the output is no terminal
DEGREES = (1, 4, 16, 64, 256, 1024)
PLACES = {10: "0.01", 100: "0.1", math.inf: "1"}  # below 10, below 100, above


def show(title: str, table: Table) -> None:
    """Print a title and a table to stdout."""
    typer.echo(title)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)


def title_of(name: str, numel: int, machine: str) -> str:
    """Return a model with its number of parameters, and where it is planned for."""
    return f"{name}: {count_text(numel)} parameters on {machine}"


OPTIONS = {  # what plans and errors call things in Python, and options of the command line
    "leave accumulate= out of prepare": "leave --accumulate out",
    "accumulate= was not passed to prepare": "--accumulate was not given",
    ", or None to keep each parameter's dtype": "",
    "Budget(disk=..., disk_path=...)": "--budget disk=... with --disk-path",
    "Budget(disk_path=...)": "--disk-path",
    "Budget(device=...)": "--budget device=...",
    "Budget(host=...)": "--budget host=...",
}


def in_options(text: str) -> str:
    """Return a text about Python's options in words of the command line."""
    for python, option in OPTIONS.items():
        text = text.replace(python, option)
    return text


def is_first_rank() -> bool:
    """Return whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def write(path: Path, text: str) -> None:
    """Write a text to a file that the user named; StorageError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; name another file") from error


def show_scaling(title: str, rows: Sequence[ScalingRow], sequence: int | None, *, as_json: bool) -> None:
    """Print a line for each world size; tokens if it is known how many a sample has."""
    if as_json:
        objects = [msgspec.to_builtins(row) for row in rows]
        for fields in objects:
            if sequence is not None:
                fields["tokens_per_s"] = fields["samples_per_s"] * sequence
        typer.echo(json.dumps(objects, indent=2))
        return
    tiers = [tier for tier in Tier if any(row.state.get(tier) for row in rows)]
    states = [tier.value for tier in tiers]
    rate = "samples/s" if sequence is None else "tokens/s"
    heads = ("sent", "pass", "step", rate, "TFLOP/s", "efficiency")
    table = _table("ranks", "stage", *states, *heads)
    for row in rows:
        if row.stage is None:
            table.add_row(f"{row.world_size:,}", *("-" for _ in range(6 + len(tiers))), "does not fit")
            continue
        per_s = row.samples_per_s * (sequence or 1)
        table.add_row(
            f"{row.world_size:,}",
            str(row.stage.value),
            *(short_size(row.state.get(tier, 0)) for tier in tiers),
            short_size(row.sent),
            f"{row.samples:,}" if row.passes == 1 else f"{row.samples:,} x {row.passes:,}",
            seconds_text(row.step_s),
            rate_text(per_s),
            rate_text(row.tflops),
            f"{row.efficiency:.1%}",
        )
    show(title, table)
    typer.echo("Model state, bytes sent in a step and samples in a pass are per rank.")
    for row in rows:
        if row.refused:
            typer.echo(f"{row.world_size:,} ranks: {row.refused}")


def _table(*heads: str) -> Table:
    columns = (Column(head, justify="right", no_wrap=True) for head in heads)
    return Table(*columns, box=None, padding=(0, 1, 0, 0), pad_edge=False)


# -- Table 1 of the ZeRO paper --


def state_rows(model: ModelProfile) -> list[dict[str, Any]]:
    """Return GB of model state on one device at stages 0 to 3, by number of devices, with the paper's digits. The paper
    trains in fp16, whose masters are whole."""
    model = replace(model, dtype="float16")
    return [
        {"devices": degree, **{f"stage_{s.value}": _digits(state_bytes(model, s, degree) / 1e9) for s in Stage}}
        for degree in DEGREES
    ]


def show_states(models: Sequence[ModelProfile], *, as_json: bool) -> None:
    """Print the columns of Table 1 for each model."""
    if as_json:
        numbers = {
            model.name: [{name: json.loads(str(value)) for name, value in row.items()} for row in state_rows(model)]
            for model in models
        }
        typer.echo(json.dumps(numbers, indent=2))
        return
    for model in models:
        table = _table("devices", "stage 0", "stage 1", "stage 2", "stage 3")
        for row in state_rows(model):
            table.add_row(*(str(value) for value in row.values()))
        show(f"{model.name}: GB of model state on one device, as in Table 1 of the ZeRO paper", table)


def _digits(gigabytes: float) -> str:
    """Return two places below 10, one below 100, and whole numbers, cut off, from there on."""
    value = Decimal(repr(round(gigabytes, 6)))
    place = next(place for below, place in PLACES.items() if gigabytes < below)
    text = str(value.quantize(Decimal(place), ROUND_FLOOR if place == "1" else ROUND_HALF_UP))
    return text.rstrip("0").rstrip(".") if "." in text else text
