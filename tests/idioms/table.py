"""What is expected of every idiom in every form, and the table for people.

expected.json has idiom -> form -> "same", "same error" or "refused". `accept` writes the outcomes of cells that are not
there yet. It never writes a result that is different, nor changes a cell: those are failures.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from idioms.forms import FORMS
from idioms.loop import THEMES, idioms
from idioms.running import DIFFERENT, ERROR, REFUSED, SAME, SAME_ERROR, Outcome

EXPECTED = Path(__file__).with_name("expected.json")
PEERS = Path(__file__).with_name("peers.json")  # peers.py writes it
MOST_LINES_SHOWN = 3  # of each refusal, in the table
GOOD = (SAME, SAME_ERROR, REFUSED)

Cells = dict[str, dict[str, str]]
Outcomes = Mapping[str, Mapping[str, Outcome]]  # by idiom and form


def read(path: Path) -> Cells:
    """One of the files beside this one; empty if it is not there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def complaints(name: str, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Where the outcomes of an idiom are not what is expected."""
    expected = read(EXPECTED).get(name, {})
    lines: list[str] = []
    for form, outcome in outcomes.items():
        seen = f"{form}: {outcome.outcome} ({outcome.detail}) at `{outcome.source}`"
        if form not in expected:
            lines.append(f"{seen}: not in the file. python -m idioms accept {name}")
        elif outcome.outcome != expected[form]:
            lines.append(f"{seen}, expected {expected[form]}")
    return lines


def accept(outcomes: Outcomes) -> list[str]:
    """Write what was observed; returns what was not written: results that differ, and cells that had another one."""
    expected = read(EXPECTED)
    refused: list[str] = []
    for name, cells in outcomes.items():
        for form, outcome in cells.items():
            before = expected.get(name, {}).get(form)
            if before is None and outcome.outcome in GOOD:
                expected.setdefault(name, {})[form] = outcome.outcome
            elif before != outcome.outcome:
                refused.append(f"{name}, {form}: {outcome.outcome} ({outcome.detail}), was {before}")
    _write(expected)
    return refused


def _write(cells: Cells) -> None:
    """In the order of the table, a line for each idiom; idioms that are gone are left out."""
    order = [form.name for form in FORMS]
    lines: list[str] = []
    for name in idioms():
        forms = cells.get(name, {})
        if forms:
            lines.append(f'  "{name}": {json.dumps({form: forms[form] for form in order if form in forms})}')
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def counts(outcomes: Outcomes) -> str:
    """How many idioms are what in each form."""
    lines = ["| form | same | same error | refused | different | error |", "|---|--:|--:|--:|--:|--:|"]
    for form in FORMS:
        kinds = Counter(cells[form.name].outcome for cells in outcomes.values() if form.name in cells)
        counted = " | ".join(str(kinds[kind]) for kind in (SAME, SAME_ERROR, REFUSED, DIFFERENT, ERROR))
        lines.append(f"| {form.name} | {counted} |")
    return "\n".join(lines)


def markdown(outcomes: Outcomes) -> str:
    """The table: a section for each theme, a row for each idiom, and below it what refusals say."""
    peers = read(PEERS)
    lines = [f"- **{form.name}**: {form.text}" for form in FORMS]
    for theme in THEMES:
        names = [name for name in outcomes if idioms()[name].theme == theme]
        if not names:
            continue
        lines += ["", f"## {theme.replace('_', ' ').capitalize()}", ""]
        lines += ["| what a loop does | zerostd | FSDP2 |", "|---|---|---|"]
        for name in names:
            cells = {form.name: outcomes[name][form.name].outcome for form in FORMS if form.name in outcomes[name]}
            peer = peers.get(name, {}).get("fsdp2", "").split(":")[0]
            lines.append(f"| {idioms()[name].text} | {in_words(cells)} | {peer} |")
        lines += ["", *_remedies(outcomes, names)]
    return "\n".join(lines).replace("](", "] (") + "\n"  # Markdown would take it for a link


def in_words(cells: Mapping[str, str]) -> str:
    """The outcome of all forms; where they differ, the most frequent one and the forms that have another."""
    (usual, _), *others = Counter(cells.values()).most_common()
    exceptions = (f"; {kind} in {', '.join(form for form in cells if cells[form] == kind)}" for kind, _ in others)
    return usual + "".join(exceptions)


def _remedies(outcomes: Outcomes, names: Iterable[str]) -> list[str]:
    """Each refusal of a theme once, with the first lines that it was raised at."""
    sources: dict[str, dict[str, None]] = {}
    for name in names:
        for outcome in outcomes[name].values():
            if outcome.outcome == REFUSED:
                sources.setdefault(outcome.detail, {})[f"`{outcome.source}`"] = None
    return [f"- {lines_in_words(list(lines))}: {detail}" for detail, lines in sources.items()]


def lines_in_words(lines: list[str]) -> str:
    """The first lines, and the number of the others."""
    num_others = len(lines) - MOST_LINES_SHOWN
    named = ", ".join(lines[:MOST_LINES_SHOWN])
    return named if num_others <= 0 else f"{named} and {num_others} other{'s' * (num_others > 1)}"
