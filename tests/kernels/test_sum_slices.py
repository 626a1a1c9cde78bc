"""`sum_slices`: the native library against the torch reference, bit for bit, and both against float64."""

from __future__ import annotations

import ctypes
import itertools
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support import warm
from zerostd.kernels import native, reference, sum_slices

SIZES = [0, 1, 15, 17, 1000, 100_003]  # elements of a slice; the last is long enough for several threads
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
each_received_dtype = pytest.mark.parametrize("received_dtype", DTYPES, ids=str)
each_out_dtype = pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
needs_native = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library is not built")


def random_bits(dtype: torch.dtype, numel: int, *, seed: int) -> torch.Tensor:
    """Every bit pattern is as likely: denormals, infinities, NaNs, both zeros and numbers that overflow in the sum."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(BITS[dtype])
    bits = torch.randint(info.min, info.max + 1, (numel,), generator=generator, dtype=torch.int64)
    return bits.to(BITS[dtype]).view(dtype)


def random_normal(dtype: torch.dtype, numel: int, *, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal bit patterns, but a NaN only has to be a NaN."""
    assert a.dtype == b.dtype
    assert torch.equal(a.isnan(), b.isnan())
    numbers = ~a.isnan()
    assert torch.equal(a[numbers].view(BITS[a.dtype]), b[numbers].view(BITS[b.dtype]))


@needs_native
@pytest.mark.parametrize("make", [random_normal, random_bits])
@pytest.mark.parametrize("size", SIZES)
@each_received_dtype
@each_out_dtype
def test_native_and_reference_give_the_same_bits(make, size, received_dtype, out_dtype) -> None:
    for num_slices, num_threads in itertools.product(range(1, 6), (1, 2)):
        received = make(received_dtype, num_slices * size, seed=num_slices)
        ours, theirs = torch.empty(size, dtype=out_dtype), torch.empty(size, dtype=out_dtype)
        native.sum_slices(received, num_slices, 1 / num_slices, ours, num_threads=num_threads)
        reference.sum_slices(received, num_slices, 1 / num_slices, theirs)
        assert_same_bits(ours, theirs)


@needs_native
@pytest.mark.parametrize("make", [random_normal, random_bits])
@pytest.mark.parametrize("size", SIZES)
@each_received_dtype
def test_accumulating_gives_the_same_bits(make, size, received_dtype) -> None:
    for num_slices, num_threads in itertools.product(range(1, 6), (1, 2)):
        received = make(received_dtype, num_slices * size, seed=num_slices)
        ours = make(torch.float32, size, seed=9)
        theirs = ours.clone()
        native.sum_slices(received, num_slices, 0.3, ours, accumulate=True, num_threads=num_threads)
        reference.sum_slices(received, num_slices, 0.3, theirs, accumulate=True)
        assert_same_bits(ours, theirs)


@needs_native
@pytest.mark.parametrize("offset", [1, 3, 7])
@each_received_dtype
@each_out_dtype
def test_views_off_the_alignment_give_the_same_bits(offset, received_dtype, out_dtype) -> None:
    received = random_bits(received_dtype, 3 * 1001 + offset, seed=offset)[offset:]
    whole = torch.full((1001 + 2 * offset,), 7.0).to(out_dtype)
    theirs = torch.empty(1001, dtype=out_dtype)
    native.sum_slices(received, 3, 0.5, whole[offset:-offset])
    reference.sum_slices(received, 3, 0.5, theirs)
    assert_same_bits(whole[offset:-offset], theirs)
    assert (whole[:offset] == 7).all() and (whole[-offset:] == 7).all()  # nothing beyond the ends was touched


@needs_native
@each_out_dtype
def test_rounding_is_to_nearest_even_as_torch_does_it(out_dtype) -> None:
    halves = torch.arange(2**16, dtype=torch.int32) << 16  # every bf16, and the bits around where it rounds
    near = torch.cat([halves + delta for delta in (0, 1, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0x3000)])
    received = near.view(torch.float32)
    out = torch.empty(received.numel(), dtype=out_dtype)
    native.sum_slices(received, 1, 1.0, out)
    assert_same_bits(out, received.to(out_dtype))


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_number_becomes_the_same_fp32(dtype) -> None:
    received = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.empty(received.numel())
    native.sum_slices(received, 1, 1.0, out)
    assert_same_bits(out, received.float())


@pytest.mark.parametrize("sums", [reference.sum_slices, pytest.param(native.sum_slices, marks=needs_native)])
@each_received_dtype
def test_sum_is_close_to_float64(sums, received_dtype) -> None:
    received = random_normal(received_dtype, 4 * 1000, seed=0)
    out = torch.ones(1000)
    sums(received, 4, 0.25, out, accumulate=True)
    torch.testing.assert_close(out.double(), 1 + received.view(4, 1000).double().sum(0) / 4, rtol=1e-6, atol=1e-6)


def test_sum_goes_in_slice_order() -> None:
    out = torch.empty(1)
    sum_slices(torch.tensor([1.0, 2.0**-24, 2.0**-24]), 3, 1.0, out)
    assert out.item() == 1.0
    sum_slices(torch.tensor([2.0**-24, 2.0**-24, 1.0]), 3, 1.0, out)
    assert out.item() == 1.0 + 2.0**-23


@needs_native
def test_result_does_not_depend_on_the_thread_when_denormals_are_flushed() -> None:
    received = torch.full((2 * 100_003,), 1e-39)
    one, two = torch.empty(100_003), torch.empty(100_003)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        native.sum_slices(received, 2, 1.0, one, num_threads=1)
        native.sum_slices(received, 2, 1.0, two, num_threads=2)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(one.view(torch.int32), two.view(torch.int32))


def test_strided_and_shaped_tensors_are_served() -> None:
    received = random_normal(torch.float32, 24, seed=0)
    expected = torch.empty(12)
    sum_slices(received, 2, 0.5, expected)
    strided = torch.empty(4, 3).t()
    sum_slices(received.view(2, 3, 4), 2, 0.5, strided)
    assert torch.equal(strided.reshape(-1), expected)
    doubled = received.repeat_interleave(2)[::2]
    out = torch.empty(3, 4)
    sum_slices(doubled, 2, 0.5, out)
    assert torch.equal(out.view(-1), expected)


def test_out_may_lie_in_the_receive_buffer() -> None:
    received = random_normal(torch.float32, 24, seed=0)
    expected = torch.empty(12)
    sum_slices(received, 2, 0.5, expected)
    out = received[6:18]
    sum_slices(received, 2, 0.5, out)
    assert torch.equal(out, expected)


def test_write_is_seen_by_autograd() -> None:
    weight = torch.ones(3, requires_grad=True)
    out = torch.ones(3)
    product = (weight * out).sum()
    sum_slices(torch.ones(6), 2, 0.5, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"received": torch.ones(6, dtype=torch.float64)}, r"received is torch\.float64"),
        ({"out": torch.ones(3, dtype=torch.int32)}, r"out is torch\.int32"),
        ({"out": torch.ones(3, device="meta")}, "share a device"),
        ({"out": torch.ones(4)}, "not num_slices=2 slices of out's 4"),
        ({"num_slices": 0}, "not num_slices=0 slices"),
        ({"out": torch.ones(3, dtype=torch.bfloat16), "accumulate": True}, "needs an fp32 out"),
        ({"num_threads": 0}, "num_threads=0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message) -> None:
    arguments = {"received": torch.ones(6), "num_slices": 2, "factor": 1.0, "out": torch.ones(3)} | change
    with pytest.raises(ValueError, match=message):
        sum_slices(**arguments)


@needs_native
def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    received = [random_normal(torch.bfloat16, 4 * 100_003, seed=seed) for seed in range(4)]
    outs = [torch.empty(100_003) for _ in received]

    def sum_often(index: int) -> None:
        for _ in range(20):
            native.sum_slices(received[index], 4, 0.25, outs[index], num_threads=3)

    threads = [threading.Thread(target=sum_often, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for buffer, out in zip(received, outs, strict=True):
        expected = torch.empty(100_003)
        reference.sum_slices(buffer, 4, 0.25, expected)
        assert_same_bits(out, expected)


FORK = """
import os, signal, sys
signal.alarm(60)  # ends a process that hangs
import torch
from zerostd.kernels import native
torch.set_num_threads(1)  # torch's own threads do not survive a fork
received = torch.ones(2 * 200_000)
out = torch.empty(200_000)
native.sum_slices(received, 2, 1.0, out, num_threads=3)  # the parent has its threads now
child = os.fork()
signal.alarm(60)
out.zero_()
native.sum_slices(received, 2, 1.0, out, num_threads=3)
good = bool((out == 2).all())
if os.path.isdir("/proc/self/task"):
    good = good and len(os.listdir("/proc/self/task")) > 1  # the child has threads of its own
if child:
    good = os.waitpid(child, 0)[1] == 0 and good
sys.exit(0 if good else 1)
"""


@needs_native
def test_threads_survive_a_fork_and_the_exit_of_the_interpreter() -> None:
    done = warm.run(FORK)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "absent.so")
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_missing_library_is_said_once_and_the_reference_serves() -> None:
    out = torch.empty(3)
    with pytest.warns(RuntimeWarning, match="make native"):
        sum_slices(torch.ones(6), 2, 1.0, out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sum_slices(torch.ones(6), 2, 1.0, out)
        assert native.load() is None
    assert torch.equal(out, torch.full((3,), 2.0))


@needs_native
def test_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    native.load.cache_clear()
    with pytest.warns(RuntimeWarning, match="ABI version"):
        assert native.load() is None
    native.load.cache_clear()


@needs_native
def test_abi_refuses_arguments_that_do_not_fit() -> None:
    library = native.load()
    assert isinstance(library, ctypes.CDLL)
    assert library.zs_sum_slices(None, 0, 1, 0, 1.0, None, 0, 0, 1) == 0
    assert library.zs_sum_slices(None, 9, 1, 0, 1.0, None, 0, 0, 1) == 1  # unknown dtype
    assert library.zs_sum_slices(None, 0, 1, 0, 1.0, None, 1, 1, 1) == 1  # accumulate into bf16
