"""`encode_blocks` and `decode_blocks`: native library and torch, bit for bit, and both against what they mean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zerostd.kernels import blocks, native
from zerostd.kernels.blocks import BLOCK, coded_bytes, decode_blocks, encode_blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
needs_native = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library is not built")
each_bits = pytest.mark.parametrize("bits", [8, 4])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blocks, "TILE", 3 * BLOCK)  # more than one tile
    yield


def numbers(dtype: torch.dtype, *, seed: int, num_blocks: int = 700) -> torch.Tensor:
    """Random bits, normal numbers, blocks of zeros and of ties."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(BITS[dtype])
    drawn = (
        torch.randint(info.min, info.max + 1, (num_blocks * BLOCK,), generator=generator).to(BITS[dtype]).view(dtype)
    )
    normal = torch.randn(num_blocks * BLOCK, generator=generator)
    sizes = torch.logspace(-30, 4, num_blocks).repeat_interleave(BLOCK)
    ties = torch.arange(BLOCK).float() - 31.5
    ties[0] = 127
    return torch.cat([drawn, (normal * sizes).to(dtype), torch.zeros(BLOCK, dtype=dtype), ties.to(dtype)])


def encode(values: torch.Tensor, bits: int, **options: int) -> torch.Tensor:
    coded = torch.full((coded_bytes(values.numel(), bits),), 0xA5, dtype=torch.uint8)
    encode_blocks(values, bits, coded, **options)
    return coded


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal bits, but a NaN only has to be a NaN."""
    here = ~a.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[here].view(BITS[a.dtype]), b[here].view(BITS[b.dtype]))


@needs_native
@each_bits
@each_dtype
def test_native_and_torch_give_the_same_codes_and_numbers(bits, dtype, by_torch, monkeypatch) -> None:
    values = [numbers(dtype, seed=seed) for seed in range(3)]
    ours = [encode(value, bits, num_threads=2) for value in values]
    decoded = torch.empty_like(values[0])
    decode_blocks(torch.cat(ours), bits, decoded, num_slices=3, num_threads=2)
    total = torch.ones(values[0].numel())
    decode_blocks(torch.cat(ours), bits, total, num_slices=3, accumulate=True)
    monkeypatch.setattr(native, "serves", lambda *tensors: False)
    theirs = [encode(value, bits) for value in values]
    num_codes = values[0].numel() * bits // 8
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our[:num_codes], their[:num_codes])
        assert same_bits(our[num_codes:].view(torch.float32), their[num_codes:].view(torch.float32))
    again = torch.empty_like(values[0])
    decode_blocks(torch.cat(theirs), bits, again, num_slices=3)
    assert same_bits(decoded, again)
    total_again = torch.ones(values[0].numel())
    decode_blocks(torch.cat(theirs), bits, total_again, num_slices=3, accumulate=True)
    assert same_bits(total, total_again)


@each_bits
def test_a_number_comes_back_within_half_a_step_of_its_block(bits) -> None:
    values = torch.randn(1000 * BLOCK, generator=torch.Generator().manual_seed(0))
    decoded = torch.empty_like(values)
    decode_blocks(encode(values, bits), bits, decoded)
    steps = values.view(-1, BLOCK).abs().amax(1, keepdim=True) / blocks.LARGEST[bits]
    error = (decoded - values).view(-1, BLOCK).abs()
    assert (error <= 0.5001 * steps).all()
    assert (error > 0.4 * steps).any()  # it is no finer either


@each_bits
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_a_number_that_is_not_finite_decodes_to_nan(bits, bad) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = bad
    decoded = torch.empty_like(values)
    decode_blocks(encode(values, bits), bits, decoded)
    assert decoded[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(decoded[:BLOCK], torch.ones(BLOCK))
    assert torch.equal(decoded[2 * BLOCK :], torch.ones(BLOCK))


def test_coded_bytes_are_what_is_promised_of_16_bits() -> None:
    assert coded_bytes(1 << 20, 8) / (2 << 20) == pytest.approx(0.53, abs=0.002)
    assert coded_bytes(1 << 20, 4) / (2 << 20) == pytest.approx(0.28, abs=0.002)


@pytest.mark.parametrize(
    ("values", "bits", "num_bytes", "message"),
    [
        (torch.zeros(64), 7, 68, "bits=7"),
        (torch.zeros(65), 8, 70, "multiple of 64"),
        (torch.zeros(64, dtype=torch.float64), 8, 68, "float64"),
        (torch.zeros(64), 8, 67, r"take \(68,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(values, bits, num_bytes, message) -> None:
    with pytest.raises(ValueError, match=message):
        encode_blocks(values, bits, torch.zeros(num_bytes, dtype=torch.uint8))
    with pytest.raises(ValueError, match=message):
        decode_blocks(torch.zeros(num_bytes, dtype=torch.uint8), bits, values)


def test_a_sum_is_kept_in_fp32() -> None:
    with pytest.raises(ValueError, match="fp32 out"):
        decode_blocks(torch.zeros(68, dtype=torch.uint8), 8, torch.zeros(64, dtype=torch.bfloat16), accumulate=True)
