"""The rooms as a newcomer meets them: few files at the top, names that are used once, docstrings that list what is
there."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.limits import MOST_SHARED_NAMES, MOST_SILENT_ROOMS, MOST_UNLISTED_FILES, MOST_UNMAPPED_FILES
from house.sources import ROOT, SOURCES, Source, hold, hold_everywhere

FRONT = {"CHANGELOG.md", "CMakeLists.txt", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "README.zh-CN.md"}
FRONT |= {
    "CITATION.cff",
    "Dockerfile",
    "mkdocs.yml",
    "pyproject.toml",
    "benchmarks",
    "docs",
    "examples",
    "src",
    "tests",
}  # beside hidden files
TOP = {"__init__.py", "__main__.py", "api.py", "errors.py", "policy.py", "compat.py"}

# Names that files of several rooms have, with the reason. An entry that is not needed any more fails.
SHARED_FILES: dict[str, str] = {
    "plan.py": "the plan, and the command that makes one",
    "report.py": "the report, and the command that makes one",
    "world.py": "the ranks, and Horovod's names for them",
    "optimizer.py": "the optimizer users get back, and Horovod's",
}
SHARED_CLASSES: dict[str, str] = {
    "ZeroStrategy": "of Fabric and of the Trainer: Lightning has a class for each",
}

SUFFIXES = {"", ".c", ".cpp", ".css", ".h", ".html", ".js", ".json", ".md", ".py", ".toml", ".txt", ".typed"}
SUFFIXES |= {".yaml", ".yml", ".cff", ".ipynb", ".png", ".svg"}
LISTED = re.compile(r"(?<![\w/.-])(\w+\.py)\b")  # a file of the room as a docstring lists it


def test_few_files_stand_outside_of_rooms() -> None:
    assert {source.name for source in SOURCES if "/" not in source.name} == TOP


def test_nothing_that_a_program_wrote_is_kept() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    kept = {line.partition("/")[0] for line in listed.splitlines()}
    assert {name for name in kept if not name.startswith(".")} == FRONT
    assert {Path(line).suffix for line in listed.splitlines()} <= SUFFIXES


def test_every_room_says_what_it_is_for() -> None:
    def silent(source: Source) -> Iterator[str]:
        if source.path.name == "__init__.py" and not ast.get_docstring(source.tree):
            yield f"{source.at(1)}: no docstring"

    hold_everywhere(silent, MOST_SILENT_ROOMS)


def test_rooms_list_the_files_that_are_there() -> None:
    """A docstring that lists files of its room lists all of them, and no other."""

    def differs(source: Source) -> Iterator[str]:
        listed = set(LISTED.findall(ast.get_docstring(source.tree) or ""))
        if source.path.name != "__init__.py" or not listed:
            return
        there = {path.name for path in source.path.parent.glob("*.py")} - {"__init__.py"}
        for name in sorted(listed - there):
            yield f"{source.at(1)}: lists {name}, which is not there"
        for name in sorted(there - listed):
            yield f"{source.at(1)}: does not list {name}"

    hold_everywhere(differs, MOST_UNLISTED_FILES)


def test_design_names_every_file() -> None:
    """docs/design.md holds the tree of the sources, the native ones too."""
    design = (ROOT / "docs" / "design.md").read_text()
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    assert len(sources) > 100
    missing = [path for path in sorted(sources) if path.name != "__init__.py" and path.name not in design]
    hold((path.relative_to(ROOT).as_posix() for path in missing), MOST_UNMAPPED_FILES)


def test_names_mean_one_thing() -> None:
    """Two rooms have files or classes of one name only where they are the same idea."""
    shared = {name: places for name, places in _places().items() if len(places) > 1}
    exceptions = SHARED_FILES | SHARED_CLASSES
    hold(
        (f"{name}: {', '.join(places)}" for name, places in sorted(shared.items()) if name not in exceptions),
        MOST_SHARED_NAMES,
    )
    hold(f"{name} is not shared any more" for name in exceptions if name not in shared)


def _places() -> dict[str, list[str]]:
    """Where each name of a file or class stands."""
    places: dict[str, list[str]] = defaultdict(list)
    for source in SOURCES:
        if source.path.name != "__init__.py":
            places[source.path.name].append(source.at(1))
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(source.at(node.lineno))
    return places
