"""Write a new file from several threads, each a part of it, in any order.

Whole pages bypass the page cache (O_DIRECT) where the file system supports that: it is several times faster, and the
host keeps its memory. Pages that two parts share, and everything on other file systems, go through the cache, in short
slices and by one thread at a time. Longer slices, and several at once, cost more (1 GB on ext4, two cores: 0.7 s; in
slices of 4 MiB 1.5 s).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import torch

from zerostd.tiers.host import PAGE, aligned

CACHED_SLICE = 256 << 10  # bytes written at a time through the page cache
START_EVERY = 32 << 20  # bytes through the page cache after which the system is asked to start writing to disk
RANGE_WRITE = 2  # SYNC_FILE_RANGE_WRITE
DIRECT = getattr(os, "O_DIRECT", 0)  # 0: a system without it
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class DirectFileWriter:
    """A file of `num_bytes` at `path`, which must not exist yet. Raises the system's OSErrors."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._direct_fd = -1
        self._scratch = threading.local()  # aligned memory of each thread
        self._lock = threading.Lock()
        self._bytes_since_start = 0
        try:
            self._direct_fd = _open_direct(path)
            if num_bytes:
                _reserve(self._fd, num_bytes)
        except BaseException:
            self.close()
            raise

    def write(self, values: torch.Tensor | bytes, offset: int) -> None:
        """Write all values at `offset` of the file. A tensor must be contiguous and on the host."""
        view = view_of(values) if isinstance(values, torch.Tensor) else memoryview(values)
        head = min(len(view), -offset % PAGE)
        body = (len(view) - head) // PAGE * PAGE
        if self._direct_fd < 0 or not body or not isinstance(values, torch.Tensor):
            self._write_cached(view, offset)
            return
        self._write_cached(view[:head], offset)
        if not self._write_direct(view[head : head + body], offset + head):
            self._write_cached(view[head : head + body], offset + head)
        self._write_cached(view[head + body :], offset + head + body)

    def sync(self) -> None:
        """Return when everything written is on disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = -1
        self._direct_fd = -1

    def _write_direct(self, view: memoryview, offset: int) -> bool:
        """Write whole pages past the cache; return False if the file system refuses."""
        source = numpy.frombuffer(view, numpy.uint8)
        pages = view if source.ctypes.data % PAGE == 0 else self._aligned_copy(source)
        done = 0
        while done < len(pages):
            try:
                done += os.pwrite(self._direct_fd, pages[done:], offset + done)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                return False
            if done % PAGE:  # a short write: what is left no longer starts on a page
                self._write_cached(pages[done:], offset + done)
                break
        return True

    def _aligned_copy(self, source: Any) -> memoryview:
        memory = getattr(self._scratch, "memory", None)
        if memory is None or memory.numel() < len(source):
            memory = self._scratch.memory = aligned(len(source))
        target: Any = memory.numpy()[: len(source)]
        target[:] = source
        return memoryview(target)

    def _write_cached(self, view: memoryview, offset: int) -> None:
        if not len(view):
            return
        done = 0
        with self._lock:
            while done < len(view):
                done += os.pwrite(self._fd, view[done : done + CACHED_SLICE], offset + done)
            self._bytes_since_start += len(view)
            if self._bytes_since_start < START_EVERY:
                return
            self._bytes_since_start = 0
        _start_writeback(self._fd)


def view_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host."""
    flat: Any = values.view(-1).view(torch.uint8).numpy() if values.numel() else b""
    return memoryview(flat)


def _open_direct(path: Path) -> int:
    """Return a descriptor that bypasses the page cache, or -1 where the file system refuses."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | DIRECT) if DIRECT else -1
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return -1


def _start_writeback(fd: int) -> None:
    """Ask the system to start writing to disk, so that the sync at the end is short. A sync here would wait for the
    file system's journal, and block other threads. Errors show up in the sync at the end."""
    sync_file_range = getattr(_LIBC, "sync_file_range", None)
    if sync_file_range is not None:
        sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), RANGE_WRITE)


def _reserve(fd: int, num_bytes: int) -> None:
    """Reserve disk space if the file system can: a full disk shows at once, and writes need not wait for blocks."""
    fallocate = getattr(_LIBC, "fallocate", None)
    if fallocate is None or fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) == 0:
        return
    code = ctypes.get_errno()
    if code not in REFUSALS:
        raise OSError(code, os.strerror(code))
