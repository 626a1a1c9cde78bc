"""The directory of a checkpoint: it appears whole or not at all, and what a killed run left behind goes.

A draft is NAME.incomplete-TOKEN beside the target, locked by a process as long as it lives. To commit it is to write
and sync the manifest, to rename the directory and to sync its parent.
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
from collections.abc import Callable
from pathlib import Path

from zerostd.checkpointing.storage.files import Reader, reason
from zerostd.checkpointing.storage.manifest import Manifest
from zerostd.errors import CheckpointError

__all__ = ["MANIFEST", "Draft", "clear_leftovers", "keep_newest", "latest", "read_manifest"]

MANIFEST, MARK = "manifest.json", ".incomplete-"
JUST_NOW_S = 1.0
MOST_BYTES = 1 << 30  # of a manifest
DRAFT = re.compile(rf".+{re.escape(MARK)}[0-9a-f]{{12}}", re.DOTALL)
REMEDY = "name checkpoints by their step, and say keep= to keep the newest only"

log = logging.getLogger("zerostd")


class Draft:
    """A directory that is being written. Of a checkpoint rank 0 makes it; the others write into its `folder`."""

    def __init__(self, target: Path, remedy: str = REMEDY) -> None:
        if not target.name or "\0" in str(target) or MARK in target.name:
            raise CheckpointError(f"{str(target)!r} cannot be the name of a checkpoint")
        target = target.absolute()
        self.target = target
        self.folder = target.with_name(f"{target.name}{MARK}{secrets.token_hex(6)}")
        try:
            new = [folder for folder in target.parents if not folder.exists()]
            target.parent.mkdir(parents=True, exist_ok=True)
            for folder in new:
                _sync(folder.parent)  # or a power failure takes them, and all that is in them
            if target.exists():
                raise CheckpointError(f"{target} is there already, and is not overwritten: {remedy}")
            clear_leftovers(target.parent)
            self.folder.mkdir()
            self._lock = _lock(self.folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # nobody would know that it is not in use
            raise CheckpointError(f"{self.folder} cannot be made: {reason(error)}") from error

    def write(self, name: str, text: str) -> None:
        """One more file, synced to disk."""
        try:
            with open(self.folder / name, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(f"{self.folder / name} cannot be written: {reason(error)}") from error

    def commit(self, manifest: Manifest | None = None) -> None:
        """All files are there: make it a checkpoint, or, without a manifest, what it is."""
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
        """It came to nothing: leave no trace."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _lock(folder: Path) -> int:
    """Lock a directory, as long as the descriptor is open. Raises OSError if somebody else has."""
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


def clear_leftovers(parent: Path) -> list[Path]:
    """Remove what runs that were killed left in `parent`; what a living one is writing stays. Returns the removed."""
    removed = []
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            if DRAFT.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink() and _is_abandoned(folder):
                log.info("%s was left by a run that was killed; it is removed", folder)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_abandoned(folder: Path) -> bool:
    """Whether nobody holds its lock. One that was made this moment may not be locked yet."""
    try:
        if time.time() - folder.stat().st_mtime < JUST_NOW_S:
            return False
        os.close(_lock(folder))
    except OSError:
        return False
    return True


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, as long as they should be. Raises CheckpointError."""
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
    for name, size in manifest.files.items():
        try:
            found = _size_of(folder / name)
        except OSError as error:
            raise CheckpointError(
                f"{folder / name}, a file of the checkpoint, cannot be read: {reason(error)}"
            ) from error
        if found != size:
            raise CheckpointError(f"{folder / name} has {found} bytes and should have {size}: it is not complete")
    return manifest


def _size_of(path: Path) -> int:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is not an ordinary file")
    return found.st_size


def check_headers(folder: Path, manifest: Manifest, on_open: Callable[[str, Reader], None]) -> None:
    """Open every file, check what the manifest says of it against its header, and hand it over."""
    readers: dict[str, Reader] = {}
    for name in manifest.files:
        readers[name] = Reader(folder / name)
        on_open(name, readers[name])
    for one in manifest.tensors:
        for part in one.parts:
            place = readers[part.file].places.get(part.key)
            numel = part.stop - part.start
            if place is None:
                raise CheckpointError(f"{folder / part.file} has no {part.key!r}, a part of {one.label}")
            if str(place.dtype) != f"torch.{one.dtype}" or place.num_bytes != numel * place.dtype.itemsize:
                raise CheckpointError(
                    f"{folder / part.file}: {part.key!r} is {place.shape} of {place.dtype}, and the manifest says "
                    f"{numel} of {one.dtype} for {one.label}"
                )
    used = {(part.file, part.key) for one in manifest.tensors for part in one.parts}
    unknown = [(name, key) for name, reader in readers.items() for key in reader.places if (name, key) not in used]
    if unknown:
        raise CheckpointError(f"{folder / unknown[0][0]}: the manifest does not say what {unknown[0][1]!r} is")


def latest(parent: Path) -> Path | None:
    """The newest complete checkpoint below `parent`; None if there is none. What is skipped is logged, with why."""
    found: list[tuple[float, int, Path]] = []
    if not parent.is_dir():
        return None
    for folder in sorted(parent.iterdir()):
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        if MARK in folder.name:
            log.warning("%s is skipped: it was never completed", folder)
            continue
        if not (folder / MANIFEST).exists():
            continue
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            log.warning("%s is skipped: %s", folder, error)
            continue
        found.append((manifest.saved, manifest.step, folder))
    return max(found)[2] if found else None


def keep_newest(target: Path, keep: int) -> list[Path]:
    """Remove checkpoints beside `target`, but not the `keep` newest complete ones. Returns the removed."""
    others, removed = [], []
    with contextlib.suppress(OSError):
        for folder in target.parent.iterdir():
            is_one = folder.name != target.name and MARK not in folder.name and (folder / MANIFEST).exists()
            with contextlib.suppress(CheckpointError):
                if is_one:
                    manifest = read_manifest(folder)
                    others.append((manifest.saved, manifest.step, folder))
    for _, _, folder in sorted(others)[: max(0, len(others) - (keep - 1))]:
        gone = folder.with_name(f"{folder.name}{MARK}{secrets.token_hex(6)}")
        try:
            folder.rename(gone)  # it goes as one, also if this process is killed now
            shutil.rmtree(gone)
            removed.append(folder)
        except OSError as error:
            log.warning("%s is old and was not removed: %s", folder, reason(error))
    return removed
