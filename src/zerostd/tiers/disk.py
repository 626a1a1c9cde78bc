"""Disk: extents of scratch files, read and written by threads of their own.

In come host tensors that start on a page, out come transfers. An extent is one preallocated file without a name. Used
through `TierTensor` and `Pool`, and by `measuring` to learn the drive's speed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import warnings
import weakref
from dataclasses import dataclass, field

import torch

from zerostd.errors import PrepareError, StorageError
from zerostd.monitoring.ledger import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers.disk_threads import DiskBlock, DiskThreads
from zerostd.tiers.limits import check_disk
from zerostd.tiers.pages import PAGE, padded
from zerostd.tiers.scratch_files import open_unnamed, reason, reserve, supports_direct
from zerostd.tiers.transfer import Done, Transfer, Work

BLOCK_BYTES = 8 * 2**20  # what one thread moves at a time


@dataclass(eq=False)
class Extent:
    """Space for `num_bytes` of one kind on disk. `file` is for messages: the file has no name any more."""

    file: str
    num_bytes: int
    kind: Kind
    fd: int  # -1 when freed
    transfers: list[Work] = field(default_factory=list, repr=False)  # those that may still be under way

    def close(self) -> None:
        """Close the file, which gives its space back."""
        os.close(self.fd)
        self.fd = -1


class Disk:
    """Allocates extents under `path` and moves bytes between them and host memory, asynchronously.

    Transfers are in no order among each other: wait for a write before reading, or writing, the same bytes. Any thread
    may read and write; allocate and free on one. `limit` is the most bytes that all extents together may take.
    """

    def __init__(self, path: str | None, ledger: Ledger, *, num_threads: int = 4, limit: int | None = None) -> None:
        self.path = tempfile.gettempdir() if path is None else os.fspath(path)
        self.is_direct = supports_direct(self.path)
        self._ledger = ledger
        self._limit = limit
        self._extents: set[Extent] = set()
        self._lock = threading.Lock()
        self._threads = DiskThreads(max(1, num_threads), is_direct=self.is_direct)
        self._finalizer = weakref.finalize(self, _shut, self._threads, self._extents)
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
        fd, name = open_unnamed(self.path)
        try:
            reserve(fd, size, is_direct=self.is_direct)
        except OSError as error:
            os.close(fd)
            raise PrepareError(
                f"could not reserve {size} bytes for {kind.value} in {self.path} ({reason(error)}); make room, raise "
                "the quota or the file size limit (ulimit -f), or name another directory with Budget(disk_path=...)"
            ) from error
        extent = Extent(name, num_bytes, kind, fd)
        self._extents.add(extent)
        self._ledger.enter(kind, num_bytes, Tier.DISK)
        return extent

    def read(self, extent: Extent, offset: int, target: torch.Tensor) -> Transfer:
        """Start filling `target` from `offset` of `extent` on."""
        self._check(extent, offset, target)
        return self._start(extent, offset, target, is_write=False)

    def write(self, extent: Extent, offset: int, source: torch.Tensor) -> Transfer:
        """Start writing `source` to `offset` of `extent`."""
        self._check(extent, offset, source)
        file_bytes = os.fstat(extent.fd).st_size
        if file_bytes < extent.num_bytes:  # a write would hide it behind zeros
            raise StorageError(f"{extent} was cut to {file_bytes} bytes by another process: what it held is lost")
        return self._start(extent, offset, source, is_write=True)

    def free(self, extent: Extent) -> None:
        """Give the space back, after the transfers that are under way in it."""
        self._check_extent(extent)
        for transfer in extent.transfers:
            with contextlib.suppress(StorageError):  # raised to whoever waits for it
                transfer.wait()
        self._extents.discard(extent)
        self._ledger.leave(extent.kind, extent.num_bytes, Tier.DISK)
        extent.close()

    def close(self) -> None:
        """Wait for what is under way, give all space back and end the threads. Closing twice is free."""
        if self._finalizer.alive:
            for extent in list(self._extents):
                self.free(extent)
            self._finalizer()

    def _start(self, extent: Extent, offset: int, memory: torch.Tensor, *, is_write: bool) -> Transfer:
        if memory.numel() == 0:
            return Done()
        view = memory.detach().view(-1).view(torch.uint8).numpy().data  # keeps the memory alive
        starts = range(0, len(view), BLOCK_BYTES)
        work = Work(len(starts))
        with self._lock:
            extent.transfers = [*(transfer for transfer in extent.transfers if not transfer.is_done()), work]
        for start in starts:
            part = view[start : start + BLOCK_BYTES]
            begin = offset + start
            shares_page = begin + len(part) < extent.num_bytes
            self._threads.submit(DiskBlock(extent.fd, extent.file, begin, part, is_write, shares_page, work))
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
        if self._threads.process != os.getpid():
            raise StorageError(
                f"the disk tier in {self.path} belongs to process {self._threads.process} and its threads; this is a "
                f"forked child, {os.getpid()}: make a Disk of its own, or spawn instead of fork"
            )

    def _check_extent(self, extent: Extent) -> None:
        if extent not in self._extents:
            raise StorageError(f"{extent} is not an extent of this Disk, or was freed before; use what allocate gave")


def _shut(threads: DiskThreads, extents: set[Extent]) -> None:
    """End the threads and close the files; a forked child only closes its copies of the files."""
    if threads.include_current():  # the garbage collector may run anywhere; a thread cannot wait for itself
        threading.Thread(target=_shut, args=(threads, extents)).start()
        return
    threads.close()
    for extent in extents:
        extent.close()
    extents.clear()
