"""The threads that move blocks between scratch files and host memory for a `Disk`.

With O_DIRECT, offsets, addresses and lengths must be whole pages. The end of a request that does not fill a page goes
through a page of the thread's own; what follows in that page of the file stays as it is.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerostd.errors import StorageError
from zerostd.tiers.pages import PAGE
from zerostd.tiers.scratch_files import reason
from zerostd.tiers.transfer import Work

Move = Callable[[int, Sequence[memoryview], int], int]  # os.preadv or os.pwritev


@dataclass(eq=False)
class DiskBlock:
    """The part of a request that one thread carries out."""

    fd: int
    file: str  # for messages
    offset: int
    view: memoryview  # of the memory, which it keeps alive
    is_write: bool
    shares_page: bool  # whether the file has more in the last page, which a write must keep
    work: Work

    def __str__(self) -> str:
        verb = "writing" if self.is_write else "reading"
        return f"{verb} {len(self.view)} bytes at offset {self.offset} of {self.file}"


class DiskThreads:
    """Threads and their queue. They know nothing of the Disk, so that it can be collected while they wait."""

    def __init__(self, num_threads: int, *, is_direct: bool) -> None:
        self.process = os.getpid()
        self._step = PAGE if is_direct else 1  # moves start and end on multiples of it
        self._queue: queue.SimpleQueue[DiskBlock | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"zerostd-disk-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, block: DiskBlock) -> None:
        """Queue a block."""
        self._queue.put(block)

    def close(self) -> None:
        """Return when everything queued is done and the threads have ended; in a forked child at once."""
        if self.process != os.getpid():
            return
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def include_current(self) -> bool:
        """Return whether the calling thread is one of them."""
        return threading.current_thread() in self._threads

    def _run(self) -> None:
        page = memoryview(mmap.mmap(-1, PAGE))
        while True:
            block = self._queue.get()
            if block is None:
                return
            work = block.work
            error = self._carry_out(block, page)
            del block  # and with it the memory, which must not wait for the next request
            if error is None:
                work.finish()
            else:
                work.fail(error)
            del work, error

    def _carry_out(self, block: DiskBlock, page: memoryview) -> BaseException | None:
        """Move a block; return what went wrong."""
        try:
            moved = _write(block, page, self._step) if block.is_write else _read(block, page, self._step)
        except OSError as error:
            failure = StorageError(f"{block} failed: {reason(error)}; check the drive and its free space")
            failure.__cause__ = error.with_traceback(None)  # it would keep the memory alive
            return failure
        except BaseException as error:  # whatever it is, somebody waits for it
            return error
        if moved < len(block.view):
            return StorageError(
                f"{block} ended early: wanted {len(block.view)} bytes, got {moved}; the file was cut short under us, "
                "or the drive is full: check who else touches it"
            )
        return None


def _write(block: DiskBlock, page: memoryview, step: int) -> int:
    """Write a block; return how many bytes of it were written."""
    tail = len(block.view) % step
    body = len(block.view) - tail
    moved = _move(os.pwritev, block.fd, block.view[:body], block.offset, step)
    if moved < body or not tail:
        return moved
    if block.shares_page and _move(os.preadv, block.fd, page, block.offset + body, step) < len(page):
        return moved
    page[:tail] = block.view[body:]
    return body + min(tail, _move(os.pwritev, block.fd, page, block.offset + body, step))


def _read(block: DiskBlock, page: memoryview, step: int) -> int:
    """Read a block; return how many bytes of it were read."""
    tail = len(block.view) % step
    body = len(block.view) - tail
    moved = _move(os.preadv, block.fd, block.view[:body], block.offset, step)
    if moved < body or not tail:
        return moved
    last = min(tail, _move(os.preadv, block.fd, page, block.offset + body, step))
    block.view[body : body + last] = page[:last]
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
