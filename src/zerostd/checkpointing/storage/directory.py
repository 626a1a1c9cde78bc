"""The directory of a checkpoint: it appears whole or not at all, and leftovers of killed runs are removed.

A pending directory is NAME.incomplete-TOKEN beside the target, and its process locks it while it lives. A commit
writes and syncs the manifest, renames the directory and syncs its parent.

Objects of a URL cannot be renamed or locked. There the manifest is the commit: it is written last, and removed first.
Ranks write to a pending directory on this machine and upload from there, so training does not wait for the network.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from zerostd.checkpointing.storage.manifest import Manifest
from zerostd.checkpointing.storage.remote import AnyPath, RemotePath
from zerostd.checkpointing.storage.safetensors_files import system_errors
from zerostd.errors import CheckpointError
from zerostd.monitoring.retrying import Retries
from zerostd.tiers.scratch_files import reason

MANIFEST = "manifest.json"
MARK = ".incomplete-"
PENDING = re.compile(rf".+{re.escape(MARK)}[0-9a-f]{{12}}", re.DOTALL)
MARKER = "incomplete"  # an object beside files that have no manifest yet
LEFTOVER = re.compile(r"rank-\d+-of-\d+\.safetensors")  # of a save that was killed, if there is no manifest
JUST_NOW_S = 1.0
MOST_BYTES = 1 << 30  # of a manifest
SEQUENCE = re.compile(rb'"sequence":(\d{1,18})')
HEAD_BYTES = 256  # of a manifest, in which its sequence is
REMEDY = "name checkpoints by their step, and pass keep= to keep only the newest"

log = logging.getLogger("zerostd")


class PendingDirectory:
    """A directory that is being written. Rank 0 makes that of a checkpoint; the others write into its `folder`."""

    def __init__(self, target: Path, remedy: str = REMEDY) -> None:
        if not target.name or "\0" in str(target) or MARK in target.name:
            raise CheckpointError(f"{str(target)!r} cannot be the name of a checkpoint")
        self.target = target = target.absolute()
        self.folder = _with_token(target)
        try:
            new = [folder for folder in target.parents if not folder.exists()]
            target.parent.mkdir(parents=True, exist_ok=True)
            for folder in new:
                _sync(folder.parent)  # or a power failure loses them with all they hold
            if target.exists():
                raise CheckpointError(f"{target} already exists and is not overwritten: {remedy}")
            clear_leftovers(target.parent)
            self.folder.mkdir()
            self._lock = _lock(self.folder)
        except OSError as error:
            with suppress(OSError):
                self.folder.rmdir()  # without a lock nobody would know that it is not in use
            raise CheckpointError(f"{self.folder} cannot be created: {reason(error)}") from error

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        with system_errors(f"{path} cannot be written"), open(path, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def commit(self, manifest: Manifest | None = None) -> None:
        """Write the manifest, if there is one, and give the directory its name."""
        with self._lock, system_errors(f"{self.target} cannot be completed"):
            if manifest is not None:
                sequence = max(_sequences_in(self.target.parent), default=0) + 1
                self.write(MANIFEST, replace(manifest, sequence=sequence).to_json())
            _sync(self.folder)
            if self.target.exists():
                raise CheckpointError(f"{self.target} was created by another process meanwhile: this one is discarded")
            self.folder.rename(self.target)
            _sync(self.target.parent)

    def drop(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


class PendingObjects:
    """Objects below a URL that are being written: the same verbs. Files of others are not removed."""

    def __init__(self, target: RemotePath, retries: Retries) -> None:
        self.target = self.folder = target
        self._retries = retries
        self._is_ours = True  # what lies there, the manifest too
        if not target.name:
            raise CheckpointError(f"{str(target)!r} cannot be the name of a checkpoint")
        with system_errors(f"{target} cannot be written"):
            present = list(target.iterdir())
            if any(path.name != MARKER and not LEFTOVER.fullmatch(path.name) for path in present):
                raise CheckpointError(f"{target} already exists and is not overwritten: {REMEDY}")
            for path in present:
                path.unlink()
            (target / MARKER).write_bytes(b"")  # what must not be written is refused now

    def commit(self, manifest: Manifest) -> None:
        path = self.target / MANIFEST
        with system_errors(f"{self.target} cannot be completed"):
            if path.exists():
                self._is_ours = False
                raise CheckpointError(f"{self.target} was created by another process meanwhile: this one is discarded")
            sequence = max(_sequences_in(self.target.parent), default=0) + 1
            content = replace(manifest, sequence=sequence).to_json().encode()
            self._retries.attempt("writing", str(path), path.write_bytes, content)
        self._is_ours = False  # but whoever reads it
        with suppress(OSError):
            (self.target / MARKER).unlink()

    def drop(self) -> None:
        if self._is_ours:
            with suppress(OSError):  # a store that is gone takes no call
                _remove_objects(self.target)


def begin(target: AnyPath, retries: Retries) -> PendingDirectory | PendingObjects:
    """Return the pending place of a checkpoint. Raises CheckpointError if the target exists or cannot be made."""
    return PendingDirectory(target) if isinstance(target, Path) else PendingObjects(target, retries)


@contextmanager
def local_file(folder: AnyPath, name: str, retries: Retries) -> Iterator[Path]:
    """Return where to write a file of a pending checkpoint. At the end it is in its place."""
    if isinstance(folder, Path):
        yield folder / name
        return
    spool = PendingDirectory(Path(tempfile.gettempdir()) / f"zerostd-{os.getuid()}" / folder.name)
    try:
        try:
            yield spool.folder / name
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. {folder} is written to TMPDIR first: set TMPDIR to a disk with room"
            ) from error
        with system_errors(f"{folder / name} cannot be written"):
            retries.attempt("uploading", str(folder / name), (folder / name).upload, spool.folder / name)
    finally:
        spool.drop()


def _remove_objects(folder: RemotePath) -> None:
    """Remove a checkpoint, complete or not; the manifest goes first, so that it is whole or none."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
        if path.name in (MANIFEST, MARKER) or LEFTOVER.fullmatch(path.name):
            path.unlink()


def _with_token(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{MARK}{secrets.token_hex(6)}")


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(folder: Path) -> ExitStack:
    """Lock a directory until the returned stack is closed. Raises OSError if it is locked."""
    with ExitStack() as stack:
        fcntl.flock(stack.enter_context(_opened(folder)), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stack.pop_all()


def _sync(folder: Path) -> None:
    with _opened(folder) as fd:
        os.fsync(fd)


def clear_leftovers(parent: AnyPath) -> None:
    """Remove what killed runs left in `parent`, but nothing that a living process is writing. Below a URL it is unknown
    what is being written: leftovers are removed by the next save under their name."""
    if isinstance(parent, RemotePath):
        return
    with suppress(OSError):
        for folder in parent.iterdir():
            if not PENDING.fullmatch(folder.name) or not folder.is_dir() or folder.is_symlink():
                continue
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime < JUST_NOW_S:
                    continue  # it may not be locked yet
                _lock(folder).close()  # raises if somebody holds the lock
                log.info("removing %s, left by a killed run", folder)
                shutil.rmtree(folder, ignore_errors=True)


def _sequences_in(parent: AnyPath) -> Iterator[int]:
    """Yield the sequence of each checkpoint in `parent`; manifests that cannot be read have none."""
    with suppress(OSError):
        for folder in parent.iterdir():
            path = folder / MANIFEST
            with suppress(OSError):
                is_there = isinstance(path, RemotePath) or path.exists()
                match = SEQUENCE.search(_head_of(path)) if is_there else None
                if match is not None:
                    yield int(match[1])


def _head_of(path: AnyPath) -> bytes:
    if isinstance(path, RemotePath):
        return path.read_bytes(0, HEAD_BYTES)
    with open(path, "rb", opener=_open_now) as file:
        return file.read(HEAD_BYTES)


def _open_now(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait


def read_manifest(folder: AnyPath) -> Manifest:
    """Return the manifest of a checkpoint, after checking that all its files are there with the right lengths."""
    path = folder / MANIFEST
    with system_errors(f"{path} cannot be read"):
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a directory, so it is not a checkpoint: name one that zerostd.save wrote"
            )
        if not path.exists():
            raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a checkpoint, or was never completed")
        if (size := _size_of(path)) > MOST_BYTES:
            raise CheckpointError(f"{path} has {size} bytes: it is not a manifest")
        manifest = Manifest.from_json(path.read_bytes(), str(path))
    for name, entry in manifest.files.items():
        file = folder / name
        with system_errors(f"{file}, a file of the checkpoint, cannot be read"):
            size = _size_of(file)
        if size != entry.bytes:
            raise CheckpointError(f"{file} has {size} bytes and should have {entry.bytes}: it is incomplete")
    return manifest


def _size_of(path: AnyPath) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not an ordinary file")
    return status.st_size


def _checkpoints_in(parent: AnyPath) -> tuple[list[AnyPath], dict[AnyPath, CheckpointError]]:
    """Return the complete checkpoints, the oldest first, and why the others cannot be loaded. Their order is that in
    which they were saved, whatever the clock said; those of version 1 have no sequence, and go by their steps."""
    complete: list[tuple[int, int, float, AnyPath]] = []
    unusable: dict[AnyPath, CheckpointError] = {}
    folders: list[AnyPath] = [*parent.iterdir()]
    for folder in sorted(folders, key=str):
        try:
            with system_errors("it cannot be read"):
                if not folder.is_dir():
                    continue
                if MARK in folder.name:
                    raise CheckpointError("it was never completed")
                if not (folder / MANIFEST).exists():
                    continue
            manifest = read_manifest(folder)
            complete.append((manifest.sequence, manifest.step, manifest.saved, folder))
        except CheckpointError as error:
            unusable[folder] = error
    return [folder for *_, folder in sorted(complete)], unusable


def latest(parent: AnyPath) -> AnyPath | None:
    """Return the newest complete checkpoint in `parent`, or None. Skipped ones are logged, with the reason."""
    complete, unusable = _checkpoints_in(parent) if parent.is_dir() else ([], {})
    for folder, error in unusable.items():
        if not folder.name.startswith("."):
            log.warning("%s is skipped: %s", folder, error)
    return next((folder for folder in reversed(complete) if not folder.name.startswith(".")), None)


def make_room(target: AnyPath, keep: int | None) -> None:
    """Remove leftovers, and those checkpoints that `keep` would remove once `target` is there. One at least stays."""
    clear_leftovers(target.parent)
    if keep is not None and keep > 1:
        keep_newest(target, keep)


def keep_newest(target: AnyPath, keep: int) -> None:
    """Remove complete checkpoints beside `target`, the oldest first, until `keep` are left with it. Links are the
    user's: they do not count, and stay."""
    try:
        complete, _ = _checkpoints_in(target.parent)
    except OSError as error:  # the new checkpoint is whole all the same
        log.warning("old checkpoints stay, because %s cannot be listed: %s", target.parent, reason(error))
        return
    older = [folder for folder in complete if folder.name != target.name and not folder.is_symlink()]
    for folder in older[: max(0, len(older) - (keep - 1))]:
        try:
            _remove(folder)
        except OSError as error:
            log.warning("the old checkpoint %s could not be removed: %s", folder, reason(error))


def _remove(folder: AnyPath) -> None:
    """Remove a checkpoint. The directory disappears at once, even if this process is killed meanwhile."""
    if isinstance(folder, RemotePath):
        _remove_objects(folder)
        return
    doomed = _with_token(folder)
    folder.rename(doomed)
    shutil.rmtree(doomed)
