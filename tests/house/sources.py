"""Every Python file of the library, read once for the tests of the house."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "zerostd"


class Source:
    """One file under `src/zerostd`; parsed when first asked for, so that a broken file fails its own tests only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(PACKAGE).as_posix()  # "scheduling/hooks.py"
        self.room = self.name.split("/")[0].removesuffix(".py")  # "scheduling"; "api" for api.py

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @property
    def package(self) -> str:
        """The package the file lies in, which relative imports start from: "zerostd.scheduling"."""
        return ".".join(["zerostd", *self.path.relative_to(PACKAGE).parent.parts])

    def at(self, line: int) -> str:
        """Where a finding is, as editors and terminals link it."""
        return f"{self.path.relative_to(ROOT).as_posix()}:{line}"


SOURCES = [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]

each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
