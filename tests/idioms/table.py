"""What is expected of every idiom in every form, and the table for people.

expected.json   idiom -> form -> "same" or "refused": what holds
known.json      idiom -> form -> "different: ..." or "error: ...": what is to be mended; it may only shrink

A cell stands in one of the two. `accept` writes what was observed: a mended cell moves from the second to the first. A
cell that held and does not hold any more is never written; that is a failure.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from idioms.forms import FORMS
from idioms.loop import THEMES, idioms
from idioms.running import DIFFERENT, ERROR, REFUSED, SAME, Outcome

EXPECTED = Path(__file__).with_name("expected.json")
KNOWN = Path(__file__).with_name("known.json")
PEERS = Path(__file__).with_name("peers.json")  # peers.py writes it
GOOD = (SAME, REFUSED)

Cells = dict[str, dict[str, str]]
Outcomes = Mapping[str, Mapping[str, Outcome]]  # by idiom and form


def read(path: Path) -> Cells:
    """One of the two files; empty if it is not there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def complaints(name: str, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Where the outcomes of an idiom are not what the two files say."""
    expected = read(EXPECTED).get(name, {})
    known = read(KNOWN).get(name, {})
    lines: list[str] = []
    for form, outcome in outcomes.items():
        seen = f"{form}: {outcome.outcome} ({outcome.detail}) at `{outcome.source}`"
        if form in expected and outcome.outcome != expected[form]:
            lines.append(f"{seen}, expected {expected[form]}")
        elif form in known and outcome.outcome not in GOOD and not known[form].startswith(outcome.outcome):
            lines.append(f"{seen}, known as {known[form]}")
        elif form in known and outcome.outcome in GOOD:
            lines.append(f"{seen}: mended. Move it to expected.json: python -m idioms accept {name}")
        elif form not in expected and form not in known:
            lines.append(f"{seen}: stands in neither file. python -m idioms accept {name}")
    return lines


def accept(outcomes: Outcomes) -> list[str]:
    """Write what was observed; returns what was not written because it held before."""
    expected = read(EXPECTED)
    known = read(KNOWN)
    refused: list[str] = []
    for name, cells in outcomes.items():
        for form, outcome in cells.items():
            held = expected.get(name, {}).get(form)
            if outcome.outcome in GOOD:
                expected.setdefault(name, {})[form] = outcome.outcome
                known.get(name, {}).pop(form, None)
            elif held is not None:
                refused.append(f"{name}, {form}: {outcome.outcome} ({outcome.detail}), was {held}")
            else:
                known.setdefault(name, {})[form] = f"{outcome.outcome}: {outcome.detail[:100]}"
    _write(EXPECTED, expected)
    _write(KNOWN, known)
    return refused


def _write(path: Path, cells: Cells) -> None:
    """In the order of the table, a line for each idiom; idioms that are gone are left out."""
    order = [form.name for form in FORMS]
    lines: list[str] = []
    for name in idioms():
        forms = cells.get(name, {})
        if forms:
            lines.append(f'  "{name}": {json.dumps({form: forms[form] for form in order if form in forms})}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def counts(outcomes: Outcomes) -> str:
    """How many idioms are what in each form."""
    lines = ["| form | same | refused | different | error |", "|---|--:|--:|--:|--:|"]
    for form in FORMS:
        kinds = Counter(cells[form.name].outcome for cells in outcomes.values() if form.name in cells)
        lines.append(f"| {form.name} | {kinds[SAME]} | {kinds[REFUSED]} | {kinds[DIFFERENT]} | {kinds[ERROR]} |")
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
        lines.append(f"| what a loop does | {' | '.join(form.name for form in FORMS)} | FSDP2 |")
        lines.append(f"|---|{'---|' * (len(FORMS) + 1)}")
        for name in names:
            cells = [outcomes[name][form.name].outcome for form in FORMS if form.name in outcomes[name]]
            cells.append(peers.get(name, {}).get("fsdp2", "").split(":")[0])
            lines.append(f"| {idioms()[name].text} | {' | '.join(cells)} |")
        lines += ["", *_remedies(outcomes, names)]
    return "\n".join(lines).replace("](", "] (") + "\n"  # Markdown would take it for a link


def _remedies(outcomes: Outcomes, names: Iterable[str]) -> list[str]:
    """Each refusal of a theme once, with the lines that it was raised at."""
    sources: dict[str, dict[str, None]] = {}
    for name in names:
        for outcome in outcomes[name].values():
            if outcome.outcome == REFUSED:
                sources.setdefault(outcome.detail, {})[f"`{outcome.source}`"] = None
    return [f"- {', '.join(lines)}: {detail}" for detail, lines in sources.items()]
