"""Moments in fewer bytes: the native library and torch, bit for bit, and both against what the codes mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.moments import arrays, assert_same_arrays, numbers, state
from zerostd.kernels import (
    MOMENT_CODECS,
    Adam,
    Moment,
    Sgd,
    Split,
    decode_moments,
    encode_moments,
    moments,
    native,
    update,
)
from zerostd.kernels.moments import BF16, BLOCK, INT8_AVERAGE, INT8_SQUARES
from zerostd.kernels.rules import UpdateArguments

ADAM = Adam(1e-3, 0.0, False, beta1=0.9, beta2=0.95, eps=1e-8, decoupled=True, step=3)
RULES = {
    "AdamW": replace(ADAM, weight_decay=0.1),
    "Adam": replace(ADAM, weight_decay=0.1, decoupled=False, maximize=True, step=400),
    "no decay, no eps": replace(ADAM, eps=0.0, beta1=0.0, step=1),
}
SIZES = [0, 1, 63, 64, 65, 1000, 100_003]
needs_native = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library is not built")
each_codec = pytest.mark.parametrize("codec", MOMENT_CODECS)
each_moment = pytest.mark.parametrize("moment", (INT8_AVERAGE, INT8_SQUARES, BF16), ids=lambda moment: moment.name)
each_int8 = pytest.mark.parametrize("moment", MOMENT_CODECS["int8"], ids=lambda moment: moment.name)
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
@each_codec
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_native_and_torch_give_the_same_bits(
    rule: Adam, codec: str, dtype: torch.dtype, instructions: list[int]
) -> None:
    for level in instructions:
        native.load().zs_limit_instructions(level)  # type: ignore[union-attr]
        for numel, is_split, any_bits in ((size, s, b) for size in SIZES for s in (True, False) for b in (True, False)):
            gradient = numbers(numel, seed=1, any_bits=any_bits).to(dtype)
            ours = arrays(numel, codec, is_split=is_split, any_bits=any_bits)
            theirs = arrays(numel, codec, is_split=is_split, any_bits=any_bits)
            weights = [None if is_split else torch.empty(numel, dtype=torch.float16) for _ in range(2)]
            for factor in (1.0, 0.3):
                update(rule, gradient, ours, factor=factor, weight=weights[0], num_threads=3)
                moments.update(UpdateArguments(rule, gradient, factor, theirs, theirs, weights[1]))
            assert_same_arrays((*ours, *weights[:1]), (*theirs, *weights[1:]), f"level {level}, {numel} numbers")


@needs_native
@each_codec
@pytest.mark.parametrize("is_split", [True, False])
def test_an_update_beside_its_source_leaves_it(is_split: bool, codec: str) -> None:
    numel = (1 << 20) + 100  # long enough to be written around the cache
    gradient = numbers(numel, seed=1).bfloat16()
    source, before, target = (arrays(numel, codec, is_split=is_split) for _ in range(3))
    update(RULES["AdamW"], gradient, source, target, num_threads=2)
    assert_same_arrays(source, before, "source")
    update(RULES["AdamW"], gradient, source, num_threads=2)
    assert_same_arrays(target, source, "target")


@each_codec
def test_the_bits_do_not_depend_on_where_a_block_lies(codec: str) -> None:
    numel = 10 * BLOCK
    block = MOMENT_CODECS[codec][0].block
    gradient = numbers(numel, seed=1)
    whole, cut = (arrays(numel, codec, is_split=False) for _ in range(2))
    update(RULES["AdamW"], gradient, whole)
    start = 0
    for stop in (3 * block, 7 * block, numel):
        records = slice(*(MOMENT_CODECS[codec][0].num_elements(end) for end in (start, stop)))
        update(
            RULES["AdamW"],
            gradient[start:stop],
            (cut[0][start:stop], *(column[records] for column in cut[1:])),  # type: ignore[arg-type, index]
        )
        start = stop
    assert_same_arrays(cut, whole, "in parts")


@each_moment
def test_what_is_decoded_has_the_same_codes(moment: Moment) -> None:
    values = numbers(3000 * BLOCK + 7, seed=3, any_bits=True)
    coded = state(values.square() if moment is INT8_SQUARES else values, moment)
    again = state(decode_moments(coded, moment, values.numel()), moment)
    assert torch.equal(coded.view(torch.uint8), again.view(torch.uint8))


def test_a_block_has_a_few_percent_of_error_at_most_and_its_largest_number_none() -> None:
    values = torch.randn(1000, BLOCK, generator=torch.Generator().manual_seed(0)).flatten()
    averages = decode_moments(state(values, INT8_AVERAGE), INT8_AVERAGE, values.numel()).view(-1, BLOCK)
    largest = values.view(-1, BLOCK).abs().amax(1, keepdim=True)
    parts = values.view(-1, BLOCK).abs() / largest
    step = (1 + parts) ** 2 / 254  # of softsign, between two codes
    assert (((averages - values.view(-1, BLOCK)).abs() / largest) <= 0.51 * step).all()
    squares = values.square()
    decoded = decode_moments(state(squares, INT8_SQUARES), INT8_SQUARES, values.numel())
    errors = (decoded.sqrt() - values.abs()).view(-1, BLOCK).abs() / largest * 255
    assert (errors <= torch.where(parts < 0.5 / 255, 1.001, 0.501)).all()
    at_largest = values.view(-1, BLOCK).abs() == largest
    assert torch.equal(averages[at_largest], values.view(-1, BLOCK)[at_largest])


def test_a_square_above_zero_never_becomes_zero() -> None:
    squares = torch.zeros(2 * BLOCK)
    squares[0], squares[1], squares[BLOCK] = 1.0, 1e-12, 1e-30
    decoded = decode_moments(state(squares, INT8_SQUARES), INT8_SQUARES, squares.numel())
    assert decoded[0] == 1.0 and 0 < decoded[1] < 1e-4 and decoded[BLOCK] > 0
    assert (decoded[2:BLOCK] == 0).all()


@each_int8
def test_a_block_with_a_number_that_is_not_finite_is_nan_and_no_other(moment: Moment) -> None:
    for bad in (float("nan"), float("inf")):
        values = torch.ones(3 * BLOCK)
        values[BLOCK + 5] = bad
        decoded = decode_moments(state(values, moment), moment, values.numel()).view(3, BLOCK)
        assert decoded[1].isnan().all() and torch.equal(decoded[::2], torch.ones(2, BLOCK))


@each_moment
def test_zeros_are_zero_bytes(moment: Moment) -> None:
    coded = torch.full((moment.num_bytes(100),), 7, dtype=torch.uint8).view(moment.dtype)
    encode_moments(torch.zeros(100), moment, coded)
    assert not coded.any() and coded.nbytes == {torch.uint8: 2 * 68, torch.bfloat16: 200}[moment.dtype]


# -- the dither --


def test_bf16_numbers_are_rounded_up_as_often_as_their_lower_half_says() -> None:
    numel = 1 << 20
    zeros = [torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2)]
    gradient = torch.rand(numel, generator=torch.Generator().manual_seed(0)) + 1.0
    update(RULES["no decay, no eps"], gradient, (torch.zeros(numel), *zeros))
    for exact, rounded in zip((gradient, gradient.square() * 0.05), zeros, strict=True):  # beta1 is 0, beta2 0.95
        unit = torch.frexp(exact).exponent.sub(8).exp2()  # of bf16
        part = torch.remainder(exact, unit) / unit
        went_up = rounded.float() > exact - part * unit
        assert ((rounded.float() - exact).abs() < unit).all()
        for low in torch.arange(8) / 8:
            chosen = (part >= low) & (part < low + 1 / 8)
            expected = part[chosen].mean()
            deviation = (expected * (1 - expected) / chosen.sum()).sqrt()
            assert abs(went_up[chosen].float().mean() - expected) < 5 * deviation + 1e-5


@each_int8
def test_int8_codes_are_rounded_up_as_often_as_their_fraction_says(moment: Moment) -> None:
    numel = 1 << 20
    values = torch.rand(numel, generator=torch.Generator().manual_seed(0)) + 0.01
    values[::BLOCK] = 2.0  # the scale of each block
    gradient = values if moment is INT8_AVERAGE else values * 0.05**-0.5  # beta1 is 0, beta2 0.95
    columns = [state(torch.zeros(numel), each) for each in MOMENT_CODECS["int8"]]
    update(RULES["no decay, no eps"], gradient, (torch.zeros(numel), *columns))
    codes = columns[moment is INT8_SQUARES].view(-1, 68)[:, :BLOCK].flatten()
    exact = values / (2.0 + values) * 254 if moment is INT8_AVERAGE else values * 127.5
    assert (codes.view(-1, BLOCK)[:, 0] == (127 if moment is INT8_AVERAGE else 255)).all()
    assert ((codes - exact).abs() < 1.001).all()
    part = exact.frac()
    for low in torch.arange(8) / 8:
        chosen = (part >= low + 0.001) & (part < low + 1 / 8 - 0.001)
        expected = part[chosen].mean()
        deviation = (expected * (1 - expected) / chosen.sum()).sqrt()
        assert abs((codes[chosen] > exact[chosen]).float().mean() - expected) < 5 * deviation + 1e-4


def stepped(arrays_of: list[Tensor], num_steps: int, *, varies: bool, rounds: bool = False) -> list[Tensor]:
    """Both moments after these steps; `rounds` rounds them to nearest bf16 after each."""
    generator = torch.Generator().manual_seed(1)
    gradient = torch.full_like(arrays_of[0], 0.37)
    for number in range(1, num_steps + 1):
        if varies:
            gradient = torch.randn(gradient.numel(), generator=generator)
        rule = replace(ADAM, beta2=0.999, step=number, exact_root=True)
        update(rule, gradient.bfloat16(), arrays_of)
        for state_ in arrays_of[1:] if rounds else ():
            state_.copy_(state_.bfloat16())
    return arrays_of[1:]


@each_codec
@pytest.mark.parametrize("varies", [True, False])
def test_dithered_moments_follow_fp32_where_rounded_ones_stand_still(varies: bool, codec: str) -> None:
    numel = 2000
    begin = [torch.zeros(numel), torch.zeros(numel), torch.full((numel,), 4.0)]  # the gradients have become smaller
    _, exact = stepped([array.clone() for array in begin], 3000, varies=varies)
    _, rounded = stepped([array.clone() for array in begin], 3000, varies=varies, rounds=True)
    columns = [state(array, moment) for array, moment in zip(begin[1:], MOMENT_CODECS[codec], strict=True)]
    columns = stepped([begin[0].clone(), *columns], 3000, varies=varies)
    pairs = zip(columns, MOMENT_CODECS[codec], strict=True)
    average, dithered = (decode_moments(column, moment, numel) for column, moment in pairs)
    assert rounded.mean() > 3 * exact.mean(), "rounded to nearest, they stand still"
    ratio = dithered / exact
    if varies:
        assert abs(ratio.mean() - 1) < 0.01 and (ratio - 1).square().mean().sqrt() < 0.08
    else:  # all elements are alike, so this is one walk
        assert (ratio == ratio[0]).all() and abs(ratio[0] - 1) < 0.2
        assert ((average - 0.37).abs() < 0.004).all()


def test_numbers_that_are_not_finite_stay_and_no_other_becomes_one() -> None:
    gradient = torch.ones(200)
    gradient[5], gradient[70], gradient[71] = float("nan"), float("inf"), 1e30
    states = [torch.zeros(200, dtype=torch.bfloat16) for _ in range(2)]
    update(ADAM, gradient, (torch.zeros(200), *states))
    average, square = states
    assert average.isnan().nonzero().flatten().tolist() == square.isnan().nonzero().flatten().tolist() == [5]
    assert average.isinf().nonzero().flatten().tolist() == [70]
    assert square.isinf().nonzero().flatten().tolist() == [70, 71]


# -- refusals --


def refused(words: str, rule: object, source: tuple[Tensor | Split, ...], gradient: Tensor) -> None:
    with pytest.raises(ValueError, match=words):
        update(rule, gradient, source)  # type: ignore[arg-type]


def test_arguments_that_do_not_fit_are_refused() -> None:
    gradient = torch.zeros(100)
    master, average, square = arrays(100, "int8", is_split=False)
    *_, square_bf16 = arrays(100, "bf16", is_split=False)
    sgd = Sgd(0.1, 0.0, False, momentum=0.9, dampening=0.0, nesterov=False, is_first=False)
    refused("coded states are Adam's", sgd, (master, average), gradient)
    refused("states all fp32 or coded", ADAM, (master, average, torch.zeros(100)), gradient)
    refused("states all fp32 or coded", ADAM, (master, average, square_bf16), gradient)
    refused("states all fp32 or coded", ADAM, (master, torch.zeros(100), square_bf16), gradient)
    refused("they must agree", ADAM, (master, average[:-68], square), gradient)  # type: ignore[index]
    refused("they must agree", ADAM, (master, square_bf16, square_bf16[:-1]), gradient)  # type: ignore[index, arg-type]
