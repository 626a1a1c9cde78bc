"""Rooms of a pool: never two in one place, given back from anywhere, kept for the next time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerostd.errors import PrepareError
from zerostd.monitoring import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers.allocator import TierAllocator, TierTensor
from zerostd.tiers.disk import Disk
from zerostd.tiers.host import Host
from zerostd.tiers.pool import Pool

CPU, PAGE = torch.device("cpu"), 4096


def host_pool(limit: int | None = None) -> Pool:
    ledger = Ledger()
    return Pool(TierAllocator(CPU, Host(CPU, ledger, 1), None, ledger), Tier.HOST, Kind.ACTIVATIONS, limit)


def memory_of(room: TierTensor) -> torch.Tensor:
    assert room.tensor is not None
    return room.tensor


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(1, 5 * PAGE), max_size=5), st.integers(0, 9)), max_size=25))
def test_rooms_never_overlap_and_come_back(turns: list[tuple[list[int], int]]) -> None:
    pool, taken = host_pool(), list[tuple[TierTensor, int]]()
    for number, (sizes, num_back) in enumerate(turns):
        taken += [(room, number % 251) for room in pool.take(sizes)]
        new = taken[len(taken) - len(sizes) :]
        assert [room.numel for room, _ in new] == sizes
        for one, value in new:
            memory_of(one).fill_(value)
        assert all(bool((memory_of(one) == value).all()) for one, value in taken)
        new.clear()
        one = None  # type: ignore[assignment]
        del taken[:num_back]
        assert pool.used == sum(-(-one.numel // PAGE) * PAGE for one, _ in taken)
    taken.clear()
    assert pool.used == 0


def test_the_same_sizes_take_nothing_more() -> None:
    pool = host_pool()
    for _ in range(5):
        first, second = pool.take([10 * PAGE, 3]), pool.take([5 * PAGE])
        assert pool.num_bytes == 16 * PAGE
        del first, second


def test_slabs_become_one_when_sizes_have_changed() -> None:
    pool = host_pool()
    for size in (10, 11, 12, 13):
        rooms = pool.take([size * PAGE])
        del rooms
    assert pool.num_bytes <= 1.25 * 13 * PAGE + 13 * PAGE
    rooms = pool.take([PAGE])
    assert pool.num_bytes == 13 * PAGE
    del rooms


def test_rooms_are_given_back_from_another_thread() -> None:
    pool = host_pool()
    rooms = pool.take([PAGE])
    thread = threading.Thread(target=rooms.clear)
    thread.start()
    thread.join()
    assert pool.used == 0


def test_a_limit_is_kept_and_nothing_is_lost() -> None:
    pool = host_pool(limit=4 * PAGE)
    kept = pool.take([2 * PAGE])
    with pytest.raises(PrepareError, match="more activations"):
        pool.take([PAGE, 2 * PAGE])
    assert pool.used == 2 * PAGE
    assert len(pool.take([2 * PAGE])) == len(kept)


def test_rooms_on_disk(tmp_path: Path) -> None:
    ledger = Ledger()
    allocator = TierAllocator(CPU, Host(CPU, ledger, 1), Disk(str(tmp_path), ledger), ledger)
    pool, memory = Pool(allocator, Tier.DISK, Kind.ACTIVATIONS), allocator.host.allocate(2 * PAGE, Kind.BUFFERS)
    first, second = pool.take([PAGE + 7, PAGE - 5])
    for room, value in ((first, 3), (second, 4)):
        memory.fill_(value)
        room.start_write(0, memory[: room.numel]).wait()
    for room, value in ((first, 3), (second, 4)):
        room.start_read(0, memory[: room.numel]).wait()
        assert bool((memory[: room.numel] == value).all())
    assert ledger.now[Tier.DISK, Kind.ACTIVATIONS] == 3 * PAGE
    allocator.close()


def test_memory_goes_back_when_no_block_is_in_use() -> None:
    pool = host_pool()
    rooms = pool.take([PAGE])
    assert not pool.give_back() and pool.num_bytes == PAGE
    del rooms
    assert pool.give_back() and pool.num_bytes == 0
    assert len(pool.take([PAGE])) == 1


def test_a_thread_grows_a_pool_and_blocks_are_cut_from_what_it_took() -> None:
    pool = host_pool()
    few = pool.take([2 * PAGE])
    thread = threading.Thread(target=pool.grow_to, args=(10 * PAGE - 1,))
    thread.start()
    thread.join()
    assert pool.num_bytes == 2 * PAGE  # until the next one is taken
    more = [pool.take([3 * PAGE]), pool.take([5 * PAGE])]
    assert pool.num_bytes == 10 * PAGE
    del few, more
    again = pool.take([PAGE])  # far fewer than it was grown to: it keeps the memory for those that come
    assert pool.num_bytes == 10 * PAGE
    pool.grow_to(10 * PAGE)
    pool.grow_to(4 * PAGE)
    del again
    assert pool.take([10 * PAGE]) and pool.num_bytes <= 20 * PAGE


def test_growing_without_memory_leaves_the_error_to_who_needs_it() -> None:
    pool = host_pool(limit=4 * PAGE)
    pool.grow_to(10 * PAGE)
    assert pool.take([PAGE])
    with pytest.raises(PrepareError):
        pool.take([10 * PAGE])


def test_memory_that_a_thread_takes_for_later_hides_no_leak_of_another() -> None:
    ledger = Ledger()
    ledger.leaks.start(0)
    with ledger.leaks.ignored():
        thread = threading.Thread(target=ledger.enter, args=(Kind.BUFFERS, 5, Tier.HOST))
        thread.start()
        thread.join()
        ledger.enter(Kind.BUFFERS, 7, Tier.HOST)
    assert [leak.num_bytes for leaks in ledger.leaks._open.values() for leak in leaks] == [5]
