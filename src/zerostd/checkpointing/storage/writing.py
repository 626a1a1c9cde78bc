"""Write one checkpoint from all ranks: each writes its own file in a thread, and rank 0 the manifest.

begin    rank 0 makes the directory, and all ranks learn its name
thread   each rank writes its file, group by group; the next update of a group waits until that group is written
finish   when all ranks have written, rank 0 merges their manifests and commits the directory
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from zerostd.checkpointing.storage.directory import PendingDirectory, keep_newest
from zerostd.checkpointing.storage.manifest import BLOCK, FileEntry, Manifest, TensorEntry, TensorPart
from zerostd.checkpointing.storage.safetensors_files import DirectFileWriter, OutputTensor, write_file
from zerostd.communication import Control
from zerostd.errors import CheckpointError
from zerostd.kernels import crc32
from zerostd.monitoring.progress import ByteProgress
from zerostd.parameters.flat import SavedInterval
from zerostd.parameters.observing import StepObserver
from zerostd.policy import Tier
from zerostd.tiers import Done, Stream, Transfer, Work, record_event
from zerostd.tiers.host import PAGE, aligned

log = logging.getLogger("zerostd")

ReadRecord = Callable[[SavedInterval, int, int], torch.Tensor]


class Saving(StepObserver):
    """A checkpoint that is being written. It is complete when all ranks have seen it finished: in `wait`, or in one of
    the steps that training takes meanwhile.

    All ranks make it together. `manifest` is this rank's: its tensors describe `records` one by one, without parts.
    """

    def __init__(
        self, target: Path, records: Sequence[SavedInterval], manifest: Manifest, control: Control, keep: int | None
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
        folder: Path | CheckpointError | None = None
        try:
            if control.world.rank == 0:
                self._directory = PendingDirectory(target)
                folder = self._directory.folder
        except CheckpointError as error:
            folder = error
        with self._dropping():
            folder = _first_value(control.meet("zerostd.save()", folder))
        self._thread = threading.Thread(target=self._write, args=(folder, records, manifest, read), name="zerostd save")
        self._thread.start()

    def group_write(self, group: str) -> Transfer:
        """Return the transfer that is done when a group is written and may change."""
        return self._group_writes.get(group, Done())

    def after_step(self) -> None:
        """Finish the checkpoint if all ranks have written. All ranks call it at the same points."""
        what = "a step after zerostd.save()"
        if not self.is_finished and all(self._control.collect(not self._thread.is_alive(), what)):
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
            self._outcome = self._write_file(folder, records, manifest, read)
        except BaseException as error:
            self._outcome = checkpoint_error(error)
        finally:
            for work in self._group_writes.values():
                if not work.is_done():
                    work.finish()  # the checkpoint is lost, and training goes on
        if self._control.world.size == 1:
            self._finish()

    def _finish(self) -> None:
        """Commit the checkpoint. All ranks have written, or failed."""
        where = "the end of zerostd.save()"
        with self._dropping():
            outcomes = self._control.collect_on_first(self._outcome, where)
        try:
            _first_value(self._control.collect(self._commit(outcomes), where))
        except CheckpointError as error:
            self.error = error
            log.error("the checkpoint %s was not saved: %s", self.target, error)
        self.is_finished = True
        self._outcome = None

    def _write_file(
        self, folder: Path, records: Sequence[SavedInterval], manifest: Manifest, read: ReadRecord
    ) -> Manifest:
        world = self._control.world
        name = f"rank-{world.rank:05d}-of-{world.size:05d}.safetensors"
        stored = [record for record in records if record.stop > record.start]
        keys = {record: str(number) for number, record in enumerate(stored)}
        tensors = [_output_tensor(key, record, read) for record, key in keys.items()]
        group_ends = {key: group for group, key in {record.group: key for record, key in keys.items()}.items()}
        total = sum(tensor.num_bytes for tensor in tensors)
        with ByteProgress("saving", total, is_shown=world.rank == 0) as progress:

            def on_written(tensor: OutputTensor) -> None:
                progress.add(tensor.num_bytes)
                if tensor.key in group_ends:
                    self._group_writes[group_ends[tensor.key]].finish()

            num_bytes, checksums = write_file(folder / name, tensors, on_written, {})
        entries = []
        for entry, record in zip(manifest.tensors, records, strict=True):
            key = keys.get(record)
            if key is not None:
                entry = replace(entry, parts=(TensorPart(record.start, record.stop, name, key, checksums[key]),))
            entries.append(entry)
        return replace(manifest, files={name: FileEntry(num_bytes)}, tensors=tuple(entries))

    def _commit(self, outcomes: Sequence[Manifest | CheckpointError]) -> CheckpointError | None:
        """Commit the directory on rank 0 if all ranks have written; return what went wrong."""
        if self._directory is None:
            return None
        try:
            for rank, outcome in enumerate(outcomes):
                if isinstance(outcome, CheckpointError):
                    raise CheckpointError(f"rank {rank}: {outcome}; nothing was saved")
            manifests = [outcome for outcome in outcomes if isinstance(outcome, Manifest)]
            self._directory.commit(_merge_manifests(manifests))
        except Exception as error:
            self._directory.drop()
            return checkpoint_error(error)
        if self._keep is not None:
            keep_newest(self._directory.target, self._keep)
        return None

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Drop the directory if the ranks cannot agree on it."""
        try:
            yield
        except BaseException:
            if self._directory is not None:
                self._directory.drop()
            raise


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


def _merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Merge the manifests of all ranks; fields they share are taken from rank 0."""
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
    if optimizer is not None:
        optimizer = replace(optimizer, singles=singles)
    ordered = {identity: tuple(sorted(each, key=lambda part: part.start)) for identity, each in parts.items()}
    tensors = tuple(replace(entry, parts=ordered[identity]) for identity, entry in entries.items())
    common = replace(manifests[0], saved=time.time(), optimizer=optimizer)
    return replace(common, files=files, tensors=tensors, random=random)


def checkpoint_error(error: BaseException) -> CheckpointError:
    """Return an error as one of checkpoints, so that other ranks can be told."""
    return error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")


def _first_value(values: list[Any]) -> Any:
    """Return rank 0's value, or raise on all ranks the error of the first rank that has one."""
    for rank, value in enumerate(values):
        if isinstance(value, CheckpointError):
            raise CheckpointError(f"rank {rank}: {value}" if rank else str(value)) from value
    return values[0]
