"""The directory of a checkpoint: it appears whole or not at all, and leftovers of killed runs are removed.

A pending directory is NAME.incomplete-TOKEN beside the target, locked by its process as long as that lives. To commit
it is to write and sync the manifest, rename the directory and sync its parent.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from zerostd.checkpointing.storage.manifest import Manifest
from zerostd.checkpointing.storage.safetensors_files import reason, system_errors
from zerostd.errors import CheckpointError

MANIFEST = "manifest.json"
MARK = ".incomplete-"
PENDING = re.compile(rf".+{re.escape(MARK)}[0-9a-f]{{12}}", re.DOTALL)
JUST_NOW_S = 1.0
MOST_BYTES = 1 << 30  # of a manifest
SEQUENCE = re.compile(rb'"sequence":(\d{1,18})')
HEAD_BYTES = 256  # of a manifest, in which its sequence is
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
            with suppress(OSError):
                self.folder.rmdir()  # without a lock nobody would know that it is not in use
            raise CheckpointError(f"{self.folder} cannot be made: {reason(error)}") from error

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
                raise CheckpointError(f"{self.target} was made by somebody else meanwhile: this one is dropped")
            self.folder.rename(self.target)
            _sync(self.target.parent)

    def drop(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


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


def clear_leftovers(parent: Path) -> None:
    """Remove what killed runs left in `parent`, but nothing that a living process is writing."""
    with suppress(OSError):
        for folder in parent.iterdir():
            if not PENDING.fullmatch(folder.name) or not folder.is_dir() or folder.is_symlink():
                continue
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime < JUST_NOW_S:
                    continue  # it may not be locked yet
                _lock(folder).close()  # raises if somebody holds the lock
                log.info("%s was left by a run that was killed; it is removed", folder)
                shutil.rmtree(folder, ignore_errors=True)


def _sequences_in(parent: Path) -> Iterator[int]:
    """Yield the sequence of each checkpoint in `parent`; manifests that cannot be read have none."""
    with suppress(OSError):
        for path in parent.glob(f"*/{MANIFEST}"):
            with suppress(OSError), open(path, "rb", opener=_open_now) as file:
                match = SEQUENCE.search(file.read(HEAD_BYTES))
                if match is not None:
                    yield int(match[1])


def _open_now(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, after checking that all its files are there with the right lengths."""
    path = folder / MANIFEST
    with system_errors(f"{path} cannot be read"):
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a directory, and so no checkpoint")
        if not path.exists():
            raise CheckpointError(f"{folder} has no {MANIFEST}: it is no checkpoint, or was never completed")
        if (size := _size_of(path)) > MOST_BYTES:
            raise CheckpointError(f"{path} has {size} bytes: it is not a manifest")
        manifest = Manifest.from_json(path.read_bytes(), str(path))
    for name, entry in manifest.files.items():
        file = folder / name
        with system_errors(f"{file}, a file of the checkpoint, cannot be read"):
            size = _size_of(file)
        if size != entry.bytes:
            raise CheckpointError(f"{file} has {size} bytes and should have {entry.bytes}: it is not complete")
    return manifest


def _size_of(path: Path) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not an ordinary file")
    return status.st_size


def _checkpoints_in(parent: Path) -> tuple[list[Path], dict[Path, CheckpointError]]:
    """Return the complete checkpoints, the oldest first, and why the others cannot be loaded. Their order is that in
    which they were saved, whatever the clock said; those of version 1 have no sequence, and go by their steps."""
    complete: list[tuple[int, int, float, Path]] = []
    unusable: dict[Path, CheckpointError] = {}
    for folder in sorted(parent.iterdir()):
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


def latest(parent: Path) -> Path | None:
    """Return the newest complete checkpoint in `parent`, or None. Skipped ones are logged, with the reason."""
    complete, unusable = _checkpoints_in(parent) if parent.is_dir() else ([], {})
    for folder, error in unusable.items():
        if not folder.name.startswith("."):
            log.warning("%s is skipped: %s", folder, error)
    return next((folder for folder in reversed(complete) if not folder.name.startswith(".")), None)


def make_room(target: Path, keep: int | None) -> None:
    """Remove leftovers, and those checkpoints that `keep` would remove once `target` is there. One at least stays."""
    clear_leftovers(target.parent)
    if keep is not None and keep > 1:
        keep_newest(target, keep)


def keep_newest(target: Path, keep: int) -> None:
    """Remove complete checkpoints beside `target`, the oldest first, until `keep` are left with it. Links are the
    user's: they do not count, and stay."""
    try:
        complete, _ = _checkpoints_in(target.parent)
    except OSError as error:  # the new checkpoint is whole all the same
        log.warning("%s cannot be listed, so old checkpoints stay: %s", target.parent, reason(error))
        return
    older = [folder for folder in complete if folder.name != target.name and not folder.is_symlink()]
    for folder in older[: max(0, len(older) - (keep - 1))]:
        doomed = _with_token(folder)
        try:
            folder.rename(doomed)  # it goes as one, also if this process is killed now
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("%s is old and was not removed: %s", folder, reason(error))
