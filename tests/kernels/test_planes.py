"""Planes of bytes: the library and the torch reference write the same ones, and numbers come back bit by bit."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from zerostd.kernels import join_planes, native, split_planes


def planes_of(values: torch.Tensor, item_bytes: int) -> list[torch.Tensor]:
    planes = [torch.empty(len(values) // item_bytes, dtype=torch.uint8) for _ in range(item_bytes)]
    split_planes(values, planes)
    return planes


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("count", [0, 1, 31, 1000])
def test_library_and_reference_agree_and_give_numbers_back(item_bytes: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(0, 256, (item_bytes * count,), dtype=torch.uint8, generator=generator)
    planes = planes_of(values, item_bytes)
    joined = torch.empty_like(values)
    join_planes(planes, joined)
    assert torch.equal(joined, values)
    with mock.patch.object(native, "serves", return_value=False):
        for ours, theirs in zip(planes, planes_of(values, item_bytes), strict=True):
            assert torch.equal(ours, theirs)
        join_planes(planes, joined.zero_())
    assert torch.equal(joined, values)


@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, 127), (torch.float32, 127)])
def test_first_plane_is_the_exponent_and_the_last_bit_is_the_sign(dtype: torch.dtype, bias: int) -> None:
    values = torch.tensor([1.0, -1.0, 4.0, 0.0, -0.375], dtype=dtype)
    first, *_, last = planes_of(values.view(torch.uint8), dtype.itemsize)
    assert first.tolist() == [bias, bias, bias + 2, 0, bias - 2]
    assert (last & 1).tolist() == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("values", "planes", "message"),
    [
        (torch.zeros(6, dtype=torch.uint8), [torch.zeros(2, dtype=torch.uint8)] * 3, "3 planes"),
        (torch.zeros(6, dtype=torch.uint8), [torch.zeros(2, dtype=torch.uint8)] * 2, "planes of 3, not 2"),
        (torch.zeros(4), [torch.zeros(2, dtype=torch.uint8)] * 2, "torch.uint8"),
    ],
)
def test_what_does_not_fit_is_refused(values: torch.Tensor, planes: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_planes(values, planes)
    with pytest.raises(ValueError, match=message):
        join_planes(planes, values)
