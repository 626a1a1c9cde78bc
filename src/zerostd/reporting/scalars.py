"""A run's numbers as TensorBoard's scalars: a folder for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zerostd.errors import NotSupportedError
from zerostd.reporting.reading import RankLog, Run
from zerostd.reporting.records import Held, Quality, Seconds, Step

__all__ = ["Scalar", "scalars_of", "write_scalars"]

Scalar = tuple[str, int, float]  # name, step, value


def scalars_of(log: RankLog) -> Iterator[Scalar]:
    """What one rank wrote, number by number. Loss and quality are rank 0's; lengths and bytes every rank's own."""
    for step in log.of(Step):
        length = step.end - step.start
        yield "time/step_s", step.step, length
        for name in ("loss", "grad_norm", "lr"):
            if (value := getattr(step, name)) is not None:
                yield f"training/{name}", step.step, value
        for name in ("samples", "tokens"):
            if (value := getattr(step, name)) is not None and length > 0:
                yield f"speed/{name}_per_s", step.step, value / length
    for quality in log.of(Quality):
        yield f"quality/{quality.name}", quality.step, quality.value
    for held in log.of(Held):
        for tier, kinds in held.bytes.items():
            for kind, size in kinds.items():
                yield f"memory/{tier}/{kind}", held.step, float(size)
        for name in ("allocated", "most_allocated", "reserved"):
            if (value := getattr(held, name)) is not None:
                yield f"memory/device/{name}", held.step, float(value)
    for some in log.of(Seconds):
        for name, seconds in some.seconds.items():
            yield f"{some.kind}/{name}_s", some.step, seconds


def write_scalars(run: Run, folder: Path) -> list[Path]:
    """Write event files that `tensorboard --logdir` shows; returns their folders.

    Raises:
        NotSupportedError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise NotSupportedError(
            f"TensorBoard's files are written by its own package, which is not there ({error}): pip install "
            "'zerostd[tensorboard]'"
        ) from error
    folders = []
    for log in run.ranks:
        path = folder / run.about.name / f"rank-{log.rank}"
        writer = SummaryWriter(path)
        for name, step, value in scalars_of(log):
            writer.add_scalar(name, value, step)
        writer.close()
        folders.append(path)
    return folders
