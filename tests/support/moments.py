"""Numbers of all sizes, coded states made of them, and how to tell that two have the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from zerostd.kernels import MOMENT_CODECS, Moment, Split, encode_moments, split
from zerostd.kernels.moments import BLOCK, INT8_AVERAGE

Arrays = tuple[Tensor | Split, ...]


def numbers(numel: int, *, seed: int, any_bits: bool = False) -> Tensor:
    """Normal numbers of all sizes; with `any_bits` some that are NaN, infinite or subnormal."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-28, 4, numel // BLOCK + 1).repeat_interleave(BLOCK)[:numel]
    values = torch.randn(numel, generator=generator) * sizes
    if any_bits:
        bits = torch.randint(-(2**31), 2**31 - 1, (numel,), generator=generator).to(torch.int32).view(torch.float32)
        values = torch.where(torch.rand(numel, generator=generator) < 5e-4, bits, values)
    return values


def state(values: Tensor, moment: Moment) -> Tensor:
    """The codes of a state."""
    coded = torch.empty(moment.num_elements(values.numel()), dtype=moment.dtype, device=values.device)
    encode_moments(values, moment, coded)
    return coded


def arrays(numel: int, codec: str, *, is_split: bool, any_bits: bool = False) -> Arrays:
    """A master and the states of Adam."""
    master, average, square = (numbers(numel, seed=seed, any_bits=any_bits) for seed in (2, 3, 4))
    states = map(state, (average * 0.1, square.square()), MOMENT_CODECS[codec])
    return (split(master) if is_split else master, *states)


def assert_same_arrays(ours: tuple, theirs: tuple, label: str) -> None:
    """Equal bits, but a NaN only has to be a NaN."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        pairs = zip(a, b, strict=True) if isinstance(a, Split) else [(a, b)]
        for mine, other in (pair for pair in pairs if pair[0] is not None):
            assert _same(mine.cpu(), other.cpu()), f"{label}: array {index}, {mine.dtype}"


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype == torch.uint8:
        a, b = (records.view(-1, INT8_AVERAGE.record) for records in (a, b))
        scales = [records[:, BLOCK:].contiguous().view(torch.float32) for records in (a, b)]
        return torch.equal(a[:, :BLOCK], b[:, :BLOCK]) and _same(*scales)
    if a.is_floating_point():
        here = ~a.isnan()
        return torch.equal(here, ~b.isnan()) and torch.equal(a[here].view(torch.uint8), b[here].view(torch.uint8))
    return torch.equal(a, b)
