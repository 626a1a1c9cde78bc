"""Packed extents: numbers come back bit by bit from any part, take fewer bytes of the disk, and damage is an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerostd import StorageError
from zerostd.monitoring import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers.disk import Disk
from zerostd.tiers.host import PAGE, aligned
from zerostd.tiers.packed_extents import PackedExtent
from zerostd.tiers.packing import TILE_BYTES, Packer


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def disk(tmp_path: Path, ledger: Ledger) -> Iterator[Disk]:
    disk = Disk(str(tmp_path), ledger, num_requests=2)
    yield disk
    disk.close()
    assert not any(ledger.now.values())


def weights(num_bytes: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Return the bytes of numbers that are distributed as those of a layer are, in memory that starts on a page."""
    generator = torch.Generator().manual_seed(seed)
    memory = aligned(num_bytes)
    numbers = 0.02 * torch.randn(num_bytes // dtype.itemsize, generator=generator)
    memory.view(dtype).copy_(numbers)
    return memory


def read(disk: Disk, extent: PackedExtent, offset: int, num_bytes: int) -> torch.Tensor:
    target = aligned(num_bytes).fill_(7)
    disk.read(extent, offset, target).wait()
    return target


def allocate(disk: Disk, num_bytes: int, item_bytes: int = 2) -> PackedExtent:
    extent = disk.allocate(num_bytes, Kind.PARAMETERS, "layer.weight", item_bytes=item_bytes)
    assert isinstance(extent, PackedExtent)
    return extent


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.70), (torch.float32, 0.86), (torch.float16, 0.92)])
def test_weights_come_back_and_take_fewer_bytes(disk: Disk, ledger: Ledger, dtype: torch.dtype, most: float) -> None:
    size = 3 * TILE_BYTES + 5 * PAGE
    values = weights(size, dtype)
    extent = allocate(disk, size, dtype.itemsize)
    disk.write(extent, 0, values).wait()
    assert torch.equal(read(disk, extent, 0, size), values)
    assert extent.held_bytes < most * size
    assert ledger.now[Tier.DISK, Kind.PARAMETERS] == extent.held_bytes
    assert ledger.unpacking_s > 0
    disk.free(extent)
    assert ledger.now[Tier.DISK, Kind.PARAMETERS] == 0


def test_space_goes_back_to_the_drive(disk: Disk) -> None:
    size = 4 * TILE_BYTES
    extent = allocate(disk, size)
    before = os.fstat(extent.scratch_file.fd).st_blocks * 512
    disk.write(extent, 0, weights(size)).wait()
    assert os.fstat(extent.scratch_file.fd).st_blocks * 512 < 0.72 * before
    disk.free(extent)


def test_random_bytes_are_kept_as_they_are(disk: Disk) -> None:
    size = TILE_BYTES + PAGE
    values = aligned(size).random_(generator=torch.Generator().manual_seed(1))
    extent = allocate(disk, size)
    disk.write(extent, 0, values).wait()
    assert extent.held_bytes == size
    assert torch.equal(read(disk, extent, 0, size), values)
    disk.write(extent, 0, values.zero_()).wait()
    assert extent.held_bytes < 2 * PAGE  # the second tile has one, and is not packed
    assert torch.equal(read(disk, extent, 0, size), values)
    disk.free(extent)


def test_what_was_never_written_is_zero(disk: Disk) -> None:
    extent = allocate(disk, TILE_BYTES + PAGE)
    assert not read(disk, extent, PAGE, TILE_BYTES).any()
    disk.free(extent)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3 * TILE_BYTES // PAGE - 1), st.integers(1, TILE_BYTES + 5), st.integers(0, 99)),
        min_size=1,
        max_size=4,
    )
)
def test_parts_can_be_written_and_read_again(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int, int]]
) -> None:
    size = 3 * TILE_BYTES
    disk = Disk(str(tmp_path_factory.mktemp("disk")), Ledger(), num_requests=2)
    extent = allocate(disk, size)
    expected = weights(size).clone()
    disk.write(extent, 0, weights(size)).wait()
    for page, length, seed in writes:
        start = page * PAGE
        part = weights(2 * length, seed=seed)[: min(length, size - start)]
        disk.write(extent, start, part).wait()
        expected[start : start + len(part)] = part
        assert torch.equal(read(disk, extent, start, len(part)), part)
    assert torch.equal(read(disk, extent, 0, size), expected)
    disk.close()


def test_a_damaged_tile_is_an_error_that_says_where(disk: Disk) -> None:
    size = 2 * TILE_BYTES
    extent = allocate(disk, size)
    disk.write(extent, 0, weights(size)).wait()
    with open(f"/proc/self/fd/{extent.scratch_file.fd}", "r+b") as file:
        file.seek(extent.start + TILE_BYTES + 2 * PAGE + 5)
        file.write(b"\xff\x00\xff")
        file.flush()
        os.fsync(file.fileno())
    assert len(read(disk, extent, 0, TILE_BYTES)) == TILE_BYTES
    where = rf"offset {extent.start + TILE_BYTES + 2 * PAGE} of .* are not those that were written: .*'layer.weight'"
    with pytest.raises(StorageError, match=where):
        read(disk, extent, TILE_BYTES, TILE_BYTES)
    disk.free(extent)


def test_a_packer_takes_the_memory_that_is_counted() -> None:
    packer = Packer()
    tensors = [tensor for tensor in vars(packer).values() if isinstance(tensor, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) == Packer.NUM_BYTES
