"""Moments as codes of 8 bits: the native library and torch, bit for bit, and both against what the codes mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.moments import arrays, assert_same_arrays, numbers, state
from zerostd.kernels import Adam, Moment, Sgd, Split, decode_moments, encode_moments, moments, native, update
from zerostd.kernels.moments import BLOCK, RECORD
from zerostd.kernels.rules import UpdateArguments

ADAM = Adam(1e-3, 0.0, False, beta1=0.9, beta2=0.95, eps=1e-8, decoupled=True, step=3)
RULES = {
    "AdamW": replace(ADAM, weight_decay=0.1),
    "Adam": replace(ADAM, weight_decay=0.1, decoupled=False, maximize=True, step=400),
    "no decay, no eps": replace(ADAM, eps=0.0, beta1=0.0, step=1),
}
SIZES = [0, 1, 63, 64, 65, 1000, 100_003]
needs_native = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library is not built")
each_moment = pytest.mark.parametrize("moment", Moment)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def instructions() -> Iterator[list[int]]:
    """What the processor has, from the most down."""
    library = native.load()
    assert library is not None
    yield list(range(library.zs_limit_instructions(9), -1, -1))
    library.zs_limit_instructions(9)


@needs_native
@each_dtype
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_native_and_torch_give_the_same_bits(rule: Adam, dtype: torch.dtype, instructions: list[int]) -> None:
    for level in instructions:
        native.load().zs_limit_instructions(level)  # type: ignore[union-attr]
        for numel, is_split, any_bits in ((size, s, b) for size in SIZES for s in (True, False) for b in (True, False)):
            gradient = numbers(numel, seed=1, any_bits=any_bits).to(dtype)
            ours = arrays(numel, is_split=is_split, any_bits=any_bits)
            theirs = arrays(numel, is_split=is_split, any_bits=any_bits)
            weights = [None if is_split else torch.empty(numel, dtype=torch.float16) for _ in range(2)]
            for factor in (1.0, 0.3):
                update(rule, gradient, ours, factor=factor, weight=weights[0], num_threads=3)
                moments.update(UpdateArguments(rule, gradient, factor, theirs, theirs, weights[1]))
            assert_same_arrays((*ours, *weights[:1]), (*theirs, *weights[1:]), f"level {level}, {numel} numbers")


@needs_native
@pytest.mark.parametrize("is_split", [True, False])
def test_an_update_beside_its_source_leaves_it(is_split: bool) -> None:
    numel = (1 << 20) + 100  # long enough to be written around the cache
    gradient = numbers(numel, seed=1).bfloat16()
    source, before, target = (arrays(numel, is_split=is_split) for _ in range(3))
    update(RULES["AdamW"], gradient, source, target, num_threads=2)
    assert_same_arrays(source, before, "source")
    update(RULES["AdamW"], gradient, source, num_threads=2)
    assert_same_arrays(target, source, "target")


@each_moment
def test_what_is_decoded_has_the_same_codes(moment: Moment) -> None:
    values = numbers(3000 * BLOCK + 7, seed=3, any_bits=True)
    coded = state(values if moment is Moment.AVERAGE else values.square(), moment)
    again = state(decode_moments(coded, moment, values.numel()), moment)
    assert torch.equal(coded, again)


def test_a_block_has_a_few_percent_of_error_at_most_and_its_largest_number_none() -> None:
    values = torch.randn(1000, BLOCK, generator=torch.Generator().manual_seed(0)).flatten()
    averages = decode_moments(state(values, Moment.AVERAGE), Moment.AVERAGE, values.numel()).view(-1, BLOCK)
    largest = values.view(-1, BLOCK).abs().amax(1, keepdim=True)
    parts = values.view(-1, BLOCK).abs() / largest
    step = (1 + parts) ** 2 / 254  # of softsign, between two codes
    assert (((averages - values.view(-1, BLOCK)).abs() / largest) <= 0.51 * step).all()
    squares = values.square()
    decoded = decode_moments(state(squares, Moment.SQUARES), Moment.SQUARES, values.numel())
    errors = (decoded.sqrt() - values.abs()).view(-1, BLOCK).abs() / largest * 255
    assert (errors <= torch.where(parts < 0.5 / 255, 1.001, 0.501)).all()
    at_largest = values.view(-1, BLOCK).abs() == largest
    assert torch.equal(averages[at_largest], values.view(-1, BLOCK)[at_largest])


def test_a_square_above_zero_never_becomes_zero() -> None:
    squares = torch.zeros(2 * BLOCK)
    squares[0], squares[1], squares[BLOCK] = 1.0, 1e-12, 1e-30
    decoded = decode_moments(state(squares, Moment.SQUARES), Moment.SQUARES, squares.numel())
    assert decoded[0] == 1.0 and 0 < decoded[1] < 1e-4 and decoded[BLOCK] > 0
    assert (decoded[2:BLOCK] == 0).all()


@each_moment
def test_a_block_with_a_number_that_is_not_finite_is_nan_and_no_other(moment: Moment) -> None:
    for bad in (float("nan"), float("inf")):
        values = torch.ones(3 * BLOCK)
        values[BLOCK + 5] = bad
        decoded = decode_moments(state(values, moment), moment, values.numel()).view(3, BLOCK)
        assert decoded[1].isnan().all() and torch.equal(decoded[::2], torch.ones(2, BLOCK))


def test_zeros_are_zero_bytes() -> None:
    for moment in Moment:
        coded = torch.full((Moment.num_bytes(100),), 7, dtype=torch.uint8)
        encode_moments(torch.zeros(100), moment, coded)
        assert not coded.any() and coded.numel() == 2 * RECORD


def refused(words: str, rule: object, source: tuple[Tensor | Split, ...], gradient: Tensor) -> None:
    with pytest.raises(ValueError, match=words):
        update(rule, gradient, source)  # type: ignore[arg-type]


def test_arguments_that_do_not_fit_are_refused() -> None:
    gradient = torch.zeros(100)
    master, average, square = arrays(100, is_split=False)
    sgd = Sgd(0.1, 0.0, False, momentum=0.9, dampening=0.0, nesterov=False, is_first=False)
    refused("coded states are Adam's", sgd, (master, average), gradient)
    refused("states all fp32 or coded", ADAM, (master, average, torch.zeros(100)), gradient)
    refused("they must agree", ADAM, (master, average[:-RECORD], square), gradient)  # type: ignore[index]
