"""Blocks of small integers on a GPU: Triton's kernels give the bits of the CPU, and are used."""

from __future__ import annotations

import warnings

import pytest
import torch

from zerostd.kernels import blocks
from zerostd.kernels.blocks import BLOCK, coded_bytes, decode_blocks, encode_blocks

pytestmark = pytest.mark.gpu

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def numbers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, and numbers of all sizes; not a multiple of what a program takes."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(BITS[dtype])
    drawn = torch.randint(info.min, info.max + 1, (1001 * BLOCK,), generator=generator).to(BITS[dtype]).view(dtype)
    normal = torch.randn(3000 * BLOCK, generator=generator)
    return torch.cat([drawn, (normal * torch.logspace(-30, 4, 3000).repeat_interleave(BLOCK)).to(dtype)])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    here = ~a.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[here].view(BITS[a.dtype]), b[here].view(BITS[b.dtype]))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", list(BITS), ids=str)
def test_codes_and_numbers_have_the_bits_of_the_cpu(bits, dtype):
    coded: dict[str, list[torch.Tensor]] = {"cpu": [], "cuda": []}
    for device, parts in coded.items():
        for seed in range(3):
            values = numbers(dtype, seed).to(device)
            parts.append(torch.zeros(coded_bytes(values.numel(), bits), dtype=torch.uint8, device=device))
            encode_blocks(values, bits, parts[-1])
    numel = values.numel()
    num_codes = numel * bits // 8
    for ours, theirs in zip(coded["cuda"], coded["cpu"], strict=True):
        assert torch.equal(ours.cpu()[:num_codes], theirs[:num_codes])
        assert same_bits(ours.cpu()[num_codes:].view(torch.float32), theirs[num_codes:].view(torch.float32))
    for out_dtype, accumulate in ((dtype, False), (torch.float32, True)):
        decoded = {device: torch.ones(numel, dtype=out_dtype, device=device) for device in coded}
        for device, parts in coded.items():
            decode_blocks(torch.cat(parts), bits, decoded[device], num_slices=3, accumulate=accumulate)
        assert same_bits(decoded["cuda"].cpu(), decoded["cpu"])


def test_triton_works_here():
    pytest.importorskip("triton")
    blocks._device_blocks.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert blocks._device_blocks("cuda") is not None
