"""Disk: extents of scratch files, read and written by threads of their own.

In come host tensors that start on a page, out come transfers. An extent is one preallocated file, unlinked before it
has a byte: nothing is left when the process ends, however it ends. O_DIRECT, where the file system takes it, keeps the
page cache from using up the host memory that the disk is there to save. Offsets, addresses and lengths must be whole
pages then: the end of a request that does not fill one goes through a page of the thread's own, and what follows in
that page of the file stays as it is. Used through `TierTensor`, and by `measuring` to learn the drive's speed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from zerostd.errors import PrepareError, StorageError
from zerostd.monitoring.ledger import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers.host import PAGE, padded
from zerostd.tiers.limits import check_disk
from zerostd.tiers.transfer import Done, Transfer
from zerostd.tiers.worker import Work

BLOCK_BYTES = 8 * 2**20  # what one thread moves at a time
DIRECT = getattr(os, "O_DIRECT", 0)  # 0: a system without it


@dataclass(eq=False)
class Extent:
    """Space for `num_bytes` of one kind on disk. `file` is for messages: the file has no name any more."""

    file: str
    num_bytes: int
    kind: Kind
    fd: int
    transfers: list[Work] = field(default_factory=list, repr=False)  # those that may still be under way


Block = tuple[Extent, int, memoryview, bool, Work]  # offset, memory, whether it is written
Move = Callable[[int, Sequence[memoryview], int], int]  # os.preadv or os.pwritev


class Disk:
    """Allocates extents under `path` and moves bytes between them and host memory, asynchronously.

    Transfers are in no order among each other: wait for a write before reading, or writing, the same bytes. Any thread
    may read and write; allocate and free on one. `limit` is the most bytes that all extents together may take.
    """

    def __init__(self, path: str | None, ledger: Ledger, *, num_threads: int = 4, limit: int | None = None) -> None:
        self.path = tempfile.gettempdir() if path is None else os.fspath(path)
        self.is_direct = _supports_direct(self.path)
        self._ledger = ledger
        self._limit = limit
        self._extents: set[Extent] = set()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._blocks: queue.SimpleQueue[Block | None] = queue.SimpleQueue()
        serve = partial(_serve, self._blocks, PAGE if self.is_direct else 1)
        names = [f"zerostd-disk-{number}" for number in range(max(1, num_threads))]
        threads = [threading.Thread(target=serve, name=name, daemon=True) for name in names]
        for thread in threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _shut, self._process, threads, self._blocks, self._extents)
        if not self.is_direct:
            warnings.warn(
                f"the file system of {self.path} does not take O_DIRECT: transfers go through the page cache, which is "
                "slower and uses host memory; name a directory on a local drive with Budget(disk_path=...)",
                RuntimeWarning,
                stacklevel=2,
            )

    def allocate(self, num_bytes: int, kind: Kind) -> Extent:
        """Return an extent of `num_bytes` zeros whose space is reserved; raise PrepareError if there is none."""
        self._check_open()
        if num_bytes < 0:
            raise StorageError(f"cannot allocate {num_bytes} bytes on disk; ask for 0 or more")
        size = max(PAGE, padded(num_bytes))
        used = sum(padded(extent.num_bytes) for extent in self._extents)
        check_disk(size, self.path, None if self._limit is None else max(0, self._limit - used))
        fd, name = _open_unnamed(self.path)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)
            else:
                os.ftruncate(fd, size)  # a system that cannot reserve: missing space shows as a failed write
            if self.is_direct:
                _set_direct(fd)
        except OSError as error:
            os.close(fd)
            raise PrepareError(
                f"could not reserve {size} bytes for {kind.value} in {self.path} ({_reason(error)}); make room, raise "
                "the quota or the file size limit (ulimit -f), or name another directory with Budget(disk_path=...)"
            ) from error
        extent = Extent(name, num_bytes, kind, fd)
        self._extents.add(extent)
        self._ledger.enter(kind, num_bytes, Tier.DISK)
        return extent

    def read(self, extent: Extent, offset: int, target: torch.Tensor) -> Transfer:
        """Start filling `target` from `offset` of `extent` on."""
        return self._start(extent, offset, target, is_write=False)

    def write(self, extent: Extent, offset: int, source: torch.Tensor) -> Transfer:
        """Start writing `source` to `offset` of `extent`."""
        return self._start(extent, offset, source, is_write=True)

    def free(self, extent: Extent) -> None:
        """Give the space back, after the transfers that are under way in it."""
        self._check_extent(extent)
        for transfer in extent.transfers:
            with contextlib.suppress(StorageError):  # raised to whoever waits for it
                transfer.wait()
        self._extents.discard(extent)
        self._ledger.leave(extent.kind, extent.num_bytes, Tier.DISK)
        os.close(extent.fd)

    def close(self) -> None:
        """Wait for what is under way, give all space back and end the threads. Closing twice is free."""
        if self._finalizer.alive:
            for extent in list(self._extents):
                self.free(extent)
            self._finalizer()

    def _start(self, extent: Extent, offset: int, memory: torch.Tensor, *, is_write: bool) -> Transfer:
        self._check(extent, offset, memory)
        if is_write and (file_bytes := os.fstat(extent.fd).st_size) < extent.num_bytes:  # it would hide behind zeros
            raise StorageError(f"{extent} was cut to {file_bytes} bytes by another process: what it held is lost")
        if memory.numel() == 0:
            return Done()
        view = memory.detach().view(-1).view(torch.uint8).numpy().data  # keeps the memory alive
        starts = range(0, len(view), BLOCK_BYTES)
        work = Work(len(starts))
        with self._lock:
            extent.transfers = [*(transfer for transfer in extent.transfers if not transfer.is_done()), work]
        for start in starts:
            self._blocks.put((extent, offset + start, view[start : start + BLOCK_BYTES], is_write, work))
        return work

    def _check(self, extent: Extent, offset: int, memory: torch.Tensor) -> None:
        """Refuse a request that cannot be carried out."""
        self._check_open()
        self._check_extent(extent)
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise StorageError(f"a {memory.device} tensor with strides {memory.stride()}: pass a contiguous CPU tensor")
        if memory.nbytes and memory.data_ptr() % PAGE:
            raise StorageError(f"memory at {memory.data_ptr():#x} starts on no multiple of {PAGE}; use Host.allocate")
        if offset < 0 or offset % PAGE:
            raise StorageError(f"offset {offset} is not a multiple of {PAGE}; lay out extents in whole pages")
        end = offset + memory.nbytes
        if end > extent.num_bytes:
            raise StorageError(f"bytes {offset} to {end} are beyond the end of {extent}; allocate a larger one")

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise StorageError(f"the disk tier in {self.path} was closed; make a new Disk")
        if self._process != os.getpid():
            raise StorageError(
                f"the disk tier in {self.path} belongs to process {self._process} and its threads; this is a "
                f"forked child, {os.getpid()}: make a Disk of its own, or spawn instead of fork"
            )

    def _check_extent(self, extent: Extent) -> None:
        if extent not in self._extents:
            raise StorageError(f"{extent} is not an extent of this Disk, or was freed before; use what allocate gave")


def _serve(blocks: queue.SimpleQueue[Block | None], step: int) -> None:
    """Move blocks until None comes, from and to multiples of `step`. A thread does not keep its Disk alive."""
    page = memoryview(mmap.mmap(-1, PAGE))
    while True:
        block = blocks.get()
        if block is None:
            return
        work = block[-1]
        error = _carry_out(block, page, step)
        del block  # and with it the memory, which must not wait for the next request
        work.finish(error)
        del work, error


def _shut(
    process: int, threads: list[threading.Thread], blocks: queue.SimpleQueue[Block | None], extents: set[Extent]
) -> None:
    """End the threads and close the files; a forked child only closes its copies of the files."""
    if threading.current_thread() in threads:  # the garbage collector may run anywhere; no thread can wait for itself
        threading.Thread(target=_shut, args=(process, threads, blocks, extents)).start()
        return
    if process == os.getpid():
        for _ in threads:
            blocks.put(None)
        for thread in threads:
            thread.join()
    for extent in extents:
        os.close(extent.fd)
    extents.clear()


def _carry_out(block: Block, page: memoryview, step: int) -> BaseException | None:
    """Move a block; return what went wrong."""
    extent, offset, view, is_write, _ = block
    what = f"{'writing' if is_write else 'reading'} {len(view)} bytes at offset {offset} of {extent.file}"
    try:
        moved = _move_block(extent, offset, view, page, step, is_write=is_write)
    except OSError as error:
        failure = StorageError(f"{what} failed: {_reason(error)}; check the drive and its free space")
        failure.__cause__ = error.with_traceback(None)  # it would keep the memory alive
        return failure
    except BaseException as error:  # whatever it is, somebody waits for it
        return error
    if moved < len(view):
        return StorageError(
            f"{what} ended early: wanted {len(view)} bytes, got {moved}; the file was cut short under us, or the drive "
            "is full: check who else touches it"
        )
    return None


def _move_block(extent: Extent, offset: int, view: memoryview, page: memoryview, step: int, *, is_write: bool) -> int:
    """Read or write a block; return how many bytes of it were moved."""
    move = os.pwritev if is_write else os.preadv
    tail = len(view) % step
    body = len(view) - tail
    moved = _move(move, extent.fd, view[:body], offset, step)
    if moved < body or not tail:
        return moved
    if is_write:
        shares_page = offset + len(view) < extent.num_bytes  # the file has more in the last page, which must be kept
        if shares_page and _move(os.preadv, extent.fd, page, offset + body, step) < len(page):
            return moved
        page[:tail] = view[body:]
    last = min(tail, _move(move, extent.fd, page, offset + body, step))
    if not is_write:
        view[body : body + last] = page[:last]
    return body + last


def _move(move: Move, fd: int, view: memoryview, offset: int, step: int) -> int:
    """Move `view`; return its bytes up to the end of the file. Goes on after short moves, from a multiple of `step`."""
    done = 0
    while done < len(view):
        reached = done + move(fd, [view[done:]], offset + done)
        start = reached if reached == len(view) else reached - reached % step
        if start <= done:
            return reached
        done = start
    return done


def _open_unnamed(path: str) -> tuple[int, str]:
    """Create a file in `path` that has no name there; return its descriptor and what to call it in messages."""
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
    """Do the same where a file must have a name first: for a moment, in a private directory of its own."""
    folder = tempfile.mkdtemp(prefix="zerostd-", dir=path)  # 0700
    name = os.path.join(folder, "extent")
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(name)
    finally:
        os.rmdir(folder)
    return fd, f"{name} (unlinked)"


def _supports_direct(path: str) -> bool:
    """Return whether files in `path` take transfers past the page cache; raise PrepareError if none can be made there.
    Some file systems take the flag and refuse the transfer, hence the trial."""
    if not os.path.isdir(path):
        raise PrepareError(f"disk_path={path!r} is not a directory; name an existing one that you may write to")
    fd, _ = _open_unnamed(path)
    page = memoryview(mmap.mmap(-1, PAGE))
    try:
        _set_direct(fd)
        return bool(DIRECT) and os.pwritev(fd, [page], 0) == PAGE and os.preadv(fd, [page], 0) == PAGE
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise PrepareError(
            f"disk_path={path!r} cannot hold files: a trial write failed ({_reason(error)}); name another directory"
        ) from error
    finally:
        os.close(fd)


def _set_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | DIRECT)


def _reason(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}"
