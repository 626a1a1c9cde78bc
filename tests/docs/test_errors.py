"""The table of errors holds messages that the library has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import zerostd
from house.sources import SOURCES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"


def messages() -> list[str]:
    """Return all texts of the library, with `…` for what is filled in."""
    texts = []
    for source in SOURCES:
        for node in source.nodes:
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table whose first column is called `heading`."""
    table = PAGE.read_text().split(f"| {heading} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_every_message_of_the_table_is_one_of_the_library() -> None:
    texts = "\n".join(messages())
    shown = [re.escape(cells[0].strip("`")).replace("…", ".*?") for cells in rows("message")]
    assert len(shown) > 20
    assert [text for text in shown if not re.search(text, texts)] == []


def test_every_row_has_a_cause_and_a_remedy() -> None:
    assert [cells for cells in rows("message") if len(cells) != 3 or not all(cells)] == []


def test_the_classes_are_those_of_the_library() -> None:
    names = {cells[0].strip("`") for cells in rows("class")}
    exported = {name for name in zerostd.__all__ if name.endswith("Error")}
    assert names == exported - {"ZerostdError"}
    for name, base in [(cells[0].strip("`"), cells[1].strip("`")) for cells in rows("class")]:
        assert base in [parent.__name__ for parent in getattr(zerostd, name).__mro__]
