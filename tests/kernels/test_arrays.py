"""`square_norm`, `cast`, `copy` and `touch`: the native library against torch."""

from __future__ import annotations

import ctypes
import math
import mmap

import pytest
import torch
from torch import Tensor

from zerostd.kernels import cast, copy, native, reference, square_norm, touch

SIZES = [0, 1, 15, 17, 1000, 4096, 100_003]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {4: torch.int32, 2: torch.int16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
needs_native = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library is not built")


def random_bits(dtype: torch.dtype, numel: int) -> Tensor:
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(0))
    return bits.to(BITS[dtype.itemsize]).view(dtype)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    """Equal bit patterns, but a NaN only has to be a NaN."""
    assert a.dtype == b.dtype
    assert torch.equal(a.isnan(), b.isnan())
    numbers = ~a.isnan()
    assert torch.equal(a[numbers].view(BITS[a.itemsize]), b[numbers].view(BITS[b.itemsize]))


@needs_native
@each_dtype
@pytest.mark.parametrize("size", SIZES)
def test_square_norm_has_the_same_bits_with_any_number_of_threads(dtype, size) -> None:
    numbers = torch.randn(size + 1, generator=torch.Generator().manual_seed(0)).to(dtype)[1:]
    expected = reference.square_norm(numbers)
    assert square_norm(numbers) == square_norm(numbers, 3) == (expected, True)
    assert math.isclose(expected, float(numbers.double().square().sum()), rel_tol=1e-12)


@each_dtype
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_square_norm_says_when_not_all_is_finite(dtype, bad) -> None:
    numbers = torch.full((100_003,), torch.finfo(dtype).max, dtype=dtype)
    assert square_norm(numbers, 2)[1]
    numbers[77_777] = bad
    assert not square_norm(numbers, 2)[1]
    assert not math.isfinite(reference.square_norm(numbers))


@needs_native
@each_dtype
@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
def test_cast_gives_the_bits_of_torch(dtype, target_dtype) -> None:
    for size in SIZES:
        source, target = random_bits(dtype, size + 1)[1:], torch.empty(size + 1, dtype=target_dtype)[1:]
        cast(source, target, 3)
        assert_same_bits(target, source.to(target_dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.bool], ids=str)
def test_copy_takes_any_dtype(dtype) -> None:
    source = torch.randint(0, 2, (1_000_003,)).to(dtype)
    target = torch.empty_like(source)
    copy(source, target, 3)
    assert torch.equal(source, target)


def test_overlapping_and_strided_arrays_are_served() -> None:
    whole = torch.arange(10.0)
    copy(whole[:8], whole[2:])
    assert whole[2:].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    halves = torch.arange(8.0).bfloat16()
    cast(halves, halves.view(torch.float16))
    assert halves.view(torch.float16).tolist() == list(range(8))
    strided = torch.zeros(8, 2)[:, 0]
    copy(torch.arange(8.0), strided)
    assert strided.tolist() == list(range(8))


@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_touch_writes_a_zero_to_every_page(offset) -> None:
    size = 9 << 20
    memory = mmap.mmap(-1, size)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    for touched in [touch] if not native.LIBRARY.exists() else [touch, lambda a, n, _: reference.touch(a, n)]:
        data.fill_(7)
        end = size - 4096 - 5
        touched(data.data_ptr() + offset, end - offset, 3)
        expected = torch.full_like(data, 7)
        expected[offset] = 0
        expected[-(-(offset + 1) // 4096) * 4096 : end : 4096] = 0
        assert torch.equal(data, expected)
        touched(data.data_ptr() + 10, 0, 3)
        assert data[10] == (0 if offset == 10 else 7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: square_norm(torch.ones(3, dtype=torch.int32)), "int32"),
        (lambda: square_norm(torch.ones(3), 0), "num_threads=0"),
        (lambda: cast(torch.ones(3), torch.ones(3, dtype=torch.float64)), "float64"),
        (lambda: cast(torch.ones(3), torch.ones(4)), "3 elements and target 4"),
        (lambda: copy(torch.ones(3), torch.ones(3).bfloat16()), "cast between them"),
        (lambda: copy(torch.ones(3), torch.ones(4)), "3 elements and target 4"),
        (lambda: touch(0, -1, 1), "num_bytes=-1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@needs_native
def test_abi_refuses_arguments_that_do_not_fit() -> None:
    library = native.load()
    assert library is not None
    total = ctypes.c_double()
    assert library.zs_square_norm(None, 9, 0, 1, ctypes.byref(total)) == 1
    assert library.zs_cast(None, 0, None, 3, 0, 1) == 1
    assert library.zs_copy(None, None, -1, 1) == 1
    assert library.zs_touch(None, 0, 0) == 1
    assert library.zs_update(native.StepArgument(rule=3, num_threads=1)) == 1
    assert library.zs_update(native.StepArgument(momentum=1, num_threads=1)) == 1  # Adam has none
    assert library.zs_update(native.StepArgument(num_threads=1)) == 0
