"""A real browser without a window, and what it made of a page."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EMPTY = {"meta", "link", "br", "img", "input", "hr"}  # elements without an end


def find_browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def rendered(page: Path, browser: str, width: int = 1280) -> tuple[str, str]:
    """(the document after its scripts ran, what the console said)."""
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={page.parent / 'browser'}",
            f"--window-size={width},900",
            "--virtual-time-budget=5000",
            "--enable-logging=stderr",
            "--v=0",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return done.stdout, console


@dataclass
class Element:
    """One element: its tag and attributes, and all text in it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    parents: tuple[Element, ...] = field(default=(), repr=False)


class Document(HTMLParser):
    """The elements of a document, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)

    def all(self, tag: str | None = None, **attributes: str | None) -> list[Element]:
        """Those with this tag and these attributes; None: whatever its value."""
        wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
        return [
            one
            for one in self.elements
            if tag in (None, one.tag)
            and all(name in one.attributes and value in (None, one.attributes[name]) for name, value in wanted.items())
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs}, parents=tuple(self._open))
        self.elements.append(made)
        if tag not in EMPTY:
            self._open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self._open and self._open[-1] is self.elements[-1]:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data
