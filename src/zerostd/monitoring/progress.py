"""Progress bars on stderr. The command line, training loops and checkpoints show theirs with these.

A bar is drawn on a terminal only. Where stderr goes to a file, `ByteProgress` logs a line from time to time.
"""

from __future__ import annotations

import logging
import time
from typing import Self

from rich import progress as bars
from rich.console import Console

BYTES_SHOWN_AFTER_S = 2.0  # shorter work shows nothing
LINE_EVERY_S = 30.0

log = logging.getLogger("zerostd")


class ProgressBar:
    """A bar that appears with the first update. Columns may use `task.description` and `task.fields[note]`.

    `is_visible` says whether it is drawn: stderr is a terminal, and the caller wants it.
    """

    def __init__(
        self, *columns: bars.ProgressColumn, total: float | None, is_shown: bool = True, is_transient: bool = True
    ) -> None:
        console = Console(stderr=True)
        self.is_visible = is_shown and console.is_terminal
        self._progress = bars.Progress(*columns, console=console, transient=is_transient, disable=not self.is_visible)
        self._task = self._progress.add_task("", total=total, note="")

    def update(self, completed: float, description: str = "", note: str = "") -> None:
        """Show that so much is completed."""
        if self.is_visible:
            self._progress.update(self._task, completed=completed, description=description, note=note)
            self._progress.start()  # does nothing if it has started

    def close(self) -> None:
        """Stop drawing; a transient bar disappears."""
        if self._progress.live.is_started:
            self._progress.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ByteProgress(ProgressBar):
    """Shows progress of work on a known number of bytes."""

    def __init__(self, what: str, total: int, *, is_shown: bool) -> None:
        text = bars.TextColumn("{task.description}")
        rates = (bars.DownloadColumn(True), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
        super().__init__(text, bars.BarColumn(), *rates, total=total, is_shown=is_shown)
        self._what = what
        self._total = total
        self._done = 0
        self._logs_lines = is_shown and not self.is_visible
        self._begun_s = time.monotonic()
        self._last_line_s = self._begun_s

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._begun_s >= BYTES_SHOWN_AFTER_S:
            self.update(self._done, self._what)
        if self._logs_lines and now - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now
            log.info("%s: %.1f of %.1f GiB", self._what, self._done / 2**30, self._total / 2**30)
