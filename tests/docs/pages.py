"""The pages of the documentation, and the blocks of code on them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FRONT = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "examples" / "README.md"]
PAGES = [*FRONT, *sorted((ROOT / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    """As test ids and messages say it: "docs/how-to/slow.md"."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """All blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
