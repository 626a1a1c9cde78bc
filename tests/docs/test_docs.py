"""The documentation is true: its code runs, its reference is current, its links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_code_on_the_page_runs(page):
    for needed in NEEDED.get(page.name, ()):
        pytest.importorskip(needed)
    names: dict[str, object] = {}
    exec(compile(PREAMBLE, "preamble", "exec"), names)
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


NEEDED = {"hugging-face.md": ("accelerate", "peft", "transformers")}
PREAMBLE = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 4)
criterion = nn.MSELoss()
loader = [(torch.ones(2, 4), torch.zeros(2, 4))]
"""


def test_reference_is_what_the_docstrings_say():
    page = runpy.run_path(str(ROOT / "docs" / "reference.py"))["page"]()
    assert (ROOT / "docs" / "reference.md").read_text() == page, "run: python docs/reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_readme_has_a_line_for_every_source_file():
    tree = re.search(r"## The tree\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert tree is not None
    sources = (ROOT / "src").rglob("*.*")
    names = {p.name for p in sources if p.suffix in (".py", ".cpp", ".h") and p.name != "__init__.py"}
    missing = {name for name in names if name not in tree.group(1)}
    assert not missing
