"""Extents: space in scratch files, read and written in whole pages, each with a checksum in host memory.

A write keeps the checksum of each page, and a read compares it. So bytes that changed on the drive raise an error, and
never become wrong numbers. O_DIRECT, if the file system supports it, bypasses the page cache, which would otherwise use
the host memory that the disk saves.

[Note: fail-over] When a write still fails after all retries, the extent moves to host memory: its readable pages are
copied, its space on the drive is freed, and later reads and writes use the memory. Pages that could not be read, or
were half written, do not match their checksum: a read of them raises an error, unless they are written first.

[Note: turns at the drive] A semaphore limits the requests at the drive to the number that is fastest. A thread gives
its turn away before it computes checksums or unpacks, and a Disk has more threads than turns. Later transfers of the
same block need no turn: a thread that waited for one could wait for a thread that waits for it in a fail-over.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerostd.errors import PrepareError, StorageError
from zerostd.kernels import crc32, crc32_pages
from zerostd.monitoring.ledger import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers.holders import Entry, Holders
from zerostd.tiers.host import PAGE, Host, aligned, check_host, padded
from zerostd.tiers.packing import Packer
from zerostd.tiers.scratch_files import ScratchFile, reason
from zerostd.tiers.worker import Work

BLOCK_BYTES = 8 * 2**20  # of one transfer by one thread
REMEDY = "load the last checkpoint into a new model"

Move = Callable[[int, Sequence[Any], int], int]  # os.preadv or os.pwritev

log = logging.getLogger("zerostd")


class Scratch:
    """Memory of one thread that moves blocks, and its turn at the drive. [Note: turns at the drive]"""

    def __init__(self, turns: threading.Semaphore) -> None:
        self.page = aligned(PAGE)  # for the end of a block, if it does not fill a page
        self.checksums = torch.empty(BLOCK_BYTES // PAGE, dtype=torch.int32)  # of the pages of a block
        self._turns = turns
        self._has_turn = False

    def take_turn(self) -> None:
        """Wait until the drive has fewer requests than its limit."""
        self._turns.acquire()
        self._has_turn = True

    def give_turn(self) -> None:
        """Let the next request reach the drive. Has no effect if this thread has no turn."""
        if self._has_turn:
            self._has_turn = False
            self._turns.release()

    @functools.cached_property
    def packer(self) -> Packer:
        """The packer for packed extents."""
        return Packer()


@dataclass
class Fallback:
    """Host memory for extents whose file can no longer be written."""

    host: Host
    ledger: Ledger
    limit: int | None = None  # of all host memory of this rank, in bytes
    is_used: bool = False  # the drive has failed: other extents do not retry, since ranks wait

    def take(self, extent: Extent) -> torch.Tensor:
        """Return memory for the whole pages of an extent; raise PrepareError if there is no room for them."""
        left = None if self.limit is None else max(0, self.limit - self.ledger.held[Tier.HOST])
        num_bytes = max(PAGE, padded(extent.num_bytes))
        check_host(num_bytes, extent.label, left)
        self.is_used = True
        with self.ledger.leaks.ignored():
            return self.host.allocate(num_bytes, extent.kind)


@dataclass(eq=False)
class Extent:
    """Space for `num_bytes` of one kind in a scratch file, beginning at byte `start`."""

    scratch_file: ScratchFile = field(repr=False)
    start: int
    num_bytes: int
    kind: Kind
    owner: str  # the first parameter of the group that the bytes belong to
    allocated_for: Ledger = field(repr=False)
    fallback: Fallback | None = field(repr=False)
    transfers: list[Work] = field(default_factory=list, repr=False)  # that may still be under way
    item_bytes: int = field(default=0, kw_only=True)  # bytes of one number, if the extent is packed
    memory: torch.Tensor | None = field(init=False, default=None, repr=False)  # see [Note: fail-over]

    def __post_init__(self) -> None:
        num_pages = self.checksum_bytes(self.num_bytes) // torch.int32.itemsize
        of_zeros = torch.tensor(crc32(torch.zeros(PAGE, dtype=torch.uint8)), dtype=torch.uint32)
        self._checksums = of_zeros.view(torch.int32).repeat(num_pages)  # one for each page
        self._gate = threading.Condition()
        self._num_moving = 0  # blocks
        self.holders = Holders(self.allocated_for, self._entries)
        self.ledger.enter(self.kind, self.num_bytes, Tier.DISK)
        self.ledger.enter(Kind.BUFFERS, self._checksums.nbytes, Tier.HOST)

    @property
    def ledger(self) -> Ledger:
        """The ledger that counts this extent."""
        return self.holders.first

    @property
    def label(self) -> str:
        return f"{self.kind.value} of the group of {self.owner!r}" if self.owner else self.kind.value

    @property
    def file(self) -> str:
        return self.scratch_file.name

    @property
    def held_bytes(self) -> int:
        """The bytes of the extent on disk."""
        return self.num_bytes

    @property
    def is_cut(self) -> bool:
        """Whether its file was truncated."""
        return self.memory is None and os.fstat(self.scratch_file.fd).st_size < self.start + self.num_bytes

    @staticmethod
    def checksum_bytes(num_bytes: int) -> int:
        """Return the bytes of host memory that the checksums of `num_bytes` take."""
        return torch.int32.itemsize * max(1, padded(num_bytes) // PAGE)

    @property
    def checksum(self) -> int:
        """The checksum of the page checksums. Extents with the same bytes have the same one."""
        return crc32(self._checksums)

    def add_transfer(self, work: Work) -> None:
        """Add a transfer that has begun."""
        with self._gate:
            self.transfers = [*(transfer for transfer in self.transfers if not transfer.is_done()), work]

    def _entries(self) -> list[Entry]:
        """Return the entries for a ledger. After a fail-over, the Host counts the memory."""
        checksums = (Kind.BUFFERS, self._checksums.nbytes, Tier.HOST)
        return [checksums] if self.memory is not None else [checksums, (self.kind, self.held_bytes, Tier.DISK)]

    def free(self, ledger: Ledger) -> None:
        """Remove a holder; when the last one leaves, free the space. No transfer may be under way."""
        if not self.holders.leave(ledger):
            return
        if self.memory is not None and self.fallback is not None:
            self.fallback.host.free(self.memory)
        self.scratch_file.give(self.start, max(PAGE, padded(self.num_bytes)))

    def failure(self, verb: str, num_bytes: int, offset: int, error: OSError) -> StorageError:
        """Return the error for a failed read or write: where it failed, and why."""
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        return StorageError(
            f"{verb} {num_bytes} bytes at offset {self.start + offset} of {self.file} failed, {self.label}: "
            f"{reason(error)}{notes}; check the drive and its free space. {REMEDY.capitalize()}"
        )

    # Called by the threads of a Disk

    def read(self, offset: int, block: torch.Tensor, scratch: Scratch) -> None:
        """Fill a block from `offset`, and check it. If a checksum does not match, read the block once more."""
        with self._moving():
            self._read_again_if_damaged(offset, block, scratch)

    def write(self, offset: int, block: torch.Tensor, scratch: Scratch) -> None:
        """Write a block to `offset`. Raises OSError if neither the file nor host memory can take it."""
        self._read_last_page(offset, block, scratch)
        try:
            with self._moving():
                self._write(offset, block, scratch)
        except OSError as error:
            self._fail_over(error)
            with self._moving():
                self._write(offset, block, scratch)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Keep the extent where it is while a block is moved."""
        with self._gate:
            self._num_moving += 1
        try:
            yield
        finally:
            with self._gate:
                self._num_moving -= 1
                self._gate.notify_all()

    def _read_again_if_damaged(self, offset: int, block: torch.Tensor, scratch: Scratch) -> None:
        damage = self._read(offset, block, scratch)
        if damage is not None:
            self.ledger.retries.count("reading", "checksum", f"{self.file}, {self.label}")
            damage = self._read(offset, block, scratch)
        if damage is not None:
            raise damage

    def _read(self, offset: int, block: torch.Tensor, scratch: Scratch) -> StorageError | None:
        """Fill a block; return an error if a page does not match its checksum."""
        body = len(block) // PAGE * PAGE
        num_pages = body // PAGE
        self._move(os.preadv, block[:body], offset)
        if body < len(block):
            self._move(os.preadv, scratch.page, offset + body)
        scratch.give_turn()
        crc32_pages(block[:body], PAGE, scratch.checksums[:num_pages])
        if body < len(block):
            crc32_pages(scratch.page, PAGE, scratch.checksums[num_pages : num_pages + 1])
            num_pages += 1
            block[body:] = scratch.page[: len(block) - body]
        actual = scratch.checksums[:num_pages]
        expected = self._checksums[offset // PAGE :][:num_pages]
        if torch.equal(actual, expected):
            return None
        page = int((actual != expected).nonzero()[0])
        numbers = [f"{int(checksum) & 0xFFFFFFFF:#010x}" for checksum in (expected[page], actual[page])]
        cause = "The drive, or another program, has changed them"
        if self.memory is not None:
            cause = "They could not be read from the drive when it failed and the group moved to host memory"
        return StorageError(
            f"the {PAGE} bytes at offset {self.start + offset + page * PAGE} of {self.file} are not those that were "
            f"written: {self.label}, checksum {numbers[0]} expected and {numbers[1]} read. {cause}: {REMEDY}, and "
            "check the drive"
        )

    def _read_last_page(self, offset: int, block: torch.Tensor, scratch: Scratch) -> None:
        """Read the page in which a block ends, to keep its other bytes. No [Note: fail-over]: it would lose them."""
        body = len(block) // PAGE * PAGE
        if body == len(block) or offset + len(block) >= self.num_bytes:
            return
        try:
            with self._moving():
                self._read_again_if_damaged(offset + body, scratch.page, scratch)
        except OSError as error:
            raise self.failure("reading", PAGE, offset + body, error) from error.with_traceback(None)

    def _write(self, offset: int, block: torch.Tensor, scratch: Scratch) -> None:
        body = len(block) // PAGE * PAGE
        num_pages = body // PAGE
        checksums = self._checksums[offset // PAGE :]
        self._move(os.pwritev, block[:body], offset)
        if body < len(block):
            scratch.page[: len(block) - body] = block[body:]
            self._move(os.pwritev, scratch.page, offset + body)
        scratch.give_turn()
        crc32_pages(block[:body], PAGE, checksums[:num_pages])
        if body < len(block):
            crc32_pages(scratch.page, PAGE, checksums[num_pages : num_pages + 1])

    def _move(self, move: Move, pages: torch.Tensor, offset: int) -> None:
        """Read or write whole pages. A transfer that ends early is continued."""
        is_write = move is os.pwritev
        if self.memory is not None:
            stored = self.memory[offset : offset + len(pages)]
            (stored if is_write else pages).copy_(pages if is_write else stored)
            return
        verb = "writing" if is_write else "reading"
        view: memoryview = pages.numpy().data
        fd = self.scratch_file.fd
        offset += self.start
        done = 0
        while done < len(view):
            where = f"{len(view) - done} bytes at offset {offset + done} of {self.file}"
            if is_write and self.fallback is not None and self.fallback.is_used:
                count = move(fd, [view[done:]], offset + done)
            else:
                count = self.ledger.retries.attempt(verb, where, move, fd, [view[done:]], offset + done)
            start = (done + count) // PAGE * PAGE
            if start <= done:
                raise StorageError(
                    f"{verb} {len(view)} bytes at offset {offset} of {self.file} ended early, {self.label}: wanted "
                    f"{len(view)} bytes, got {done + count}; the file was truncated while in use, or the drive is "
                    f"full: check which other program uses it. {REMEDY.capitalize()}"
                )
            done = start

    def _fail_over(self, error: OSError) -> None:
        """Move to host memory, unless another thread has; raise the error if there is no room. [Note: fail-over]"""
        with self._gate:
            self._gate.wait_for(lambda: self._num_moving == 0)
            if self.memory is not None:
                return
            try:
                if self.fallback is None:
                    raise error
                memory = self.fallback.take(self)
            except (PrepareError, StorageError) as refusal:
                error.add_note(f"host memory cannot take its place: {refusal}")
                raise error from None
            lost = 0
            for start in range(0, len(memory), BLOCK_BYTES):
                block = memory[start : start + BLOCK_BYTES]
                try:
                    self._move(os.preadv, block, start)
                except (OSError, StorageError):
                    lost += len(block)
            self.memory = memory
            self.ledger.leave(self.kind, self.num_bytes, Tier.DISK)
            self.scratch_file.punch(self.start, len(memory))  # other extents may need the space
            log.warning(
                "%s can no longer be written (%s): %s moves to host memory, %d bytes%s",
                *(self.file, reason(error), self.label, self.num_bytes),
                f", of which {lost} could not be read" if lost else "",
            )
