"""The numbers as tables. Every cell knows the place in the report that it shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zerostd.reporting.texts import (
    NONE,
    Format,
    bytes_text,
    count_text,
    percent_text,
    plain_text,
    rate_text,
    seconds_text,
    share_text,
    value_text,
)

__all__ = ["Cell", "Table", "comparison", "figures", "tables_of"]

WORDS = {
    "optimizer_states": "optimizer states",
    "cpu": "processor",
    "up": "link up",
    "down": "link down",
    "wire": "wires",
}
TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Cell:
    """A value, as text; `path` is where it stands in the report, "runs.0.speed.step_s"; `bar` is a share to draw."""

    text: str
    value: Any = None
    path: str = ""
    bar: float | None = None
    is_number: bool = True


@dataclass(frozen=True)
class Table:
    """Heads, and rows of as many cells."""

    name: str
    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    about: str = ""

    @property
    def are_numbers(self) -> list[bool]:
        """Which columns are."""
        return [any(row[at].is_number for row in self.rows) for at in range(len(self.heads))]


class _Report:
    """Makes cells of places."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report

    def at(self, path: str) -> Any:
        """What stands there; None where nothing does."""
        found: Any = self.report
        for part in path.split("."):
            found = found[int(part)] if isinstance(found, list) else found.get(part)
        return found

    def cell(self, path: str, form: Format, *, bar: float | None = None) -> Cell:
        value = self.at(path)
        return Cell(form(value), value, path, bar)

    def words(self, path: str) -> Cell:
        value = self.at(path)
        text = plain_text(value)
        return Cell(WORDS.get(text, text), value, path, is_number=False)


def _found(rows: Sequence[dict[str, Any]], key: str, value: str) -> int | None:
    """The index of the row with this value."""
    return next((index for index, row in enumerate(rows) if row[key] == value), None)


# -- one or several runs --


def figures(report: dict[str, Any], run: int) -> list[tuple[str, Cell]]:
    """The few numbers that say most about a run."""
    book, at = _Report(report), f"runs.{run}"
    numbers = report["runs"][run]
    found = [("step, median", book.cell(f"{at}.speed.step_s", seconds_text))]
    for name, words in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        if numbers["speed"][name] is not None:
            found.append((words, book.cell(f"{at}.speed.{name}", rate_text)))
            break
    for index, peak in enumerate(numbers["memory"]["peaks"]):
        found.append((f"{peak['tier']}, peak", book.cell(f"{at}.memory.peaks.{index}.total", bytes_text)))
    if numbers["losses"]["count"]:
        found.append(("last loss", book.cell(f"{at}.losses.last", value_text)))
    for index, quality in enumerate(numbers["quality"][:2]):
        found.append((f"last {quality['name']}", book.cell(f"{at}.quality.{index}.last", value_text)))
    busy = _found(numbers["utilisation"], "name", "device")
    if busy is not None:
        found.append(("device busy", book.cell(f"{at}.utilisation.{busy}.share", share_text)))
    return found


def comparison(report: dict[str, Any]) -> list[Table]:
    """Runs as rows: speed, memory, quality, utilisation."""
    book, runs = _Report(report), report["runs"]
    return [table for table in (_speeds(book, runs), _peaks(book, runs), _good(book, runs), _busy(book, runs)) if table]


def _names(book: _Report, index: int) -> Cell:
    return book.words(f"runs.{index}.name")


def _speeds(book: _Report, runs: list[Any]) -> Table:
    heads = ("run", "model", "ranks", "steps", "step, median", "shortest", "longest", "samples/s", "tokens/s")
    forms = {
        "steps": count_text,
        "step_s": seconds_text,
        "shortest_s": seconds_text,
        "longest_s": seconds_text,
        "samples_per_s": rate_text,
        "tokens_per_s": rate_text,
    }
    rows = tuple(
        (
            _names(book, index),
            book.words(f"runs.{index}.about.model"),
            book.cell(f"runs.{index}.about.world_size", count_text),
            *(book.cell(f"runs.{index}.speed.{name}", form) for name, form in forms.items()),
        )
        for index in range(len(runs))
    )
    about = (
        "A step is as long as its slowest rank; samples and tokens are those of all ranks together, medians over steps."
    )
    return Table("speed", "Speed", heads, rows, about)


def _peaks(book: _Report, runs: list[Any]) -> Table | None:
    tiers = [tier for tier in TIERS if any(_found(run["memory"]["peaks"], "tier", tier) is not None for run in runs)]
    if not tiers:
        return None
    rows = []
    for index, run in enumerate(runs):
        cells = [_names(book, index)]
        for tier in tiers:
            at = _found(run["memory"]["peaks"], "tier", tier)
            cells.append(Cell(NONE) if at is None else book.cell(f"runs.{index}.memory.peaks.{at}.total", bytes_text))
        cells += [book.cell(f"runs.{index}.memory.{name}", bytes_text) for name in ("allocated", "reserved")]
        rows.append(tuple(cells))
    about = (
        "Peaks of the rank that holds most; the last two are what the device's allocator had given out and had taken."
    )
    return Table("memory", "Memory", ("run", *tiers, "allocated", "reserved"), tuple(rows), about)


def _good(book: _Report, runs: list[Any]) -> Table | None:
    names = list(dict.fromkeys(quality["name"] for run in runs for quality in run["quality"]))
    if not names and not any(run["losses"]["count"] for run in runs):
        return None
    rows = []
    for index, run in enumerate(runs):
        at = f"runs.{index}"
        cells = [_names(book, index)]
        cells += [book.cell(f"{at}.losses.{name}", value_text) for name in ("first", "last", "lowest")]
        cells.append(book.cell(f"{at}.losses.lowest_step", count_text))
        for name in names:
            place = _found(run["quality"], "name", name)
            cells.append(Cell(NONE) if place is None else book.cell(f"{at}.quality.{place}.last", value_text))
        rows.append(tuple(cells))
    heads = ("run", "first loss", "last loss", "lowest loss", "in step", *(f"last {name}" for name in names))
    return Table("quality", "Model quality", heads, tuple(rows), "Losses and qualities are means over ranks.")


def _busy(book: _Report, runs: list[Any]) -> Table | None:
    names = list(dict.fromkeys(one["name"] for run in runs for one in run["utilisation"]))
    if not names:
        return None
    rows = []
    for index, run in enumerate(runs):
        cells = [_names(book, index)]
        for name in names:
            at = _found(run["utilisation"], "name", name)
            path = f"runs.{index}.utilisation.{at}.share"
            cells.append(Cell(NONE) if at is None else book.cell(path, share_text, bar=book.at(path)))
        rows.append(tuple(cells))
    heads = ("run", *(WORDS.get(name, name) for name in names))
    return Table("utilisation", "Utilisation", heads, tuple(rows), "Busy seconds over seconds of the steps.")


# -- one run --


def tables_of(report: dict[str, Any], run: int) -> dict[str, Table]:
    """Its own tables, by name; those with nothing in them are left out."""
    book, at, numbers = _Report(report), f"runs.{run}", report["runs"][run]
    made: list[Table] = [
        _kinds(book, at, numbers["memory"]["peaks"]),
        _waits(book, at, numbers["waiting"]),
        _ranks(book, at, numbers["ranks"]),
        _leaks(book, at, numbers["leaks"]),
        *(_plan(book, f"{at}.plans.{index}", plan, index) for index, plan in enumerate(numbers["plans"])),
        *(_prices(book, f"{at}.plans.{index}", plan, index) for index, plan in enumerate(numbers["plans"])),
        *(
            _lanes(book, f"{at}.timeline.steps.{index}", step)
            for index, step in enumerate(numbers["timeline"]["steps"])
        ),
    ]
    return {table.name: table for table in made if table.rows}


def _kinds(book: _Report, at: str, peaks: list[Any]) -> Table:
    kinds = list(dict.fromkeys(kind for peak in peaks for kind in peak["kinds"]))
    rows = tuple(
        (
            book.words(f"{at}.memory.peaks.{index}.tier"),
            *(book.cell(f"{at}.memory.peaks.{index}.kinds.{kind}", bytes_text) for kind in kinds),
            book.cell(f"{at}.memory.peaks.{index}.total", bytes_text),
            book.cell(f"{at}.memory.peaks.{index}.rank", count_text),
        )
        for index in range(len(peaks))
    )
    heads = ("tier", *(WORDS.get(kind, kind) for kind in kinds), "in all", "on rank")
    return Table("kinds", "Peaks", heads, rows, "Each kind at its own peak, on the rank that holds most of the tier.")


def _waits(book: _Report, at: str, causes: list[Any]) -> Table:
    forms = {"mean_s": seconds_text, "share": share_text, "longest_s": seconds_text}
    rows = tuple(
        (
            book.words(f"{at}.waiting.{index}.cause"),
            *(
                book.cell(f"{at}.waiting.{index}.{name}", form, bar=cause["share"] if name == "share" else None)
                for name, form in forms.items()
            ),
            book.cell(f"{at}.waiting.{index}.longest_step", count_text),
            book.cell(f"{at}.waiting.{index}.longest_rank", count_text),
        )
        for index, cause in enumerate(causes)
    )
    heads = ("the loop waits for", "a step, mean", "of the step", "longest", "in step", "on rank")
    return Table("waiting", "Waiting", heads, rows)


def _ranks(book: _Report, at: str, ranks: list[Any]) -> Table:
    forms: dict[str, Format] = {
        "rank": count_text,
        "steps": count_text,
        "step_s": seconds_text,
        "waiting_share": share_text,
        "has_ended": plain_text,
        "unreadable": count_text,
    }
    rows: Iterable[tuple[Cell, ...]] = (
        tuple(book.cell(f"{at}.ranks.{index}.{name}", form) for name, form in forms.items())
        for index in range(len(ranks))
    )
    heads = ("rank", "steps", "step, median", "waiting", "has ended", "lines left out")
    return Table("ranks", "Rank by rank", heads, tuple(rows) if len(ranks) > 1 else ())


def _leaks(book: _Report, at: str, leaks: list[Any]) -> Table:
    rows = tuple(
        (
            *(book.words(f"{at}.leaks.{index}.{name}") for name in ("group", "what", "where")),
            book.cell(f"{at}.leaks.{index}.bytes", bytes_text),
            *(book.cell(f"{at}.leaks.{index}.{name}", count_text) for name in ("times", "first_step", "ranks")),
        )
        for index in range(len(leaks))
    )
    heads = ("group", "what", "where", "bytes, most", "times", "first step", "ranks")
    return Table("leaks", "Leaks", heads, rows)


def _plan(book: _Report, at: str, plan: Any, number: int) -> Table:
    rows = []
    for index, row in enumerate(plan["rows"]):
        form = seconds_text if row["unit"] == "s" else bytes_text
        part = WORDS.get(row["part"], row["part"])
        name = f"{row['what']}, {part}" if part else row["what"]
        rows.append(
            (
                Cell(name, name, is_number=False),
                book.cell(f"{at}.rows.{index}.predicted", form),
                book.cell(f"{at}.rows.{index}.measured", form),
                book.cell(f"{at}.rows.{index}.error_percent", percent_text),
            )
        )
    heads = ("what", "planned", "measured", "error")
    return Table(f"plan-{number}", "Plan against measured", heads, tuple(rows))


def _prices(book: _Report, at: str, plan: Any, number: int) -> Table:
    rows = tuple(
        (
            book.words(f"{at}.prices.{index}.tier"),
            book.cell(f"{at}.prices.{index}.limit", bytes_text),
            book.cell(f"{at}.prices.{index}.saved_s_per_gib", seconds_text),
        )
        for index in range(len(plan["prices"]))
    )
    heads = ("tier", "planned for", "one more GiB saves")
    return Table(f"prices-{number}", "What more memory would buy, in a step", heads, rows)


def _lanes(book: _Report, at: str, step: Any) -> Table:
    rows = tuple(
        (
            book.cell(f"{at}.rows.{index}.rank", count_text),
            book.words(f"{at}.rows.{index}.lane"),
            book.cell(f"{at}.rows.{index}.busy_s", seconds_text),
            book.cell(f"{at}.rows.{index}.bytes", bytes_text),
            book.cell(f"{at}.rows.{index}.events", count_text),
        )
        for index in range(len(step["rows"]))
    )
    heads = ("rank", "lane", "busy", "bytes", "events")
    return Table(f"lanes-{step['step']}", f"Lanes of step {step['step']}", heads, rows)
