"""Write one checkpoint from all ranks: each writes its own file in a thread, and rank 0 the manifest.

begin    rank 0 makes the directory, and all ranks learn its name
thread   each rank writes its file, group by group; the next update of a group waits until that group is written. For
         a URL the file is on a local disk first, and uploaded when it is whole
finish   when all ranks have written, rank 0 merges their manifests and commits the directory

A process that ends before that completes the checkpoint first.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from msgspec.structs import replace

from zerostd.checkpointing.storage.directory import (
    PendingDirectory,
    PendingObjects,
    begin,
    keep_newest,
    local_file,
    make_room,
)
from zerostd.checkpointing.storage.manifest import BLOCK, FileEntry, Manifest, TensorEntry, TensorPart
from zerostd.checkpointing.storage.remote import AnyPath
from zerostd.checkpointing.storage.safetensors_files import NUM_THREADS, DirectFileWriter, OutputTensor, write_file
from zerostd.communication import Control, World
from zerostd.engine.intervals import SavedInterval
from zerostd.errors import CheckpointError
from zerostd.kernels import crc32
from zerostd.monitoring.progress import ByteProgress
from zerostd.monitoring.retrying import Retries
from zerostd.parameters.observing import StepObserver
from zerostd.policy import Tier
from zerostd.tiers import Done, Stream, Transfer, Work, record_event
from zerostd.tiers.host import PAGE, aligned
from zerostd.tiers.pacing import LinkPace

OutputTensors = Mapping[SavedInterval, OutputTensor]

LOST = (
    "the checkpoint %s was not saved: the process has ended, and %s. Call wait() of the object that zerostd.save "
    "returned while the model and the process group exist"
)

log = logging.getLogger("zerostd")


def end_process() -> NoReturn:
    """End with exit code 1: an error that is raised while the process ends does not change its code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class PendingSave(StepObserver):
    """A checkpoint on its way. A process that ends completes it first. If it has failed and no call has raised that,
    the process ends with exit code 1, unless a later checkpoint was saved."""

    def __init__(self) -> None:
        atexit.register(self._at_exit)

    def forget_exit(self) -> None:
        """Do nothing when the process ends: it is complete, its failure was raised, or a later one replaces it."""
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Complete it, or end the process with exit code 1."""

    def join(self) -> None:
        """Return when this rank's threads read no state any more, whatever came of it."""

    def finish(self) -> None:
        """Return when the checkpoint is complete or has failed, which is logged. All ranks call it."""

    def wait(self) -> None:
        """Wait until the checkpoint is complete. All ranks call it. Raises CheckpointError if it was not written."""


class Saving(PendingSave):
    """A checkpoint that is being written. It is complete when all ranks have seen it finished: in `wait`, in one of the
    steps that training takes meanwhile, or when the processes end.

    All ranks make it together. `manifest` is this rank's: its tensors describe `records` one by one, without parts.
    With a `pace` it is written as background work.
    """

    def __init__(
        self,
        target: AnyPath,
        records: Sequence[SavedInterval],
        manifest: Manifest,
        control: Control,
        keep: int | None,
        retries: Retries,
        pace: LinkPace | None = None,
    ) -> None:
        self.target = target
        self._retries = retries.cleaning(partial(make_room, target, keep))
        self.error: CheckpointError | None = None  # why it failed, if it did
        self.is_finished = False
        self._control = control
        self._keep = keep
        self._directory: PendingDirectory | PendingObjects | None = None  # on rank 0
        self._outcome: Manifest | CheckpointError | None = None  # of this rank's thread
        self._group_writes = {record.group: Work() for record in records if record.stop > record.start}
        tensors = _output_tensors(records, control.world.device, pace)
        folder: AnyPath | CheckpointError | None = None
        with ExitStack() as cleanup:
            try:
                if control.world.rank == 0:
                    self._directory = begin(target, self._retries)
                    cleanup.callback(self._directory.drop)
                    folder = self._directory.folder
            except CheckpointError as error:
                folder = error
            folder = _first_value(control.collect(folder, "zerostd.save()"), control.world)
            self._cleanup = cleanup.pop_all()
        arguments = (folder, records, manifest, tensors)
        self._thread = threading.Thread(target=self._write, args=arguments, name="zerostd save")
        self._thread.start()
        super().__init__()

    def group_write(self, group: str) -> Transfer:
        """Return the transfer that is done when a group is written and may change."""
        return self._group_writes.get(group, Done())

    def after_step(self) -> None:
        """Finish the checkpoint if all ranks have written. All ranks call it at the same points."""
        if not self.is_finished:
            self._meet("a step after zerostd.save()")

    def join(self) -> None:
        self._thread.join()

    def finish(self) -> None:
        self._thread.join()
        while not self.is_finished:
            self._meet("the end of zerostd.save()")

    def _meet(self, what: str) -> None:
        if all(self._control.collect(not self._thread.is_alive(), what)):
            self._finish()

    def _at_exit(self) -> None:
        """Complete it, or end the process with exit code 1. Ranks do not wait for one that an exception has ended."""
        try:
            if hasattr(sys, "last_value") and self._control.world.size > 1:
                raise CheckpointError("an exception ended this rank before all ranks had written")
            self.finish()
        except Exception as error:
            self._cleanup.close()
            self.error = checkpoint_error(error)
            log.error(LOST, self.target, self.error)
        if self.error is not None:
            end_process()

    def wait(self) -> None:
        self.finish()
        if self.error is not None:
            self.forget_exit()
            raise CheckpointError(str(self.error)) from self.error

    def _write(
        self, folder: AnyPath, records: Sequence[SavedInterval], manifest: Manifest, tensors: OutputTensors
    ) -> None:
        world = self._control.world
        name = f"rank-{world.rank:05d}-of-{world.size:05d}.safetensors"
        total = sum(tensor.num_bytes for tensor in tensors.values())
        last_keys = {record.group: tensor.key for record, tensor in tensors.items()}
        groups = {key: group for group, key in last_keys.items()}  # that are written with these tensors
        try:
            with (
                ByteProgress("saving", total, is_shown=world.rank == 0) as progress,
                local_file(folder, name, self._retries) as path,
            ):

                def on_written(tensor: OutputTensor) -> None:
                    progress.add(tensor.num_bytes)
                    if tensor.key in groups:
                        self._group_writes[groups[tensor.key]].finish()

                num_bytes, checksums = write_file(path, [*tensors.values()], on_written, {}, self._retries)
            entries = []
            for entry, record in zip(manifest.tensors, records, strict=True):
                if record in tensors:
                    key = tensors[record].key
                    box = (record.origin, record.shape) if record.origin else ((), ())
                    part = TensorPart(record.start, record.stop, name, key, checksums[key], *box)
                    entry = replace(entry, parts=(part,))
                entries.append(entry)
            self._outcome = replace(manifest, files={name: FileEntry(num_bytes)}, tensors=tuple(entries))
        except BaseException as error:
            self._outcome = checkpoint_error(error)
        finally:
            for work in self._group_writes.values():
                if not work.is_done():
                    work.finish()  # the checkpoint is lost, and training goes on
        if world.size == 1:
            self._finish()

    def _finish(self) -> None:
        """Commit the checkpoint. All ranks have written, or failed."""
        where = "the end of zerostd.save()"
        with self._cleanup:
            outcomes = self._control.collect_on_first(self._outcome, where)
            problem = self._commit(outcomes)
        try:
            _first_value(self._control.collect(problem, where), self._control.world)
        except CheckpointError as error:
            self.error = error
            log.error("the checkpoint %s was not saved: %s", self.target, error)
        self.is_finished = True
        self._outcome = None
        if self.error is None:
            self.forget_exit()

    def _commit(self, outcomes: Sequence[Manifest | CheckpointError]) -> CheckpointError | None:
        """Commit the directory on rank 0 if all ranks have written; return what went wrong."""
        if self._directory is None:
            return None
        try:
            for rank, outcome in enumerate(outcomes):
                if isinstance(outcome, CheckpointError):
                    raise CheckpointError(f"{self._control.world.name(rank)}: {outcome}; nothing was saved")
            manifests = [outcome for outcome in outcomes if isinstance(outcome, Manifest)]
            self._directory.commit(_merge_manifests(manifests))
        except Exception as error:
            return checkpoint_error(error)
        if self._keep is not None:
            keep_newest(self._directory.target, self._keep)
        return None


def _output_tensors(records: Sequence[SavedInterval], device: torch.device, pace: LinkPace | None) -> OutputTensors:
    """Return a numbered tensor for each record with elements, whose present values several threads write. With a
    pace this is background work.

    Records on the device are read in a stream of their own, which waits for the work queued until now.
    """
    stream = Stream(device)
    ready = record_event(device)
    scratch = threading.local()  # a block of memory for each thread, for what it reads from disk

    def write(record: SavedInterval, low: int, high: int, writer: DirectFileWriter, offset: int) -> int:
        tier = record.column.tier
        if tier is Tier.DISK and not hasattr(scratch, "memory"):
            scratch.memory = aligned(BLOCK + PAGE)
        memory = scratch.memory if tier is Tier.DISK else None
        with nullcontext() if pace is None else pace.tile(NUM_THREADS):
            if tier is Tier.HOST:
                ready.synchronize()  # it may be a copy of what was on the device
            with stream.after(ready) if tier is Tier.DEVICE else nullcontext():
                values = record.read(low, high, memory).detach().to("cpu").contiguous()  # a copy if it was elsewhere
            writer.write(values, offset)
            return crc32(values)

    tensors: dict[SavedInterval, OutputTensor] = {}
    for record in records:
        numel = record.stop - record.start
        step = BLOCK // record.dtype.itemsize
        blocks = [(low, partial(write, record, low, min(numel, low + step))) for low in range(0, numel, step)]
        if blocks:
            tensors[record] = OutputTensor(str(len(tensors)), record.dtype, (numel,), blocks)
    return tensors


def _merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Merge the manifests of all ranks; fields they share are taken from rank 0."""
    entries: dict[tuple[str, str, str], TensorEntry] = {}
    files: dict[str, FileEntry] = {}
    random: dict[str, Any] = {}
    singles: dict[str, Any] = {}
    for manifest in manifests:
        files |= manifest.files
        random |= manifest.random
        singles |= manifest.optimizer.singles if manifest.optimizer is not None else {}
        for entry in manifest.tensors:
            earlier = entries.setdefault(entry.identity, entry)
            if earlier is not entry:
                parts = sorted((*earlier.parts, *entry.parts), key=lambda part: (part.origin, part.start))
                entries[entry.identity] = replace(earlier, parts=tuple(parts))
    optimizer = manifests[0].optimizer
    if optimizer is not None:
        optimizer = replace(optimizer, singles=singles)
    common = replace(manifests[0], saved=time.time(), optimizer=optimizer)
    return replace(common, files=files, tensors=tuple(entries.values()), random=random)


def checkpoint_error(error: BaseException) -> CheckpointError:
    """Return an error as one of checkpoints, so that other ranks can be told."""
    return error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")


def _first_value(values: list[Any], world: World) -> Any:
    """Return rank 0's value, or raise on all ranks the error of the first rank that has one."""
    for rank, value in enumerate(values):
        if isinstance(value, CheckpointError):
            raise CheckpointError(f"{world.name(rank)}: {value}" if rank else str(value)) from value
    return values[0]
