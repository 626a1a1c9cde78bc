"""Write one checkpoint from all ranks: each writes its own file in a thread, and rank 0 the manifest.

begin    rank 0 makes the directory, and all ranks learn its name
thread   each rank writes its file, group by group; the next update of a group waits until that group is written
finish   when all ranks have written, rank 0 merges their manifests and commits the directory
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from zerostd.checkpointing.storage.direct_writer import DirectFileWriter
from zerostd.checkpointing.storage.directory import PendingDirectory, keep_newest
from zerostd.checkpointing.storage.manifest import BLOCK, FileEntry, Manifest, TensorEntry, TensorPart
from zerostd.checkpointing.storage.safetensors_files import OutputTensor, write_file
from zerostd.communication import Control, World
from zerostd.errors import CheckpointError
from zerostd.kernels import crc32
from zerostd.monitoring.progress import ByteProgress
from zerostd.parameters.observing import StepObserver
from zerostd.parameters.saved_intervals import SavedInterval
from zerostd.policy import Tier
from zerostd.tiers import Done, Stream, Transfer, Work, record_event
from zerostd.tiers.host import PAGE, aligned

log = logging.getLogger("zerostd")

ReadRecord = Callable[[SavedInterval, int, int], torch.Tensor]


class Saving(StepObserver):
    """A checkpoint that is being written. It is complete when all ranks have seen it finished: in `wait`, or in one of
    the steps that training takes meanwhile.

    All ranks make it together. `manifest` is this rank's part: `manifest.tensors` describes `records` one by one, still
    without parts, and `manifest.files` is empty.
    """

    def __init__(
        self,
        target: Path,
        records: Sequence[SavedInterval],
        manifest: Manifest,
        control: Control,
        *,
        keep: int | None = None,
    ) -> None:
        self.target = target
        self.error: CheckpointError | None = None  # why it failed, if it did
        self.is_finished = False
        self._control = control
        self._keep = keep
        self._directory: PendingDirectory | None = None  # on rank 0
        self._outcome: Manifest | CheckpointError | None = None  # of this rank's thread
        self._group_writes = {record.group: Work() for record in records if record.stop > record.start}
        read = _snapshot_reader(control.world.device)
        folder = self._make_directory()
        self._thread = threading.Thread(target=self._write, args=(folder, records, manifest, read), name="zerostd save")
        self._thread.start()

    def _make_directory(self) -> Path:
        begun: Any = None
        try:
            if self._control.world.rank == 0:
                self._directory = PendingDirectory(self.target)
                begun = str(self._directory.folder)
        except CheckpointError as error:
            begun = error
        try:
            return Path(_first_value(self._control.meet("zerostd.save()", begun)))
        except BaseException:
            self._drop()
            raise

    def group_write(self, group: str) -> Transfer:
        """Return the transfer that is done when a group is written and may change."""
        return self._group_writes.get(group, Done())

    def after_step(self) -> None:
        """Finish the checkpoint if all ranks have written. All ranks call it at the same points."""
        if self.is_finished:
            return
        if all(self._control.collect(not self._thread.is_alive(), "a step after zerostd.save()")):
            self._finish()

    def finish(self) -> None:
        """Return when the checkpoint is complete or has failed, which is logged. All ranks call it."""
        self._thread.join()
        if not self.is_finished:
            self._finish()

    def wait(self) -> None:
        """Return when the checkpoint is there. All ranks call it. Raises CheckpointError if it could not be written."""
        self.finish()
        if self.error is not None:
            raise CheckpointError(str(self.error)) from self.error

    def _write(self, folder: Path, records: Sequence[SavedInterval], manifest: Manifest, read: ReadRecord) -> None:
        try:
            self._outcome = _write_file(folder, records, manifest, read, self._control.world, self._group_writes)
        except CheckpointError as error:
            self._outcome = error
        except BaseException as error:
            self._outcome = CheckpointError(f"{type(error).__name__}: {error}")
        finally:
            for work in self._group_writes.values():
                if not work.is_done():
                    work.finish()  # the checkpoint is lost, and training goes on
        if self._control.world.size == 1:
            self._finish()

    def _finish(self) -> None:
        """Commit the checkpoint. All ranks have written, or failed."""
        where = "the end of zerostd.save()"
        try:
            outcomes = self._control.collect_on_first(self._outcome, where)
        except BaseException:
            self._drop()
            raise
        result: Any = None
        if self._directory is not None:
            result = _commit(self._directory, outcomes, self._keep)
        try:
            _first_value(self._control.collect(result, where))
        except CheckpointError as error:
            self.error = error
            log.error("the checkpoint %s was not saved: %s", self.target, error)
        self.is_finished = True
        self._outcome = None

    def _drop(self) -> None:
        if self._directory is not None:
            self._directory.drop()


def _snapshot_reader(device: torch.device) -> ReadRecord:
    """Return a function that reads elements of a record into host memory, as they are now.

    Records on the device are read in a stream of their own, which waits for the work queued until now. What a thread
    reads from disk is valid until it reads again.
    """
    stream = Stream(device)
    ready = record_event(device)
    scratch = threading.local()  # a block of memory for each thread

    def read(record: SavedInterval, low: int, high: int) -> torch.Tensor:
        if record.column.tier is Tier.DISK:
            if not hasattr(scratch, "memory"):
                scratch.memory = aligned(BLOCK + PAGE)
            return record.read(low, high, scratch.memory)
        if stream.stream is None or record.column.tier is not Tier.DEVICE:
            return record.read(low, high)
        with stream.after(ready):
            return record.read(low, high).to("cpu")

    return read


def _write_file(
    folder: Path,
    records: Sequence[SavedInterval],
    manifest: Manifest,
    read: ReadRecord,
    world: World,
    group_writes: Mapping[str, Work],
) -> Manifest:
    """Write this rank's file and return the manifest with its parts."""
    name = f"rank-{world.rank:05d}-of-{world.size:05d}.safetensors"
    stored = [record for record in records if record.stop > record.start]
    tensors = [_output_tensor(str(number), record, read) for number, record in enumerate(stored)]
    last_keys = {record.group: tensor.key for tensor, record in zip(tensors, stored, strict=True)}
    group_ends = {key: group_writes[group] for group, key in last_keys.items()}
    total = sum(tensor.num_bytes for tensor in tensors)
    with ByteProgress("saving", total, is_shown=world.rank == 0) as progress:

        def on_written(tensor: OutputTensor) -> None:
            progress.add(tensor.num_bytes)
            if tensor.key in group_ends:
                group_ends[tensor.key].finish()

        num_bytes, checksums = write_file(folder / name, tensors, on_written)
    keys = {record: tensor.key for tensor, record in zip(tensors, stored, strict=True)}
    entries = []
    for entry, record in zip(manifest.tensors, records, strict=True):
        key = keys.get(record)
        if key is not None:
            entry = replace(entry, parts=(TensorPart(record.start, record.stop, name, key, checksums[key]),))
        entries.append(entry)
    return replace(manifest, files={name: FileEntry(num_bytes)}, tensors=tuple(entries))


def _output_tensor(key: str, record: SavedInterval, read: ReadRecord) -> OutputTensor:
    numel = record.stop - record.start
    step = BLOCK // record.dtype.itemsize
    blocks = [(low, partial(_write_block, read, record, low, min(numel, low + step))) for low in range(0, numel, step)]
    return OutputTensor(key, record.dtype, (numel,), blocks)


def _write_block(
    read: ReadRecord, record: SavedInterval, low: int, high: int, writer: DirectFileWriter, offset: int
) -> int:
    values = read(record, low, high).detach().to("cpu").contiguous()  # a copy only if it was elsewhere
    crc = crc32(values)
    writer.write(values, offset)
    return crc


def _commit(
    directory: PendingDirectory, outcomes: Sequence[Manifest | CheckpointError], keep: int | None
) -> CheckpointError | None:
    """Commit the directory on rank 0 if all ranks have written; return what went wrong."""
    try:
        manifests = []
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, CheckpointError):
                raise CheckpointError(f"rank {rank}: {outcome}; nothing was saved")
            manifests.append(outcome)
        directory.commit(_merge_manifests(manifests))
    except Exception as error:
        directory.drop()
        return error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")
    if keep is not None:
        keep_newest(directory.target, keep)
    return None


def _merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Return the manifest of all ranks. What they have in common is rank 0's."""
    entries: dict[tuple[str, str, str], TensorEntry] = {}
    parts: dict[tuple[str, str, str], list[TensorPart]] = {}
    files: dict[str, FileEntry] = {}
    random: dict[str, Any] = {}
    singles: dict[str, Any] = {}
    for manifest in manifests:
        files |= manifest.files
        random |= manifest.random
        singles |= manifest.optimizer.singles if manifest.optimizer is not None else {}
        for entry in manifest.tensors:
            entries.setdefault(entry.identity, entry)
            parts.setdefault(entry.identity, []).extend(entry.parts)
    optimizer = manifests[0].optimizer
    return replace(
        manifests[0],
        saved=time.time(),
        files=files,
        tensors=tuple(
            replace(entry, parts=tuple(sorted(parts[identity], key=lambda part: part.start)))
            for identity, entry in entries.items()
        ),
        optimizer=None if optimizer is None else replace(optimizer, singles=singles),
        random=random,
    )


def _first_value(values: list[Any]) -> Any:
    """Return rank 0's value, or raise on all ranks the error of the first rank that has one."""
    for rank, value in enumerate(values):
        if isinstance(value, CheckpointError):
            raise CheckpointError(f"rank {rank}: {value}" if rank else str(value)) from value
    return values[0]
