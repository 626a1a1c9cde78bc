"""Every Python file of the library, read once for the tests of the house."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "zerostd"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """One file under `src/zerostd`; parsed when first asked for."""

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

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

    @functools.cached_property
    def definitions(self) -> list[tuple[str, ast.ClassDef | Function]]:
        """Every class and function, nested ones too, as "room/file.py::Outer.inner"."""
        return [(f"{self.name}::{path}", node) for path, node in _definitions(self.tree, "")]

    @property
    def package(self) -> str:
        """The package the file lies in, which relative imports start from: "zerostd.scheduling"."""
        return ".".join(["zerostd", *self.path.relative_to(PACKAGE).parent.parts])

    def at(self, line: int) -> str:
        """Where a finding is, as editors and terminals link it."""
        return f"{self.path.relative_to(ROOT).as_posix()}:{line}"


def sample(text: str) -> Source:
    """A file that is not there, to try a check on."""
    source = Source(PACKAGE / "sample.py")
    source.text = text
    return source


def _definitions(node: ast.AST, above: str) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    for child in ast.iter_child_nodes(node):
        path = above
        if isinstance(child, ast.ClassDef | Function):
            path = f"{above}.{child.name}".removeprefix(".")
            yield path, child
        yield from _definitions(child, path)


SOURCES = [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]


def hold(findings: Iterable[str], limit: int = 0) -> None:
    """Fail with all findings, a line each, if there are more than `limit`."""
    __tracebackhide__ = True
    lines = list(findings)
    assert len(lines) <= limit, "\n".join([f"{len(lines)} findings, {limit} allowed:", *lines])


def hold_everywhere(check: Callable[[Source], Iterable[str]], limit: int = 0) -> None:
    """Apply a check to every file of the library, and hold what it finds."""
    __tracebackhide__ = True
    assert len(SOURCES) > 100, f"the library is not under {PACKAGE}"
    hold((finding for source in SOURCES for finding in check(source)), limit)
