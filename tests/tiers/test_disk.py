"""Disk: what is written is read, whatever the sizes; nothing stays behind; nothing fails in silence."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from support import mounts, warm
from support.files import opened
from zerostd.errors import PrepareError, StorageError
from zerostd.monitoring.ledger import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers import extents
from zerostd.tiers.disk import NUM_REQUESTS, NUM_SPARE, Disk
from zerostd.tiers.extents import BLOCK_BYTES, Extent
from zerostd.tiers.host import PAGE, Host
from zerostd.tiers.scratch_files import MOST_FILES, open_and_unlink

MIB = 2**20
START = """
import os, resource, signal, sys, time, warnings, torch
from zerostd.errors import *
from zerostd.monitoring.ledger import Ledger
from zerostd.policy import Kind
from zerostd.tiers.disk import Disk
from zerostd.tiers.host import Host
host = Host(torch.device("cpu"), Ledger(), 1)
path = sys.argv[1]
"""


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def host() -> Host:
    return Host(torch.device("cpu"), Ledger(), 2)


@pytest.fixture
def disk(tmp_path, ledger):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a machine whose file system is without O_DIRECT
        disk = Disk(str(tmp_path), ledger)
    yield disk
    disk.close()


def reserved(folder: Path, process: int | str = "self") -> int:
    """Bytes of files without a name, which go with the last who has them open. Of a file system that others use too,
    what is free says nothing."""
    return sum(one.st_blocks * 512 for one in opened(folder, process).values() if one.st_nlink == 0)


def filled(host: Host, num_bytes: int, seed: int) -> torch.Tensor:
    tensor = host.allocate(num_bytes, Kind.BUFFERS)
    tensor.copy_(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return tensor


@pytest.mark.parametrize("num_bytes", [1, 511, 4095, 4096, 4097, MIB + 3, BLOCK_BYTES, 2 * BLOCK_BYTES + 4096 + 17])
@pytest.mark.parametrize("offset", [0, 4096, 3 * 4096])
def test_round_trip(disk, host, num_bytes, offset):
    source, target = filled(host, num_bytes, 1), host.allocate(num_bytes, Kind.BUFFERS)
    extent = disk.allocate(offset + num_bytes, Kind.PARAMETERS)
    disk.write(extent, offset, source).wait()
    transfer = disk.read(extent, offset, target)
    transfer.wait()
    transfer.wait()
    assert transfer.is_done() and torch.equal(source, target)


def test_any_dtype_and_shape(disk, host):
    source = filled(host, 4 * 333 * 2, 2).view(torch.bfloat16).view(4, 333)
    target = host.allocate(4 * 333 * 2, Kind.BUFFERS).view(torch.int32)
    extent = disk.allocate(4 * 333 * 2, Kind.GRADIENTS)
    disk.write(extent, 0, source).wait()
    disk.read(extent, 0, target).wait()
    assert torch.equal(source.flatten().view(torch.int32), target)


def test_short_write_leaves_the_rest_of_its_page_alone(disk, host):
    whole, short = filled(host, 3 * 4096 + 100, 3), filled(host, 5000, 4)
    extent = disk.allocate(3 * 4096 + 100, Kind.PARAMETERS)
    disk.write(extent, 0, whole).wait()
    disk.write(extent, 4096, short).wait()
    target = host.allocate(3 * 4096 + 100, Kind.BUFFERS)
    disk.read(extent, 0, target).wait()
    expected = whole.clone()
    expected[4096 : 4096 + 5000] = short
    assert torch.equal(target, expected)


def test_new_extent_is_zero(disk, host):
    target = filled(host, 100_001, 8)
    disk.read(disk.allocate(100_001, Kind.OPTIMIZER_STATES), 0, target).wait()
    assert not target.any()


def test_transfers_from_several_threads(disk, host):
    extent, memory = disk.allocate(64 * 8192, Kind.PARAMETERS), filled(host, 64 * 8192, 9)

    def work(first: int) -> None:
        for start in range(first * 8192, len(memory), 4 * 8192):
            disk.write(extent, start, memory[start : start + 8192]).wait()

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    target = host.allocate(len(memory), Kind.BUFFERS)
    disk.read(extent, 0, target).wait()
    assert torch.equal(target, memory)


def test_nothing_is_done_at_once(disk, host):
    extent = disk.allocate(0, Kind.PARAMETERS)
    for verb in (disk.read, disk.write):
        assert verb(extent, 0, host.allocate(0, Kind.BUFFERS)).is_done()
    disk.free(extent)


def test_many_transfers_in_random_order_against_plain_bytes(disk, host):
    chance, pages = random.Random(5), 64
    sizes = [pages * PAGE, pages * PAGE - 1, 40 * PAGE + 1]
    extents = [disk.allocate(size, Kind.OPTIMIZER_STATES) for size in sizes]
    expected = [bytearray(size) for size in sizes]
    memory = host.allocate(8 * pages * PAGE, Kind.BUFFERS)
    for extent, size in zip(extents, sizes, strict=True):
        disk.write(extent, 0, memory[:size]).wait()
    for _ in range(12):
        writes, reads, starts = [], [], iter(range(0, len(memory), 4 * PAGE))
        pieces = [(which, offset) for which in range(3) for offset in range(0, sizes[which], 4 * PAGE)]
        chance.shuffle(pieces)
        for which, offset in pieces:
            most = min(4 * PAGE, sizes[which] - offset)
            length, start = chance.randint(1, most), next(starts)
            if chance.random() < 0.5:
                data = chance.randbytes(length)
                memory[start : start + length] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                expected[which][offset : offset + length] = data
                part = memory[start : start + length]
                writes.append(disk.write(extents[which], offset, part))
            else:
                part = memory[start : start + length]
                reads.append((disk.read(extents[which], offset, part), part, which, offset))
        for transfer, part, which, offset in reversed(reads):
            transfer.wait()
            assert part.numpy().tobytes() == expected[which][offset : offset + len(part)]
        for transfer in writes:
            transfer.wait()
    for extent, plain in zip(extents, expected, strict=True):
        target = memory[: len(plain)]
        disk.read(extent, 0, target).wait()
        assert target.numpy().tobytes() == plain


def test_room_is_reserved_and_given_back(disk, tmp_path, ledger):
    extent = disk.allocate(1024 * MIB, Kind.OPTIMIZER_STATES)
    assert reserved(tmp_path) >= 1024 * MIB
    assert ledger.now[Tier.DISK, Kind.OPTIMIZER_STATES] == 1024 * MIB
    assert os.listdir(tmp_path) == []
    disk.free(extent)
    assert reserved(tmp_path) == 0
    assert ledger.now[Tier.DISK, Kind.OPTIMIZER_STATES] == 0


def test_a_thousand_extents_share_a_few_descriptors_and_give_their_room_back(disk, host, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    sizes = [4096 * (1 + number % 3) + number % 7 for number in range(1000)]
    extents = [disk.allocate(size, Kind.OPTIMIZER_STATES) for size in sizes]
    assert len(os.listdir("/proc/self/fd")) <= before + MOST_FILES
    values = {extent: filled(host, extent.num_bytes, number) for number, extent in enumerate(extents[:40])}
    for transfer in [disk.write(extent, 0, memory) for extent, memory in values.items()]:
        transfer.wait()
    full = reserved(tmp_path)
    order = random.Random(0).sample(extents[40:], len(extents) - 40)
    for extent in order[:700]:
        disk.free(extent)
    assert reserved(tmp_path) <= full - sum(extent.num_bytes for extent in order[:700]) // 4096 * 4096
    again = [disk.allocate(extent.num_bytes, Kind.PARAMETERS) for extent in order[:700]]
    assert reserved(tmp_path) <= full + MIB  # holes are used again
    for extent in again[:20]:  # and hold zeros
        target = filled(host, extent.num_bytes, 1)
        disk.read(extent, 0, target).wait()
        assert not target.any()
    for extent, memory in values.items():
        target = host.allocate(extent.num_bytes, Kind.BUFFERS)
        disk.read(extent, 0, target).wait()
        assert torch.equal(target, memory)
    for extent in (*again, *order[700:], *values):
        disk.free(extent)
    assert reserved(tmp_path) == 0 and len(os.listdir("/proc/self/fd")) == before


def test_free_waits_for_what_is_under_way(disk, host):
    memory = host.allocate(5 * BLOCK_BYTES, Kind.BUFFERS)
    extent = disk.allocate(5 * BLOCK_BYTES, Kind.PARAMETERS)
    transfer = disk.write(extent, 0, memory)
    disk.free(extent)
    assert transfer.is_done()
    transfer.wait()


def test_file_system_without_unnamed_files(tmp_path):
    fd, name = open_and_unlink(str(tmp_path))
    assert os.listdir(tmp_path) == [] and name.startswith(f"{tmp_path}/zerostd-")
    assert os.fstat(fd).st_nlink == 0 and os.fstat(fd).st_mode & 0o777 == 0o600
    os.close(fd)


def test_kill_leaves_nothing(tmp_path):
    code = """
    disk = Disk(path, Ledger())
    memory = host.allocate(64 * 2**20, Kind.BUFFERS)
    extent = disk.allocate(2**30, Kind.PARAMETERS)
    disk.write(extent, 0, memory).wait()
    print("written", flush=True)
    while True:
        transfer = disk.write(extent, 0, memory)
        disk.free(disk.allocate(8192, Kind.PARAMETERS))
        transfer.wait()
    """
    with warm.Script(START + textwrap.dedent(code), tmp_path) as child:
        assert child.stdout.readline() == "written\n"
        assert reserved(tmp_path, child.pid) >= 1024 * MIB
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert os.listdir(tmp_path) == []  # nobody can have them open


@pytest.mark.parametrize("is_write", [True, False])
def test_the_drive_has_the_next_request_while_a_block_is_summed(tmp_path, ledger, host, monkeypatch, is_write):
    """With one request at a time at the drive: the sum of the first block waits for the move of the second."""
    disk = Disk(str(tmp_path), ledger, num_requests=1)
    memory = host.allocate(2 * BLOCK_BYTES, Kind.BUFFERS).random_(0, 255)
    extent = disk.allocate(2 * BLOCK_BYTES, Kind.PARAMETERS)
    disk.write(extent, 0, memory).wait()
    at_drive = threading.Semaphore(0)  # released by each move
    num_at_drive: list[int] = []  # as each move begins
    moving: set[int] = set()
    first = threading.Lock()
    waited: list[bool] = []
    move, sums = Extent._move, extents.crc32_pages

    def moved(self: Extent, *what: object) -> None:
        moving.add(threading.get_ident())
        num_at_drive.append(len(moving))
        move(self, *what)
        moving.remove(threading.get_ident())
        at_drive.release()

    def summed(*what: object) -> None:
        if first.acquire(blocking=False):
            waited.append(at_drive.acquire(timeout=30) and at_drive.acquire(timeout=30))
        sums(*what)

    monkeypatch.setattr(Extent, "_move", moved)
    monkeypatch.setattr(extents, "crc32_pages", summed)
    (disk.write if is_write else disk.read)(extent, 0, memory).wait()
    assert waited == [True]
    assert max(num_at_drive) == 1
    disk.close()


def test_end_of_the_process_waits_for_writes(tmp_path):
    code = """
    import builtins
    disk = Disk(path, Ledger(), num_requests=1)
    memory = host.allocate(64 * 2**20, Kind.BUFFERS)
    builtins.kept = disk.write(disk.allocate(64 * 2**20, Kind.PARAMETERS), 0, memory)
    import atexit
    atexit._run_exitfuncs()
    print(kept.is_done())
    """
    done = warm.run(START + textwrap.dedent(code), tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


def test_dropped_disk_gives_back_threads_and_files(tmp_path, ledger, host):
    before = set(threading.enumerate())  # one of another test may end meanwhile

    for _ in range(3):
        disk = Disk(str(tmp_path), ledger)
        transfer = disk.write(disk.allocate(4096, Kind.PARAMETERS), 0, host.allocate(4096, Kind.BUFFERS))
        assert len(set(threading.enumerate()) - before) == NUM_REQUESTS + NUM_SPARE and opened(tmp_path)
        del disk
        gc.collect()
        assert transfer.is_done() and not set(threading.enumerate()) - before and not opened(tmp_path)


def test_idle_threads_keep_no_memory(disk, host):
    extent = disk.allocate(MIB, Kind.PARAMETERS)
    memory = torch.frombuffer(bytearray(2 * MIB), dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    part = memory[start : start + MIB]
    disk.write(extent, 0, part).wait()
    disk.read(extent, 0, part).wait()
    deadline = time.monotonic() + 10
    while sys.getrefcount(part) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sys.getrefcount(part) == 2


def test_bad_paths_are_refused(tmp_path, ledger):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, tmp_path / "missing"):
        with pytest.raises(PrepareError, match="is not a directory; name an existing one"):
            Disk(str(path), ledger)
    with pytest.raises(PrepareError, match=r"cannot create a file there \(E[A-Z]+: .*\); name a directory"):
        Disk("/proc/self", ledger)
    assert Disk(None, ledger).path  # the system's directory for temporary files


def test_budget_is_a_limit_for_all_extents_together(tmp_path, ledger):
    disk = Disk(str(tmp_path), ledger, limit=10 * 4096)
    extent = disk.allocate(8 * 4096 - 1, Kind.PARAMETERS)
    with pytest.raises(PrepareError, match=r"12288 bytes\) wanted in .* disk budget leaves .*\(8192 bytes\)"):
        disk.allocate(2 * 4096 + 1, Kind.PARAMETERS)
    disk.free(extent)
    disk.allocate(10 * 4096, Kind.PARAMETERS)
    disk.close()


def test_misuse_is_refused_at_the_call(disk, host, tmp_path, ledger):
    extent, memory = disk.allocate(3 * 4096, Kind.PARAMETERS), host.allocate(3 * 4096 + 1, Kind.BUFFERS)
    for offset, part, words in (
        (1, memory[:100], "offset 1 is not a multiple"),
        (-4096, memory[:100], "offset -4096"),
        (0, memory[1:100], "is not aligned to"),
        (0, memory, "beyond the end"),
        (4096, memory[: 2 * 4096 + 1], "beyond the end"),
        (0, memory[: 4 * 4096].view(torch.uint8)[:4096].view(64, 64).t(), "contiguous CPU tensor"),
        (0, torch.empty(8, device="meta"), "contiguous CPU tensor"),
    ):
        for verb in (disk.read, disk.write):
            with pytest.raises(StorageError, match=words):
                verb(extent, offset, part)
    with pytest.raises(StorageError, match="-1 bytes"):
        disk.allocate(-1, Kind.PARAMETERS)
    disk.free(extent)
    for call in (lambda: disk.free(extent), lambda: disk.read(extent, 0, memory[:8])):
        with pytest.raises(StorageError, match="was freed; use an extent from allocate"):
            call()
    disk.close()
    disk.close()
    with pytest.raises(StorageError, match="was closed"):
        disk.allocate(1, Kind.PARAMETERS)


@pytest.mark.parametrize(("left", "got"), [(2 * 4096, 2 * 4096), (4096 + 77, 4096 + 77), (0, 0)])
def test_file_cut_short_under_us(disk, host, left, got):
    extent, memory = disk.allocate(5 * 4096 + 9, Kind.PARAMETERS), filled(host, 5 * 4096 + 9, 6)
    disk.write(extent, 0, memory).wait()
    os.ftruncate(extent.scratch_file.fd, left)
    transfer = disk.read(extent, 0, host.allocate(5 * 4096 + 9, Kind.BUFFERS))
    for _ in range(2):
        with pytest.raises(StorageError, match=rf"offset 0 of .*wanted {5 * 4096} bytes, got {got};"):
            transfer.wait()
    with pytest.raises(StorageError, match=f"was cut to {left} bytes"):  # writing would hide the hole behind zeros
        disk.write(extent, 4096, memory[:4096])
    other = disk.allocate(5 * 4096 + 9, Kind.PARAMETERS)
    for _ in range(10):  # the threads are all still there
        disk.write(other, 0, memory).wait()
        target = host.allocate(5 * 4096 + 9, Kind.BUFFERS)
        disk.read(other, 0, target).wait()
        assert torch.equal(target, memory)


def test_error_of_a_thread_is_raised_by_wait_with_its_cause(disk, host, tmp_path):
    extent, good = disk.allocate(3 * BLOCK_BYTES, Kind.PARAMETERS), disk.allocate(4096, Kind.PARAMETERS)
    memory = host.allocate(3 * BLOCK_BYTES, Kind.BUFFERS)
    read_only = os.open(f"/proc/self/fd/{extent.scratch_file.fd}", os.O_RDONLY)
    os.dup2(read_only, extent.scratch_file.fd)  # writing fails from here on, with EBADF
    os.close(read_only)
    transfer = disk.write(extent, 0, memory)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"writing \d+ bytes at offset \d+ of .*EBADF: ") as raised:
            transfer.wait()
        assert isinstance(raised.value.__cause__, OSError) and raised.value.__cause__.errno == errno.EBADF
    for _ in range(10):
        disk.write(good, 0, memory[:4096]).wait()


def test_file_size_limit(tmp_path):
    code = """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    disk = Disk(path, Ledger())
    extent = disk.allocate(4 * 4096, Kind.PARAMETERS)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 4096, 2 * 4096))
    try:
        disk.allocate(4 * 4096, Kind.PARAMETERS)
    except PrepareError as error:
        print(error)
    memory = host.allocate(4 * 4096, Kind.BUFFERS)
    try:
        disk.write(extent, 0, memory).wait()  # comes back short, then fails
    except StorageError as error:
        print(error)
    disk.write(extent, 0, memory[:8192]).wait()
    disk.read(extent, 0, memory[:8192]).wait()
    """
    done = warm.run(START + textwrap.dedent(code), tmp_path)
    assert done.returncode == 0, done.stderr
    refused, failed = done.stdout.splitlines()
    assert f"could not reserve 16384 bytes for parameters in {tmp_path} (EFBIG: File too large)" in refused
    assert f"writing 16384 bytes at offset 0 of {tmp_path}/" in failed and "EFBIG: File too large" in failed


def test_forked_child_is_told(disk, host):
    extent, memory = disk.allocate(4096, Kind.PARAMETERS), host.allocate(4096, Kind.BUFFERS)
    child = os.fork()
    if child == 0:
        try:
            disk.read(extent, 0, memory)
        except StorageError as error:
            os._exit(42 if "forked child" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    disk.read(extent, 0, memory).wait()


def mounted(kind: str, options: str, path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """`code` in a process that sees a new file system of that kind at `path`; skips where that is not allowed."""
    start = f"from support.mounts import mount\nmount({kind!r}, {str(path)!r}, {options!r})\n"
    done = warm.run(start + START + textwrap.dedent(code), path)
    if done.returncode == mounts.NOT_ALLOWED:
        pytest.skip(f"this machine lets no user mount: {done.stderr.strip()}")
    return done


def test_file_system_without_direct(tmp_path):
    code = """
    warnings.simplefilter("always")
    with warnings.catch_warnings(record=True) as caught:
        disk = Disk(path, Ledger())
        extent = disk.allocate(3 * 4096 + 5, Kind.PARAMETERS)
        disk.allocate(100, Kind.PARAMETERS)
        source = host.allocate(5005, Kind.BUFFERS).fill_(9)
        disk.write(extent, 4096, source).wait()
        target = host.allocate(3 * 4096 + 5, Kind.BUFFERS)
        disk.read(extent, 0, target).wait()
    print(*(f"{w.category.__name__}: {w.message}" for w in caught))
    print(disk.is_direct, target.sum().item() == 9 * 5005, os.listdir(path))
    """
    done = mounted("ramfs", "", tmp_path, code)
    assert done.returncode == 0, done.stderr
    warned, rest = done.stdout.splitlines()
    assert warned.count("RuntimeWarning: ") == warned.count("does not support O_DIRECT") == 1
    assert rest == "False True []"


def test_full_file_system(tmp_path):
    code = """
    disk = Disk(path, Ledger())
    for wanted in (2**21, 2**20 - 8192):
        try:
            disk.allocate(wanted, Kind.PARAMETERS)
            print("taken")
        except PrepareError as error:
            print(error)
    from zerostd.tiers import scratch_files
    scratch_files.free_disk = lambda path: 2**40  # as if another process took the room after the check
    try:
        disk.allocate(2**20, Kind.PARAMETERS)
    except PrepareError as error:
        print(error)
    """
    done = mounted("tmpfs", "size=1m", tmp_path, code)
    refused, taken, full = done.stdout.splitlines()
    assert "(2097152 bytes) wanted" in refused and "(1048576 bytes) free" in refused
    assert taken == "taken"
    assert f"could not reserve 1048576 bytes for parameters in {tmp_path} (ENOSPC: " in full
