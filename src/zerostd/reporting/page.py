"""The page: one HTML file with everything in it, for a browser without a network.

Tables and words are written here, so they can be read where no script runs; charts are drawn in the browser from the
same numbers, which the page holds as JSON. Text from files is escaped, and the page's policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zerostd.reporting.tables import bytes_text, comparison, count_text, figures, plain_text, seconds_text, tables_of

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("charts.js", "timeline.js", "page.js")


def page_of(report: dict[str, Any]) -> str:
    """Return a report as HTML."""
    runs = report["runs"]
    script = "\n" + "\n".join(_file(name) for name in SCRIPTS) + "\n"
    template = _environment().get_template("page.html")
    return template.render(
        report=report,
        title=runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs side by side",
        comparison=comparison(report),
        figures=[figures(report, index) for index in range(len(runs))],
        tables=[tables_of(report, index) for index in range(len(runs))],
        style=Markup(_file("style.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=_embedded(report),
    )


def _embedded(report: dict[str, Any]) -> Markup:
    """Return JSON that cannot end its script element."""
    text = json.dumps(report, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


@cache
def _file(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(seconds=seconds_text, bytes=bytes_text, count=count_text, plain=plain_text)
    return environment
