"""Profiles of models: counts are exact, costs are those of a real forward, and nothing is changed by profiling."""

from __future__ import annotations

import copy
import gc
import logging
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import zerostd
from planning.machines import LAPTOP
from support.models import GPT, MLP, MODELS, GPTBlock
from zerostd.errors import PrepareError
from zerostd.measuring.identity import choose_device
from zerostd.measuring.model import profile_model
from zerostd.planning.profiles import ModelProfile

BLOCKS = ("blocks.*",)
INPUTS = {"mlp": slice(0, 1), "cnn": slice(0, 1), "gpt": slice(0, 1), "graph": slice(0, 2), "experts": slice(0, 1)}
each_model = pytest.mark.parametrize("name", list(MODELS))


def inputs_of(name: str) -> tuple[Tensor, ...]:
    """What the model's forward takes of its batch."""
    inputs = MODELS[name].batch(0, 0, 1, torch.float32)[INPUTS[name]]
    return (inputs[0][:, :-1].contiguous(),) if name == "gpt" else inputs


def saved_bytes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Bytes that autograd really saves in forward, each storage once, parameters and buffers left out."""
    model = copy.deepcopy(model)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*inputs)  # held, or addresses would be used again
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def total(profile: ModelProfile, field: str) -> float:
    return sum(getattr(group, field) for group in profile.groups)


# -- counts --


@each_model
def test_groups_and_counts_are_those_that_prepare_makes(name: str) -> None:
    case = MODELS[name]
    model = case.make(0)
    profile = profile_model(model, torch.optim.AdamW(model.parameters()), groups=case.groups, batch=inputs_of(name))
    assert profile.trained == profile.numel == sum(parameter.numel() for parameter in model.parameters())
    zerostd.prepare(model, torch.optim.AdamW(model.parameters()), groups=case.groups)
    made = {
        group.name: sum(parameter.numel() for flat in group.flats for parameter in flat.parameters)
        for group in model._zerostd.groups
    }
    zerostd.release(model)
    assert {group.name: group.trained for group in profile.groups} == made


def test_shared_parameters_count_once() -> None:
    profile = profile_model(GPT(vocabulary=48, width=32), groups=BLOCKS)
    assert profile.groups[0].trained == 48 * 32 + 12 * 32 + 2 * 32  # the table, which is the head too


def test_frozen_and_unlisted_parameters_are_not_trained() -> None:
    model = MLP()
    model.inlet.requires_grad_(False)
    frozen = sum(parameter.numel() for parameter in model.inlet.parameters())
    profile = profile_model(model)
    assert (profile.trained, profile.numel - profile.trained) == (profile.numel - frozen, frozen)
    profile = profile_model(model, torch.optim.SGD(model.outlet.parameters(), lr=0.1))
    assert profile.trained == sum(parameter.numel() for parameter in model.outlet.parameters())


def test_a_root_of_an_empty_parameter_is_planned_and_prepared() -> None:
    model = MLP()
    model.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    groups = [name for name, _ in model.named_children()]
    plan = zerostd.plan(
        model, torch.optim.AdamW(model.parameters()), batch=inputs_of("mlp"), groups=groups, machine=LAPTOP
    )
    assert "(root)" in plan.homes
    prepared, _ = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), plan=plan, groups=groups)
    zerostd.release(prepared)


class LoRA(nn.Module):
    """A frozen matrix and a trained product of two thin ones."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.base(x) + self.up(self.down(x)))


def test_adapters_train_a_little_and_frozen_matrices_save_no_inputs() -> None:
    model = nn.Sequential(*(LoRA(32, 2) for _ in range(3)))
    profile = profile_model(model, precision="bf16", groups=["*"], batch=torch.randn(4, 32))
    assert [(g.trained, g.frozen) for g in profile.groups if g.name != "(root)"] == [(128, 1024)] * 3
    assert (profile.parameter_bytes, profile.gradient_bytes, profile.state_bytes) == (2, 2, 12)
    everything = profile_model(model.requires_grad_(True), groups=["*"], batch=torch.randn(4, 32))
    assert everything.trained == profile.numel
    frozen = profile_model(nn.Sequential(nn.Linear(8, 8)).requires_grad_(False), batch=torch.randn(4, 8))
    assert total(frozen, "kept_bytes") == 0 and frozen.trained == 0


@pytest.mark.parametrize(
    ("precision", "make", "widths"),
    [
        (None, torch.optim.AdamW, (4, 4, 8, "float32")),
        ("fp32", torch.optim.AdamW, (4, 4, 8, "float32")),
        ("bf16", torch.optim.AdamW, (2, 2, 12, "bfloat16")),
        ("fp16", torch.optim.AdamW, (2, 2, 12, "float16")),
        ("bf16", lambda p: torch.optim.SGD(p, lr=0.1), (2, 2, 4, "bfloat16")),
        ("fp32", lambda p: torch.optim.SGD(p, lr=0.1), (4, 4, 0, "float32")),
        ("bf16", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), (2, 2, 8, "bfloat16")),
        ("bf16", lambda p: torch.optim.AdamW(p, amsgrad=True), (2, 2, 16, "bfloat16")),
        ("bf16", None, (2, 2, 12, "bfloat16")),
        (None, None, (4, 4, 8, "float32")),
    ],
)
def test_bytes_follow_precision_and_optimizer(precision: str | None, make: Any, widths: tuple[Any, ...]) -> None:
    model = MODELS["cnn"].make(0)  # its batch-norms stay fp32, and are the smaller part
    profile = profile_model(model, None if make is None else make(model.parameters()), precision=precision)
    assert (profile.parameter_bytes, profile.gradient_bytes, profile.state_bytes, profile.dtype) == widths


def test_sixteen_bit_and_double_models_keep_their_own_dtype() -> None:
    profile = profile_model(MLP().bfloat16())
    assert (profile.parameter_bytes, profile.gradient_bytes, profile.state_bytes) == (2, 2, 12)
    profile = profile_model(MLP().double())
    assert (profile.parameter_bytes, profile.gradient_bytes, profile.state_bytes) == (8, 8, 16)


def test_parameters_that_are_their_own_master_need_one_off_the_device() -> None:
    found = [profile_model(MLP(), precision=precision).master_bytes for precision in ("fp32", "bf16")]
    assert found == [4, 0]


# -- costs --


def test_flops_of_a_multilayer_perceptron_are_two_for_each_weight() -> None:
    profile = profile_model(MLP(24, 48, 2, 10), groups=["layers.*"], batch=torch.randn(16, 24))
    flops = {group.name: group.forward_flops for group in profile.groups}
    assert flops == {"(root)": 2 * 24 * 48 + 2 * 48 * 10, "layers.0": 2 * 48 * 48, "layers.1": 2 * 48 * 48}
    assert profile.samples == 16


def test_flops_of_a_transformer_are_those_of_its_matrices_and_of_attention() -> None:
    profile = profile_model(GPT(48, 12, 32, 2, 4), groups=BLOCKS, batch=torch.zeros(4, 12, dtype=torch.long))
    assert profile.groups[1].forward_flops == 12 * (2 * 12 * 32 * 32 + 4 * 12 * 32)
    assert profile.groups[0].forward_flops == 12 * 2 * 32 * 48


def test_flops_of_convolutions_and_recurrent_layers() -> None:
    profile = profile_model(MODELS["cnn"].make(0), groups=BLOCKS, batch=inputs_of("cnn"))
    assert [g.forward_flops for g in profile.groups] == [2 * 240, 2 * 64 * 12 * 27, 2 * 16 * 24 * 108]
    profile = profile_model(nn.LSTM(8, 16, 2, batch_first=True), batch=torch.randn(3, 5, 8))
    assert total(profile, "forward_flops") == 2 * 5 * (64 * 8 + 3 * 64 * 16)


@each_model
def test_kept_bytes_are_what_autograd_saves_in_a_real_forward(name: str) -> None:
    model, inputs = MODELS[name].make(0), inputs_of(name)
    profile = profile_model(model, groups=MODELS[name].groups, batch=inputs)
    assert total(profile, "kept_bytes") * len(inputs[0]) == pytest.approx(saved_bytes(model, inputs), abs=0.01)


def test_sixteen_bit_costs_are_those_of_a_sixteen_bit_forward() -> None:
    model, (x,) = MODELS["mlp"].make(0), inputs_of("mlp")
    profile = profile_model(model, precision="bf16", batch=x)
    assert total(profile, "kept_bytes") * 16 == saved_bytes(copy.deepcopy(model).bfloat16(), (x.bfloat16(),))
    wide, narrow = (
        profile_model(MODELS["experts"].make(0), precision=precision, batch=inputs_of("experts"))
        for precision in ("fp32", "bf16")
    )  # run with values, in fp32 both times
    assert total(narrow, "kept_bytes") == pytest.approx(total(wide, "kept_bytes") / 2, rel=0.1)
    assert total(narrow, "forward_flops") == total(wide, "forward_flops")


def test_boundary_is_the_input_of_each_block_and_peak_its_largest_output() -> None:
    profile = profile_model(GPT(48, 12, 32, 2, 4), groups=BLOCKS, batch=torch.zeros(4, 12, dtype=torch.long))
    for block in profile.groups[1:]:
        assert block.boundary_bytes == 12 * 32 * 4
        assert block.peak_bytes == 12 * 128 * 4
    assert profile.groups[0].boundary_bytes == 0


class Checkpointed(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class CheckpointedBlock(GPTBlock):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_checkpointed_blocks_keep_their_inputs_and_need_the_rest_once() -> None:
    tokens = torch.zeros(4, 12, dtype=torch.long)
    plain = profile_model(GPT(), groups=BLOCKS, batch=tokens)
    model = Checkpointed()
    inner = GPT()
    inner.blocks = nn.ModuleList(CheckpointedBlock(32, 4) for _ in range(2))
    for other in (model, inner):
        profile = profile_model(other, groups=BLOCKS, batch=tokens)
        inputs = 2 * 12 * 32 * 4
        extra = total(profile, "kept_bytes") - plain.groups[0].kept_bytes
        assert inputs <= extra <= inputs + 12 * 32 * 4  # and what the norm after the last block saves
        needed = profile.groups[1].peak_bytes - plain.groups[1].peak_bytes
        assert 0.6 * plain.groups[1].kept_bytes < needed <= plain.groups[1].kept_bytes
        assert total(profile, "forward_flops") == total(plain, "forward_flops")


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for index in (2, 0):
            x = self.blocks[index](x)
        return F.linear(x, self.blocks[1].weight)  # read, never called


def test_groups_come_in_the_order_forward_first_needs_them() -> None:
    names = [group.name for group in profile_model(Backwards(), groups=BLOCKS, batch=torch.randn(2, 4)).groups]
    assert names == ["(root)", "blocks.2", "blocks.0", "blocks.1", "blocks.3"]  # the root has no parameters, but work
    names = [group.name for group in profile_model(Backwards(), groups=BLOCKS).groups]
    assert names == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def test_batch_may_be_a_tensor_a_tuple_or_keywords() -> None:
    x = torch.randn(6, 24)
    first, *others = (profile_model(MLP(), batch=batch) for batch in (x, (x,), {"x": x}, x.to("meta")))
    assert all(other == first for other in others) and first.samples == 6
    assert profile_model(MLP()).samples is None


class Forces(nn.Module):
    """Takes a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_a_forward_that_takes_gradients_is_counted() -> None:
    profile = profile_model(Forces().to("meta"), batch=torch.randn(3, 8))
    assert total(profile, "forward_flops") == 2 * (2 * 8 * 16 + 2 * 16)


# -- models without memory --


def test_seven_billion_parameters_are_profiled_in_seconds_without_memory() -> None:
    with torch.device("meta"):
        model = GPT(vocabulary=50257, length=1024, width=4096, depth=32, heads=32)
    before, start = psutil.Process().memory_info().rss, time.process_time()
    tokens = torch.empty(2, 1024, dtype=torch.long, device="meta")
    profile = profile_model(model, precision="bf16", batch=tokens)
    assert time.process_time() - start < 20
    assert psutil.Process().memory_info().rss - before < 200 * 2**20
    assert profile.numel == sum(p.numel() for p in model.parameters()) > 6.6e9
    matrices = 32 * 12 * 4096**2 + 50257 * 4096
    assert total(profile, "forward_flops") == 1024 * (2 * matrices + 32 * 4 * 1024 * 4096)
    assert profile.groups[2].kept_bytes == pytest.approx(32 * 1024 * 4096, rel=0.01)  # 34 s h without dropout


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "graph"])
def test_a_model_without_memory_has_the_profile_of_the_real_one(name: str) -> None:
    case, batch = MODELS[name], inputs_of(name)
    with torch.device("meta"):
        meta = type(case.make(0))()
    with zerostd.empty_init():
        empty = type(case.make(0))()
    device = choose_device(None)  # where models without memory are going to be: operations keep other things there
    wanted = profile_model(case.make(0).to(device), groups=case.groups, precision="bf16", batch=batch)
    for model in (meta, empty):
        assert profile_model(model, groups=case.groups, precision="bf16", batch=batch) == wanted


def test_a_forward_that_needs_values_is_run_with_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    profile = profile_model(MODELS["experts"].make(0), groups=BLOCKS, batch=inputs_of("experts"))
    assert profile.samples == 16 and total(profile, "forward_flops") > 0 and not caplog.records


def test_a_forward_that_needs_values_and_has_none_stays_unknown(caplog: pytest.LogCaptureFixture) -> None:
    model = MODELS["experts"].make(0).to("meta")
    profile = profile_model(model, groups=BLOCKS, batch=inputs_of("experts"))
    assert profile.samples is None and total(profile, "forward_flops") == 0
    assert profile.numel == sum(p.numel() for p in model.parameters())
    assert "FLOPs and activations of MixtureOfExperts are unknown" in caplog.text


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: self.layer(row).sum()))(x)


def test_what_cannot_be_watched_or_copied_stays_unknown(caplog: pytest.LogCaptureFixture) -> None:
    uncopied = nn.Linear(8, 8)
    uncopied.generator = (number for number in range(3))
    for model, reason in ((Functional(), "torch.func"), (uncopied, "deepcopy")):
        caplog.clear()
        assert profile_model(model, batch=torch.randn(3, 8)).samples is None
        assert reason in caplog.text


# -- nothing is changed --


class Restless(nn.Module):
    """Changes everything it can reach in its forward."""

    def __init__(self, *, asks: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.asks, self.fails, self.calls, self.last = asks, fails, 0, None
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.codes = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.table = torch.arange(8.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + 1
        self.codes.data.add_(1.0)
        self.table.add_(1.0)
        x.mul_(2.0)
        random.random(), np.random.rand()
        self.eval()
        self.layers.register_forward_hook(lambda *_: None)
        self.train()
        self.last = x = checkpoint(self.layers, x + torch.rand_like(x), use_reentrant=False) + self.codes + self.table
        if self.asks and float(x.detach().sum()) > 1e9:
            return x
        if self.fails:
            self.layers[0](x[:, :3])
        return x


def look(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Everything that must stay as it is."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    return {
        "state": {name: (tensor.clone(), tensor.dtype) for name, tensor in model.state_dict().items()},
        "ids": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "requires": [p.requires_grad for p in model.parameters()],
        "training": [module.training for module in model.modules()],
        "hooks": hooks,
        "tensor hooks": [p._backward_hooks for p in model.parameters()],
        "own": (model.calls, model.last, model.table.clone()),
        "batch": x.clone(),
        "draws": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()),
        "modes": (torch.is_grad_enabled(), len(_get_current_dispatch_mode_stack())),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor | np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_nothing_changes(model: nn.Module, x: Tensor, call: Callable[[], None]) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    model.layers[1].eval()
    before = look(model, x)
    call()
    after = look(model, x)
    for what in before:
        assert same(before[what], after[what]), what
    y = (torch.ones(2, requires_grad=True) * 2).exp()  # no hook of ours is left on what autograd saves
    assert y.grad_fn._saved_result is not None and y.grad_fn._saved_result.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("asks", [False, True], ids=["without memory", "with values"])
def test_profiling_changes_nothing(asks: bool) -> None:
    model, x = Restless(asks=asks), torch.randn(4, 8)

    def call() -> None:
        with torch.no_grad():
            profile = profile_model(model, torch.optim.AdamW(model.parameters()), batch=x)
        assert profile.samples == 4 and profile.groups[0].frozen == 8 and total(profile, "kept_bytes") > 0

    assert_nothing_changes(model, x, call)


def test_a_forward_that_fails_raises_its_own_error_and_changes_nothing() -> None:
    model, x = Restless(fails=True), torch.randn(4, 8)

    def call() -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            profile_model(model, batch=x)

    assert_nothing_changes(model, x, call)


@pytest.mark.parametrize("name", ["mlp", "experts"])
def test_profiling_holds_nothing_when_it_is_done(name: str) -> None:
    model = MODELS[name].make(0)
    gc.collect()
    gc.disable()
    try:
        profile_model(model, batch=inputs_of(name))
        alive = weakref.ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()


# -- what is refused --


def test_bad_calls_are_refused_with_the_remedy() -> None:
    model = MLP()
    with pytest.raises(PrepareError, match="batch has no samples"):
        profile_model(model, batch=torch.randn(0, 24))
    with pytest.raises(PrepareError, match="precision='int8' is unknown"):
        profile_model(model, precision="int8")
    with pytest.raises(PrepareError, match="is not a parameter of this model"):
        profile_model(model, torch.optim.SGD(MLP().parameters(), lr=0.1))


def test_recomputing_ends_with_the_last_tensor_that_is_saved() -> None:
    """The last product of a block is not done again: nobody saves what comes out of it."""
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    profile = profile_model(nn.Sequential(block, nn.Tanh()), batch=torch.randn(4, 8), groups=["0"])
    group = next(one for one in profile.groups if one.name == "0")
    assert group.forward_flops == 2 * 2 * 8 * 32
    assert group.again_flops == 2 * 8 * 32
