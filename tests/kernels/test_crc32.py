"""`crc32` is zlib's, with and without the processor's own instructions, and without the library."""

from __future__ import annotations

import itertools
import random
import threading
import zlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zerostd.kernels import crc32, crc32_pages, native, reference

Checksum = Callable[[Tensor, int], int]
WAYS: dict[str, Checksum] = {
    "native": lambda tensor, before: native.crc32(tensor, before),
    "tables": lambda tensor, before: native.crc32(tensor, before, is_plain=True),
    "zlib": reference.crc32,
    "chosen": crc32,
}
needs_native = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library is not built")
each_way = pytest.mark.parametrize("way", [pytest.param(name, marks=needs_native) for name in WAYS])


def random_bytes(count: int, seed: int = 0) -> Tensor:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(count)), dtype=torch.uint8)


@each_way
def test_what_everybody_knows(way: str) -> None:
    assert WAYS[way](torch.frombuffer(bytearray(b"123456789"), dtype=torch.uint8), 0) == 0xCBF43926


@each_way
def test_every_length(way: str) -> None:
    numbers = random_bytes(5000)
    data = numbers.numpy().tobytes()
    for count in range(5001):
        assert WAYS[way](numbers[:count], 0) == zlib.crc32(data[:count]), count


@each_way
def test_any_place_length_and_beginning(way: str) -> None:
    numbers, draw = random_bytes(20_000), random.Random(1)
    data = numbers.numpy().tobytes()
    for _ in range(3000):
        start, stop, before = draw.randrange(200), draw.randrange(200, 20_000), draw.randrange(1 << 32)
        assert WAYS[way](numbers[start:stop], before) == zlib.crc32(data[start:stop], before), (start, stop, before)


@each_way
def test_part_by_part(way: str) -> None:
    numbers, draw = random_bytes(100_000), random.Random(2)
    places = sorted({0, 100_000, *(draw.randrange(100_000) for _ in range(50))})
    crc = 0
    for start, stop in itertools.pairwise(places):
        crc = WAYS[way](numbers[start:stop], crc)
    assert crc == zlib.crc32(numbers.numpy())


@each_way
@pytest.mark.parametrize("count", [(4 << 20) - 1, (64 << 20) + 13])
def test_long_ones(way: str, count: int) -> None:
    numbers = random_bytes(1 << 20).repeat(-(-count // (1 << 20)))[3 : count + 3].clone()
    numbers[count // 2] ^= 1
    assert WAYS[way](numbers, 0) == zlib.crc32(numbers.numpy())


@each_way
@pytest.mark.parametrize("value", [0, 255])
def test_nothing_but_one_byte(way: str, value: int) -> None:
    numbers = torch.full((1000,), value, dtype=torch.uint8)
    assert WAYS[way](numbers, 0) == zlib.crc32(bytes([value]) * 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_any_dtype_and_shape(dtype: torch.dtype) -> None:
    numbers = (torch.arange(7 * 11) % 2).to(dtype).view(7, 11)
    assert crc32(numbers) == zlib.crc32(numbers.flatten().view(torch.uint8).numpy())
    assert crc32(numbers[:0], 5) == crc32(torch.empty(0, 3, dtype=dtype), 5) == 5
    assert reference.crc32(numbers, 0) == crc32(numbers) and reference.crc32(numbers[:0], 5) == 5


@needs_native
def test_threads_do_not_disturb_each_other() -> None:
    numbers = [random_bytes(300_000, seed) for seed in range(4)]
    found: list[set[int]] = [set() for _ in numbers]

    def work(place: int) -> None:
        found[place].update(crc32(numbers[place]) for _ in range(50))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{zlib.crc32(one.numpy())} for one in numbers]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        crc32(torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match="on meta"):
        crc32(torch.zeros(4, device="meta"))


@needs_native
def test_a_negative_length_is_refused() -> None:
    library = native.load()
    assert library is not None and library.zs_crc32(None, -1, 0, 0, None) == 1


@pytest.mark.parametrize(
    "pages", [crc32_pages, reference.crc32_pages, pytest.param(native.crc32_pages, marks=needs_native)]
)
@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 40_961])
def test_each_page_by_itself(pages: Callable[[Tensor, int, Tensor], None], count: int) -> None:
    numbers = random_bytes(count + 1, 3)[:count]
    sums = torch.full((-(-count // 4096),), 7, dtype=torch.int32)
    pages(numbers, 4096, sums)
    expected = [zlib.crc32(page.numpy()) for page in numbers.split(4096)] if count else []
    assert sums.view(torch.uint32).tolist() == expected


def test_pages_are_checked() -> None:
    with pytest.raises(ValueError, match=r"take \(2,\) of torch.int32"):
        crc32_pages(torch.zeros(8192, dtype=torch.uint8), 4096, torch.zeros(3, dtype=torch.int32))
