"""Writes docs/reference.md from the docstrings of zerostd's public names: python docs/reference.py"""

from __future__ import annotations

import inspect
from pathlib import Path

import zerostd

PAGE = Path(__file__).with_suffix(".md")


def page() -> str:
    """The whole page."""
    parts = ["# Reference", "", "Generated from the docstrings by `python docs/reference.py`."]
    for name in zerostd.__all__:
        thing = getattr(zerostd, name)
        parts += ["", f"## zerostd.{name}", "", *entry(name, thing)]
    return "\n".join(parts) + "\n"


def entry(name: str, thing: object) -> list[str]:
    """One public name: its signature, then what it says of itself."""
    lines = ["```text", inspect.cleandoc(inspect.getdoc(thing) or ""), "```"]
    if inspect.isfunction(thing):
        lines = ["```text", f"{name}{inspect.signature(thing)}", "```", "", *lines]
    if inspect.isclass(thing):
        members = [m for m in vars(thing) if not m.startswith("_") and inspect.isfunction(vars(thing)[m])]
        lines += [f"- `{m}`: {(inspect.getdoc(vars(thing)[m]) or '').splitlines()[0]}" for m in members]
    return lines


if __name__ == "__main__":
    PAGE.write_text(page())
