"""Progress of long work: a bar where somebody looks, a line from time to time where nobody does."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

__all__ = ["Progress"]

SHOWN_AFTER_S = 2.0  # work that is over by then shows nothing
LINE_EVERY_S = 30.0

log = logging.getLogger("zerostd")


class Progress:
    """So many bytes of all."""

    def __init__(self, what: str, total: int, *, is_shown: bool) -> None:
        self.what, self.total, self.is_shown = what, total, is_shown
        self.done = 0
        self._begun = self._told = time.monotonic()
        self._bar: Bar | None = None

    def add(self, num_bytes: int) -> None:
        """These are done too."""
        self.done += num_bytes
        now = time.monotonic()
        if not self.is_shown or now - self._begun < SHOWN_AFTER_S:
            return
        if self._bar is None:
            columns = (DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
            console = Console(stderr=True)
            self._bar = Bar(TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True)
            self._bar.disable = not console.is_terminal
            self._bar.add_task(self.what, total=self.total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self.done)
        if self._bar.disable and now - self._told >= LINE_EVERY_S:
            self._told = now
            log.info("%s: %.1f of %.1f GiB", self.what, self.done / 2**30, self.total / 2**30)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
