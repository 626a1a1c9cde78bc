"""The Chinese pages say what the English ones say: the same code, commands, links and measured numbers."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from docs.pages import ROOT, blocks, name

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
NUMBER = re.compile(r"(?<![\w.])[0-9]+(?:\.[0-9]+)?(?: (?:s|GiB|B|%)(?!\w)|(?= x 1024\b))?")
SECTIONS = {  # in their order
    "What you get": "你能得到什么",
    "When to use it, and when not": "什么时候用，什么时候不用",  # noqa: RUF001
    "Measured": "实测",
    "Which placement when": "什么时候用哪种 placement",
    "Documentation": "文档",
}
TRANSLATED = sorted((ROOT / "docs" / "zh").rglob("*.md"))


def section(text: str, heading: str) -> str:
    """From a heading to the next one of its level, or to the end."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found[1]


def rows(text: str) -> list[str]:
    """Of all tables, headings too."""
    return [line for line in text.splitlines() if line.startswith("| ")]


def without_comments(block: str) -> str:
    return re.sub(r" *#.*", "", block)


@pytest.fixture(scope="module")
def measured() -> tuple[str, str]:
    return section(ENGLISH.read_text(), "Measured"), section(CHINESE.read_text(), "实测")


def test_every_number_of_the_tables_is_there(measured: tuple[str, str]) -> None:
    english, chinese = (rows(text) for text in measured)
    assert len(english) == len(chinese) > 4
    for one, other in zip(english, chinese, strict=True):
        assert NUMBER.findall(one) == NUMBER.findall(other), other


def test_numbers_with_a_unit_are_the_same(measured: tuple[str, str]) -> None:
    english, chinese = (Counter(re.findall(r"[0-9.]+ (?:s|GiB|B|%)(?!\w)", text)) for text in measured)
    assert english == chinese and sum(english.values()) > 20


def test_code_is_the_same_but_for_comments() -> None:
    for language in ("sh", "diff"):
        english, chinese = (
            [without_comments(block) for block in blocks(page, language)] for page in (ENGLISH, CHINESE)
        )
        assert english == chinese and english


def test_sections_say_the_same_in_the_same_order() -> None:
    english, chinese = ENGLISH.read_text(), CHINESE.read_text()
    assert re.findall(r"^## (.+)$", english, re.MULTILINE) == list(SECTIONS)
    assert re.findall(r"^## (.+)$", chinese, re.MULTILINE) == list(SECTIONS.values())
    for heading, its in SECTIONS.items():
        ours, theirs = section(english, heading), section(chinese, its)
        assert len(rows(ours)) == len(rows(theirs)) and ours.count("\n- ") == theirs.count("\n- "), heading
        for pattern in (r"\]\(([^)]+)\)", r"`([^`]+)`"):
            links, its_links = (re.findall(pattern, text) for text in (ours, theirs))
            assert len(links) == len(its_links), heading
            for link, its_link in zip(links, its_links, strict=True):
                assert its_link in (link, link.replace("docs/", "docs/zh/")), its_link


@pytest.mark.parametrize("page", TRANSLATED, ids=name)
def test_translated_page_has_the_code_of_the_english_one(page: Path) -> None:
    original = ROOT / "docs" / page.relative_to(ROOT / "docs" / "zh")
    assert original.exists(), "a translation has the name of the page that it translates"
    for language in ("python", "py", "sh"):
        ours, theirs = ([without_comments(block) for block in blocks(one, language)] for one in (original, page))
        assert ours == theirs, language


def test_tutorial_concepts_and_how_to_are_there_in_chinese() -> None:
    docs = ROOT / "docs"
    folders = [*(docs / "how-to").glob("*.md"), *(docs / "concepts").glob("*.md")]
    pages = [docs / "tutorial.md", docs / "how-to.md", *folders]
    assert len(pages) > 20
    missing = [name(page) for page in pages if not (docs / "zh" / page.relative_to(docs)).exists()]
    assert not missing
