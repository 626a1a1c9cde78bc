"""The numbers of a report in rows, written as people read them. Every cell knows its place in the report.

In: a report, as `report_of` returns it. Out: tables for the page, and the few figures at its top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerostd.monitoring.texts import size_text
from zerostd.policy import Tier

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
Column = tuple[str, str, Format]  # its head, the place of its value in a row, how it is written


@dataclass(frozen=True)
class Cell:
    """A value, as text; `path` is its place in the report, such as "runs.0.speed.step_s"."""

    text: str
    value: Any = None
    path: str = ""
    is_number: bool = True

    @property
    def bar(self) -> float | None:
        """The share that is drawn as a bar."""
        return self.value if self.path.endswith(".share") else None


@dataclass(frozen=True)
class Table:
    """Heads, and rows of as many cells."""

    name: str
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    about: str = ""

    @property
    def are_numbers(self) -> list[bool]:
        """Whether each column holds numbers."""
        return [any(row[at].is_number for row in self.rows) for at in range(len(self.heads))]


# -- texts --


def seconds_text(value: float) -> str:
    """Return seconds in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("\N{MICRO SIGN}s", 1e-6)):
        if abs(value) >= size:
            return f"{rate_text(value / size)} {unit}"
    return "0 s" if value == 0 else f"{value * 1e9:.3g} ns"


def bytes_text(value: int) -> str:
    """Return bytes in the unit that fits."""
    return size_text(value) if value else "0 B"


def rate_text(value: float) -> str:
    """Return a number with three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def share_text(value: float) -> str:
    """Return a part of one in percent."""
    return f"{100 * value:,.1f} %"


def percent_text(value: float) -> str:
    """Return percent with their sign."""
    return f"{'+' if value >= 0 else MINUS}{abs(value):,.1f} %"


def value_text(value: float) -> str:
    """Return a loss or a quality."""
    return f"{value:.4g}".replace("-", MINUS)


def count_text(value: int) -> str:
    """Return a whole number."""
    return f"{value:,}"


def plain_text(value: Any) -> str:
    """Return a text, or a value of run.json's settings."""
    if value is None or value == "":
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def word_text(value: Any) -> str:
    """Return a word of the report as the page says it. Cells with it are not numbers."""
    text = plain_text(value)
    return WORDS.get(text, text)


# -- cells --


def _at(report: Report, path: str) -> Any:
    """Return what stands at a place; None where nothing does."""
    value: Any = report
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value.get(part)
    return value


def _cell(report: Report, path: str, form: Format) -> Cell:
    value = _at(report, path)
    return Cell(NONE if value is None else form(value), value, path, is_number=form is not word_text)


def _cell_where(report: Report, path: str, key: str, value: str, place: str, form: Format) -> Cell:
    """Return the cell at `place` in the row of a list whose `key` has that value; an empty one if no row has."""
    for index, row in enumerate(_at(report, path)):
        if row[key] == value:
            return _cell(report, f"{path}.{index}.{place}", form)
    return Cell(NONE)


def _table(report: Report, name: str, title: str, path: str, columns: Sequence[Column], about: str = "") -> Table:
    """Return a table of a list in the report, a row for each of its items."""
    rows = [
        [_cell(report, f"{path}.{index}.{place}", form) for _, place, form in columns]
        for index in range(len(_at(report, path)))
    ]
    return Table(name, title, [head for head, _, _ in columns], rows, about)


# -- one or several runs --


def figures(report: Report, run: int) -> list[tuple[str, Cell]]:
    """Return the few numbers that say most about a run."""
    path = f"runs.{run}"
    numbers = report["runs"][run]
    shown = [("step, median", _cell(report, f"{path}.speed.step_s", seconds_text))]
    rates = [name for name in ("tokens", "samples") if numbers["speed"][f"{name}_per_s"] is not None]
    for name in rates[:1]:
        shown.append((f"{name}/s", _cell(report, f"{path}.speed.{name}_per_s", rate_text)))
    for index, peak in enumerate(numbers["memory"]["peaks"]):
        shown.append((f"{peak['tier']}, peak", _cell(report, f"{path}.memory.peaks.{index}.total", bytes_text)))
    if numbers["losses"]["count"]:
        shown.append(("last loss", _cell(report, f"{path}.losses.last", value_text)))
    for index, quality in enumerate(numbers["quality"][:2]):
        shown.append((f"last {quality['name']}", _cell(report, f"{path}.quality.{index}.last", value_text)))
    busy = _cell_where(report, f"{path}.utilisation", "name", "device", "share", share_text)
    return [*shown, ("device busy", busy)] if busy.path else shown


def comparison(report: Report) -> list[Table]:
    """Return tables with a row for each run: speed, memory, quality, utilisation."""
    runs = report["runs"]
    tiers = dict.fromkeys(peak["tier"] for run in runs for peak in run["memory"]["peaks"])
    qualities = dict.fromkeys(quality["name"] for run in runs for quality in run["quality"])
    resources = dict.fromkeys(resource["name"] for run in runs for resource in run["utilisation"])
    tables = [_table(report, "speed", "Speed", "runs", SPEED, ABOUT_SPEED)]
    if tiers:
        tables.append(_peaks(report, [tier for tier in Tier if tier in tiers]))
    if qualities or any(run["losses"]["count"] for run in runs):
        tables.append(_qualities(report, list(qualities)))
    if resources:
        tables.append(_busy(report, list(resources)))
    return tables


def _peaks(report: Report, tiers: Sequence[str]) -> Table:
    rows = [
        [
            _cell(report, f"runs.{run}.name", word_text),
            *(_cell_where(report, f"runs.{run}.memory.peaks", "tier", tier, "total", bytes_text) for tier in tiers),
            _cell(report, f"runs.{run}.memory.allocated", bytes_text),
            _cell(report, f"runs.{run}.memory.reserved", bytes_text),
        ]
        for run in range(len(report["runs"]))
    ]
    return Table("memory", "Memory", ["run", *tiers, "allocated", "reserved"], rows, ABOUT_MEMORY)


def _qualities(report: Report, names: Sequence[str]) -> Table:
    rows = [
        [
            _cell(report, f"runs.{run}.name", word_text),
            *(_cell(report, f"runs.{run}.losses.{name}", value_text) for name in ("first", "last", "lowest")),
            _cell(report, f"runs.{run}.losses.lowest_step", count_text),
            *(_cell_where(report, f"runs.{run}.quality", "name", name, "last", value_text) for name in names),
        ]
        for run in range(len(report["runs"]))
    ]
    heads = ["run", "first loss", "last loss", "lowest loss", "in step", *(f"last {name}" for name in names)]
    return Table("quality", "Model quality", heads, rows, "Losses and qualities are means over ranks.")


def _busy(report: Report, names: Sequence[str]) -> Table:
    rows = [
        [
            _cell(report, f"runs.{run}.name", word_text),
            *(_cell_where(report, f"runs.{run}.utilisation", "name", name, "share", share_text) for name in names),
        ]
        for run in range(len(report["runs"]))
    ]
    heads = ["run", *(WORDS.get(name, name) for name in names)]
    return Table("utilisation", "Utilisation", heads, rows, "Busy seconds over seconds of the steps.")


# -- one run --


def tables_of(report: Report, run: int) -> dict[str, Table]:
    """Return the tables of one run by name, without those that have no rows."""
    path = f"runs.{run}"
    numbers = report["runs"][run]
    tables = [
        _kinds(report, f"{path}.memory.peaks"),
        _table(report, "waiting", "Waiting", f"{path}.waiting", WAITING),
        _table(report, "leaks", "Leaks", f"{path}.leaks", LEAKS),
    ]
    if len(numbers["ranks"]) > 1:
        tables.append(_table(report, "ranks", "Rank by rank", f"{path}.ranks", RANKS))
    for index in range(len(numbers["plans"])):
        title = "What more memory would buy, in a step"
        tables.append(_plan(report, f"{path}.plans.{index}.rows", f"plan-{index}"))
        tables.append(_table(report, f"prices-{index}", title, f"{path}.plans.{index}.prices", PRICES))
    for index, step in enumerate(numbers["timeline"]["steps"]):
        title = f"Lanes of step {step['step']}"
        tables.append(_table(report, f"lanes-{step['step']}", title, f"{path}.timeline.steps.{index}.rows", LANES))
    return {table.name: table for table in tables if table.rows}


def _kinds(report: Report, path: str) -> Table:
    kinds = dict.fromkeys(kind for peak in _at(report, path) for kind in peak["kinds"])
    columns: list[Column] = [
        ("tier", "tier", word_text),
        *((WORDS.get(kind, kind), f"kinds.{kind}", bytes_text) for kind in kinds),
        ("in all", "total", bytes_text),
        ("on rank", "rank", count_text),
    ]
    about = "Each kind at its own peak, on the rank that holds most of the tier."
    return _table(report, "kinds", "Peaks", path, columns, about)


def _plan(report: Report, path: str, name: str) -> Table:
    rows = []
    for index, row in enumerate(_at(report, path)):
        form = seconds_text if row["unit"] == "s" else bytes_text
        what = f"{row['what']}, {WORDS.get(row['part'], row['part'])}" if row["part"] else row["what"]
        rows.append(
            [
                Cell(what, what, is_number=False),
                _cell(report, f"{path}.{index}.predicted", form),
                _cell(report, f"{path}.{index}.measured", form),
                _cell(report, f"{path}.{index}.error_percent", percent_text),
            ]
        )
    return Table(name, "Plan against measured", ["what", "planned", "measured", "error"], rows)


# -- columns --

SPEED: list[Column] = [
    ("run", "name", word_text),
    ("model", "about.model", word_text),
    ("ranks", "about.world_size", count_text),
    ("steps", "speed.steps", count_text),
    ("step, median", "speed.step_s", seconds_text),
    ("shortest", "speed.shortest_s", seconds_text),
    ("longest", "speed.longest_s", seconds_text),
    ("samples/s", "speed.samples_per_s", rate_text),
    ("tokens/s", "speed.tokens_per_s", rate_text),
]
WAITING: list[Column] = [
    ("the loop waits for", "cause", word_text),
    ("a step, mean", "mean_s", seconds_text),
    ("of the step", "share", share_text),
    ("longest", "longest_s", seconds_text),
    ("in step", "longest_step", count_text),
    ("on rank", "longest_rank", count_text),
]
RANKS: list[Column] = [
    ("rank", "rank", count_text),
    ("steps", "steps", count_text),
    ("step, median", "step_s", seconds_text),
    ("waiting", "waiting_share", share_text),
    ("has ended", "has_ended", plain_text),
    ("lines left out", "unreadable", count_text),
]
LEAKS: list[Column] = [
    ("group", "group", word_text),
    ("what", "what", word_text),
    ("where", "where", word_text),
    ("bytes, most", "bytes", bytes_text),
    ("times", "times", count_text),
    ("first step", "first_step", count_text),
    ("ranks", "ranks", count_text),
]
PRICES: list[Column] = [
    ("tier", "tier", word_text),
    ("planned for", "limit", bytes_text),
    ("one more GiB saves", "saved_s_per_gib", seconds_text),
]
LANES: list[Column] = [
    ("rank", "rank", count_text),
    ("lane", "lane", word_text),
    ("busy", "busy_s", seconds_text),
    ("bytes", "bytes", bytes_text),
    ("events", "events", count_text),
]
