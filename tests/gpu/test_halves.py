"""Masters in two halves on a GPU: the kernels give the bits of torch's operations on the CPU, and are used."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from zerostd.kernels import Split, join, rules, split

pytestmark = pytest.mark.gpu

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1.0, 3.3e38, -3.3e38]


def numbers(count: int) -> torch.Tensor:
    """Any bits, and the numbers that are special."""
    bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=torch.Generator().manual_seed(count))
    return torch.cat([bits.to(torch.int32).view(torch.float32), torch.tensor(SPECIAL)])


@pytest.mark.parametrize("count", [0, 1, 2048, 1_000_003])
def test_halves_have_the_bits_of_the_cpu(count):
    whole = numbers(count)
    expected = split(whole)
    found = split(whole.cuda())
    assert torch.equal(found.high.cpu().view(torch.int16), expected.high.view(torch.int16))
    assert torch.equal(found.low.cpu(), expected.low)
    joined = join(Split(expected.high.cuda(), expected.low.cuda())).cpu()
    assert torch.equal(joined.view(torch.int32), join(expected).view(torch.int32))


def test_slices_that_begin_anywhere():
    whole = numbers(10_000).cuda()
    expected = split(whole)
    found = Split(torch.zeros_like(expected.high), torch.zeros_like(expected.low))
    rules.split_into(whole[3:9001].clone(), Split(found.high[3:9001], found.low[3:9001]))
    assert torch.equal(found.low[3:9001], expected.low[3:9001])
    assert not found.low[:3].any() and not found.low[9001:].any()


def test_triton_works_here():
    pytest.importorskip("triton")
    rules._device_halves.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rules._device_halves("cuda") is not None
