"""Moments in fewer bytes: the same bits on every route, tier, stage and number of ranks, and close to exact.

The oracle does not use the library's layout: plain torch, parameter by parameter, int8 in blocks from each parameter's
start. tests/kernels/test_moments.py tests the codes themselves.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zerostd
from offload.jobs import PLACEMENTS
from support.agreement import agree
from support.compare import assert_bitwise
from support.halves import moved_from_ties
from support.moments import state
from support.processes import doing
from support.side_by_side import data, seeded
from zerostd import Placement, PrepareError
from zerostd.kernels import MOMENT_CODECS, decode_moments, update
from zerostd.kernels.rules import Adam
from zerostd.optimizers import cpu_updater, streamed_updater
from zerostd.policy import Kind

INT8 = {"optimizer_states": "int8"}
BF16 = {"optimizer_states": "bf16"}
STATES = ("exp_avg", "exp_avg_sq")
each_codec = pytest.mark.parametrize("codec", MOMENT_CODECS)
STEPS = 4
WIDTH = 53  # no parameter is a multiple of 64 long


class Net(nn.Module):
    """Three layers, one of them frozen, and one that only odd steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        for layer in self.layers[: 4 if uses_all else 3]:
            x = x + torch.tanh(layer(x))
        return x * self.scale


def loss_of(model: Any, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    batch = data(6, WIDTH, number=number).to(dtype)
    return F.mse_loss(model(batch, number % 2 == 1).float(), data(6, WIDTH, number=number + 50))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() == 2], "weight_decay": 0.1}]
    groups.append({"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-2})
    return torch.optim.AdamW(groups, lr=5e-3)


def by_hand(precision: str, codec: str, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """Losses; masters and decoded states by name."""
    model = seeded(Net)
    shown = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().clone().view(-1) for name, p in shown.items()}
    if precision == "bf16":
        masters = {name: moved_from_ties(master) for name, master in masters.items()}
        model.bfloat16()
    moments = MOMENT_CODECS[codec]
    states = {name: [state(torch.zeros(m.numel()), moment) for moment in moments] for name, m in masters.items()}
    counts = dict.fromkeys(shown, 0)
    losses = []
    for number in range(steps):
        with torch.no_grad():
            for name, p in shown.items():
                p.copy_(masters[name].view(p.shape))
                p.grad = None
        loss = loss_of(model, number, torch.bfloat16 if precision == "bf16" else torch.float32)
        loss.backward()
        losses.append(loss.item())
        for name, p in shown.items():
            if p.grad is None:
                continue
            counts[name] += 1
            lr, decay = (5e-3, 0.1) if p.dim() == 2 else (1e-2, 0.0)
            rule = Adam(lr, decay, False, 0.9, 0.999, 1e-8, True, counts[name])
            update(rule, p.grad.reshape(-1), (masters[name], *states[name]))
            if precision == "bf16":
                masters[name] = moved_from_ties(masters[name])
    found = {name: master.view(shown[name].shape) for name, master in masters.items()}
    for name, codes in states.items():
        for key, moment, coded in zip(STATES, moments, codes, strict=True):
            numbers = decode_moments(coded, moment, masters[name].numel())
            found[f"{name}.{key}"] = numbers.view(shown[name].shape)
    return losses, found


def prepared(placement: Placement | None, folder: Any, codec: str, **options: Any) -> tuple[Any, Any]:
    model = seeded(Net)
    placement = dataclasses.replace(placement or Placement(), codec={"optimizer_states": codec})
    options = {"groups": ["layers.*"], "accumulate": 1, "exact": False, **options}
    budget = zerostd.Budget(disk_path=str(folder))
    return zerostd.prepare(model, adamw(model), placement=placement, budget=budget, **options)


def run_steps(model: Any, optimizer: Any, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def found_in(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Masters and states, by name. All ranks call it."""
    found = {n: value for n, value in zerostd.full_state_dict(model).items() if not n.startswith("layers.1.")}
    for name, p in model.named_parameters():
        if p in optimizer.state:
            found |= {f"{name}.{key}": optimizer.state[p][key].clone() for key in STATES}
    return found


def shards_of(model: Any) -> list[Any]:
    groups = model.__dict__["_zerostd"].groups
    return [shard for group in groups for flat in group.flats for shard in flat.state_shards]


@pytest.fixture(autouse=True)
def tiles() -> Iterator[None]:
    """Several tiles, of whole blocks."""
    with (
        mock.patch.object(cpu_updater, "TILE_NUMEL", 11 * 64),
        mock.patch.object(cpu_updater, "DISK_TILE_NUMEL", 1 << 16),
        mock.patch.object(streamed_updater, "TILE_NUMEL", 16 * 64),
    ):
        yield


SPECULATING = Placement(optimizer_states="host", cpu_share=0.5, speculate=True)


@each_codec
@pytest.mark.parametrize("name", [None, *PLACEMENTS, "speculating"])
def test_all_routes_and_tiers_have_the_bits_of_plain_torch(name: str | None, codec: str, tmp_path: Path) -> None:
    placement = SPECULATING if name == "speculating" else None if name is None else PLACEMENTS[name]
    clipping = {"max_grad_norm": 1e9} if name == "speculating" else {}
    for precision in ("bf16", "fp32"):
        losses, expected = by_hand(precision, codec)
        model, optimizer = prepared(placement, tmp_path, codec, precision=precision, **clipping)
        assert run_steps(model, optimizer, range(STEPS)) == losses, f"{name}, {precision}"
        assert_bitwise(found_in(model, optimizer), expected, f"{name}, {precision}")
        assert all(shard.is_coded for shard in shards_of(model))
        zerostd.release(model)


def on_ranks(rank: int, size: int, codec: str, folder: str) -> list[str]:
    """Every rank has the same data, so the mean of gradients is the gradient of one."""
    failures = []
    losses, expected = by_hand("bf16", codec)
    for stage, name in (
        (0, None),
        (1, "states on host"),
        (2, "states on all tiers"),
        (3, None),
        (3, "everything on host"),
    ):
        doing(f"stage {stage}, {name}")
        placement = None if name is None else PLACEMENTS[name]
        model, optimizer = prepared(placement, folder, codec, precision="bf16", stage=stage)
        label = f"rank {rank} of {size}, stage {stage}, {name}"
        if run_steps(model, optimizer, range(STEPS)) != losses:
            failures.append(f"{label}: other losses")
        found = found_in(model, optimizer)
        failures += [f"{label}: {key}" for key, value in expected.items() if not torch.equal(found[key], value)]
        zerostd.release(model)
    return failures


@each_codec
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_bits_of_one(size: int, codec: str, ranks: Any, tmp_path: Path) -> None:
    agree(ranks(size, on_ranks, size, codec, str(tmp_path)))


# -- checkpoints --


def go_on(rank: int, path: str, folder: str, codec: str, expected: list[float]) -> list[str]:
    """Load what one rank saved, on two, go on, and hand it back through torch's format."""
    failures = []
    for name in (None, "states on host, half streamed", "states on disk"):
        placement = None if name is None else PLACEMENTS[name]
        model, optimizer = prepared(placement, folder, codec, precision="bf16", stage=3)
        zerostd.load(path, model, optimizer)
        if run_steps(model, optimizer, range(2, STEPS)) != expected:
            failures.append(f"rank {rank}, {name}: other losses")
        before = found_in(model, optimizer)
        zerostd.save_dcp(f"{folder}/{name}", model, optimizer)
        zerostd.release(model)
        model, optimizer = prepared(None, folder, codec, precision="bf16", stage=2)
        zerostd.load_dcp(f"{folder}/{name}", model, optimizer)
        after = found_in(model, optimizer)
        failures += [f"rank {rank}, {name}: {key}" for key in before if not torch.equal(before[key], after[key])]
        zerostd.save(f"{folder}/{name} again", model, optimizer)
        zerostd.release(model)
    return failures


@each_codec
def test_training_resumes_bit_for_bit_at_any_number_of_ranks(codec: str, ranks: Any, tmp_path: Path) -> None:
    losses, expected = by_hand("bf16", codec)
    model, optimizer = prepared(PLACEMENTS["states on all tiers"], tmp_path, codec, precision="bf16")
    run_steps(model, optimizer, range(2))
    zerostd.save(tmp_path / "one", model, optimizer)
    assert run_steps(model, optimizer, range(2, STEPS)) == losses[2:]
    zerostd.release(model)
    agree(ranks(2, go_on, str(tmp_path / "one"), str(tmp_path), codec, losses[2:]))
    for name in (None, "states on host", "states on disk, streamed"):
        model, optimizer = prepared(None if name is None else PLACEMENTS[name], tmp_path, codec, precision="bf16")
        zerostd.load(tmp_path / "states on disk again", model, optimizer)
        assert_bitwise(found_in(model, optimizer), expected, f"{name}")
        zerostd.release(model)


@each_codec
def test_states_are_fp32_numbers_to_users_and_to_runs_without_codes(codec: str, tmp_path: Path) -> None:
    model, optimizer = prepared(PLACEMENTS["states on host"], tmp_path, codec, precision="bf16")
    run_steps(model, optimizer, range(2))
    weight = model.layers[0].weight
    average = optimizer.state[weight]["exp_avg"]
    assert average.shape == weight.shape and average.dtype == torch.float32
    assert int(optimizer.state[weight]["step"]) == 2
    optimizer.state[weight]["exp_avg"].zero_()
    assert not optimizer.state[weight]["exp_avg"].any() and optimizer.state[weight]["exp_avg_sq"].any()
    before = found_in(model, optimizer)
    saved = optimizer.state_dict()
    zerostd.save(tmp_path / "coded", model, optimizer)
    run_steps(model, optimizer, range(2, 3))
    optimizer.load_state_dict(saved)
    after = found_in(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before if "exp_avg" in key)
    zerostd.release(model)
    exact = seeded(Net)
    exact, optimizer = zerostd.prepare(exact, adamw(exact), precision="bf16", groups=["layers.*"])
    zerostd.load(tmp_path / "coded", exact, optimizer)
    assert_bitwise(found_in(exact, optimizer), before, "without codes")
    zerostd.release(exact)


# -- bytes --


@each_codec
@pytest.mark.parametrize("tier", ["device", "host"])
def test_moments_take_as_many_bytes_as_their_codes(tier: str, codec: str, tmp_path: Path) -> None:
    model, optimizer = prepared(Placement(optimizer_states=tier), tmp_path, codec, precision="bf16")
    flats = [flat for group in model.__dict__["_zerostd"].groups for flat in group.flats if flat.state_shards]
    numel = sum(flat.layout.numel for flat in flats)
    for flat in flats:
        aligned = [interval.offset % 64 == 0 for interval in flat.layout.intervals]
        assert all(aligned) if codec == "int8" else flat.layout.gaps[:-1] == (), "gaps are for blocks only"
    both = {"int8": 2 * numel // 64 * 68, "bf16": 4 * numel}[codec]
    states = numel * 2 + both  # with the lower halves of masters
    pages = 0 if tier == "device" else 3 * 4096 * len(shards_of(model))
    for _ in range(2):
        held = zerostd.memory(model).now[tier][Kind.OPTIMIZER_STATES.value]
        assert states <= held <= states + pages, f"{held} bytes for {numel} elements"
        assert zerostd.memory(model).coded[Kind.OPTIMIZER_STATES.value] == (8 * numel, both)
        run_steps(model, optimizer, range(1))
    zerostd.release(model)


# -- refusals --


def refused(words: str, optimizer: Any = None, net: Any = None, **options: Any) -> None:
    model = seeded(Net) if net is None else net
    trained = [p for p in model.parameters() if p.requires_grad]
    options = {"exact": False, "placement": Placement(codec=INT8), **options}
    with pytest.raises(PrepareError, match=words):
        zerostd.prepare(model, (optimizer or torch.optim.AdamW)(trained), **options)
    assert all(p.dtype in (torch.float32, torch.float64) for p in model.parameters()), "it was touched"


def test_what_cannot_be_coded_is_refused_by_name() -> None:
    refused("exact=False", exact=True)
    refused("the optimizer is SGD", lambda params: torch.optim.SGD(params, lr=0.1))
    refused("the optimizer is NAdam", torch.optim.NAdam)
    refused(r"AdamW\(amsgrad=True\)", lambda params: torch.optim.AdamW(params, amsgrad=True))
    refused("'scale' is torch.float64", net=seeded(Net).double())
    refused("no codec 'int4'.*'int8', 'bf16'", placement=Placement(codec={"optimizer_states": "int4"}))
    refused("no codec 'int8' for 'parameters'", placement=Placement(codec={"parameters": "int8"}))
    refused("'bf16'.*exact=False", placement=Placement(codec=BF16), exact=True)
    refused("'bf16'} is for .* the optimizer is NAdam", torch.optim.NAdam, placement=Placement(codec=BF16))
    with pytest.raises(PrepareError, match="needs the optimizer"):
        zerostd.prepare(seeded(Net), placement=Placement(codec=INT8), exact=False)


# -- accuracy --


class Gpt(nn.Module):
    """Two blocks of width 48 on bytes. Rows of frequent and of rare bytes share blocks, so states have all sizes."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.tokens(tokens) + self.places.weight
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


LENGTH = 32
TEXT = torch.tensor(list(inspect.getsource(inspect).encode("ascii", "ignore")))  # of Python's own library


def text_loss(model: Any, number: int) -> Tensor:
    starts = torch.randint(len(TEXT) - LENGTH - 1, (16,), generator=torch.Generator().manual_seed(number))
    row = TEXT[starts[:, None] + torch.arange(LENGTH + 1)]
    return F.cross_entropy(model(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten())


def linear(values: Tensor, largest_code: int) -> Tensor:
    """What codes without companding make of a state."""
    rows = F.pad(values.reshape(-1), (0, -values.numel() % 64)).view(-1, 64)
    scales = rows.abs().amax(1, keepdim=True) / largest_code
    codes = torch.nan_to_num(rows / scales).round()
    return (codes * scales).view(-1)[: values.numel()].view(values.shape)


def losses_of(how: str) -> list[float]:
    model: Any = seeded(Gpt)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    if how in MOMENT_CODECS:
        placement = Placement(codec={"optimizer_states": how})
        model, optimizer = zerostd.prepare(model, optimizer, placement=placement, exact=False)
    losses = []
    for number in range(120):
        loss = text_loss(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if how == "linear":
            for states in optimizer.state.values():
                states["exp_avg"].copy_(linear(states["exp_avg"], 127))
                states["exp_avg_sq"].copy_(linear(states["exp_avg_sq"], 255))
        if not losses[-1] < 20:
            break
    return losses


def test_coded_moments_train_as_exact_ones_do_and_plain_codes_do_not() -> None:
    """Plain codes have no companding, and let small squares become zero."""
    exact, bare = (losses_of(how) for how in ("exact", "linear"))
    assert exact[-1] < 0.7 * exact[0], "nothing was learnt"
    for codec, most in (("int8", 0.05), ("bf16", 0.02)):
        apart = max(abs(mine - theirs) for mine, theirs in zip(losses_of(codec), exact, strict=True))
        assert apart < most, f"{codec} is {apart} from exact"
    assert not bare[-1] < exact[len(bare) - 1] + 1, f"without companding {bare[-1]} after {len(bare)} steps"
