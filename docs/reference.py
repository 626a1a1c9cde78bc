"""Writes docs/reference.md from the docstrings of zerostd's public names: python docs/reference.py"""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import typer

import zerostd
from zerostd.cli.main import COMMANDS, app

PAGE = Path(__file__).with_suffix(".md")


INTERNAL = {"reopen", "before_forward", "before_backward", "after_step", "counts", "set_counts"}
INTERNAL |= {"records", "bits", "shares", "ways"}  # methods that the library calls itself
FIRST = [
    "prepare",
    "plan",
    "memory",
    "save",
    "load",
    "latest",
    "track",
    "record",
    "Placement",
    "Budget",
    "Precision",
    "Stage",
]


def page() -> str:
    """The whole page: what most loops need, the other functions, classes, exceptions, and the command line."""
    parts = ["# Reference", "", "Generated from the docstrings by `python docs/reference.py`."]
    rest = [name for name in zerostd.__all__ if name not in FIRST and not name.endswith("Error")]
    groups = {
        "What most loops need": FIRST,
        "Other functions": [name for name in rest if name[0].islower()],
        "Other classes": [name for name in rest if name[0].isupper()],
        "Exceptions": [name for name in zerostd.__all__ if name.endswith("Error")],
    }
    for title, names in groups.items():
        parts += ["", f"## {title}"]
        for name in names:
            parts += ["", f"### zerostd.{name}", "", *entry(name, getattr(zerostd, name))]
    parts += [
        "",
        "## Command line",
        "",
        "`zerostd --version` prints the version. `zerostd COMMAND --help` has the same as below.",
    ]
    for name in COMMANDS:
        parts += ["", f"### zerostd {name}", "", *command(name)]
    return "\n".join(parts) + "\n"


def command(name: str) -> list[str]:
    """One command: what it does, and its arguments and options."""
    group = typer.main.get_command(app)
    found = group.get_command(None, name)  # type: ignore[attr-defined]
    text = [" ".join(part.split()) for part in (found.help or "").split("\n\n")]
    lines = ["\n\n".join(text), "", "| argument or option | meaning |", "|---|---|"]
    for parameter in found.params:
        if parameter.name == "help":
            continue
        names = (
            ", ".join(parameter.opts)
            if parameter.opts[0].startswith("-")
            else (parameter.metavar or parameter.name.upper())
        )
        is_value = parameter.opts[0].startswith("-") and not parameter.is_flag and parameter.metavar
        help_text = (parameter.help or "").replace("|", "\\|")
        lines.append(f"| `{names}{' ' + parameter.metavar if is_value else ''}` | {help_text} |")
    return lines


def entry(name: str, thing: Any) -> list[str]:
    """One public name: its signature, then what it says of itself."""
    lines = ["```text", inspect.cleandoc(inspect.getdoc(thing) or ""), "```"]
    if inspect.isfunction(thing) or is_dataclass(thing):
        lines = ["```text", *signature(name, thing), "```", "", *lines]
    if inspect.isclass(thing):
        members = [m for m in vars(thing) if m[0] != "_" and m not in INTERNAL and inspect.isfunction(vars(thing)[m])]
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
    """Annotations without the quotes that they have in Python's own text, and long default objects by their class."""
    return re.sub(r" = (\w+)\(.{40,}\)$", r" = \1()", re.sub(r"(: |-> )'([^']*)'", r"\1\2", text))


if __name__ == "__main__":
    PAGE.write_text(page())
