"""Progress of a training loop: a bar on a terminal, plain lines elsewhere, on rank 0 only.

What it shows is what the loop logs and what is known anyway: how long steps take, samples or tokens a second, bytes by
tier. Nothing here waits for the device: a loss is shown when it has arrived.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, Self, TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from torch import nn

from zerostd.engine.runtime import Runtime, runtime_of
from zerostd.errors import MisuseError, check_batches, is_whole
from zerostd.monitoring.progress import ProgressBar
from zerostd.monitoring.texts import percent_text, rate_text, seconds_text, size_text, value_text
from zerostd.reporting.recording import EVERY, PendingNumber, Recording, record

LINE_EVERY_S = 10.0
BAR_WIDTH = 14
TAKEN_BY_BAR = 38  # columns of a terminal, beside the counts: the word, the bar and the time that is left
SMOOTH = 0.9  # of a step's length is what the steps before took

Batch = TypeVar("Batch")


def track(
    loader: Iterable[Batch],
    model: nn.Module,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    total: int | None = None,
    every: int = EVERY,
) -> Tracker[Batch]:
    """Iterate over a loader and show progress; with a directory, record the run.

        steps = zerostd.track(loader, model, run_dir="runs/monday")
        for batch in steps:
            ...
            optimizer.step()
            steps.log(loss=loss)

    Iterate again for the next epoch: the recording continues in the same directory.

    Args:
        loader: Any iterable of batches.
        model: The module that prepare was called on.
        run_dir: The run directory to create, like `path` of `zerostd.record`. None: nothing is recorded.
        total: Number of batches, if the loader has no length.
        every: As for `zerostd.record`.
    """
    runtime = runtime_of(model, "track")
    check_batches(loader, "zerostd.track")
    if total is not None and not is_whole(total):
        raise MisuseError(f"total={total!r} must be a whole number of batches, 0 or more")
    return Tracker(loader, runtime, None if run_dir is None else record(model, run_dir, every=every), total)


class Tracker(Generic[Batch]):
    """A loader that shows progress. Leaving its loop, however that happens, closes the recording; another loop over it
    goes on with the recording."""

    def __init__(
        self, loader: Iterable[Batch], runtime: Runtime, recording: Recording | None, total: int | None
    ) -> None:
        self.recording = recording
        self._loader = loader
        self._runtime = runtime
        self._total = len(loader) if total is None and isinstance(loader, Sized) else total
        self._numbers: dict[str, PendingNumber] = {}
        self._shown: dict[str, float] = {}
        self._step_s: float | None = None
        self._sizes: dict[str, int] = {}  # samples and tokens of a batch
        self._bar: ProgressBar | None = None
        self._last_line = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of batches; TypeError if neither the loader nor `total` says it."""
        if self._total is None:
            raise TypeError(f"{type(self._loader).__name__} has no length; pass total= to zerostd.track")
        return self._total

    def __iter__(self) -> Iterator[Batch]:
        if self.recording is not None:
            self.recording.reopen()
        if self._bar is None and self._runtime.world.rank == 0 and sys.stderr.isatty():
            columns = (TextColumn("training"), BarColumn(BAR_WIDTH), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = ProgressBar(*columns, TextColumn("{task.fields[note]}"), total=self._total, is_transient=False)
            self._bar.update(0)
        try:
            begun = time.perf_counter()
            for number, batch in enumerate(self._loader):
                if number:
                    now = time.perf_counter()
                    self._passed(number, now - begun)
                    begun = now
                self._sizes = _sizes(batch)
                yield batch
            self._passed(self._total or 0, time.perf_counter() - begun)
        finally:
            self.close()

    def log(self, **numbers: Any) -> None:
        """Log numbers of the last step, such as `loss`; tensors may be on the device. Samples and tokens are counted
        from the batch, if possible, unless given here."""
        logged = {**self._sizes, **numbers}
        if self.recording is not None:
            self.recording.log(**logged)
        self._numbers |= {name: PendingNumber(value) for name, value in logged.items() if value is not None}

    def close(self) -> None:
        """End the bar and the recording."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self.recording is not None:
            self.recording.close()

    def _passed(self, number: int, seconds: float) -> None:
        """Show that one more batch is done."""
        self._step_s = seconds if self._step_s is None else SMOOTH * self._step_s + (1 - SMOOTH) * seconds
        for name in [name for name, number in self._numbers.items() if number.has_arrived()]:
            self._shown[name] = float(self._numbers.pop(name))
        if self._runtime.world.rank != 0:
            return
        if self._bar is not None:
            room = shutil.get_terminal_size().columns - TAKEN_BY_BAR - 2 * len(str(self._total))
            self._bar.update(number, note=self._text()[: max(0, room)])
        elif number == self._total or time.perf_counter() - self._last_line > LINE_EVERY_S:
            self._last_line = time.perf_counter()
            print(f"training {number}/{self._total or '?'} {self._text()}", file=sys.stderr, flush=True)

    def _text(self) -> str:
        logged = {name: value for name, value in self._shown.items() if name not in ("samples", "tokens")}
        parts = [f"{name} {value_text(value)}" for name, value in logged.items()]
        step_s = self._step_s or 0.0
        parts.append(f"{seconds_text(step_s)}/step")
        counted = [name for name in ("tokens", "samples") if self._shown.get(name) and step_s]
        num_ranks = self._runtime.world.size  # with batches of one size, as on the page
        parts += [f"{rate_text(num_ranks * self._shown[name] / step_s)} {name}/s" for name in counted[:1]]
        held = Counter[str]()
        for (tier, _), size in self._runtime.ledger.now.items():
            held[tier.value] += size
        parts += [f"{tier} {size_text(size)}" for tier, size in held.items() if size]
        if self.recording is not None and self.recording.waited is not None:
            parts.append(f"waiting {percent_text(self.recording.waited)}")
        return ", ".join(parts)


def _sizes(batch: Any) -> dict[str, int]:
    """Return samples and tokens of a batch, as far as they can be seen: the first length of its first tensor, and its
    elements if these are whole numbers in two dimensions."""
    if isinstance(batch, torch.Tensor):
        is_text = batch.dim() == 2 and not batch.is_floating_point() and batch.dtype != torch.bool
        sizes = {"samples": len(batch) if batch.dim() else 0, "tokens": batch.numel() if is_text else 0}
        return {name: size for name, size in sizes.items() if size}
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((sizes for part in parts if (sizes := _sizes(part))), {})
