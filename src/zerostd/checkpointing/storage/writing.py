"""All ranks write one checkpoint: each its own file, in a thread, rank 0 the manifest, and then it is there.

begin    the directory, which rank 0 makes and all hear of
thread   this rank's file, group by group: what a group's update waits for
finish   all ranks have written: the manifest
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerostd.checkpointing.storage.directory import Draft, keep_newest
from zerostd.checkpointing.storage.files import Source, write_file
from zerostd.checkpointing.storage.manifest import BLOCK, Manifest, Part, TensorEntry
from zerostd.checkpointing.storage.progress import Progress
from zerostd.checkpointing.storage.values import dtype_name
from zerostd.communication import Control
from zerostd.errors import CheckpointError
from zerostd.parameters.observing import StepObserver
from zerostd.parameters.saved_intervals import SavedInterval
from zerostd.policy import Tier
from zerostd.tiers import Done, Stream, Transfer, Work, record_event
from zerostd.tiers.pages import PAGE, aligned

__all__ = ["Facts", "Saving"]

log = logging.getLogger("zerostd")


@dataclass(frozen=True)
class Facts:
    """What goes into the manifest beside tensors. The same on all ranks but for `random` and `singles`."""

    version: str
    step: int
    stage: int
    random: Any  # of this rank's generators that are not torch's, as JSON
    originals: Mapping[str, str]  # dtypes of parameters before prepare
    names: Mapping[str, Sequence[str]]  # all names of parameters and buffers that have several
    optimizer: Mapping[str, Any] | None = None  # without singles
    singles: Mapping[str, Any] = field(default_factory=dict)  # of this rank
    loss_scale: Mapping[str, Any] | None = None
    modules: Mapping[str, Any] = field(default_factory=dict)  # what get_extra_state gave, as JSON, by name of module
    passes: int = 0  # backward passes of a step that is not complete
    extra: Any = None
    frozen: bool = True  # parameters that do not train are written, too


@dataclass(frozen=True)
class _Piece:
    """A record as it was written."""

    kind: str
    of: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    part: Part | None  # None: it has no elements


class _Aside:
    """Reads what rests on the device in a lane of its own, as it is when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._ready = Stream(device), record_event(device)
        self._scratch = threading.local()  # a block of memory for each thread

    def reader(self, record: SavedInterval) -> Callable[[int, int], torch.Tensor]:
        """Of a part of the record, in host memory; what a thread read from disk is there until it reads again."""
        if record.column.tier is Tier.DISK:
            return lambda low, high: record.read(low, high, self._memory())
        if self._stream.stream is None or record.column.tier is not Tier.DEVICE:
            return record.read

        def read(low: int, high: int) -> torch.Tensor:
            with self._stream.after(self._ready):
                return record.read(low, high).to("cpu")

        return read

    def _memory(self) -> torch.Tensor:
        if not hasattr(self._scratch, "block"):
            self._scratch.block = aligned(BLOCK + PAGE)
        block: torch.Tensor = self._scratch.block
        return block


class Saving(StepObserver):
    """A checkpoint on its way. It is there when all ranks have seen it finished: in `wait`, or in one of the steps that
    go on meanwhile. Made by all ranks together."""

    def __init__(
        self, target: Path, records: Sequence[SavedInterval], facts: Facts, control: Control, *, keep: int | None = None
    ) -> None:
        self.target = target
        self.error: CheckpointError | None = None  # what became of it, if it failed
        self.is_finished = False
        self._facts, self._control, self._keep = facts, control, keep
        self._draft: Draft | None = None
        self._done: Any = None
        self._failed: CheckpointError | None = None
        self._kept: dict[str, Work] = {one.group: Work() for one in records if one.stop > one.start}
        self._aside = _Aside(control.world.device)
        begun: Any = None
        try:
            if control.world.rank == 0:
                self._draft = Draft(target)
                begun = str(self._draft.folder)
        except CheckpointError as error:
            begun = error
        try:
            folder = Path(_first_or_raise(control.meet("zerostd.save()", begun)))
        except BaseException:
            self._drop()
            raise
        self._thread = threading.Thread(target=self._write, args=(folder, records), name="zerostd save")
        self._thread.start()

    def kept(self, group: str) -> Transfer:
        """When what a group had is written, and may change."""
        return self._kept.get(group, Done())

    def after_step(self) -> None:
        """Finish it if all ranks have written. All ranks call it at the same points."""
        if self.is_finished:
            return
        if all(self._control.collect(not self._thread.is_alive(), "a step after zerostd.save()")):
            self._finish()

    def settle(self) -> None:
        """Return when it is there or has failed, which was logged. All ranks call it."""
        self._thread.join()
        if not self.is_finished:
            self._finish()

    def wait(self) -> None:
        """Return when the checkpoint is there. All ranks call it. Raises CheckpointError if it could not be written."""
        self.settle()
        if self.error is not None:
            raise CheckpointError(str(self.error)) from self.error

    def _write(self, folder: Path, records: Sequence[SavedInterval]) -> None:
        try:
            self._done = _write_mine(folder, records, self._control, self._kept, self._aside)
        except CheckpointError as error:
            self._failed = error
        except BaseException as error:
            self._failed = CheckpointError(f"{type(error).__name__}: {error}")
        finally:
            for work in self._kept.values():
                if not work.is_done():
                    work.finish()  # what was to be kept is lost, and training goes on
        if self._control.world.size == 1:
            self._finish()

    def _finish(self) -> None:
        """All ranks have written, or failed."""
        facts, end = self._facts, "the end of zerostd.save()"
        try:
            brought = self._control.collect_on_first((self._done, facts.random, facts.singles, self._failed), end)
        except BaseException:
            self._drop()
            raise
        result: Any = None
        if self._draft is not None:
            result = _commit(self._draft, brought, facts, self._keep)
        try:
            _first_or_raise(self._control.collect(result, end))
        except CheckpointError as error:
            self.error = error
            log.error("the checkpoint %s was not saved: %s", self.target, error)
        self.is_finished, self._done = True, None

    def _drop(self) -> None:
        if self._draft is not None:
            self._draft.drop()


def _write_mine(
    folder: Path, records: Sequence[SavedInterval], control: Control, kept: Mapping[str, Work], aside: _Aside
) -> tuple[list[_Piece], str, int]:
    world = control.world
    name = f"rank-{world.rank:05d}-of-{world.size:05d}.safetensors"
    filled = [one for one in records if one.stop > one.start]
    sources = [
        Source(str(number), one.dtype, (one.stop - one.start,), one.stop - one.start, aside.reader(one))
        for number, one in enumerate(filled)
    ]
    left = Counter(one.group for one in filled)
    groups = {source.key: one.group for one, source in zip(filled, sources, strict=True)}
    total = sum(source.numel * source.dtype.itemsize for source in sources)
    with Progress("saving", total, is_shown=world.rank == 0) as progress:

        def on_written(key: str, num_bytes: int) -> None:
            progress.add(num_bytes)
            left[groups[key]] -= 1
            if not left[groups[key]]:
                kept[groups[key]].finish()

        written = write_file(folder / name, sources, on_written)
    parts = {
        one: Part(one.start, one.stop, name, source.key, written.crc32[source.key])
        for one, source in zip(filled, sources, strict=True)
    }
    pieces = [_Piece(one.kind, one.of, one.state, dtype_name(one.dtype), one.shape, parts.get(one)) for one in records]
    return pieces, name, written.num_bytes


def _commit(draft: Draft, brought: list[Any], facts: Facts, keep: int | None) -> CheckpointError | str:
    """Rank 0: the manifest, if all have written."""
    failed = [(rank, error) for rank, (_, _, _, error) in enumerate(brought) if error is not None]
    try:
        if failed:
            raise CheckpointError(f"rank {failed[0][0]}: {failed[0][1]}; nothing was saved")
        draft.commit(_manifest(brought, facts))
    except Exception as error:
        draft.drop()
        return error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")
    if keep is not None:
        keep_newest(draft.target, keep)
    return ""


def _manifest(brought: list[Any], facts: Facts) -> Manifest:
    found: dict[tuple[str, str, str], list[_Piece]] = {}
    files: dict[str, int] = {}
    singles: dict[str, Any] = {}
    for (pieces, name, size), _, more, _ in brought:
        files[name] = size
        singles |= more
        for piece in pieces:
            found.setdefault((piece.kind, piece.of, piece.state), []).append(piece)
    return Manifest(
        zerostd=facts.version,
        saved=time.time(),
        step=facts.step,
        world_size=len(brought),
        stage=facts.stage,
        files=files,
        tensors=tuple(_entry(pieces, facts) for pieces in found.values()),
        optimizer=None if facts.optimizer is None else {**facts.optimizer, "singles": singles},
        loss_scale=facts.loss_scale,
        random={str(rank): random for rank, (_, random, _, _) in enumerate(brought)},
        modules=facts.modules,
        passes=facts.passes,
        extra=facts.extra,
        frozen=facts.frozen,
    )


def _entry(pieces: list[_Piece], facts: Facts) -> TensorEntry:
    first = pieces[0]
    is_parameter = first.kind == "parameter"
    return TensorEntry(
        first.kind,
        first.of,
        first.dtype,
        first.shape,
        tuple(sorted((piece.part for piece in pieces if piece.part is not None), key=lambda part: part.start)),
        first.state,
        facts.originals.get(first.of, "") if is_parameter else "",
        tuple(facts.names.get(first.of, ())) if first.kind in ("parameter", "buffer") else (),
    )


def _first_or_raise(everyone: list[Any]) -> Any:
    """Rank 0's word, or on all ranks the error of the first that has one."""
    for rank, said in enumerate(everyone):
        if isinstance(said, CheckpointError):
            raise CheckpointError(f"rank {rank}: {said}" if rank else str(said)) from said
    return everyone[0]
