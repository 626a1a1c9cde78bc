"""Equal frozen parameters kept once across models: bytes, values after writes, and whose memory is freed when."""

from __future__ import annotations

import gc
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from zerostd.parameters.blueprints import MARK

WIDTH = 512
TIERS = ["host", "disk", "packed"]


class Adapted(nn.Module):
    """A layer of a base model, with or without a trained adapter."""

    def __init__(self, *, has_adapter: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 4, bias=False) if has_adapter else None
        self.up = nn.Linear(4, WIDTH, bias=False) if has_adapter else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return torch.tanh(y if self.down is None or self.up is None else y + self.up(self.down(x)))


def build(*, has_adapter: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Adapted(has_adapter=False) for _ in range(3)))
    for index in range(3):
        if has_adapter:
            adapted = Adapted(has_adapter=True)
            adapted.base = model[index].base
            model[index] = adapted
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("base" not in name)
    return model


def frozen(model: nn.Module, tier: str, folder: Path, **options: Any) -> nn.Module:
    codec = {"parameters": "lossless"} if tier == "packed" else {}
    placement = zerostd.Placement(parameters="disk" if tier == "packed" else tier, codec=codec)
    budget = {"disk_path": str(folder), **options.pop("budget", {})}
    model, _ = zerostd.prepare(model, placement=placement, budget=budget, groups=["*"], **options)
    return model


def held(model: nn.Module, tier: str) -> int:
    """Bytes of parameters that a model counts in a tier."""
    return zerostd.memory(model).now["host" if tier == "host" else "disk"]["parameters"]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return zerostd.full_state_dict(model)


def same(model: nn.Module, expected: nn.Module) -> bool:
    state = values(model) if MARK in vars(model) else model.state_dict()
    return all(torch.equal(state[name], value) for name, value in expected.state_dict().items())


@pytest.mark.parametrize("tier", TIERS)
def test_equal_models_take_the_bytes_of_one(tier: str, tmp_path: Path) -> None:
    models = [frozen(build(), tier, tmp_path) for _ in range(3)]
    alone = held(models[0], tier)
    buffers = [zerostd.memory(model).now["host"].get("buffers", 0) for model in models]
    assert zerostd.deduplicate(*models) == 2 * alone
    assert [held(model, tier) for model in models] == [alone, 0, 0]
    assert [zerostd.memory(model).shared["parameters"] for model in models] == [(alone, alone), (alone, 0), (alone, 0)]
    assert "are shared with equal parameters, 0.0 MiB of them counted here" in str(zerostd.memory(models[1]))
    assert all(same(model, build()) for model in models)
    if tier != "host":  # checksums of pages are kept once, too
        assert zerostd.memory(models[1]).now["host"]["buffers"] < buffers[1]
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        assert all(torch.equal(model(x), build()(x)) for model in models)
    assert zerostd.deduplicate(*models) == 0
    for model in models:
        zerostd.release(model)


@pytest.mark.parametrize("tier", TIERS)
def test_memory_is_freed_with_the_last_holder(tier: str, tmp_path: Path) -> None:
    """Whoever counts the bytes hands them on; what is left can be read and written."""
    models = [frozen(build(), tier, tmp_path) for _ in range(3)]
    alone = held(models[0], tier)
    zerostd.deduplicate(*models)
    first, second, third = models
    zerostd.release(first)
    assert same(first, build())
    assert [held(model, tier) for model in (second, third)] == [alone, 0]
    del second, models  # dropped, not released
    gc.collect()
    assert held(third, tier) == alone and not zerostd.memory(third).shared
    assert same(third, build())
    with torch.no_grad():
        third[0].base.weight.neg_()  # alone: no copy
    assert held(third, tier) == pytest.approx(alone, rel=0.01)
    expected = build()
    with torch.no_grad():
        expected[0].base.weight.neg_()
    assert same(third, expected)
    zerostd.release(third)


def _by_data(model: nn.Module, folder: Path) -> None:
    model[1].base.weight.data[0].mul_(2.0)


def _by_gathered(model: nn.Module, folder: Path) -> None:
    with zerostd.gathered(model, write=True), torch.no_grad():
        model[1].base.weight[0].mul_(2.0)


def _by_state_dict(model: nn.Module, folder: Path) -> None:
    model.load_state_dict(_doubled().state_dict())


def _by_ordinary_file(model: nn.Module, folder: Path) -> None:
    torch.save(_doubled().state_dict(), folder / "model.pt")
    zerostd.load(folder / "model.pt", model)


def _by_checkpoint(model: nn.Module, folder: Path) -> None:
    other = frozen(_doubled(), "host", folder)
    zerostd.save(folder / "checkpoint", other)
    zerostd.release(other)
    zerostd.load(folder / "checkpoint", model)


def _by_dcp(model: nn.Module, folder: Path) -> None:
    other = frozen(_doubled(), "host", folder)
    zerostd.save_dcp(folder / "dcp", other)
    zerostd.release(other)
    zerostd.load_dcp(folder / "dcp", model)


def _doubled() -> nn.Module:
    expected = build()
    with torch.no_grad():
        expected[1].base.weight[0].mul_(2.0)
    return expected


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("write", [_by_data, _by_gathered, _by_state_dict, _by_ordinary_file, _by_checkpoint, _by_dcp])
@pytest.mark.parametrize("writer", [0, 1])
def test_a_write_leaves_the_other_model_alone(write: Any, tier: str, writer: int, tmp_path: Path) -> None:
    """The one that counts the bytes writes, and the one that does not."""
    models = [frozen(build(), tier, tmp_path) for _ in range(2)]
    zerostd.deduplicate(*models)
    write(models[writer], tmp_path)
    assert same(models[writer], _doubled())
    assert same(models[1 - writer], build())
    shared = {model: zerostd.memory(model).shared.get("parameters", (0, 0))[0] for model in models}
    assert len(set(shared.values())) == 1
    if write not in (_by_checkpoint, _by_dcp):  # these read straight into the memory, so all of it is copied before
        assert shared[models[0]] > 0, "groups that were not written to stay shared"
    zerostd.release(models[writer])
    assert same(models[1 - writer], build())
    zerostd.release(models[1 - writer])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_writes_that_change_nothing_copy_nothing(tier: str, tmp_path: Path) -> None:
    models = [frozen(build(), tier, tmp_path) for _ in range(2)]
    alone = held(models[0], tier)
    zerostd.deduplicate(*models)
    with zerostd.gathered(models[1], write=True):
        pass
    models[0].load_state_dict(build().state_dict())
    assert [held(model, tier) for model in models] == [alone, 0]
    for model in models:
        zerostd.release(model)


def test_a_budget_of_one_model_has_room_for_its_copy(tmp_path: Path) -> None:
    """The bytes that others count do not count twice against the limit of the disk."""
    size = sum(parameter.nbytes for parameter in build().parameters())
    limit = {"disk": size + 64 * 4096}
    models = [frozen(build(), "disk", tmp_path, budget=limit) for _ in range(2)]
    zerostd.deduplicate(*models)
    for number, model in enumerate(models):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
    for number, model in enumerate(models):
        assert all(bool((value == number).all()) for value in values(model).values())
        assert held(model, "disk") <= size + 64 * 4096
        zerostd.release(model)


def with_crc32(data: bytes, wanted: int) -> bytes:
    """Return `data` with four bytes at its end that give it a checksum."""
    rows = []
    for index in range(256):
        row = index
        for _ in range(8):
            row = (row >> 1) ^ (0xEDB88320 if row & 1 else 0)
        rows.append(row)
    target = wanted ^ 0xFFFFFFFF
    indices = []
    for _ in range(4):
        indices.append(next(index for index, row in enumerate(rows) if row >> 24 == target >> 24))
        target = ((target ^ rows[indices[-1]]) << 8) & 0xFFFFFFFF
    state = zlib.crc32(data) ^ 0xFFFFFFFF
    tail = b""
    for index in reversed(indices):
        tail += bytes([(state ^ index) & 0xFF])
        state = (state >> 8) ^ rows[index]
    return data + tail


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_equal_checksums_are_not_enough(tier: str, tmp_path: Path) -> None:
    """Two vectors of other numbers with the crc32 of the first: they are compared byte by byte."""
    first = torch.arange(1024, dtype=torch.int32)
    other = (first.numpy() + 1).tobytes()[:-4]
    forged = with_crc32(other, zlib.crc32(first.numpy().tobytes()))
    second = torch.frombuffer(bytearray(forged), dtype=torch.int32)
    assert zlib.crc32(second.numpy().tobytes()) == zlib.crc32(first.numpy().tobytes())

    def model(numbers: torch.Tensor) -> nn.Module:
        module = nn.Module()
        module.numbers = nn.Parameter(numbers.clone(), requires_grad=False)
        return frozen_vector(module, tier, tmp_path)

    models = [model(first), model(second), model(first)]
    freed = zerostd.deduplicate(*models)
    assert freed == held(models[0], tier) == held(models[1], tier) and held(models[2], tier) == 0
    assert [torch.equal(values(m)["numbers"], v) for m, v in zip(models, (first, second, first), strict=True)] == [
        True
    ] * 3
    for each in models:
        zerostd.release(each)


def frozen_vector(module: nn.Module, tier: str, folder: Path) -> nn.Module:
    placement = zerostd.Placement(parameters=tier)
    return zerostd.prepare(module, placement=placement, budget={"disk_path": str(folder)})[0]


def test_the_base_of_an_adapter_and_a_reference_model(tmp_path: Path) -> None:
    """Preference training: adapters train on a base whose memory a dispatched reference model shares; losses are those
    of models that share nothing."""

    def train(*, is_shared: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
        policy = build(has_adapter=True)
        optimizer = torch.optim.AdamW((p for p in policy.parameters() if p.requires_grad), lr=1e-2)
        policy, optimizer = zerostd.prepare(
            policy,
            optimizer,
            placement=zerostd.Placement(parameters="host", optimizer_states="host"),
            groups=["*"],
        )
        plan = zerostd.Plan.from_json('{"homes": {"*": {"parameters": "host"}}}')
        reference = zerostd.dispatch(build(), plan=plan, groups=["*"], device="cpu")
        freed = zerostd.deduplicate(policy, reference) if is_shared else 0
        losses = []
        for step in range(4):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
            with torch.no_grad():
                expected = reference(x)
            loss = -torch.nn.functional.logsigmoid((policy(x) - expected).mean()) + policy(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert same(reference, build())
        state = values(policy)
        zerostd.release(policy)
        assert same(reference, build())
        zerostd.release(reference)
        return losses, state, freed

    plain, plain_state, _ = train(is_shared=False)
    losses, state, freed = train(is_shared=True)
    assert losses == plain
    assert all(torch.equal(state[name], value) for name, value in plain_state.items())
    assert freed >= 3 * (WIDTH * WIDTH + WIDTH) * 4


def test_models_from_files_share_after_they_are_loaded(tmp_path: Path) -> None:
    torch.save(build().state_dict(), tmp_path / "model.pt")
    plan = zerostd.Plan.from_json('{"homes": {"*": {"parameters": "disk"}}}')

    def dispatched() -> nn.Module:
        with zerostd.empty_init():
            model = build()
        budget = {"disk_path": str(tmp_path)}
        return zerostd.dispatch(model, tmp_path / "model.pt", plan=plan, budget=budget, groups=["*"], device="cpu")

    models = [dispatched() for _ in range(2)]
    alone = held(models[0], "disk")
    assert zerostd.deduplicate(*models) == alone
    zerostd.release(models[0])
    assert same(models[1], build())
    zerostd.release(models[1])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_equal_groups_inside_a_model_share(tier: str, tmp_path: Path) -> None:
    model = nn.Sequential(*(build()[0] for _ in range(4)))
    model = frozen(model, tier, tmp_path)
    alone = held(model, tier)
    assert zerostd.deduplicate(model) == 3 * alone // 4
    assert held(model, tier) == alone // 4
    assert zerostd.memory(model).shared["parameters"] == (alone, alone // 4)
    with torch.no_grad():
        model[2].base.weight.zero_()
    state = values(model)
    assert not state["2.base.weight"].any() and torch.equal(state["1.base.weight"], state["3.base.weight"])
    assert state["1.base.weight"].any() and held(model, tier) == alone // 2
    zerostd.release(model)
    assert torch.equal(model[0].base.weight, model[3].base.weight)


def test_a_background_save_keeps_the_values_of_its_moment(tmp_path: Path) -> None:
    """It reads memory that two models share; one is written to, and the other is released, before it is done."""
    models = [frozen(build(), "disk", tmp_path) for _ in range(2)]
    zerostd.deduplicate(*models)
    pending = zerostd.save(tmp_path / "checkpoint", models[1], wait=False)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.zero_()
    zerostd.release(models[0])
    pending.wait()
    zerostd.load(tmp_path / "checkpoint", models[1])
    assert same(models[1], build())
    zerostd.release(models[1])


def test_what_differs_or_trains_is_not_shared(tmp_path: Path) -> None:
    others = [
        frozen(build(seed=1), "host", tmp_path),  # other values
        frozen(build(), "disk", tmp_path),  # another tier
        frozen(build(), "device", tmp_path),
        frozen(build(), "host", tmp_path, precision="bf16"),  # another dtype
        frozen(build().requires_grad_(True), "host", tmp_path),  # trains
    ]
    model = frozen(build(), "host", tmp_path)
    assert zerostd.deduplicate(model, *others) == 0
    assert not zerostd.memory(model).shared
    for each in (model, *others):
        zerostd.release(each)


def test_directories_are_not_mixed(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    models = [frozen(build(), "disk", folder) for folder in folders]
    assert zerostd.deduplicate(*models) == 0
    for model in models:
        zerostd.release(model)


def test_a_memory_with_more_holders_is_joined(tmp_path: Path) -> None:
    """A model that comes alone joins two that share; it does not take one of them away."""
    models = [frozen(build(), "host", tmp_path) for _ in range(3)]
    alone = held(models[0], "host")
    zerostd.deduplicate(models[1], models[2])
    assert zerostd.deduplicate(models[0], models[1]) == alone
    assert sum(held(model, "host") for model in models) == alone
    for model in models:
        zerostd.release(model)


def test_it_is_refused_where_values_are_in_use(tmp_path: Path) -> None:
    model = frozen(build(), "host", tmp_path)
    refused: list[str] = []

    def inside(*_: Any) -> None:
        with pytest.raises(zerostd.MisuseError) as error:
            zerostd.deduplicate(model)
        refused.append(str(error.value))

    handle = model[0].base.register_forward_hook(inside)
    model(torch.ones(1, WIDTH))
    handle.remove()
    assert len(refused) == 1 and "inside a forward or a backward pass" in refused[0]
    with pytest.raises(zerostd.MisuseError, match="needs models"):
        zerostd.deduplicate()
    with pytest.raises(zerostd.MisuseError, match="prepare"):
        zerostd.deduplicate(build())
    zerostd.release(model)


def _share_on_ranks(rank: int, folder: str, tier: str, stage: int) -> tuple[int, int, bool]:
    models = []
    for _ in range(2):
        model, _ = zerostd.prepare(
            build(),
            stage=stage,
            placement=zerostd.Placement(parameters=tier),
            budget={"disk_path": folder},
            groups=["*"],
        )
        models.append(model)
    freed = zerostd.deduplicate(*models)
    alone = zerostd.memory(models[0]).now[tier]["parameters"]
    with zerostd.gathered(models[0], write=True), torch.no_grad():
        models[0][1].base.weight[0].mul_(2.0)
    states = [values(model) for model in models]
    expected = [_doubled().state_dict(), build().state_dict()]
    is_right = all(
        torch.equal(state[name], value)
        for state, wanted in zip(states, expected, strict=True)
        for name, value in wanted.items()
    )
    for model in models:
        zerostd.release(model)
    return freed, alone, is_right


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_ranks_share_their_shards(ranks: Any, tier: str, tmp_path: Path) -> None:
    for freed, alone, is_right in ranks(2, _share_on_ranks, str(tmp_path), tier, 3):
        assert freed == alone > 0 and is_right


# Storages that are equal before prepare


def test_one_parameter_under_many_names_is_kept_once(tmp_path: Path) -> None:
    """Through modules that are in several places, and through modules that have the same Parameter."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    other = nn.Linear(WIDTH, WIDTH, bias=False)
    other.weight = layer.weight
    model = nn.Sequential(layer, nn.Sequential(layer), other).requires_grad_(False)
    x = torch.randn(2, WIDTH)
    expected = model(x)
    model = frozen_vector(model, "host", tmp_path)
    assert held(model, "host") == -(-(WIDTH * WIDTH + WIDTH) * 4 // 4096) * 4096
    assert torch.equal(model(x), expected)
    with torch.no_grad():
        layer.weight.zero_()
    assert not other.weight.any() and not model[1][0].weight.any()
    zerostd.release(model)
    assert other.weight is layer.weight


@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.t(), lambda w: w[:8]], ids=["whole", "transposed", "rows"])
def test_views_of_a_trained_parameter_are_refused(view: Any) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(64, 64))
    model.view = nn.Parameter(view(model.weight.data))
    with pytest.raises(zerostd.PrepareError, match="two Parameter objects over the same memory"):
        zerostd.prepare(model)


def test_a_buffer_in_the_memory_of_a_trained_parameter_is_refused() -> None:
    """It would keep the first values, where torch's follows the parameter."""
    model = nn.Linear(64, 64)
    model.register_buffer("rows", model.weight.data[8:16])
    with pytest.raises(zerostd.PrepareError, match=r"buffer 'rows' is in the memory of parameter 'weight'"):
        zerostd.prepare(model)
    model.weight.requires_grad_(False)
    zerostd.release(zerostd.prepare(model)[0])


def test_buffers_over_one_storage_stay_that() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    table = torch.randn(8, 8)
    model[0].register_buffer("table", table)
    model[1].register_buffer("table", table)
    model, _ = zerostd.prepare(model)
    assert model[0].table.data_ptr() == model[1].table.data_ptr()
    zerostd.release(model)
