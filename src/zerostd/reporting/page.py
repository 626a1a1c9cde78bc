"""The page: one HTML file with everything in it, for a browser without a network.

In: a report, as `report_of` returns it. Out: HTML. templates/page.html says which tables there are and what is in their
columns; here values get their text. Tables can be read where no script runs; charts are drawn in the browser from the
same numbers, which the page holds as JSON. Text from files is escaped, and the page's policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zerostd.monitoring.texts import rate_text, seconds_text, size_text, value_text
from zerostd.policy import Tier

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("charts.js", "timeline.js", "page.js")
NONE = "\N{EN DASH}"  # where there is no value
MINUS = "\N{MINUS SIGN}"
WORDS = {
    "optimizer_states": "optimizer states",
    "cpu": "CPU",
    "up": "link up",
    "down": "link down",
    "wire": "between ranks",
}

Place = tuple[str | int, ...]  # in the report: fields, numbers of rows, and names or tiers that rows have
Column = tuple[str, Place | str, str]  # head, place of its values below a row ("speed.step_s"), how they are written
Cell = dict[str, Any]  # text, value, path in the report such as "runs.0.speed.step_s", is_number, share drawn as a bar


def page_of(report: dict[str, Any]) -> str:
    """Return a report as HTML."""
    return rendered("page.html", report, json.dumps(report, allow_nan=False, separators=(",", ":")), SCRIPTS)


def rendered(template: str, report: dict[str, Any], data: str, scripts: Iterable[str]) -> str:
    """Return a template with its numbers, its data as JSON for the scripts, and the style of all pages."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        extensions=["jinja2.ext.do"],
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(FORMATS)
    script = "\n" + "\n".join((TEMPLATES / name).read_text(encoding="utf-8") for name in scripts) + "\n"
    for letter in "<>&":  # so that it cannot end its script element
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return environment.get_template(template).render(
        report=report,
        tiers=list(Tier),
        cell_at=partial(_cell, report),
        rows_of=partial(_rows, report),
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(data),
    )


def _rows(report: dict[str, Any], place: Place, columns: Iterable[Column]) -> list[list[Cell]]:
    """Return the cells of a list in the report, a row for each of its items."""
    items, _ = _find(report, place)
    return [[_cell(report, (*place, row), below, form) for _, below, form in columns] for row in range(len(items))]


def _cell(report: dict[str, Any], place: Place, below: Place | str, form: str) -> Cell:
    value, path = _find(report, (*place, *(below.split(".") if isinstance(below, str) else below)))
    return {
        "text": NONE if value is None else FORMATS[form](value),
        "value": value,
        "path": path,
        "is_number": form != "word",
        "bar": value if path.endswith(".share") else None,
    }


def _find(report: dict[str, Any], place: Place) -> tuple[Any, str]:
    """Return what stands at a place, and its path; None where nothing does, without a path if there is no such row."""
    value: Any = report
    path = []
    for part in place:
        if isinstance(value, list) and isinstance(part, str):
            rows = [row for row, item in enumerate(value) if part in (item.get("name"), item.get("tier"))]
            if not rows:
                return None, ""
            part = rows[0]
        value = value.get(part) if isinstance(value, dict) else value[part]
        path.append(str(part))
    return value, ".".join(path)


# -- how values are written --


def _plain(value: Any) -> str:
    """Return a text, or a value of run.json's settings."""
    if value is None or value == "":
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _sign(percent: float) -> str:
    return "" if percent == 0 else MINUS if percent < 0 else "+"


FORMATS: dict[str, Callable[[Any], str]] = {
    "bytes": lambda size: size_text(size) if size else "0 B",
    "count": "{:,}".format,
    "error": lambda percent: f"{_sign(round(percent, 1))}{abs(percent):,.1f} %",
    "loss": lambda value: value_text(value).replace("-", MINUS),  # or a quality
    "plain": _plain,
    "rate": rate_text,
    "seconds": seconds_text,
    "share": lambda share: f"{100 * share:,.1f} %",
    "word": lambda word: WORDS.get(word, _plain(word)),  # cells with it are not numbers
}
