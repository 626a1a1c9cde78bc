"""The page: one HTML file with everything in it, for a browser without a network.

In: a report, as `report_of` returns it. Out: HTML. Tables and words are written here, so they can be read where no
script runs; charts are drawn in the browser from the same numbers, which the page holds as JSON. Text from files is
escaped, and the page's policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zerostd.monitoring.texts import size_text
from zerostd.policy import Tier

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("charts.js", "timeline.js", "page.js")
NONE = "\N{EN DASH}"  # where there is no value
MINUS = "\N{MINUS SIGN}"
WORDS = {
    "optimizer_states": "optimizer states",
    "cpu": "processor",
    "up": "link up",
    "down": "link down",
    "wire": "wires",
}
ABOUT_SPEED = (
    "A step is as long as its slowest rank; samples and tokens are those of all ranks together, medians over steps."
)
ABOUT_MEMORY = (
    "Peaks of the rank that holds most; the last two are what the device's allocator had given out and had taken."
)

Report = dict[str, Any]
Format = Callable[[Any], str]
Place = str | tuple[str, str, str, str]  # a path; or (list, key, value, field): in the row whose `key` has that value
Column = tuple[str, Place, Format]  # its head, the place of its value below a row, how it is written
Cell = dict[str, Any]  # text, value, path in the report such as "runs.0.speed.step_s", is_number, share drawn as a bar
Table = dict[str, Any]  # name, title, heads, are_numbers, rows of as many cells, about


def page_of(report: Report) -> str:
    """Return a report as HTML."""
    runs = report["runs"]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(seconds=_seconds, bytes=_bytes, count=_count, plain=_plain)
    script = "\n" + "\n".join((TEMPLATES / name).read_text(encoding="utf-8") for name in SCRIPTS) + "\n"
    data = json.dumps(report, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":  # so that it cannot end its script element
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return environment.get_template("page.html").render(
        report=report,
        title=runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs side by side",
        comparison=_comparison(report),
        figures=[_figures(report, f"runs.{index}", run) for index, run in enumerate(runs)],
        tables=[_tables(report, f"runs.{index}", run) for index, run in enumerate(runs)],
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(data),
    )


# -- how values are written --

_count = "{:,}".format


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("\N{MICRO SIGN}s", 1e-6)):
        if abs(value) >= size:
            return f"{_rate(value / size)} {unit}"
    return "0 s" if value == 0 else f"{value * 1e9:.3g} ns"


def _bytes(value: int) -> str:
    return size_text(value) if value else "0 B"


def _rate(value: float) -> str:
    """Return a number with three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{100 * value:,.1f} %"


def _error(percent: float) -> str:
    return f"{'+' if percent >= 0 else MINUS}{abs(percent):,.1f} %"


def _loss(value: float) -> str:
    """Return a loss or a quality."""
    return f"{value:.4g}".replace("-", MINUS)


def _plain(value: Any) -> str:
    """Return a text, or a value of run.json's settings."""
    if value is None or value == "":
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _word(value: Any) -> str:
    """Return a word of the report as the page says it. Cells with it are not numbers."""
    text = _plain(value)
    return WORDS.get(text, text)


def _at(report: Report, path: str) -> Any:
    """Return what stands at a place; None where nothing does."""
    value: Any = report
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value.get(part)
    return value


def _cell(report: Report, path: str, place: Place, form: Format) -> Cell:
    """Return the value at a place below `path`; an empty cell if no row has the value that the place asks for."""
    if isinstance(place, tuple):
        rows, key, name, field = place
        index = next((index for index, row in enumerate(_at(report, f"{path}.{rows}")) if row[key] == name), None)
        if index is None:
            return {"text": NONE, "value": None, "path": "", "is_number": True, "bar": None}
        place = f"{rows}.{index}.{field}"
    path = f"{path}.{place}"
    value = _at(report, path)
    return {
        "text": NONE if value is None else form(value),
        "value": value,
        "path": path,
        "is_number": form is not _word,
        "bar": value if path.endswith(".share") else None,
    }


def _table(report: Report, name: str, title: str, path: str, columns: Sequence[Column], about: str = "") -> Table:
    """Return a table of a list in the report, a row for each of its items."""
    rows = [
        [_cell(report, f"{path}.{index}", place, form) for _, place, form in columns]
        for index in range(len(_at(report, path)))
    ]
    return _titled(name, title, [head for head, _, _ in columns], rows, about)


def _titled(name: str, title: str, heads: list[str], rows: list[list[Cell]], about: str = "") -> Table:
    are_numbers = [any(row[at]["is_number"] for row in rows) for at in range(len(heads))]
    return {"name": name, "title": title, "heads": heads, "are_numbers": are_numbers, "rows": rows, "about": about}


def _figures(report: Report, path: str, run: dict[str, Any]) -> list[tuple[str, Cell]]:
    """Return the few numbers that say most about a run."""
    columns: list[Column] = [("step, median", "speed.step_s", _seconds)]
    rates = [name for name in ("tokens", "samples") if run["speed"][f"{name}_per_s"] is not None]
    columns += [(f"{name}/s", f"speed.{name}_per_s", _rate) for name in rates[:1]]
    for index, peak in enumerate(run["memory"]["peaks"]):
        columns.append((f"{peak['tier']}, peak", f"memory.peaks.{index}.total", _bytes))
    if run["losses"]["count"]:
        columns.append(("last loss", "losses.last", _loss))
    for index, quality in enumerate(run["quality"][:2]):
        columns.append((f"last {quality['name']}", f"quality.{index}.last", _loss))
    if any(resource["name"] == "device" for resource in run["utilisation"]):
        columns.append(("device busy", ("utilisation", "name", "device", "share"), _share))
    return [(head, _cell(report, path, place, form)) for head, place, form in columns]


def _comparison(report: Report) -> list[Table]:
    """Return tables with a row for each run: speed, memory, quality, utilisation."""
    runs = report["runs"]
    tiers = {peak["tier"] for run in runs for peak in run["memory"]["peaks"]}
    qualities = dict.fromkeys(quality["name"] for run in runs for quality in run["quality"])
    resources = dict.fromkeys(resource["name"] for run in runs for resource in run["utilisation"])
    tables = [_table(report, "speed", "Speed", "runs", SPEED, ABOUT_SPEED)]
    if tiers:
        peaks: list[Column] = [
            (tier, ("memory.peaks", "tier", tier, "total"), _bytes) for tier in Tier if tier in tiers
        ]
        tables.append(_table(report, "memory", "Memory", "runs", [RUN, *peaks, *ALLOCATOR], ABOUT_MEMORY))
    if qualities or any(run["losses"]["count"] for run in runs):
        about = "Losses and qualities are means over ranks."
        last: list[Column] = [(f"last {name}", ("quality", "name", name, "last"), _loss) for name in qualities]
        tables.append(_table(report, "quality", "Model quality", "runs", [RUN, *LOSSES, *last], about))
    if resources:
        about = "Busy seconds over seconds of the steps."
        busy: list[Column] = [(_word(name), ("utilisation", "name", name, "share"), _share) for name in resources]
        tables.append(_table(report, "utilisation", "Utilisation", "runs", [RUN, *busy], about))
    return tables


def _tables(report: Report, path: str, run: dict[str, Any]) -> dict[str, Table]:
    """Return the tables of one run by name, without those that have no rows."""
    kinds = dict.fromkeys(kind for peak in run["memory"]["peaks"] for kind in peak["kinds"])
    peaks: list[Column] = [
        ("tier", "tier", _word),
        *((_word(kind), f"kinds.{kind}", _bytes) for kind in kinds),
        ("in all", "total", _bytes),
        ("on rank", "rank", _count),
    ]
    about = "Each kind at its own peak, on the rank that holds most of the tier."
    tables = [
        _table(report, "kinds", "Peaks", f"{path}.memory.peaks", peaks, about),
        _table(report, "waiting", "Waiting", f"{path}.waiting", WAITING),
        _table(report, "leaks", "Leaks", f"{path}.leaks", LEAKS),
    ]
    if len(run["ranks"]) > 1:
        tables.append(_table(report, "ranks", "Rank by rank", f"{path}.ranks", RANKS))
    for index, plan in enumerate(run["plans"]):
        title = "What more memory would buy, in a step"
        tables.append(_plan(report, f"{path}.plans.{index}.rows", f"plan-{index}", plan["rows"]))
        tables.append(_table(report, f"prices-{index}", title, f"{path}.plans.{index}.prices", PRICES))
    for index, step in enumerate(run["timeline"]["steps"]):
        title = f"Lanes of step {step['step']}"
        tables.append(_table(report, f"lanes-{step['step']}", title, f"{path}.timeline.steps.{index}.rows", LANES))
    return {table["name"]: table for table in tables if table["rows"]}


def _plan(report: Report, path: str, name: str, entries: list[dict[str, Any]]) -> Table:
    rows = []
    for index, entry in enumerate(entries):
        form = _seconds if entry["unit"] == "s" else _bytes
        what = f"{entry['what']}, {_word(entry['part'])}" if entry["part"] else entry["what"]
        cells = [{"text": what, "value": what, "path": "", "is_number": False, "bar": None}]
        for field, text in (("predicted", form), ("measured", form), ("error_percent", _error)):
            cells.append(_cell(report, f"{path}.{index}", field, text))
        rows.append(cells)
    return _titled(name, "Plan against measured", ["what", "planned", "measured", "error"], rows)


# -- columns --

RUN: Column = ("run", "name", _word)
SPEED: list[Column] = [
    RUN,
    ("model", "about.model", _word),
    ("ranks", "about.world_size", _count),
    ("steps", "speed.steps", _count),
    ("step, median", "speed.step_s", _seconds),
    ("shortest", "speed.shortest_s", _seconds),
    ("longest", "speed.longest_s", _seconds),
    ("samples/s", "speed.samples_per_s", _rate),
    ("tokens/s", "speed.tokens_per_s", _rate),
]
ALLOCATOR: list[Column] = [
    ("allocated", "memory.allocated", _bytes),
    ("reserved", "memory.reserved", _bytes),
]
LOSSES: list[Column] = [
    ("first loss", "losses.first", _loss),
    ("last loss", "losses.last", _loss),
    ("lowest loss", "losses.lowest", _loss),
    ("in step", "losses.lowest_step", _count),
]
WAITING: list[Column] = [
    ("the loop waits for", "cause", _word),
    ("a step, mean", "mean_s", _seconds),
    ("of the step", "share", _share),
    ("longest", "longest_s", _seconds),
    ("in step", "longest_step", _count),
    ("on rank", "longest_rank", _count),
]
RANKS: list[Column] = [
    ("rank", "rank", _count),
    ("steps", "steps", _count),
    ("step, median", "step_s", _seconds),
    ("waiting", "waiting_share", _share),
    ("has ended", "has_ended", _plain),
    ("lines left out", "unreadable", _count),
]
LEAKS: list[Column] = [
    ("group", "group", _word),
    ("what", "what", _word),
    ("where", "where", _word),
    ("bytes, most", "bytes", _bytes),
    ("times", "times", _count),
    ("first step", "first_step", _count),
    ("ranks", "ranks", _count),
]
PRICES: list[Column] = [
    ("tier", "tier", _word),
    ("planned for", "limit", _bytes),
    ("one more GiB saves", "saved_s_per_gib", _seconds),
]
LANES: list[Column] = [
    ("rank", "rank", _count),
    ("lane", "lane", _word),
    ("busy", "busy_s", _seconds),
    ("bytes", "bytes", _bytes),
    ("events", "events", _count),
]
