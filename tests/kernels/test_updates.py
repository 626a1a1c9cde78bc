"""`update`: the native library against the torch reference and against torch.optim, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.halves import assert_halves, every_lower_half
from zerostd.kernels import Adagrad, Adam, Rule, Sgd, Split, join, native, reference, split, update
from zerostd.kernels.rules import UpdateArguments

SIZES = [0, 1, 15, 17, 1000, 100_003]
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.int16: torch.int16}
STREAMED = (1 << 20) + 300  # elements; long enough to be written around the cache

ADAM = Adam(1e-3, 0.0, False, beta1=0.9, beta2=0.95, eps=1e-8, decoupled=True, step=3)
SGD = Sgd(0.1, 0.0, False, momentum=0.9, dampening=0.0, nesterov=False, is_first=False)
ADAGRAD = Adagrad(0.01, 0.0, False, lr_decay=0.0, eps=1e-10, step=3)
RULES = {
    "Adam": ADAM,
    "AdamW": replace(ADAM, weight_decay=0.1),
    "Adam coupled": replace(ADAM, weight_decay=0.1, decoupled=False, maximize=True),
    "Adam from the gradient": replace(ADAM, beta1=0.3, step=1),
    "Adam exact": replace(ADAM, exact_root=True),
    "SGD": replace(SGD, momentum=0.0, weight_decay=0.01),
    "SGD first": replace(SGD, is_first=True, dampening=0.5, maximize=True),
    "SGD momentum": replace(SGD, dampening=0.5, weight_decay=0.01),
    "SGD Nesterov": replace(SGD, nesterov=True),
    "Adagrad": ADAGRAD,
    "Adagrad exact": replace(ADAGRAD, exact_root=True),
    "Adagrad decay": replace(ADAGRAD, lr_decay=0.1, weight_decay=0.01, maximize=True),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
each_gradient_dtype = pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library is not built")


def random_bits(dtype: torch.dtype, numel: int, *, seed: int) -> Tensor:
    """Every bit pattern is as likely: denormals, infinities, NaNs, both zeros and numbers that overflow."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(BITS[dtype])
    bits = torch.randint(info.min, info.max + 1, (numel,), generator=generator, dtype=torch.int64)
    return bits.to(BITS[dtype]).view(dtype)


def random_normal(dtype: torch.dtype, numel: int, *, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


each_make = pytest.mark.parametrize("make", [random_normal, random_bits])


def make_arrays(make, rule: Rule, numel: int) -> list[Tensor]:
    master, *states = (make(torch.float32, numel, seed=seed) for seed in range(10, 11 + len(rule.state_names)))
    if make is random_normal and not isinstance(rule, Sgd):
        states[-1].abs_()  # a sum of squares
    return [master, *states]


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    """Equal bit patterns, but a NaN only has to be a NaN."""
    assert a.dtype == b.dtype
    numbers = torch.ones(a.shape, dtype=torch.bool)
    if a.is_floating_point():
        assert torch.equal(a.isnan(), b.isnan())
        numbers = ~a.isnan()
    assert torch.equal(a[numbers].view(BITS[a.dtype]), b[numbers].view(BITS[b.dtype]))


def assert_all_same(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert_same_bits(a, b)


def clones(arrays: list[Tensor]) -> list[Tensor]:
    return [array.clone() for array in arrays]


def update_reference(rule, gradient, source, target=None, *, factor=1.0, weight=None) -> None:
    target = source if target is None else target
    reference.update(UpdateArguments(rule, gradient, factor, tuple(source), tuple(target), weight))


@each_make
@each_rule
@each_gradient_dtype
def test_native_and_reference_give_the_same_bits(make, rule, gradient_dtype) -> None:
    for numel, num_threads in ((size, threads) for size in SIZES for threads in (1, 3)):
        gradient = make(gradient_dtype, numel, seed=1)
        source = make_arrays(make, rule, numel)
        theirs = clones(source)
        for factor in (1.0, 0.3):
            update(rule, gradient, source, factor=factor, num_threads=num_threads)
            update_reference(rule, gradient, theirs, factor=factor)
            assert_all_same(source, theirs)


@each_make
@each_rule
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_weight_is_the_new_master_rounded(make, rule, weight_dtype) -> None:
    gradient, source = make(torch.bfloat16, 1001, seed=1), make_arrays(make, rule, 1001)
    weight = torch.empty(1001, dtype=weight_dtype)
    update(rule, gradient, source, weight=weight)
    assert_same_bits(weight, source[0].to(weight_dtype))


@each_rule
@pytest.mark.parametrize("numel", [1000, 100_003, STREAMED])
def test_out_of_place_leaves_the_source_and_gives_the_same_bits(rule, numel) -> None:
    gradient, source = random_normal(torch.bfloat16, numel, seed=1), make_arrays(random_normal, rule, numel)
    before, in_place = clones(source), clones(source)
    target = [torch.empty_like(array) for array in source]
    weights = [torch.empty(numel, dtype=torch.bfloat16) for _ in range(2)]
    update(rule, gradient, source, target, weight=weights[0], num_threads=2)
    update(rule, gradient, in_place, weight=weights[1])
    assert_all_same(source, before)
    assert_all_same([*target, weights[0]], [*in_place, weights[1]])


@each_rule
@each_gradient_dtype
@pytest.mark.parametrize("numel", [1000, STREAMED])
def test_weight_may_land_on_its_gradient(rule, gradient_dtype, numel) -> None:
    gradient, source = random_normal(gradient_dtype, numel, seed=1), make_arrays(random_normal, rule, numel)
    theirs, expected = clones(source), torch.empty_like(gradient)
    update(rule, gradient, theirs, weight=expected)
    update(rule, gradient, source, weight=gradient, num_threads=2)
    assert_all_same([*source, gradient], [*theirs, expected])
    other = gradient.view(torch.float16) if gradient_dtype == torch.bfloat16 else gradient  # same item size
    update(rule, gradient, source, weight=other)


@each_rule
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_views_off_the_alignment_give_the_same_bits(rule, offset) -> None:
    gradient = random_bits(torch.bfloat16, 1001 + offset, seed=1)[offset:]
    source = [random_bits(torch.float32, 1001 + 2 * offset, seed=seed) for seed in range(1 + len(rule.state_names))]
    theirs = [array[offset:-offset].clone() for array in source]
    whole = torch.full((1001 + 2 * offset,), 7.0, dtype=torch.bfloat16)
    edges = [array.clone() for array in source]
    update(rule, gradient, [array[offset:-offset] for array in source], weight=whole[offset:-offset])
    update_reference(rule, gradient, theirs)
    assert_all_same([array[offset:-offset] for array in source], theirs)
    for array, edge in zip([*source, whole], [*edges, torch.full_like(whole, 7.0)], strict=True):
        assert_same_bits(array[:offset], edge[:offset])  # nothing beyond the ends was touched
        assert_same_bits(array[-offset:], edge[-offset:])


@each_make
@each_rule
def test_split_master_gives_the_same_bits(make, rule) -> None:
    for numel in SIZES:
        gradient, (master, *states) = make(torch.bfloat16, numel, seed=1), make_arrays(make, rule, numel)
        halves, state_copies, theirs = split(master), clones(states), split(master)
        update_reference(rule, gradient, [theirs, *clones(states)])
        update(rule, gradient, [halves, *state_copies], num_threads=3)
        master = join(split(master))
        update(rule, gradient, [master, *states])
        assert_all_same([join(halves), *state_copies], [join(split(master)), *states])
        assert_all_same(halves, split(master))
        assert_all_same(halves, theirs)


def test_high_half_may_land_on_the_gradient() -> None:
    gradient, (master, *states) = random_normal(torch.bfloat16, 1000, seed=1), make_arrays(random_normal, ADAM, 1000)
    source = split(master)
    expected = Split(torch.empty_like(source.high), torch.empty_like(source.low))
    update(ADAM, gradient, [source, *states], [expected, *clones(states)])
    low = torch.empty_like(source.low)
    update(ADAM, gradient, [source, *states], [Split(gradient, low), *clones(states)])
    assert_all_same([gradient, low], expected)


def test_halves_are_rounded_as_torch_rounds_and_join_to_the_number() -> None:
    numbers = every_lower_half()
    assert_halves(split(numbers), numbers)
    assert_all_same(split(join(split(numbers))), split(numbers))


def test_every_instruction_set_splits_every_lower_half_alike(each_level) -> None:
    """A master of zero that moves by the gradient is the gradient afterwards."""
    library = native.load()
    assert library is not None
    numbers = every_lower_half()
    move = replace(SGD, lr=-1.0, momentum=0.0)
    for level in [*each_level, 0]:
        assert library.zs_limit_instructions(level) == level
        halves = split(torch.full_like(numbers, -0.0))
        update(move, numbers, [halves])
        assert_halves(halves, numbers)
        update(move, torch.full_like(numbers, -0.0), [halves])
        assert_halves(halves, numbers)  # read and written again


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
    "AdamW without decay": (torch.optim.AdamW, {"weight_decay": 0.0, "maximize": True, "betas": (0.4, 0.999)}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.01, "eps": 1e-6}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "SGD Nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.01}),
    "Adagrad maximize": (torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "eps": 1e-6, "maximize": True}),
}
NAMES = {"exp_avg": 0.0, "exp_avg_sq": 0.0, "momentum_buffer": 0.0, "sum": 0.0}


def rule_of(optimizer: torch.optim.Optimizer, step: int) -> Rule:
    group = optimizer.param_groups[0]
    same = {name: group[name] for name in ("lr", "weight_decay", "maximize")}
    match optimizer:
        case torch.optim.SGD():
            return Sgd(**same, **{n: group[n] for n in ("momentum", "dampening", "nesterov")}, is_first=step == 1)
        case torch.optim.Adagrad():
            return Adagrad(**same, lr_decay=group["lr_decay"], eps=group["eps"], step=step)
    beta1, beta2 = group["betas"]
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    return Adam(**same, beta1=beta1, beta2=beta2, eps=group["eps"], decoupled=decoupled, step=step)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("numel", [13, 50_021])
@each_gradient_dtype
def test_ten_steps_give_the_bits_of_torch_optim(name, numel, gradient_dtype) -> None:
    make_optimizer, options = OPTIMIZERS[name]
    parameter = torch.nn.Parameter(random_normal(torch.float32, numel, seed=0))
    optimizer = make_optimizer([parameter], **options, foreach=False)
    first = rule_of(optimizer, 1)
    start = options.get("initial_accumulator_value", 0.0)
    arrays = [parameter.detach().clone(), *(torch.full((numel,), start) for _ in first.state_names)]
    for step in range(1, 11):
        gradient = random_normal(gradient_dtype, numel, seed=step)
        parameter.grad = gradient.float() if step % 2 else gradient.float() * 0.37
        optimizer.step()
        update(rule_of(optimizer, step), gradient, arrays, factor=1.0 if step % 2 else 0.37, num_threads=1 + step % 3)
        assert_same_bits(arrays[0], parameter.detach())
    states = [optimizer.state[parameter].get(state) for state in NAMES]
    assert_all_same(arrays[1:], [state for state in states if state is not None])


@pytest.fixture
def each_level() -> Iterator[range]:
    library = native.load()
    assert library is not None
    yield range(library.zs_limit_instructions(9), 0, -1)
    library.zs_limit_instructions(9)


@each_rule
def test_every_instruction_set_with_fma_gives_the_same_bits(rule, each_level) -> None:
    library = native.load()
    assert library is not None
    gradient, source = random_bits(torch.float16, 5003, seed=1), make_arrays(random_bits, rule, 5003)
    theirs = clones(source)
    update_reference(rule, gradient, theirs, factor=0.3)
    for level in each_level:
        assert library.zs_limit_instructions(level) == level
        ours, weight = clones(source), torch.empty(5003, dtype=torch.bfloat16)
        update(rule, gradient, ours, factor=0.3, weight=weight)
        assert_all_same([*ours, weight], [*theirs, theirs[0].bfloat16()])


BASELINE = """
import torch
import test_updates as t
assert t.native.load().zs_limit_instructions(0) == 0
torch.set_num_threads(1)
t.SIZES = [17, 5003]
for rule in t.RULES.values():
    for make in (t.random_normal, t.random_bits):
        t.test_native_and_reference_give_the_same_bits(make, rule, torch.float16)
        t.test_split_master_gives_the_same_bits(make, rule)
        t.test_weight_is_the_new_master_rounded(make, rule, torch.float16)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ATEN_CPU_CAPABILITY is for x86")
def test_without_fma_the_bits_are_those_of_torch_without_fma() -> None:
    here = Path(__file__)
    places = [here.parent, here.parents[1], Path(native.__file__).parents[2], os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(map(str, places))
    environment = os.environ | {"PYTHONPATH": path, "ATEN_CPU_CAPABILITY": "default"}
    subprocess.run([sys.executable, "-c", BASELINE], check=True, timeout=120, env=environment)


def test_result_does_not_depend_on_the_thread_when_denormals_are_flushed() -> None:
    gradient, source = torch.full((100_003,), 1e-39), [torch.full((100_003,), 1e-39) for _ in range(3)]
    theirs, three = clones(source), clones(source)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        update(ADAM, gradient, source)
        update(ADAM, gradient, three, num_threads=3)
        torch.set_num_threads(1)
        update_reference(ADAM, gradient, theirs)
    finally:
        torch.set_flush_denormal(False)
    assert_all_same(source, three)
    assert_all_same(source, theirs)


def test_strided_tensors_are_served_by_the_reference() -> None:
    gradient, source = random_normal(torch.float32, 100, seed=1), make_arrays(random_normal, ADAM, 100)
    strided = [array.repeat_interleave(2)[::2] for array in source]
    update(ADAM, gradient, strided)
    update(ADAM, gradient, source)
    assert_all_same(strided, source)


def test_writes_are_seen_by_autograd() -> None:
    parameter, weight = torch.ones(3, requires_grad=True), torch.ones(3)
    product = (parameter * weight).sum()
    update(replace(SGD, momentum=0.0), torch.ones(3), [torch.ones(3)], weight=weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def ones(dtype: torch.dtype = torch.float32, numel: int = 8) -> Tensor:
    return torch.ones(numel, dtype=dtype)


SHARED = ones(numel=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient": ones(torch.float64)}, r"gradient is torch\.float64"),
        ({"weight": ones(torch.int32)}, r"weight is torch\.int32"),
        ({"source": [ones()]}, "source has 1 arrays"),
        ({"source": [ones(), ones(), ones(torch.bfloat16)]}, r"source\[2\] is torch\.bfloat16"),
        ({"source": [ones(), split(ones()), ones()]}, "only a master can be split"),
        ({"target": [split(ones()), ones(), ones()]}, "both be split"),
        ({"source": [split(ones()), ones(), ones()], "weight": ones()}, "weight must be None"),
        ({"gradient": ones(numel=7)}, "must agree"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"source": [SHARED[:8], ones(), ones()], "weight": SHARED[4:12]}, "overlaps"),
        ({"source": [SHARED[:8], SHARED[8:], ones()], "target": [SHARED[8:], ones(), ones()]}, "overlaps"),
        ({"gradient": SHARED[:8], "weight": SHARED[1:9]}, "overlaps"),
        ({"gradient": SHARED[:4].view(torch.bfloat16), "weight": SHARED[:8]}, "overlaps"),
        ({"gradient": SHARED[:8], "target": [SHARED[:8], ones(), ones()]}, "overlaps"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message) -> None:
    arguments = {"rule": ADAM, "gradient": ones(), "source": [ones(), ones(), ones()]} | change
    with pytest.raises(ValueError, match=message):
        update(**arguments)


def test_abi_refuses_steps_that_do_not_fit() -> None:
    library = native.load()
    assert library is not None
    assert library.zs_update(native.StepArgument(rule=3, num_threads=1)) == 1
    assert library.zs_update(native.StepArgument(momentum=1, num_threads=1)) == 1  # Adam has none
    assert library.zs_update(native.StepArgument(num_threads=1)) == 0
