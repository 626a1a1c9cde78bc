"""Scratch files: files without a name that go with the process, opened past the page cache where that is possible.

A file is unlinked before it has a byte, so nothing is left when the process ends, however it ends. O_DIRECT keeps the
page cache from using up the host memory that the disk is there to save. Called by `Disk`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile

from zerostd.errors import PrepareError
from zerostd.tiers.pages import PAGE

DIRECT = getattr(os, "O_DIRECT", 0)  # 0: a system without it


def open_unnamed(path: str) -> tuple[int, str]:
    """Create a file in `path` that has no name there; return its descriptor and what to call it in messages."""
    try:
        if hasattr(os, "O_TMPFILE"):
            with contextlib.suppress(OSError):  # not every file system has it
                fd = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                return fd, f"{path}/(file {os.fstat(fd).st_ino}, unlinked)"
        return _open_and_unlink(path)
    except OSError as error:
        raise PrepareError(
            f"disk_path={path!r}: cannot make a file there ({reason(error)}); name a directory that you may write to"
        ) from error


def _open_and_unlink(path: str) -> tuple[int, str]:
    """Do the same where a file must have a name first: for a moment, in a private directory of its own."""
    folder = tempfile.mkdtemp(prefix="zerostd-", dir=path)  # 0700
    name = os.path.join(folder, "extent")
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(name)
    finally:
        os.rmdir(folder)
    return fd, f"{name} (unlinked)"


def reserve(fd: int, num_bytes: int, *, is_direct: bool) -> None:
    """Reserve the file's blocks, and set O_DIRECT if `is_direct`."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
    else:
        os.ftruncate(fd, num_bytes)  # a system that cannot reserve: missing space shows as a failed write
    if is_direct:
        _set_direct(fd)


def supports_direct(path: str) -> bool:
    """Return whether files in `path` take transfers past the page cache; raise PrepareError if none can be made there.

    Some file systems take the flag and refuse the transfer, hence the trial.
    """
    if not os.path.isdir(path):
        raise PrepareError(f"disk_path={path!r} is not a directory; name an existing one that you may write to")
    fd, _ = open_unnamed(path)
    try:
        return bool(DIRECT) and _moves_directly(fd)
    except OSError as error:
        raise PrepareError(
            f"disk_path={path!r} cannot hold files: a trial write failed ({reason(error)}); name another directory"
        ) from error
    finally:
        os.close(fd)


def _moves_directly(fd: int) -> bool:
    page = memoryview(mmap.mmap(-1, PAGE))
    try:
        _set_direct(fd)
        return os.pwritev(fd, [page], 0) == PAGE and os.preadv(fd, [page], 0) == PAGE
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise


def _set_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | DIRECT)


def reason(error: OSError) -> str:
    """Return the name and the text of a system error."""
    return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}"
