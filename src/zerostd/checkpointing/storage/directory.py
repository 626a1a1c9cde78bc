"""The directory of a checkpoint: it appears whole or not at all, and leftovers of killed runs are removed.

A pending directory is NAME.incomplete-TOKEN beside the target, locked by its process as long as that lives. To commit
it is to write and sync the manifest, rename the directory and sync its parent.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from zerostd.checkpointing.storage.manifest import Manifest
from zerostd.checkpointing.storage.safetensors_files import reason
from zerostd.errors import CheckpointError

MANIFEST = "manifest.json"
MARK = ".incomplete-"
PENDING = re.compile(rf".+{re.escape(MARK)}[0-9a-f]{{12}}", re.DOTALL)
JUST_NOW_S = 1.0
MOST_BYTES = 1 << 30  # of a manifest
REMEDY = "name checkpoints by their step, and say keep= to keep the newest only"

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
                raise CheckpointError(f"{target} is there already, and is not overwritten: {remedy}")
            clear_leftovers(target.parent)
            self.folder.mkdir()
            self._lock = _lock(self.folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # without a lock nobody would know that it is not in use
            raise CheckpointError(f"{self.folder} cannot be made: {reason(error)}") from error

    def write(self, name: str, text: str) -> None:
        """Write one more file and sync it to disk."""
        try:
            with open(self.folder / name, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(f"{self.folder / name} cannot be written: {reason(error)}") from error

    def commit(self, manifest: Manifest | None = None) -> None:
        """Write the manifest, if there is one, and give the directory its name."""
        try:
            if manifest is not None:
                self.write(MANIFEST, manifest.to_json())
            _sync(self.folder)
            if self.target.exists():
                raise CheckpointError(f"{self.target} was made by somebody else meanwhile: this one is dropped")
            self.folder.rename(self.target)
            _sync(self.target.parent)
        except OSError as error:
            raise CheckpointError(f"{self.target} cannot be completed: {reason(error)}") from error
        finally:
            self._unlock()

    def drop(self) -> None:
        """Remove the directory: it will not be committed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _with_token(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{MARK}{secrets.token_hex(6)}")


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _lock(folder: Path) -> int:
    """Lock a directory until the returned descriptor is closed. Raises OSError if it is locked."""
    fd = _open(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _sync(folder: Path) -> None:
    fd = _open(folder)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def clear_leftovers(parent: Path) -> None:
    """Remove what killed runs left in `parent`, but nothing that a living process is writing."""
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            if not PENDING.fullmatch(folder.name) or not folder.is_dir() or folder.is_symlink():
                continue
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime < JUST_NOW_S:
                    continue  # it may not be locked yet
                os.close(_lock(folder))  # raises if somebody holds the lock
                log.info("%s was left by a run that was killed; it is removed", folder)
                shutil.rmtree(folder, ignore_errors=True)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, after checking that all its files are there with the right lengths."""
    path = folder / MANIFEST
    try:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a directory, and so no checkpoint")
        if (size := _size_of(path)) > MOST_BYTES:
            raise CheckpointError(f"{path} has {size} bytes: it is not a manifest")
        manifest = Manifest.from_json(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is no checkpoint, or was never completed") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    for name, entry in manifest.files.items():
        file = folder / name
        try:
            size = _size_of(file)
        except OSError as error:
            raise CheckpointError(f"{file}, a file of the checkpoint, cannot be read: {reason(error)}") from error
        if size != entry.bytes:
            raise CheckpointError(f"{file} has {size} bytes and should have {entry.bytes}: it is not complete")
    return manifest


def _size_of(path: Path) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not an ordinary file")
    return status.st_size


def _checkpoints_in(parent: Path) -> Iterator[tuple[Path, Manifest | CheckpointError]]:
    """Yield every checkpoint with its manifest, or with the reason why it cannot be loaded."""
    for folder in sorted(parent.iterdir()):
        if not folder.is_dir():
            continue
        if MARK in folder.name:
            yield folder, CheckpointError("it was never completed")
        elif (folder / MANIFEST).exists():
            try:
                yield folder, read_manifest(folder)
            except CheckpointError as error:
                yield folder, error


def latest(parent: Path) -> Path | None:
    """Return the newest complete checkpoint in `parent`, or None. Skipped ones are logged, with the reason."""
    candidates: list[tuple[float, int, Path]] = []
    for folder, manifest in _checkpoints_in(parent) if parent.is_dir() else ():
        if folder.name.startswith("."):
            continue
        if isinstance(manifest, CheckpointError):
            log.warning("%s is skipped: %s", folder, manifest)
        else:
            candidates.append((manifest.saved, manifest.step, folder))
    return max(candidates)[2] if candidates else None


def keep_newest(target: Path, keep: int) -> None:
    """Remove complete checkpoints beside `target`, the oldest first, until `keep` are left with it."""
    older: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError):
        for folder, manifest in _checkpoints_in(target.parent):
            if isinstance(manifest, Manifest) and folder.name != target.name:
                older.append((manifest.saved, manifest.step, folder))
    for _, _, folder in sorted(older)[: max(0, len(older) - (keep - 1))]:
        doomed = _with_token(folder)
        try:
            folder.rename(doomed)  # it goes as one, also if this process is killed now
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("%s is old and was not removed: %s", folder, reason(error))
