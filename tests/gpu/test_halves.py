"""Masters in two halves on a GPU: the kernels give the bits of torch's operations on the CPU, and are used."""

from __future__ import annotations

import warnings

import pytest
import torch

from support.halves import assert_halves, every_lower_half
from zerostd.kernels import Split, join, rules, split

pytestmark = pytest.mark.gpu


def numbers(count: int) -> torch.Tensor:
    """Any bits."""
    bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=torch.Generator().manual_seed(count))
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("count", [0, 1, 2048, 1_000_003])
def test_halves_have_the_bits_of_the_cpu(count):
    whole = numbers(count)
    expected = split(whole)
    on_gpu = split(whole.cuda())
    assert torch.equal(on_gpu.high.cpu().view(torch.int16), expected.high.view(torch.int16))
    assert torch.equal(on_gpu.low.cpu(), expected.low)
    joined = join(Split(expected.high.cuda(), expected.low.cuda())).cpu()
    assert torch.equal(joined.view(torch.int32), join(expected).view(torch.int32))


@pytest.mark.parametrize("has_triton", [True, False])
def test_every_lower_half_splits_as_on_the_cpu(has_triton, monkeypatch):
    if not has_triton:
        monkeypatch.setattr(rules, "_device_halves", lambda device_type: None)
    whole = every_lower_half()
    halves = split(whole.cuda())
    assert_halves(Split(halves.high.cpu(), halves.low.cpu()), whole)
    joined = join(halves).cpu().view(torch.int32)
    assert torch.equal(joined, join(split(whole)).view(torch.int32))


def test_slices_that_begin_anywhere():
    whole = numbers(10_000).cuda()
    expected = split(whole)
    taken = Split(torch.zeros_like(expected.high), torch.zeros_like(expected.low))
    rules.split_into(whole[3:9001].clone(), Split(taken.high[3:9001], taken.low[3:9001]))
    assert torch.equal(taken.low[3:9001], expected.low[3:9001])
    assert not taken.low[:3].any() and not taken.low[9001:].any()


def test_triton_works_here():
    pytest.importorskip("triton")
    rules._device_halves.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rules._device_halves("cuda") is not None
