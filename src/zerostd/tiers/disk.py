"""Disk: bytes in extents of scratch files, which its own threads read and write.

`read` and `write` take a host tensor that starts on a page, and return a transfer. O_DIRECT needs offsets, addresses
and lengths in whole pages. If a request ends inside a page, a thread copies that end through a page of its own, and the
rest of the page in the file does not change. `TierTensor` uses a Disk; `measuring` uses one to measure rates.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import tempfile
import threading
import warnings
import weakref

import torch

from zerostd.errors import PrepareError, StorageError
from zerostd.monitoring.ledger import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers.debug import be_late
from zerostd.tiers.extents import BLOCK_BYTES, Extent, Fallback, Scratch
from zerostd.tiers.host import PAGE, padded
from zerostd.tiers.pacing import LinkPace, Priority, current
from zerostd.tiers.packed_extents import PackedExtent
from zerostd.tiers.packing import Packer
from zerostd.tiers.scratch_files import MOST_FILES, ScratchFile, check_disk, reason, supports_direct
from zerostd.tiers.transfer import Done, Transfer
from zerostd.tiers.worker import Work

NUM_REQUESTS = 4  # at the drive at a time
NUM_SPARE = 2  # threads more than that: they sum or unpack meanwhile

Block = tuple[Extent, int, torch.Tensor, bool, Work]  # offset, memory, whether it is written
Blocks = queue.PriorityQueue[tuple[float, int, Block | None]]  # priority and number of each; None ends a thread


class Disk:
    """Allocates extents under `path` and moves bytes between them and host memory, asynchronously.

    Transfers run in any order, except for their priority (`pacing.at`): wait for a write before you read or write the
    same bytes. Any thread may read and write; only one may allocate and free. `limit` is the largest number of bytes of
    all extents together. Extents whose file can no longer be written move to `fallback`.
    """

    def __init__(
        self,
        path: str | None,
        ledger: Ledger,
        *,
        num_requests: int = NUM_REQUESTS,
        limit: int | None = None,
        fallback: Fallback | None = None,
        pace: LinkPace | None = None,
    ) -> None:
        self.path = tempfile.gettempdir() if path is None else os.fspath(path)
        self.is_direct = supports_direct(self.path)
        self._ledger = ledger
        self._limit = limit
        self._fallback = fallback
        self._extents: set[Extent] = set()
        self._files: list[ScratchFile] = []
        self._process = os.getpid()
        self._blocks: Blocks = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._packers_held = 0  # bytes of host memory
        self._num_requests = max(1, num_requests)
        names = [f"zerostd-disk-{number}" for number in range(self._num_requests + NUM_SPARE)]
        serve = (self._blocks, pace or LinkPace(), threading.Semaphore(self._num_requests))
        threads = [threading.Thread(target=_serve, args=serve, name=name, daemon=True) for name in names]
        for thread in threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _shut, self._process, threads, self._blocks, self._files)
        if not self.is_direct:
            warnings.warn(
                f"the file system of {self.path} does not support O_DIRECT: transfers go through the page cache, which "
                "is slower and uses host memory; name a directory on a local drive with Budget(disk_path=...)",
                RuntimeWarning,
                stacklevel=2,
            )

    def allocate(self, num_bytes: int, kind: Kind, owner: str = "", *, item_bytes: int = 0) -> Extent:
        """Return an extent of zeros with reserved space, or raise PrepareError; it packs numbers of `item_bytes`."""
        self._check_open()
        if num_bytes < 0:
            raise StorageError(f"cannot allocate {num_bytes} bytes on disk; ask for 0 or more")
        size = max(PAGE, padded(num_bytes))
        used = sum(padded(extent.held_bytes) for extent in self._extents if extent.ledger is self._ledger)
        check_disk(size, self.path, None if self._limit is None else max(0, self._limit - used))
        file = self._file()
        try:
            start = file.take(size)
        except OSError as error:
            raise PrepareError(
                f"could not reserve {size} bytes for {kind.value} in {self.path} ({reason(error)}); make room, raise "
                "the quota or the file size limit (ulimit -f), or name another directory with Budget(disk_path=...)"
            ) from error
        extent: Extent
        if item_bytes:
            self._take_packers()
            extent = PackedExtent(file, start, num_bytes, kind, owner, self._ledger, None, item_bytes=item_bytes)
        else:
            extent = Extent(file, start, num_bytes, kind, owner, self._ledger, self._fallback)
        self._extents.add(extent)
        return extent

    def join(self, extent: Extent) -> None:
        """Hold an extent of another Disk of the same directory, or of another owner, until `free`."""
        self._check_open()
        extent.holders.join(self._ledger)
        self._extents.add(extent)
        if extent.scratch_file not in self._files:
            extent.scratch_file.open_again()
            self._files.append(extent.scratch_file)
        if isinstance(extent, PackedExtent):
            self._take_packers()

    @staticmethod
    def packer_bytes(num_requests: int = NUM_REQUESTS) -> int:
        """Return the bytes of host memory that threads use to pack and unpack."""
        return (num_requests + NUM_SPARE) * Packer.NUM_BYTES

    def _take_packers(self) -> None:
        """Count that memory in the ledger, once."""
        if not self._packers_held:
            self._packers_held = self.packer_bytes(self._num_requests)
            self._ledger.enter(Kind.BUFFERS, self._packers_held, Tier.HOST)

    def _file(self) -> ScratchFile:
        """Return a new file, or the one with the fewest bytes if there are enough files."""
        if len(self._files) < MOST_FILES:
            self._files.append(ScratchFile(self.path, is_direct=self.is_direct))
            return self._files[-1]
        return min(self._files, key=lambda file: file.num_taken)

    def read(self, extent: Extent, offset: int, target: torch.Tensor) -> Transfer:
        """Start reading from `offset` of `extent` into `target`."""
        return self._start(extent, offset, target, is_write=False)

    def write(self, extent: Extent, offset: int, source: torch.Tensor) -> Transfer:
        """Start writing `source` to `offset` of `extent`."""
        if extent.fallback is not None:
            extent.fallback = self._fallback  # another Disk may have allocated it
        return self._start(extent, offset, source, is_write=True)

    def free(self, extent: Extent) -> None:
        """Free the space of an extent, after its pending transfers."""
        self._check_extent(extent)
        for transfer in extent.transfers:
            with contextlib.suppress(StorageError):  # the caller that waits for it gets it too
                transfer.wait()
        extent.free(self._ledger)
        if not extent.holders.has(self._ledger):
            self._extents.discard(extent)
        file = extent.scratch_file
        if not any(other.scratch_file is file for other in self._extents):
            self._files.remove(file)
            file.close()

    def close(self) -> None:
        """Wait for pending transfers, free all space and end the threads. A second call has no effect."""
        if self._finalizer.alive:
            for extent in list(self._extents):
                while extent in self._extents:
                    self.free(extent)
            self._ledger.leave(Kind.BUFFERS, self._packers_held, Tier.HOST)
            self._finalizer()

    def _start(self, extent: Extent, offset: int, memory: torch.Tensor, *, is_write: bool) -> Transfer:
        self._check(extent, offset, memory)
        if is_write and extent.is_cut:  # it would hide behind zeros
            file_bytes = os.fstat(extent.scratch_file.fd).st_size
            raise StorageError(
                f"{extent.file} was cut to {file_bytes} bytes by another process: its content is lost, {extent.label}"
            )
        if memory.numel() == 0:
            return Done()
        pages = memory.detach().view(-1).view(torch.uint8)  # keeps the memory alive
        starts = range(0, len(pages), BLOCK_BYTES)
        work = Work(len(starts))
        extent.add_transfer(work)
        for start in starts:
            block = (extent, offset + start, pages[start : start + BLOCK_BYTES], is_write, work)
            self._blocks.put((current(), next(self._numbers), block))
        return work

    def _check(self, extent: Extent, offset: int, memory: torch.Tensor) -> None:
        """Refuse a request that cannot be carried out."""
        self._check_open()
        self._check_extent(extent)
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise StorageError(f"a {memory.device} tensor with strides {memory.stride()}: pass a contiguous CPU tensor")
        if memory.nbytes and memory.data_ptr() % PAGE:
            raise StorageError(f"memory at {memory.data_ptr():#x} is not aligned to {PAGE} bytes; use Host.allocate")
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
            raise StorageError(f"{extent} is not an extent of this Disk, or was freed; use an extent from allocate")


def _serve(blocks: Blocks, pace: LinkPace, turns: threading.Semaphore) -> None:
    """Read and write blocks until the queue returns None. A thread does not keep its Disk alive."""
    scratch = Scratch(turns)
    while True:
        scratch.take_turn()
        priority, _, block = blocks.get()
        if block is None:
            scratch.give_turn()
            return
        work = block[-1]
        be_late()
        error = _carry_out(block, scratch)
        scratch.give_turn()
        del block  # and with it the memory, which must not wait for the next request
        if priority < Priority.BACKGROUND:
            pace.ask()
        work.finish(error)
        del work, error


def _shut(process: int, threads: list[threading.Thread], blocks: Blocks, files: list[ScratchFile]) -> None:
    """End the threads and close the files; a forked child only closes its copies of the files."""
    if threading.current_thread() in threads:  # called by the garbage collector; a thread cannot wait for itself
        threading.Thread(target=_shut, args=(process, threads, blocks, files)).start()
        return
    if process == os.getpid():
        for number in range(len(threads)):
            blocks.put((math.inf, number, None))
        for thread in threads:
            thread.join()
    for file in files:
        file.close()
    files.clear()


def _carry_out(block: Block, scratch: Scratch) -> BaseException | None:
    """Read or write a block; return an error without its traceback, which would keep the memory alive."""
    extent, offset, memory, is_write, _ = block
    try:
        (extent.write if is_write else extent.read)(offset, memory, scratch)
    except OSError as error:
        failure = extent.failure("writing" if is_write else "reading", len(memory), offset, error)
        failure.__cause__ = error.with_traceback(None)
        return failure
    except BaseException as error:  # whatever it is, somebody waits for it
        return error.with_traceback(None)
    return None
