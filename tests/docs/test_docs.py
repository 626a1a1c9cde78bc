"""The documentation is true: its code and commands run, what is generated is current, its links lead somewhere."""

from __future__ import annotations

import os
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from docs.pages import PAGES, ROOT, blocks, name
from zerostd.cli.main import app
from zerostd.tiers import debug

LINKS: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "links.py"))
RUN_ELSEWHERE = {"docs/tutorial.md", "docs/zh/tutorial.md"}  # test_tutorial.py does all of it in order
NEEDED = {
    "docs/hugging-face.md": ("accelerate", "peft", "transformers"),
    "docs/how-to/larger-than-the-gpu.md": ("accelerate", "transformers"),
    "docs/lightning-keras.md": ("lightning", "keras"),
}
os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras looks for it when it is imported
PREAMBLE = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 4)
criterion = nn.MSELoss()
loader = [(torch.ones(2, 4), torch.zeros(2, 4))]
"""

each_page = pytest.mark.parametrize("page", PAGES, ids=name)


def has_code_of_its_own(page: Path) -> bool:
    """Translations have the code of the page that they translate, see test_translation.py."""
    return bool(blocks(page, "python")) and name(page) not in RUN_ELSEWHERE and "docs/zh/" not in name(page)


@pytest.mark.parametrize("page", [page for page in PAGES if has_code_of_its_own(page)], ids=name)
def test_code_on_the_page_runs(page: Path) -> None:
    for needed in NEEDED.get(name(page), ()):
        pytest.importorskip(needed)
    names: dict[str, object] = {}
    exec(compile(PREAMBLE, "preamble", "exec"), names)
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{name(page)}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES[:2], ids=name)
def test_loop_of_the_readme_runs_as_the_diff_leaves_it(page: Path) -> None:
    (diff,) = blocks(page, "diff")
    after = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    exec(compile(PREAMBLE + "\n".join(after), name(page), "exec"), {})


def test_pictures_are_those_of_the_script() -> None:
    pictures = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    for file, text in pictures["files"]().items():
        assert (ROOT / "docs" / "pictures" / file).read_text() == text, "run: python docs/pictures.py"


def commands() -> list[str]:
    """Lines that plan for a machine that is described: they need no files but those of the repository."""
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    told = [
        line
        for line in lines
        if line.startswith("zerostd plan") and any(word in line for word in ("--cluster", "--machine", "--table"))
    ]
    return sorted({line for line in told if "1T" not in line})  # a test of its own holds what scale.md says


@pytest.mark.parametrize("command", commands())
def test_plan_on_the_page_works(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    assert re.search(r"^device |\b7\.5|^ranks ", done.output, re.MULTILINE)


def test_there_are_commands_to_try() -> None:
    assert len(commands()) >= 3


def test_other_commands_are_placeholders_or_name_files_that_are_there() -> None:
    """Words in capitals stand for the reader's; what looks like a file must be one."""
    files = []
    for page in PAGES:
        if name(page) in RUN_ELSEWHERE:
            continue
        for word in shlex.split(" ".join(blocks(page, "sh")).replace("\\\n", " "), comments=True):
            if "/" in word and "=" not in word and not any(part.isupper() for part in re.split(r"[/.]", word)):
                files.append(word)
                assert (ROOT / word).exists(), f"{name(page)}: {word}"
    assert files


def test_reference_is_what_the_docstrings_say() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "reference.py"))["page"]()
    assert (ROOT / "docs" / "reference.md").read_text() == page, "run: python docs/reference.py"


def test_diffs_are_those_of_the_scripts() -> None:
    diffs = runpy.run_path(str(ROOT / "docs" / "diffs.py"))
    for path, port in diffs["PAGES"].items():
        text = path.read_text()
        assert text == diffs["page"](path), "run: python docs/diffs.py"
        assert (
            f"--- {port}_before.py\n+++ {port}_after.py\n" in text
            and "+    model, optimizer = zerostd.prepare(" in text
        )


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for _, target, _ in LINKS["links"](page.read_text()):
        path = LINKS["in_repository"](name(page), target)
        if "://" in target:
            continue
        to, anchor = page if path is None else ROOT / path, target.partition("#")[2]
        if not to.exists() or (anchor and anchor not in LINKS["anchors"](to.read_text())):
            wrong.append(target)
    assert not wrong, f"{name(page)}: {wrong}"


def test_anchors_are_those_of_headings_outside_code() -> None:
    assert LINKS["anchors"]("# A `b`: c\n\n## D-e, f (g)\n```sh\n# no\n```\n") == {"a-b-c", "d-e-f-g"}


MEASURED = [
    "README.md",
    "docs/evaluation.md",
    "docs/how-to/slow.md",
    "docs/how-to/from-deepspeed.md",
    "docs/how-to/from-fsdp2.md",
]


@pytest.mark.parametrize("page", MEASURED)
def test_measured_numbers_are_in_a_table_of_results(page: str) -> None:
    """Seconds and GiB that a page tells are those of some benchmark, rounded."""
    results = "\n".join(path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*.md"))
    known = [float(number) for number in re.findall(r"(?<![\w.])[0-9]+\.[0-9]+(?![\w.])", results)]
    told = re.findall(r"(?<![\w.])([0-9]+\.([0-9]+)) (?:s|GiB)\b", (ROOT / page).read_text())
    unknown = {text for text, digits in told if float(text) not in {round(one, len(digits)) for one in known}}
    assert told and not unknown


def test_every_table_of_results_has_a_row_on_the_evaluation_page() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text()
    tables = sorted(path.name for path in (ROOT / "benchmarks" / "results").glob("*.md"))
    missing = [table for table in tables if f"(../benchmarks/results/{table})" not in page]
    assert tables and not missing


def test_every_debug_mode_is_documented() -> None:
    (row,) = [
        line for line in (ROOT / "docs" / "environment.md").read_text().splitlines() if f"| `{debug.VARIABLE}`" in line
    ]
    assert [word for word in debug.WORDS if f"`{word}`:" not in row] == []
