"""`empty_init()`: nothing has memory, and later everything has the values that the code gave it."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable

import psutil
import pytest
import torch
from torch import nn

from zerostd.errors import NotSupportedError, PrepareError
from zerostd.parameters.deferred import draw_seeds, empty_init, is_deferred, make_real

CPU = torch.device("cpu")
LARGE = 20_000  # float32 elements that are over the limit up to which constants are made at once


def real(tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return make_real("it", tensor, seed=seed, device=CPU)


def all_real(module: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    named = dict(module.named_parameters())
    seeds = draw_seeds(named.items(), seed=seed)
    return {
        name: make_real(name, tensor, seed=seeds[name], device=CPU) if is_deferred(tensor) else tensor.detach()
        for name, tensor in named.items()
    }


class VisionLike(nn.Module):
    def __init__(self, dim: int = 192) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, 200, dim))
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))
        self.table = nn.Parameter(0.02 * torch.randn(200, dim))
        self.proj = nn.Conv2d(3, dim, 16)
        self.head = nn.Linear(dim, 100)
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.05)
            module.bias.data.zero_()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(200, 300),
    "Bilinear": lambda: nn.Bilinear(20, 30, 40),
    "Embedding": lambda: nn.Embedding(500, 40, padding_idx=3),
    "EmbeddingBag": lambda: nn.EmbeddingBag(500, 40),
    "Conv1d": lambda: nn.Conv1d(30, 40, 3),
    "Conv2d": lambda: nn.Conv2d(30, 40, 3),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(30, 40, 3),
    "BatchNorm2d": lambda: nn.BatchNorm2d(50),
    "GroupNorm": lambda: nn.GroupNorm(5, 50),
    "LayerNorm": lambda: nn.LayerNorm(50),
    "RMSNorm": lambda: nn.RMSNorm(50),
    "PReLU": lambda: nn.PReLU(7),
    "MultiheadAttention": lambda: nn.MultiheadAttention(64, 4),
    "LSTM": lambda: nn.LSTM(30, 40, num_layers=2, bidirectional=True),
    "GRUCell": lambda: nn.GRUCell(30, 40),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(64, 4, 128),
    "Transformer": lambda: nn.Transformer(32, 2, 2, 2, 64),
    "VisionLike": VisionLike,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(40, 50)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(40, 50)),
}


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS.keys())
def test_layer_gets_the_values_that_plain_construction_gives(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    plain = build()
    with empty_init():
        module = build()
    values = all_real(module)
    expected = dict(plain.named_parameters())
    assert values.keys() == expected.keys()
    for name, value in values.items():
        other = expected[name].detach()
        assert (value.shape, value.dtype, value.stride()) == (other.shape, other.dtype, other.stride()), name
        assert not value.is_meta and not value.requires_grad
        if other.unique().numel() == 1:
            assert torch.equal(value, other), name
        elif other.numel() > 1000:
            assert value.std().item() == pytest.approx(other.std().item(), rel=0.1), name
            assert value.mean().item() == pytest.approx(other.mean().item(), abs=0.1 * other.std().item()), name
            assert value.unique().numel() > 100


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS.keys())
def test_buffers_are_real_and_as_in_plain_construction(build: Callable[[], nn.Module]) -> None:
    plain = build()
    with empty_init():
        module = build()
    random = {"parametrizations.weight.0._u", "parametrizations.weight.0._v"}
    assert [name for name, _ in module.named_buffers()] == [name for name, _ in plain.named_buffers()]
    for name, buffer in module.named_buffers():
        assert not buffer.is_meta, name
        assert name in random or torch.equal(buffer, plain.get_buffer(name)), name


def test_parameters_made_with_empty_are_on_meta() -> None:
    with empty_init():
        module = nn.Linear(3, 4)
    assert isinstance(module.weight, nn.Parameter) and module.weight.is_meta and is_deferred(module.weight)
    assert vars(module.weight) == {} and module.weight.requires_grad


INITS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal": nn.init.normal_,
    "uniform": lambda w: nn.init.uniform_(w, -2, 3),
    "kaiming": nn.init.kaiming_uniform_,
    "xavier": nn.init.xavier_normal_,
    "orthogonal": nn.init.orthogonal_,
    "orthogonal, wide": lambda w: nn.init.orthogonal_(w.t()),
    "trunc_normal": nn.init.trunc_normal_,
    "trunc_normal, narrow": lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 1.0, 2.0),
    "by hand": lambda w: w.data.uniform_(-0.9, 0.9).erfinv_().mul_(0.3).add_(0.1).clamp_(-0.5, 0.5),
    "twice": lambda w: nn.init.normal_(nn.init.kaiming_uniform_(w)),
    "rows": lambda w: [row.data.normal_(std=i + 1) for i, row in enumerate(w)],
    "padding": lambda w: (nn.init.normal_(w), w.data[3].fill_(0)),
    "masked": lambda w: (nn.init.normal_(w), w.data.__setitem__(w.data.abs() > 1, 0.0)),
    "norm": lambda w: (nn.init.normal_(w), w.data.div_(w.data.norm(dim=1, keepdim=True))),
    "eye": nn.init.eye_,
    "constant": lambda w: nn.init.constant_(w, 0.3),
    "copy": lambda w: w.data.copy_(torch.arange(w.numel()).view_as(w)),
    "bernoulli": lambda w: w.data.bernoulli_(0.3),
    "svd": lambda w: (nn.init.normal_(w), w.data.copy_(torch.linalg.svd(w.data, full_matrices=False)[0])),
}


@pytest.mark.parametrize("init", INITS.values(), ids=INITS.keys())
def test_single_parameter_equals_plain_construction_under_the_seed(init: Callable[[torch.Tensor], object]) -> None:
    plain = nn.Parameter(torch.empty(30, 20))
    torch.manual_seed(7)
    init(plain)
    with empty_init():
        parameter = nn.Parameter(torch.empty(30, 20))
        init(parameter)
    assert torch.equal(real(parameter, seed=7), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "factory",
    [torch.zeros, torch.ones, torch.rand, torch.randn, lambda *n, **k: torch.full(n, 3, **k), torch.Tensor.new_ones],
)
def test_large_factory_is_deferred_and_equal(factory: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    if factory is torch.Tensor.new_ones:
        build = lambda: torch.zeros(1).new_ones(100, 400, dtype=dtype)  # noqa: E731
    else:
        build = lambda: factory(100, 400, dtype=dtype)  # noqa: E731
    torch.manual_seed(3)
    plain = build()
    with empty_init():
        parameter = nn.Parameter(build())
    assert is_deferred(parameter)
    assert torch.equal(real(parameter, seed=3), plain)


def test_default_dtype_is_the_one_of_the_recording() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with empty_init():
            parameter = nn.Parameter(torch.randn(LARGE))
        torch.manual_seed(0)
        plain = torch.randn(LARGE)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(real(parameter), plain)


def test_hundred_billion_parameters_take_no_memory() -> None:
    gc.collect()
    before, start = psutil.Process().memory_info().rss, time.process_time()
    with empty_init():
        model = nn.Sequential(*(nn.Linear(32768, 32768) for _ in range(94)))
    assert time.process_time() - start < 2
    assert psutil.Process().memory_info().rss - before < 200 << 20
    assert sum(parameter.numel() for parameter in model.parameters()) > 100e9


def test_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    with empty_init():
        module = nn.TransformerEncoderLayer(64, 4)
    assert torch.equal(torch.get_rng_state(), state)
    all_real(module)
    assert torch.equal(torch.get_rng_state(), state)


def test_value_depends_on_seed_only_not_on_what_else_is_made() -> None:
    with empty_init():
        module = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    together = all_real(module)
    seeds = draw_seeds(module.named_parameters(), seed=0)
    for name, parameter in reversed(list(module.named_parameters())):
        assert torch.equal(make_real(name, parameter, seed=seeds[name], device=CPU), together[name])
    assert not torch.equal(together["0.weight"], together["1.weight"])
    assert not torch.equal(together["0.weight"], all_real(module, seed=1)["0.weight"])
    assert module[0].weight.is_meta and is_deferred(module[0].weight)


def test_building_again_gives_the_same_values() -> None:
    values = []
    for _ in range(2):
        with empty_init():
            module = nn.Linear(50, 50)
        values.append(all_real(module)["weight"])
    assert torch.equal(*values)


def test_two_contexts_are_independent() -> None:
    with empty_init():
        one = nn.Linear(50, 50)
    with empty_init():
        two = nn.Linear(50, 50)
    values = all_real(nn.ModuleList([one, two]))
    assert not torch.equal(values["0.weight"], values["1.weight"])
    assert torch.equal(real(one.weight), real(two.weight))  # same records, same seed


def test_second_context_goes_on_where_the_first_ended() -> None:
    with empty_init():
        module = nn.Linear(50, 50)
    with empty_init():
        with torch.no_grad():
            module.weight[0].fill_(1)
        nn.init.ones_(module.bias)
    values = all_real(module)
    assert (values["weight"][0] == 1).all() and values["weight"][1].unique().numel() > 1
    assert (values["bias"] == 1).all()


def test_nested_context_leaves_the_work_to_the_outer() -> None:
    with empty_init():
        with empty_init():
            one = nn.Linear(50, 50)
        two = nn.Linear(50, 50)
    assert all(map(is_deferred, [*one.parameters(), *two.parameters()]))
    assert not is_deferred(torch.empty(3))


def test_copies_have_equal_values() -> None:
    with empty_init():
        student = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
        pair = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student)})
        with torch.no_grad():
            pair["teacher"][1].weight.mul_(2)
    values = all_real(pair)
    assert torch.equal(values["student.0.weight"], values["teacher.0.weight"])
    assert torch.equal(values["student.1.weight"] * 2, values["teacher.1.weight"])
    assert not torch.equal(values["student.0.weight"], values["student.1.weight"])


def test_parameters_on_one_storage_have_equal_values() -> None:
    with empty_init():
        module = nn.ModuleDict({"a": nn.Linear(50, 50), "b": nn.Linear(50, 50), "c": nn.Linear(25, 50, bias=False)})
        module["b"].weight = nn.Parameter(module["a"].weight.data)
        module["c"].weight = nn.Parameter(module["a"].weight.data[:, 25:])
        nn.init.normal_(module["b"].weight)
    values = all_real(module)
    assert torch.equal(values["a.weight"], values["b.weight"])
    assert torch.equal(values["a.weight"][:, 25:], values["c.weight"])
    assert values["c.weight"].untyped_storage().nbytes() == values["c.weight"].nbytes


def test_what_is_computed_from_two_parameters_agrees_with_both() -> None:
    with empty_init():
        down, up, whole = nn.Linear(50, 4, bias=False), nn.Linear(4, 50, bias=False), nn.Linear(50, 50, bias=False)
        with torch.no_grad():
            whole.weight.copy_(up.weight @ down.weight)
    values = all_real(nn.ModuleList([down, up, whole]))
    assert torch.equal(values["2.weight"], values["1.weight"] @ values["0.weight"])


def test_write_after_read_does_not_reach_the_reader() -> None:
    with empty_init():
        source = nn.Parameter(torch.empty(30, 30).fill_(1))
        target = nn.Parameter(torch.empty(30, 30))
        with torch.no_grad():
            target.copy_(source)
            source.fill_(2)
            target.add_(source)
    assert (real(target) == 3).all() and (real(source) == 2).all()


def test_cast_inside_is_recorded_and_cast_outside_is_refused() -> None:
    with empty_init():
        module = nn.Linear(50, 50).to(torch.bfloat16)
        other = nn.Linear(50, 50)
    torch.manual_seed(0)
    assert torch.equal(real(module.weight), nn.Linear(50, 50).weight.to(torch.bfloat16))
    other.to(torch.bfloat16)
    with pytest.raises(PrepareError, match=r"'other\.weight'.*empty_init"):
        make_real("other.weight", other.weight, seed=0, device=CPU)


def test_meta_parameter_without_a_record_is_refused() -> None:
    module = nn.Linear(3, 3, device="meta")
    assert not is_deferred(module.weight)
    with pytest.raises(PrepareError, match=r"'weight'.*empty_init"):
        make_real("weight", module.weight, seed=0, device=CPU)


LATE: dict[str, Callable[[nn.Module], object]] = {
    "init": lambda module: nn.init.zeros_(module.weight),
    "row": lambda module: module.weight.detach()[0].fill_(0),
    "apply": lambda module: module.apply(lambda child: nn.init.normal_(child.weight)),
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE.keys())
def test_initialisation_after_the_context_is_refused(late: Callable[[nn.Module], object]) -> None:
    with empty_init():
        module = nn.Linear(30, 30)
        nn.init.normal_(module.weight)
    real(module.weight)
    late(module)
    with pytest.raises(PrepareError, match=r"'w' was changed after empty_init\(\).*gathered"):
        make_real("w", module.weight, seed=0, device=CPU)
    real(module.bias)


def test_loading_a_state_dict_inside_is_recorded() -> None:
    plain = nn.Linear(300, 300)
    with empty_init():
        module = nn.Linear(300, 300)
        module.load_state_dict(plain.state_dict())
    values = all_real(module)
    assert torch.equal(values["weight"], plain.weight) and torch.equal(values["bias"], plain.bias)


def test_real_tensor_that_changes_after_it_was_read() -> None:
    small, large = torch.ones(10), torch.ones(LARGE)
    with empty_init():
        one, two = nn.Parameter(torch.empty(10)), nn.Parameter(torch.empty(LARGE))
        one.data.copy_(small)
        two.data.copy_(large)
    small.zero_()
    assert (real(one) == 1).all()
    assert (real(two) == 1).all()
    large.zero_()
    with pytest.raises(PrepareError, match="was changed after parameters copied it"):
        real(two)


def test_masks_and_tables_are_real() -> None:
    def masks() -> list[torch.Tensor]:
        mask = torch.empty(77, 77)
        mask.fill_(float("-inf")).triu_(1)
        causal = torch.tril(torch.ones(200, 200)).view(1, 1, 200, 200)
        angles = torch.outer(torch.arange(3000), 1.0 / 10000 ** (torch.arange(0, 32, 2) / 32))
        return [mask, causal, angles.cos(), torch.polar(torch.ones_like(angles), angles), mask[0]]

    expected = masks()
    with empty_init():
        given = masks()
    for one, other in zip(given, expected, strict=True):
        assert not one.is_meta and torch.equal(one, other)


def test_code_that_looks_at_values_sees_them() -> None:
    with empty_init():
        weight = nn.Parameter(torch.empty(40, 40).normal_())
        ones = torch.empty(4).fill_(1)
        assert ones.tolist() == [1, 1, 1, 1] and ones.numpy().sum() == 4 and ones.sum().item() == 4
        assert (ones > 0).all() and torch.equal(ones, torch.ones(4)) and ones.nonzero().shape == (4, 1)
        assert ones[torch.tensor([True, False, True, True])].shape == (3,)
        table = torch.zeros(4)
        table.copy_(ones)
        largest = weight.abs().max().item()
        with torch.no_grad():
            weight.div_(largest)
    assert (table == 1).all() and not table.is_meta
    for seed in (0, 1):
        assert real(weight, seed).abs().max() == 1


def test_deferred_tensor_shows_the_device_it_was_asked_for() -> None:
    with empty_init():
        weight = nn.Linear(3, 3).weight
        assert weight.device == CPU and not weight.is_meta
        assert torch.arange(3, device=weight.device).tolist() == [0, 1, 2]
        assert torch.arange(3, device="meta").tolist() == [0, 1, 2]
        assert copy.copy(torch.ones(2)).to(weight.device).tolist() == [1, 1]
    assert weight.is_meta and weight.device.type == "meta"


def test_own_generator_is_refused() -> None:
    with empty_init(), pytest.raises(NotSupportedError, match=r"torch\.Generator"):
        nn.init.normal_(torch.empty(3), generator=torch.Generator())
    with empty_init(), pytest.raises(NotSupportedError, match=r"torch\.Generator"):
        nn.init.trunc_normal_(torch.empty(3), generator=torch.Generator())


def test_forward_inside_gives_shapes() -> None:
    with empty_init():
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten()).eval()
        with torch.no_grad():
            head = nn.Linear(net(torch.zeros(1, 3, 224, 224)).shape[1], 10)
    assert head.in_features == 8 * 222 * 222
    assert not net[1].running_mean.is_meta


def test_error_inside_leaves_torch_as_it_was() -> None:
    trunc_normal = nn.init._no_grad_trunc_normal_
    with pytest.raises(KeyError), empty_init():
        nn.Linear(3, 3)
        raise KeyError
    assert not torch.empty(3).is_meta and not nn.Linear(3, 3).weight.is_meta
    assert not torch.zeros(LARGE).is_meta
    assert nn.init._no_grad_trunc_normal_ is trunc_normal
    assert not nn.modules.module._global_parameter_registration_hooks


def test_values_may_be_made_inside_the_context() -> None:
    with empty_init():
        module = nn.Linear(500, 500)
        inside = real(module.weight)
        nn.init.ones_(module.weight)
    assert not inside.is_meta and inside.unique().numel() > 1
    assert (real(module.weight) == 1).all()


def test_uninitialised_parameter_is_zero() -> None:
    with empty_init():
        parameter = nn.Parameter(torch.empty(1000))
    torch.full((1000,), 7.0)  # what might lie in the memory
    assert (real(parameter) == 0).all()


def test_records_die_with_the_parameters() -> None:
    source = torch.ones(LARGE)
    with empty_init():
        module = nn.Linear(LARGE, 1)
        module.weight.data.copy_(source)
        module.weight.data.mul_(2)
    held = weakref.ref(source)
    del source
    gc.collect()
    assert held() is not None
    del module
    gc.collect()
    assert held() is None


def test_lazy_modules_get_their_parameters_later() -> None:
    with empty_init():
        module = nn.LazyLinear(4)
    assert module(torch.ones(2, 3)).shape == (2, 4)
    assert not module.weight.is_meta


@pytest.mark.gpu
def test_values_are_made_on_the_device() -> None:
    device = torch.device("cuda")
    torch.cuda.init()
    state = torch.cuda.get_rng_state()
    with empty_init():
        module = nn.TransformerEncoderLayer(64, 4)
        nn.init.orthogonal_(module.linear1.weight)
        nn.init.trunc_normal_(module.linear2.weight)
    for name, parameter in module.named_parameters():
        if is_deferred(parameter):
            one, two = (make_real(name, parameter, seed=5, device=device) for _ in range(2))
            assert one.is_cuda and torch.equal(one, two)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.cuda.manual_seed(0)
    with empty_init():
        weight = nn.Linear(50, 50, device="cuda").weight
        assert weight.device.type == "cuda"
    expected = nn.Linear(50, 50, device="cuda").weight
    assert torch.equal(make_real("w", weight, seed=0, device=device), expected)
