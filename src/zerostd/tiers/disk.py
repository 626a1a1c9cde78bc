"""Disk: extents of scratch files that nobody else can see, read and written by threads of their own.

An extent is one preallocated file without a name: it is unlinked before it has a byte, so nothing is left when the
process ends, however it ends. Files are opened past the page cache (O_DIRECT) where the file system takes that, since
cached copies would use up the host memory that the disk is there to save.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import queue
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from zerostd.errors import PrepareError, StorageError
from zerostd.monitoring.ledger import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers.limits import check_disk
from zerostd.tiers.transfer import Done, Transfer, Work

__all__ = ["ALIGNMENT", "BLOCK_BYTES", "Disk", "Extent", "supports_direct"]

ALIGNMENT = 4096  # of offsets and addresses; the largest logical block of common drives
BLOCK_BYTES = 8 * 2**20  # what one thread moves at a time
DIRECT = getattr(os, "O_DIRECT", 0)  # 0: a system without it

Move = Callable[[int, Sequence[memoryview], int], int]  # os.preadv or os.pwritev


@dataclass(eq=False)
class Extent:
    """Room for `num_bytes` of one kind on disk. `file` is for messages: the file has no name any more."""

    file: str
    num_bytes: int
    kind: Kind
    fd: int  # -1 when freed
    transfers: list[Work] = field(default_factory=list, repr=False)  # those that may still be under way


class Disk:
    """Allocates extents under `path` and moves bytes between them and host memory, asynchronously.

    Transfers are in no order among each other: wait for a write before reading, or writing, the same bytes. Any thread
    may read and write; allocate and free on one. `limit` is the most bytes that all extents together may take.
    """

    def __init__(self, path: str | None, ledger: Ledger, *, num_threads: int = 4, limit: int | None = None) -> None:
        self.path = tempfile.gettempdir() if path is None else os.fspath(path)
        self.is_direct = _probe(self.path)
        self._ledger = ledger
        self._limit = limit
        self._extents: set[Extent] = set()
        self._lock = threading.Lock()
        self._threads = _Threads(max(1, num_threads), self.is_direct)
        self._finalizer = weakref.finalize(self, _shut, self._threads, self._extents)
        if not self.is_direct:
            warnings.warn(
                f"the file system of {self.path} does not take O_DIRECT: transfers go through the page cache, which is "
                "slower and uses host memory; name a directory on a local drive with Budget(disk_path=...)",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def bytes_read(self) -> int:
        """Bytes that reads have brought in so far."""
        return self._threads.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes that writes have put down so far."""
        return self._threads.bytes_written

    def allocate(self, num_bytes: int, kind: Kind) -> Extent:
        """An extent of `num_bytes` zeros, its room reserved; PrepareError if there is none."""
        self._check_open()
        if num_bytes < 0:
            raise StorageError(f"cannot allocate {num_bytes} bytes on disk; ask for 0 or more")
        room = max(ALIGNMENT, _round_up(num_bytes))
        used = sum(_round_up(extent.num_bytes) for extent in self._extents)
        check_disk(room, self.path, None if self._limit is None else max(0, self._limit - used))
        fd, name = _open(self.path)
        try:
            getattr(os, "posix_fallocate", _extend)(fd, 0, room)
            if self.is_direct:
                _set_direct(fd, True)
        except OSError as error:
            os.close(fd)
            raise PrepareError(
                f"could not reserve {room} bytes for {kind.value} in {self.path} ({_reason(error)}); make room, raise "
                "the quota or the file size limit (ulimit -f), or name another directory with Budget(disk_path=...)"
            ) from error
        extent = Extent(name, num_bytes, kind, fd)
        self._extents.add(extent)
        self._ledger.enter(kind, num_bytes, Tier.DISK)
        return extent

    def read(self, extent: Extent, offset: int, target: torch.Tensor, *, urgent: bool = False) -> Transfer:
        """Fill `target` from `offset` of `extent` on; urgent requests go before those that wait."""
        return self._start(extent, offset, target, is_write=False, urgent=urgent)

    def write(self, extent: Extent, offset: int, source: torch.Tensor, *, urgent: bool = False) -> Transfer:
        """Put `source` at `offset` of `extent`; urgent requests go before those that wait."""
        return self._start(extent, offset, source, is_write=True, urgent=urgent)

    def free(self, extent: Extent) -> None:
        """Give the room back, after the transfers that are under way in it."""
        self._check_extent(extent)
        for transfer in extent.transfers:
            with contextlib.suppress(StorageError):  # raised to whoever waits for it
                transfer.wait()
        self._extents.discard(extent)
        self._ledger.leave(extent.kind, extent.num_bytes, Tier.DISK)
        _close(extent)

    def close(self) -> None:
        """Wait for what is under way, give all room back and end the threads. Closing twice is free."""
        if self._finalizer.alive:
            for extent in list(self._extents):
                self.free(extent)
            self._finalizer()

    def _start(self, extent: Extent, offset: int, memory: torch.Tensor, *, is_write: bool, urgent: bool) -> Transfer:
        self._check_open()
        self._check_extent(extent)
        size = _check_request(extent, offset, memory)
        if is_write and (found := os.fstat(extent.fd).st_size) < extent.num_bytes:  # a write would hide it behind zeros
            raise StorageError(f"{extent} was cut to {found} bytes by somebody: what it held is lost")
        if size == 0:
            return Done()
        view = memoryview((ctypes.c_char * size).from_address(memory.data_ptr())).cast("B")
        starts = range(0, size, BLOCK_BYTES)
        work = Work(len(starts))
        with self._lock:
            extent.transfers = [*(transfer for transfer in extent.transfers if not transfer.is_done()), work]
        for start in starts:
            part = view[start : start + BLOCK_BYTES]
            self._threads.put(_Block(extent, offset + start, part, memory, work, is_write), urgent)
        return work

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise StorageError(f"the disk tier in {self.path} was closed; make a new Disk")
        if self._threads.process != os.getpid():
            raise StorageError(
                f"the disk tier in {self.path} belongs to process {self._threads.process} and its threads; this is a "
                f"forked child, {os.getpid()}: make a Disk of its own, or spawn instead of fork"
            )

    def _check_extent(self, extent: Extent) -> None:
        if extent not in self._extents:
            raise StorageError(f"{extent} is not an extent of this Disk, or was freed before; use what allocate gave")


@dataclass(eq=False)
class _Block:
    """What one thread does at a time: a part of a request."""

    extent: Extent
    offset: int
    view: memoryview
    memory: torch.Tensor  # keeps the view's memory alive
    work: Work
    is_write: bool


class _Threads:
    """The threads and their queue. They know nothing of the Disk, so that it can go while they wait."""

    def __init__(self, num_threads: int, is_direct: bool) -> None:
        self.bytes_read = 0
        self.bytes_written = 0
        self.process = os.getpid()
        self._is_direct = is_direct
        self._queue: queue.PriorityQueue[tuple[int, int, _Block | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"zerostd-disk-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, block: _Block, urgent: bool) -> None:
        """Queue a block, in front of all that are not urgent if it is."""
        self._queue.put((0 if urgent else 1, next(self._order), block))

    def close(self) -> None:
        """Return when all that was queued is done and the threads have ended."""
        for _ in self._threads:
            self._queue.put((2, next(self._order), None))
        for thread in self._threads:
            thread.join()

    def is_one_of_them(self) -> bool:
        return threading.current_thread() in self._threads

    def _run(self) -> None:
        page = memoryview(mmap.mmap(-1, ALIGNMENT))  # for the end of a request that does not fill a page
        while True:
            block = self._queue.get()[2]
            if block is None:
                return
            work, error = block.work, self._carry_out(block, page)
            del block  # with it the memory: it must not wait for the next request
            if error is None:
                work.finish()
            else:
                work.fail(error)
            del work, error

    def _carry_out(self, block: _Block, page: memoryview) -> BaseException | None:
        try:
            step = ALIGNMENT if self._is_direct else 1
            moved = (_write if block.is_write else _read)(block, page, step)
        except OSError as error:
            failure = StorageError(f"{_describe(block)} failed: {_reason(error)}; check the drive and its free space")
            failure.__cause__ = error.with_traceback(None)  # it would keep the memory alive
            return failure
        except BaseException as error:  # whatever it is, somebody waits for it
            return error
        if moved < len(block.view):
            return StorageError(
                f"{_describe(block)} ended early: wanted {len(block.view)} bytes, got {moved}; the file was cut short "
                "under us, or the drive is full: check who else touches it"
            )
        with self._lock:
            if block.is_write:
                self.bytes_written += moved
            else:
                self.bytes_read += moved
        return None


def supports_direct(fd: int) -> bool:
    """Whether the open, writable file `fd` takes transfers past the page cache; its first 4096 bytes are overwritten.

    Some file systems take the flag and refuse the transfer, hence the trial. The file is left as it was opened.
    """
    if not DIRECT:
        return False
    page = memoryview(mmap.mmap(-1, ALIGNMENT))
    try:
        _set_direct(fd, True)
        return os.pwritev(fd, [page], 0) == ALIGNMENT and os.preadv(fd, [page], 0) == ALIGNMENT
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        _set_direct(fd, False)


def _write(block: _Block, page: memoryview, step: int) -> int:
    """Bytes of the block that were written."""
    fd, body = block.extent.fd, len(block.view) - len(block.view) % step
    moved = _move(os.pwritev, fd, block.view[:body], block.offset, step)
    tail = len(block.view) - body
    if moved < body or not tail:
        return moved
    shares_page = block.offset + len(block.view) < block.extent.num_bytes  # what follows in the page must stay
    if shares_page and _move(os.preadv, fd, page, block.offset + body, step) < len(page):
        return moved
    page[:tail] = block.view[body:]
    return body + min(tail, _move(os.pwritev, fd, page, block.offset + body, step))


def _read(block: _Block, page: memoryview, step: int) -> int:
    """Bytes of the block that were read."""
    fd, body = block.extent.fd, len(block.view) - len(block.view) % step
    moved = _move(os.preadv, fd, block.view[:body], block.offset, step)
    tail = len(block.view) - body
    if moved < body or not tail:
        return moved
    got = min(tail, _move(os.preadv, fd, page, block.offset + body, step))
    block.view[body : body + got] = page[:got]
    return body + got


def _move(move: Move, fd: int, view: memoryview, offset: int, step: int) -> int:
    """Bytes of `view` moved: all, or those before the end. Goes on after short moves, from a multiple of `step`."""
    done = 0
    while done < len(view):
        reached = done + move(fd, [view[done:]], offset + done)
        start = reached if reached == len(view) else reached - reached % step
        if start <= done:
            return reached
        done = start
    return done


def _check_request(extent: Extent, offset: int, memory: torch.Tensor) -> int:
    """The bytes of `memory`, or an error that says why they cannot be moved."""
    size = memory.numel() * memory.element_size()
    if memory.device.type != "cpu" or not memory.is_contiguous():
        raise StorageError(f"a {memory.device} tensor with strides {memory.stride()}: pass a contiguous CPU tensor")
    if size and memory.data_ptr() % ALIGNMENT:
        raise StorageError(f"memory at {memory.data_ptr():#x} starts on no multiple of {ALIGNMENT}; use Host.allocate")
    if offset < 0 or offset % ALIGNMENT:
        raise StorageError(f"offset {offset} is not a multiple of {ALIGNMENT}; lay out extents in whole pages")
    if offset + size > extent.num_bytes:
        raise StorageError(f"bytes {offset} to {offset + size} are beyond the end of {extent}; allocate a larger one")
    return size


def _probe(path: str) -> bool:
    """Whether files in `path` take O_DIRECT; PrepareError if none can be made there."""
    if not os.path.isdir(path):
        raise PrepareError(f"disk_path={path!r} is not a directory; name an existing one that you may write to")
    fd, _ = _open(path)
    try:
        return supports_direct(fd)
    except OSError as error:
        raise PrepareError(
            f"disk_path={path!r} cannot hold files: a trial write failed ({_reason(error)}); name another directory"
        ) from error
    finally:
        os.close(fd)


def _open(path: str) -> tuple[int, str]:
    """A new file in `path` that has no name there, and what to call it in messages."""
    try:
        if hasattr(os, "O_TMPFILE"):
            with contextlib.suppress(OSError):  # not every file system has it
                fd = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                return fd, f"{path}/(file {os.fstat(fd).st_ino}, unlinked)"
        return _open_and_unlink(path)
    except OSError as error:
        raise PrepareError(
            f"disk_path={path!r}: cannot make a file there ({_reason(error)}); name a directory that you may write to"
        ) from error


def _open_and_unlink(path: str) -> tuple[int, str]:
    """The same where files must have a name first: for a moment, in a directory of its own that is not to be seen."""
    folder = tempfile.mkdtemp(prefix="zerostd-", dir=path)  # 0700
    name = os.path.join(folder, "extent")
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(name)
    finally:
        os.rmdir(folder)
    return fd, f"{name} (unlinked)"


def _extend(fd: int, offset: int, num_bytes: int) -> None:
    os.ftruncate(fd, offset + num_bytes)  # a system that cannot reserve: missing room shows as a failed write


def _set_direct(fd: int, on: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | DIRECT if on else flags & ~DIRECT)


def _shut(threads: _Threads, extents: set[Extent]) -> None:
    """End the threads and close the files; a forked child only closes its copies of the files."""
    if threads.is_one_of_them():  # the collector may run anywhere; a thread cannot wait for itself
        threading.Thread(target=_shut, args=(threads, extents)).start()
        return
    if threads.process == os.getpid():
        threads.close()
    for extent in extents:
        _close(extent)
    extents.clear()


def _close(extent: Extent) -> None:
    os.close(extent.fd)
    extent.fd = -1


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _describe(block: _Block) -> str:
    verb = "writing" if block.is_write else "reading"
    return f"{verb} {len(block.view)} bytes at offset {block.offset} of {block.extent.file}"


def _reason(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}"
