"""Progress bars: drawn on a terminal, logged from time to time elsewhere, and nothing at all for short work."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console
from rich.progress import TextColumn

from zerostd.monitoring import progress
from zerostd.monitoring.progress import ByteProgress, ProgressBar


class Clock:
    """Stands in for the module's `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def draw_on(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> io.StringIO:
    """Return what bars are drawn on from now on."""
    drawn = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=drawn, force_terminal=is_terminal))
    return drawn


def test_bar_shows_description_and_note_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw_on(monkeypatch, is_terminal=True)
    with ProgressBar(TextColumn("{task.description}: {task.fields[note]}"), total=2.0) as bar:
        assert bar.is_visible and not drawn.getvalue()
        bar.update(1.0, "half", "of it")
    assert "half: of it" in drawn.getvalue()


@pytest.mark.parametrize(("is_terminal", "is_shown"), [(False, True), (True, False)])
def test_bar_is_not_drawn_elsewhere(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, is_shown: bool) -> None:
    drawn = draw_on(monkeypatch, is_terminal=is_terminal)
    with ProgressBar(TextColumn("{task.description}"), total=2.0, is_shown=is_shown) as bar:
        bar.update(1.0, "half")
    assert not bar.is_visible and not drawn.getvalue()


def test_bytes_are_shown_after_two_seconds(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    drawn = draw_on(monkeypatch, is_terminal=True)
    with ByteProgress("saving", 4 << 30, is_shown=True) as bar:
        bar.add(1 << 30)
        assert not drawn.getvalue()
        clock.now += 2.0
        bar.add(1 << 30)
    assert "saving" in drawn.getvalue() and "2.0/4.0 GiB" in drawn.getvalue()


def test_bytes_are_logged_every_half_minute_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = draw_on(monkeypatch, is_terminal=False)
    caplog.set_level(logging.INFO, "zerostd")
    with ByteProgress("saving", 4 << 30, is_shown=True) as bar:
        for _ in range(4):
            clock.now += 15.0
            bar.add(1 << 30)
    assert caplog.messages == ["saving: 2.0 of 4.0 GiB", "saving: 4.0 of 4.0 GiB"]
    assert not drawn.getvalue()
