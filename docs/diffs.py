"""Writes the diffs of the ported scripts into the pages that show them: python docs/diffs.py"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORTS = ROOT / "examples" / "ports"
PAGES = {  # and whose diff they show
    ROOT / "docs" / folder / f"from-{name}.md": name
    for folder in ("how-to", "zh/how-to")
    for name in ("deepspeed", "fsdp2")
}
PLACE = re.compile(r"(<!-- diff -->\n).*?(<!-- end of diff -->)", flags=re.DOTALL)


def diff(name: str) -> str:
    """From one script to the other, whole, as a block of a page."""
    paths = [PORTS / f"{name}_{when}.py" for when in ("before", "after")]
    before, after = (path.read_text().splitlines() for path in paths)
    lines = difflib.unified_diff(before, after, *(path.name for path in paths), lineterm="", n=1000)
    text = "\n".join(line for line in lines if not line.startswith("@@"))
    return f"```diff\n{text}\n```\n"


def page(path: Path) -> str:
    """A page with its diff as it is now."""
    return PLACE.sub(lambda match: match[1] + diff(PAGES[path]) + match[2], path.read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path))
