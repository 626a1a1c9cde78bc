"""Places outside this machine's file systems: URLs that fsspec supports, such as s3://mine/step-1000.

`RemotePath` has those verbs of pathlib.Path that checkpoints need, so `directory`, `reading` and `safetensors_files`
take either. An object is there whole or not at all, and there is no rename. Every failure is an OSError. A failure that
may be temporary has EIO, so that `Retries` repeats the call. Keys and addresses are in fsspec's own configuration.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from zerostd.errors import CheckpointError
from zerostd.monitoring.decoding import path_of

LASTING = {  # errors that no later try avoids, and their numbers
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    NotImplementedError: errno.EOPNOTSUPP,  # such as writing to http
}


@dataclass(frozen=True, order=True)
class RemotePath:
    """A URL without a slash at its end."""

    url: str

    @classmethod
    def parse(cls, url: str) -> RemotePath:
        """Return a path for a URL, unless fsspec or what it needs for this protocol is missing."""
        protocol, rest = url.split("://", 1)
        place = cls(f"{protocol}://{rest.rstrip('/')}")
        try:
            place._open()
        except ImportError as error:
            raise CheckpointError(f"{url}: {error}. URLs need fsspec: pip install 'zerostd[url]'") from error
        except Exception as error:
            raise CheckpointError(f"{url} cannot be used: {error!s:.200}") from error
        return place

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}{'' if self.url.endswith('/') else '/'}{name}")

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]

    @property
    def parent(self) -> RemotePath:
        above = self.url.removesuffix(self.name)
        return RemotePath(above if above.endswith("://") else above.rstrip("/"))

    def _open(self) -> tuple[Any, str]:
        """Return the file system, which fsspec keeps for each thread, and the path in it."""
        from fsspec.core import url_to_fs  # an extra, and 0.1 s

        system, path = url_to_fs(self.url)
        return system, path

    @contextmanager
    def _call(self) -> Iterator[tuple[Any, str]]:
        """Return file system and path for a call, whose errors become OSErrors with a number."""
        try:
            yield self._open()
        except Exception as error:
            number = next((number for kind, number in LASTING.items() if isinstance(error, kind)), errno.EIO)
            text = f"{type(error).__name__}: {error!s:.200}" if number == errno.EIO else os.strerror(number)
            raise OSError(number, text) from error  # a FileNotFoundError for ENOENT

    def stat(self) -> os.stat_result:
        """Return the kind and the length, as pathlib does."""
        with self._call() as (system, path):
            system.invalidate_cache()  # other ranks and processes write too
            info = system.info(path)
        kind = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
        return os.stat_result((kind, 0, 0, 1, 0, 0, int(info["size"] or 0), 0, 0, 0))

    def exists(self) -> bool:
        return self._mode() != 0

    def is_dir(self) -> bool:
        return stat.S_ISDIR(self._mode())

    def _mode(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the direct children; nothing, if nothing is there."""
        try:
            with self._call() as (system, path):
                system.invalidate_cache()
                names = {entry.rstrip("/") for entry in system.ls(path, detail=False)} - {path.rstrip("/")}
        except FileNotFoundError:
            return
        for name in sorted(names):
            yield self / name.rsplit("/", 1)[-1]

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        with self._call() as (system, path):
            return bytes(system.cat_file(path, start=start, end=stop))

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill memory from an offset on; return how many bytes there were."""
        content = self.read_bytes(offset, offset + len(memory))
        memory[: len(content)] = content
        return len(content)

    def write_bytes(self, content: bytes) -> None:
        with self._call() as (system, path):
            try:
                system.pipe_file(path, content)
            except FileNotFoundError:  # a file system with directories
                system.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
                system.pipe_file(path, content)

    def upload(self, file: Path) -> None:
        """Write what a local file holds."""
        with self._call() as (system, path):
            system.put_file(os.fspath(file), path)
        length = self.stat().st_size
        if length != file.stat().st_size:
            raise OSError(errno.EIO, f"{length} of {file.stat().st_size} bytes arrived")

    def unlink(self) -> None:
        with self._call() as (system, path):
            system.rm_file(path)


AnyPath: TypeAlias = Path | RemotePath


def place_of(path: str | os.PathLike[str], what: str) -> AnyPath:
    """Return a path or a URL that a user gave; raise CheckpointError if it is neither, or cannot be used."""
    place = path_of(path, what, CheckpointError)
    return RemotePath.parse(path) if isinstance(path, str) and "://" in path else place
