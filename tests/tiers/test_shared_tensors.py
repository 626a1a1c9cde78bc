"""Tensors that share memory: values, whose ledger counts the bytes, and when the memory goes, in any order."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch

from zerostd.errors import PrepareError
from zerostd.monitoring import Ledger
from zerostd.policy import Budget, Kind, Tier
from zerostd.tiers import TierAllocator
from zerostd.tiers.host import Host, padded
from zerostd.tiers.shared_tensors import SharedTensor, are_equal, checksum, shared_bytes

NUMEL = 5_000
SIZE = padded(NUMEL * 4)
TIERS = [Tier.HOST, Tier.DISK]
ALL = slice(0, NUMEL)


def make_allocator(folder: Path, disk: int | None = None) -> TierAllocator:
    ledger = Ledger()
    device = torch.device("cpu")
    allocator = TierAllocator(device, Host(device, ledger, 1), None, ledger)
    allocator.open_disk(Budget(disk=disk, disk_path=str(folder)), 1)
    return allocator


def keep(allocator: TierAllocator, owner: str, tier: Tier, values: torch.Tensor) -> SharedTensor:
    allocator.reserve(owner, tier, Kind.PARAMETERS, SIZE)
    tensor = allocator.allocate(owner, tier, Kind.PARAMETERS, NUMEL, torch.float32)
    tensor.write(ALL, values)
    return SharedTensor.of(tensor, allocator, owner)


def held(allocator: TierAllocator, tier: Tier) -> int:
    return allocator.ledger.now[tier, Kind.PARAMETERS]


def on_disk(folder: Path) -> int:
    """Bytes of the files in a directory that have no name, which this process has open."""
    sizes = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = link.readlink()
            status = link.stat()
        except OSError:  # the descriptor of the loop itself
            continue
        if str(target).startswith(str(folder)):
            sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("seed", range(6))
def test_owners_come_write_and_go_in_any_order(tier: Tier, seed: int, tmp_path: Path) -> None:
    """Values are those of owners that share nothing; all ledgers together count each memory once."""
    draw = random.Random(seed)
    allocators = [make_allocator(tmp_path) for _ in range(4)]
    tensors = {index: keep(allocator, "w", tier, torch.zeros(NUMEL)) for index, allocator in enumerate(allocators)}
    expected = {index: torch.zeros(NUMEL) for index in tensors}
    for _ in range(60):
        index, other = (draw.choice(list(tensors)) for _ in range(2))
        act = draw.choice(["share", "share", "write", "write", "leave"])
        if act == "share" and index != other and torch.equal(expected[index], expected[other]):
            if tensors[index].memory is not tensors[other].memory:
                assert are_equal(tensors[index], tensors[other])
                tensors[index] = tensors[other].shared_with(tensors[index], allocators[index], "w")
        elif act == "write":
            low = draw.randrange(NUMEL)
            part = slice(low, draw.randrange(low, NUMEL) + 1)
            number = float(draw.randrange(2))
            tensors[index].write(part, torch.full((part.stop - part.start,), number))
            expected[index][part] = number
        elif act == "leave" and len(tensors) > 2:
            allocators[index].close()
            del tensors[index], expected[index]
            assert held(allocators[index], tier) == 0
        assert all(torch.equal(tensor.read(ALL), expected[key]) for key, tensor in tensors.items())
        memories = {id(tensor.memory) for tensor in tensors.values()}
        assert sum(held(allocator, tier) for allocator in allocators) == SIZE * len(memories)
        if tier is Tier.DISK:
            assert on_disk(tmp_path) == SIZE * len(memories)
    for index in tensors:
        allocators[index].close()
    assert on_disk(tmp_path) == 0 and not any(held(allocator, tier) for allocator in allocators)


def test_checksums_of_both_tiers_tell_contents_apart(tmp_path: Path) -> None:
    allocator = make_allocator(tmp_path)
    for tier in TIERS:
        ones, other, zeros = (
            keep(allocator, name, tier, torch.full((NUMEL,), value))
            for name, value in (("a", 1.0), ("b", 1.0), ("c", 0.0))
        )
        assert checksum(ones) == checksum(other) != checksum(zeros)
        assert are_equal(ones, other) and not are_equal(ones, zeros)
    allocator.close()


def test_negative_zero_and_nan_are_compared_as_bytes(tmp_path: Path) -> None:
    allocator = make_allocator(tmp_path)
    nan = keep(allocator, "nan", Tier.HOST, torch.full((NUMEL,), float("nan")))
    same = keep(allocator, "same", Tier.HOST, torch.full((NUMEL,), float("nan")))
    plus, minus = (keep(allocator, str(sign), Tier.HOST, torch.full((NUMEL,), sign)) for sign in (0.0, -0.0))
    assert are_equal(nan, same) and not are_equal(plus, minus)
    shared = nan.shared_with(same, allocator, "same")
    shared.write(slice(0, 7), torch.full((7,), float("nan")))
    assert shared.holders.num == 2, "the bits are those that are there"
    assert shared_bytes([nan, shared]) == (2 * SIZE, SIZE)
    allocator.close()


def test_a_write_without_room_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """Two owners of one allocator: the copy would pass the limit of the disk."""
    allocator = make_allocator(tmp_path, disk=2 * SIZE)
    first, second = (keep(allocator, name, Tier.DISK, torch.ones(NUMEL)) for name in "ab")
    second = first.shared_with(second, allocator, "b")
    allocator.reserve("c", Tier.DISK, Kind.PARAMETERS, SIZE)
    with pytest.raises(PrepareError, match="'b' are written to, but share memory with equal ones"):
        second.write(slice(0, 10), torch.zeros(10))
    assert bool((first.read(ALL) == 1).all()) and bool((second.read(ALL) == 1).all())
    assert held(allocator, Tier.DISK) == 2 * SIZE
    allocator.free("c", Kind.PARAMETERS)
    second.write(slice(0, 10), torch.zeros(10))
    assert bool((first.read(ALL) == 1).all()) and int(second.read(ALL).sum()) == NUMEL - 10
    allocator.close()


@pytest.mark.parametrize("tier", TIERS)
def test_holders_leave_while_others_read(tier: Tier, tmp_path: Path) -> None:
    """Each in a thread of its own, the one that allocated the memory first."""
    allocators = [make_allocator(tmp_path) for _ in range(4)]
    numbers = torch.randn(NUMEL)
    tensors = [keep(allocator, "w", tier, numbers) for allocator in allocators]
    for index in range(1, 4):
        tensors[index] = tensors[0].shared_with(tensors[index], allocators[index], "w")
    wrong: list[int] = []

    def read_and_leave(index: int) -> None:
        for _ in range(50 * (index + 1)):
            if not torch.equal(tensors[index].read(ALL), numbers):
                wrong.append(index)
        allocators[index].close()

    threads = [threading.Thread(target=read_and_leave, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not any(held(allocator, tier) for allocator in allocators)
