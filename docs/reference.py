"""Writes docs/reference.md from the docstrings of zerostd's public names: python docs/reference.py"""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import zerostd

PAGE = Path(__file__).with_suffix(".md")


def page() -> str:
    """The whole page."""
    parts = ["# Reference", "", "Generated from the docstrings by `python docs/reference.py`."]
    for name in zerostd.__all__:
        thing = getattr(zerostd, name)
        parts += ["", f"## zerostd.{name}", "", *entry(name, thing)]
    return "\n".join(parts) + "\n"


def entry(name: str, thing: Any) -> list[str]:
    """One public name: its signature, then what it says of itself."""
    lines = ["```text", inspect.cleandoc(inspect.getdoc(thing) or ""), "```"]
    if inspect.isfunction(thing) or is_dataclass(thing):
        lines = ["```text", *signature(name, thing), "```", "", *lines]
    if inspect.isclass(thing):
        members = [m for m in vars(thing) if not m.startswith("_") and inspect.isfunction(vars(thing)[m])]
        lines += [""] if members else []
        lines += [f"- `{m}`: {first_paragraph(vars(thing)[m])}" for m in members]
    return lines


def first_paragraph(thing: Any) -> str:
    """Of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def signature(name: str, thing: Any) -> list[str]:
    """How it is called, a parameter on each line where one line is too short."""
    found = inspect.signature(thing)
    parts, ends = list[str](), re.sub(r"^.*\)(?=$| ->)", "", plain(str(found)).removesuffix(" -> None"))
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(plain(str(parameter)))
    short = f"{name}({', '.join(parts)}){ends}"
    return [short] if len(short) <= 110 else [f"{name}(", *(f"    {part}," for part in parts), f"){ends}"]


def plain(text: str) -> str:
    """Annotations without the quotes that they have in Python's own text."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


if __name__ == "__main__":
    PAGE.write_text(page())
