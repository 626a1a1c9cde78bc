"""A new file that several threads write, each a part, in any order.

Whole pages go past the page cache (O_DIRECT) where the file system takes that: it is several times faster than by way
of the cache, and the host keeps its memory. Pages that two parts share, and everything elsewhere, goes through it, in
short pieces and by one thread at a time: long ones, and several at once, cost the system more (1 GB on ext4, two cores:
0.7 s; in pieces of 4 MiB 1.5 s).
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

from zerostd.tiers.pages import PAGE, aligned

__all__ = ["Sink", "view_of"]

PIECE = 256 << 10  # bytes that are written at a time, through the page cache
START_EVERY = 32 << 20  # bytes, after which the system is told to begin with the disk
RANGE_WRITE = 2  # SYNC_FILE_RANGE_WRITE
DIRECT = getattr(os, "O_DIRECT", 0)  # 0: a system without it
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Sink:
    """A file of `num_bytes` at `path`, which must not be there yet; OSError as the system has it."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._direct = -1
        self._scratch = threading.local()  # whole pages of each thread
        self._lock = threading.Lock()
        self._since_start = 0
        try:
            self._direct = _open_direct(path)
            if num_bytes:
                _reserve(self._fd, num_bytes)
        except BaseException:
            self.close()
            raise

    def put(self, values: torch.Tensor | bytes, offset: int) -> None:
        """All of it, at `offset` of the file. A tensor is contiguous and on the host."""
        view = view_of(values) if isinstance(values, torch.Tensor) else memoryview(values)
        head = min(len(view), -offset % PAGE)
        body = (len(view) - head) // PAGE * PAGE
        if self._direct < 0 or not body or not isinstance(values, torch.Tensor):
            self._through_cache(view, offset)
            return
        self._through_cache(view[:head], offset)
        if not self._past_cache(view[head : head + body], offset + head):
            self._through_cache(view[head : head + body], offset + head)
        self._through_cache(view[head + body :], offset + head + body)

    def sync(self) -> None:
        """Return when all of it is on the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Let the file go."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1

    def _past_cache(self, view: memoryview, offset: int) -> bool:
        """Whole pages, from memory that starts on one; False if the file system does not take it."""
        source = numpy.frombuffer(view, numpy.uint8)
        pages, done = view if source.ctypes.data % PAGE == 0 else self._copied(source), 0
        while done < len(pages):
            try:
                done += os.pwrite(self._direct, pages[done:], offset + done)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                return False
            if done % PAGE:  # the rest cannot go this way
                self._through_cache(pages[done:], offset + done)
                break
        return True

    def _copied(self, source: Any) -> memoryview:
        held = getattr(self._scratch, "memory", None)
        if held is None or held.numel() < len(source):
            held = self._scratch.memory = aligned(len(source))
        target: Any = held.numpy()[: len(source)]
        target[:] = source
        return memoryview(target)

    def _through_cache(self, view: memoryview, offset: int) -> None:
        if not len(view):
            return
        done = 0
        with self._lock:
            while done < len(view):
                done += os.pwrite(self._fd, view[done : done + PIECE], offset + done)
            self._since_start += len(view)
            if self._since_start < START_EVERY:
                return
            self._since_start = 0
        start_writing(self._fd)


def view_of(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    flat: Any = values.view(-1).view(torch.uint8).numpy() if values.numel() else b""
    return memoryview(flat)


def _open_direct(path: Path) -> int:
    """-1 where the file system does not take it."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | DIRECT) if DIRECT else -1
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return -1


def start_writing(fd: int) -> None:
    """Let the system begin to write to the disk, so that it does not wait for the end. A sync would wait for the file
    system's journal, and the writes of other threads with it. What goes wrong is told by the sync at the end."""
    start = getattr(_LIBC, "sync_file_range", None)
    if start is not None:
        start(fd, ctypes.c_int64(0), ctypes.c_int64(0), RANGE_WRITE)


def _reserve(fd: int, num_bytes: int) -> None:
    """Room for all of it, if the file system can: a full disk is noticed now, and writes need not wait for blocks."""
    fallocate = getattr(_LIBC, "fallocate", None)
    if fallocate is None or fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) == 0:
        return
    code = ctypes.get_errno()
    if code not in REFUSALS:
        raise OSError(code, os.strerror(code))
