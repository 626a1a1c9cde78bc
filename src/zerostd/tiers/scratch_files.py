"""Scratch files: a few files without a name, and the intervals of them that are taken.

A file is unlinked before it has a byte, so nothing is left when the process ends, however it ends. A thousand groups
would need a thousand descriptors if each extent had a file: so extents share a few, which also lets threads write to
several files at the same time. Space that an extent frees becomes a hole, and returns to the drive at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import threading

from zerostd.errors import PrepareError
from zerostd.monitoring.texts import exact_size
from zerostd.policy import Tier
from zerostd.tiers.host import PAGE, UNLIMITED, check_budget

DIRECT = getattr(os, "O_DIRECT", 0)  # 0: a system without it
MOST_FILES = 8  # that the extents of a disk share
PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of Linux


class ScratchFile:
    """A file, its reserved bytes and the holes in it. All intervals are whole pages."""

    def __init__(self, path: str, *, is_direct: bool) -> None:
        self.fd, self.name = open_unnamed(path)  # the name is for messages
        self.num_bytes = 0  # its length
        self.num_taken = 0  # bytes that are not in holes
        self._holes: list[tuple[int, int]] = []  # from, to; in no order
        self._lock = threading.Lock()
        self._num_users = 1  # disks that have it open
        if is_direct:
            set_direct(self.fd)

    def take(self, size: int) -> int:
        """Return where `size` bytes of zeros begin, whose space is reserved. Raises OSError if there is none."""
        with self._lock:
            return self._take(size)

    def _take(self, size: int) -> int:
        hole = next((hole for hole in self._holes if hole[1] - hole[0] >= size), None)
        start = self.num_bytes if hole is None else hole[0]
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, start, size)
            elif hole is None:
                os.ftruncate(self.fd, start + size)  # cannot reserve: missing space shows as a failed write
        except OSError:  # a part of it may be reserved
            if hole is None:
                os.ftruncate(self.fd, self.num_bytes)
            else:
                self.punch(start, size)
            raise
        if hole is None:
            self.num_bytes += size
        else:
            self._holes.remove(hole)
            self._holes += [(start + size, hole[1])] if hole[1] - start > size else []
        self.num_taken += size
        return start

    def give(self, start: int, size: int) -> None:
        """Give bytes back to the drive: cut the file there, or leave a hole."""
        with self._lock:
            self._give(start, size)

    def _give(self, start: int, size: int) -> None:
        self.num_taken -= size
        if self.num_taken == 0 or start + size == self.num_bytes:
            self.num_bytes = 0 if self.num_taken == 0 else start
            self._holes = [hole for hole in self._holes if hole[0] < self.num_bytes]
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self.num_bytes)
        elif self.punch(start, size):
            self._holes.append((start, start + size))

    def punch(self, start: int, size: int) -> bool:
        """Leave a hole of zeros without space; returns whether the file system can."""
        fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
        if fallocate is None:
            return False
        return int(fallocate(self.fd, PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(size))) == 0

    def open_again(self) -> None:
        """Keep it open for another disk: each of them closes it."""
        with self._lock:
            self._num_users += 1

    def close(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                os.close(self.fd)


def open_unnamed(path: str) -> tuple[int, str]:
    """Create a file in `path` that has no name there; return its descriptor and what to call it in messages."""
    try:
        if hasattr(os, "O_TMPFILE"):
            with contextlib.suppress(OSError):  # not every file system has it
                fd = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                return fd, f"{path}/(file {os.fstat(fd).st_ino}, unlinked)"
        return open_and_unlink(path)
    except OSError as error:
        raise PrepareError(
            f"disk_path={path!r}: cannot create a file there ({reason(error)}); name a directory that you may write to"
        ) from error


def open_and_unlink(path: str) -> tuple[int, str]:
    """Do the same on file systems where a file must first have a name: for a moment, in a private directory."""
    folder = tempfile.mkdtemp(prefix="zerostd-", dir=path)  # 0700
    name = os.path.join(folder, "extent")
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(name)
    finally:
        os.rmdir(folder)
    return fd, f"{name} (unlinked)"


def supports_direct(path: str) -> bool:
    """Return whether files in `path` take transfers past the page cache; raise PrepareError if none can be made there.
    Some file systems take the flag and refuse the transfer, hence the trial."""
    if not os.path.isdir(path):
        raise PrepareError(f"disk_path={path!r} is not a directory; name an existing one that you may write to")
    fd, _ = open_unnamed(path)
    page = memoryview(mmap.mmap(-1, PAGE))
    try:
        set_direct(fd)
        return bool(DIRECT) and os.pwritev(fd, [page], 0) == PAGE and os.preadv(fd, [page], 0) == PAGE
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise PrepareError(
            f"disk_path={path!r} cannot hold files: a trial write failed ({reason(error)}); name another directory"
        ) from error
    finally:
        os.close(fd)


def set_direct(fd: int) -> None:
    """Let transfers of a file go past the page cache."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | DIRECT)


def reason(error: OSError) -> str:
    """Return the system's message with the short name of the error."""
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror or error}"


def free_disk(path: str) -> int:
    """Return the bytes a user may still write to the file system of `path`; UNLIMITED if it does not say its size."""
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize if stats.f_blocks else UNLIMITED


def check_disk(num_bytes: int, path: str, limit: int | None = None) -> None:
    """Refuse `num_bytes` in the file system of `path` if they are not free, or over `limit`: what the budget leaves."""
    try:
        free = free_disk(path)
    except OSError as error:
        raise PrepareError(f"{path} cannot be used as a directory ({error.strerror}); name another one") from error
    wanted = f"{exact_size(num_bytes)} wanted in {path}"
    check_budget(num_bytes, limit, free, wanted, Tier.DISK)
    if num_bytes > free:
        raise PrepareError(
            f"{wanted}, but its file system has {exact_size(free)} free; "
            "make room, name another directory with Budget(disk_path=...), or place less on disk"
        )
