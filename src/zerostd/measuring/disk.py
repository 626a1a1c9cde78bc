"""What a directory's file system can do, through the disk tier itself: read alone, write alone, both at once."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

import torch

from zerostd.measuring.timing import TrialSizes, within
from zerostd.monitoring.ledger import Ledger
from zerostd.planning.machine import DiskRates
from zerostd.policy import Kind
from zerostd.tiers.disk import Disk
from zerostd.tiers.host import Host
from zerostd.tiers.limits import free_disk
from zerostd.tiers.transfer import Transfer

REQUEST_BYTES = 16 << 20  # two blocks of the disk tier
DEPTH = 4  # requests of each direction on their way at once

Request = Callable[[int], Transfer]  # by its number


def disk_rates(path: str, sizes: TrialSizes) -> DiskRates:
    """Return the rates of files in `path`; the one made for it has no name and is gone afterwards."""
    ledger = Ledger()
    disk = Disk(path, ledger)
    host = Host(torch.device("cpu"), ledger, 1)
    try:
        return _DiskTrial(disk, host, sizes).rates()
    finally:
        disk.close()
        host.free_all()


class _DiskTrial:
    """One file: its first half is read, its second half written."""

    def __init__(self, disk: Disk, host: Host, sizes: TrialSizes) -> None:
        self.disk = disk
        self.sizes = sizes
        size = within(sizes.disk, free_disk(disk.path))
        self.step = min(REQUEST_BYTES, max(4096, size // 8 // 4096 * 4096))
        self.file = disk.allocate(max(size, 2 * self.step), Kind.BUFFERS)
        memory = host.allocate(2 * DEPTH * self.step, Kind.BUFFERS)
        # A file system may store zeros without writing them.
        memory.view(torch.int64).random_(generator=torch.Generator())
        self._in, self._out = memory.view(2, DEPTH, self.step).unbind()
        self.half = 0  # requests that are in one half of what has been written; none yet

    def rates(self) -> DiskRates:
        """Write the file once first: room that is reserved but was never written is not read from the drive."""
        whole = self.file.num_bytes // self.step
        _, count = self._go(self.write_first, most=whole)
        self.half = max(1, count // 2)
        most = 2 * whole
        read, _ = self._go(self.read, most=most)
        write, _ = self._go(self.write, most=most)
        both, _ = self._go(self.read, self.write, most=most)
        return DiskRates(self.disk.path, read, write, both)

    def read(self, number: int) -> Transfer:
        return self.disk.read(self.file, number % self.half * self.step, self._in[number % DEPTH])

    def write(self, number: int) -> Transfer:
        return self.disk.write(self.file, (self.half + number % self.half) * self.step, self._out[number % DEPTH])

    def write_first(self, number: int) -> Transfer:
        return self.disk.write(self.file, number * self.step, self._out[number % DEPTH])

    def _go(self, *requests: Request, most: int) -> tuple[float, int]:
        """Return bytes a second of each kind of request, all kinds busy, and how many of each there was time for."""
        under_way: deque[list[Transfer]] = deque()
        begin = time.perf_counter()
        for number in itertools.count():
            if number >= most or (number >= 2 and time.perf_counter() - begin > self.sizes.disk_seconds):
                break
            if len(under_way) == DEPTH:
                _wait(under_way.popleft())
            under_way.append([request(number) for request in requests])
        for transfers in under_way:
            _wait(transfers)
        return number * self.step / (time.perf_counter() - begin), number


def _wait(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
