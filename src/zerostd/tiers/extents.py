"""Extents: space in scratch files, moved in whole pages, each of which has a checksum in host memory.

A page's checksum is kept when the page is written and compared when it is read, so bytes that changed on the drive are
an error and never a wrong number. O_DIRECT, where the file system takes it, keeps the page cache from using up the host
memory that the disk is there to save.

[Note: fail-over] When a write fails for good, the extent moves to host memory: what can be read of it is copied, its
space is given up, and the extent goes on from memory. Pages that could not be read, or were half written, do
not have their checksum: reading them raises, unless they are written first.

[Note: turns at the drive] The drive always has as many requests as it works best with. A thread gives its turn away
before it sums or unpacks a block, and a Disk has more threads than turns. What a block moves after that goes without a
turn: a thread that waited for one here could wait for a thread that waits for it in a fail-over.
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
from zerostd.tiers.host import PAGE, Host, aligned, padded
from zerostd.tiers.limits import check_host
from zerostd.tiers.packing import Packer
from zerostd.tiers.scratch_files import ScratchFile, reason
from zerostd.tiers.worker import Work

BLOCK_BYTES = 8 * 2**20  # what one thread moves at a time
REMEDY = "load the last checkpoint into a new model"

Move = Callable[[int, Sequence[Any], int], int]  # os.preadv or os.pwritev

log = logging.getLogger("zerostd")


class Scratch:
    """Memory of one thread that moves blocks, and its turn at the drive. [Note: turns at the drive]"""

    def __init__(self, turns: threading.Semaphore) -> None:
        self.page = aligned(PAGE)  # for the end of a block that does not fill one
        self.checksums = torch.empty(BLOCK_BYTES // PAGE, dtype=torch.int32)  # of the pages of a block
        self._turns = turns
        self._has_turn = False

    def take_turn(self) -> None:
        """Wait until fewer requests are at the drive than it is to have at a time."""
        self._turns.acquire()
        self._has_turn = True

    def give_turn(self) -> None:
        """Let the next request reach the drive; nothing happens if that was done before."""
        if self._has_turn:
            self._has_turn = False
            self._turns.release()

    @functools.cached_property
    def packer(self) -> Packer:
        """For extents that are packed."""
        return Packer()


@dataclass
class Fallback:
    """Host memory for extents whose file can no longer be written."""

    host: Host
    ledger: Ledger
    limit: int | None = None  # most bytes of host memory that this rank may have in all
    is_used: bool = False  # the drive has failed: other extents do not try it again and again, while ranks wait

    def take(self, extent: Extent) -> torch.Tensor:
        """Return memory for the whole pages of an extent; raise PrepareError if there is no room for them."""
        used = sum(size for (tier, _), size in list(self.ledger.now.items()) if tier is Tier.HOST)
        left = None if self.limit is None else max(0, self.limit - used)
        num_bytes = max(PAGE, padded(extent.num_bytes))
        check_host(num_bytes, extent.label, left)
        self.is_used = True
        with self.ledger.leaks.ignored():
            return self.host.allocate(num_bytes, extent.kind)


@dataclass(eq=False)
class Extent:
    """Space for `num_bytes` of one kind, from byte `start` of a scratch file on."""

    scratch_file: ScratchFile = field(repr=False)
    start: int
    num_bytes: int
    kind: Kind
    owner: str  # the first parameter of the group whose bytes they are
    allocated_for: Ledger = field(repr=False)
    fallback: Fallback | None = field(repr=False)
    transfers: list[Work] = field(default_factory=list, repr=False)  # those that may still be under way
    item_bytes: int = field(default=0, kw_only=True)  # of a number, if numbers are packed
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
        """The ledger that counts it."""
        return self.holders.first

    @property
    def label(self) -> str:
        return f"{self.kind.value} of the group of {self.owner!r}" if self.owner else self.kind.value

    @property
    def file(self) -> str:
        return self.scratch_file.name

    @property
    def held_bytes(self) -> int:
        """The bytes that it takes on disk."""
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
        """Equal for extents that have the same bytes, as far as a checksum of their pages' checksums can tell."""
        return crc32(self._checksums)

    def add_transfer(self, work: Work) -> None:
        """Note a transfer that has begun."""
        with self._gate:
            self.transfers = [*(transfer for transfer in self.transfers if not transfer.is_done()), work]

    def _entries(self) -> list[Entry]:
        """Return what it takes, as a ledger has it. Memory that took the file's place is counted by its Host."""
        checksums = (Kind.BUFFERS, self._checksums.nbytes, Tier.HOST)
        return [checksums] if self.memory is not None else [checksums, (self.kind, self.held_bytes, Tier.DISK)]

    def free(self, ledger: Ledger) -> None:
        """Let a holder leave; the last one gives the space back. Nothing may be under way."""
        if not self.holders.leave(ledger):
            return
        if self.memory is not None and self.fallback is not None:
            self.fallback.host.free(self.memory)
        self.scratch_file.give(self.start, max(PAGE, padded(self.num_bytes)))

    def failure(self, verb: str, num_bytes: int, offset: int, error: OSError) -> StorageError:
        """Return the error that says where reading or writing has failed, and why."""
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        return StorageError(
            f"{verb} {num_bytes} bytes at offset {self.start + offset} of {self.file} failed, {self.label}: "
            f"{reason(error)}{notes}; check the drive and its free space. {REMEDY.capitalize()}"
        )

    # In the threads of a Disk

    def read(self, offset: int, block: torch.Tensor, scratch: Scratch) -> None:
        """Fill a block from `offset` on, and check it. A block that is not as it was written is read once more."""
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
        """Fill a block; return an error if a page of it does not have its checksum."""
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
        """Read the page that a block ends inside of, whose other bytes must be kept. A drive that cannot be read is no
        reason for [Note: fail-over]: the page would be lost by it."""
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
        """Read or write whole pages. Goes on after short moves."""
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
        """Move to host memory, unless another thread did; raise the error if there is no room. [Note: fail-over]"""
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
            self.scratch_file.punch(self.start, len(memory))  # its space may be what others lack
            log.warning(
                "%s can no longer be written (%s): %s moves to host memory, %d bytes%s",
                *(self.file, reason(error), self.label, self.num_bytes),
                f", of which {lost} could not be read" if lost else "",
            )
