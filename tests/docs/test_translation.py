"""The Chinese README says what the English one says: the same code, commands, links and measured numbers."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from docs.pages import ROOT, blocks

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
NUMBER = re.compile(r"(?<![\w.])[0-9]+(?:\.[0-9]+)?(?: (?:s|GiB|B|%)(?!\w)|(?= x 1024\b))?")


def section(text: str, heading: str) -> str:
    """From a heading to the next one of its level."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## )", text, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found[1]


def rows(text: str) -> list[str]:
    """Of all tables, headings too."""
    return [line for line in text.splitlines() if line.startswith("| ")]


@pytest.fixture(scope="module")
def measured() -> tuple[str, str]:
    return section(ENGLISH.read_text(), "Measured"), section(CHINESE.read_text(), "实测")


def test_every_number_of_the_tables_is_there(measured: tuple[str, str]) -> None:
    english, chinese = (rows(text) for text in measured)
    assert len(english) == len(chinese) > 10
    for one, other in zip(english, chinese, strict=True):
        assert NUMBER.findall(one) == NUMBER.findall(other), other


def test_numbers_with_a_unit_are_the_same(measured: tuple[str, str]) -> None:
    english, chinese = (Counter(re.findall(r"[0-9.]+ (?:s|GiB|B|%)(?!\w)", text)) for text in measured)
    assert english == chinese and sum(english.values()) > 30


def test_code_is_the_same_but_for_comments() -> None:
    english, chinese = (
        [re.sub(r" *#.*", "", block) for block in blocks(page, "python")] for page in (ENGLISH, CHINESE)
    )
    assert english == chinese and english


def test_links_and_placements_are_the_same() -> None:
    english, chinese = ENGLISH.read_text(), CHINESE.read_text()
    for heading, its in (
        ("Documentation", "文档"),
        ("Install", "安装"),
        ("Which placement when", "什么时候用哪种 placement"),
    ):
        for pattern in (r"\]\(([^)]+)\)", r"`([^`]+)`"):
            ours, theirs = (
                re.findall(pattern, section(text, name)) for text, name in ((english, heading), (chinese, its))
            )
            assert ours == theirs and (ours or pattern.startswith("`")), heading
