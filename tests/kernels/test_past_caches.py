"""A copy past the caches is a copy, wherever it begins and ends, and touches nothing else."""

from __future__ import annotations

import random

import pytest
import torch

from zerostd.kernels import copy_past_caches, native

GUARD = 173  # around the target


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(count)), dtype=torch.uint8)


@pytest.fixture(params=["native", "torch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    elif not native.LIBRARY.exists():
        pytest.skip("the native library is not built")


@pytest.mark.usefixtures("_way")
def test_any_place_and_length() -> None:
    source = random_bytes(5000, 1)
    draw = random.Random(2)
    lengths = [*range(200), *(draw.randrange(5000) for _ in range(200))]
    for length in lengths:
        start, place = draw.randrange(5001 - length), draw.randrange(130)
        target = torch.full((5300,), GUARD, dtype=torch.uint8)
        copy_past_caches(source[start : start + length], target[place : place + length])
        expected = torch.full((5300,), GUARD, dtype=torch.uint8)
        expected[place : place + length] = source[start : start + length]
        assert torch.equal(target, expected), (length, start, place)


@pytest.mark.usefixtures("_way")
def test_other_dtypes_and_shapes() -> None:
    source = torch.randn(7, 33).to(torch.bfloat16)
    target = torch.empty(33 * 7, dtype=torch.bfloat16)
    copy_past_caches(source.view(-1).view(torch.uint8), target)
    assert torch.equal(target, source.flatten())


@pytest.mark.usefixtures("_way")
def test_onto_itself() -> None:
    source = random_bytes(4096, 3)
    before = source.clone()
    copy_past_caches(source, source)
    assert torch.equal(source, before)


def test_what_does_not_fit_is_refused() -> None:
    source = torch.zeros(8)
    with pytest.raises(ValueError, match="32 bytes do not go into 28"):
        copy_past_caches(source, torch.zeros(7))
    with pytest.raises(ValueError, match="contiguous"):
        copy_past_caches(source, torch.zeros(16)[::2])
