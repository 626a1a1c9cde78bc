"""Wires that carry 8 bits a number: what arrives, what it costs, that models train, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerostd
from support.agreement import agree
from support.models import MODELS
from support.reference import Recipe, train_zerostd
from support.side_by_side import seeded
from zerostd.kernels import coded_bytes, decode_blocks, encode_blocks

BOTH = {"gather": "int8", "reduce": "int8"}
BITS = 8
STEPS = 12


def coded(codec: dict[str, str] | None = None, **placement: Any) -> dict[str, Any]:
    return {"placement": zerostd.Placement(codec=BOTH if codec is None else codec, **placement), "exact": False}


def rounded(values: Tensor) -> Tensor:
    """What the codes of a slice say."""
    codes = torch.empty(coded_bytes(values.numel(), BITS), dtype=torch.uint8)
    encode_blocks(values, BITS, codes)
    out = torch.empty_like(values)
    decode_blocks(codes, BITS, out)
    return out


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(48, 80), nn.Tanh(), nn.Linear(80, 48)))


def wires_say_what_the_codes_say(rank: int) -> list[str]:
    model, _ = zerostd.prepare(net(), stage=3, groups=["*"], **coded())
    wires = model.__dict__["_zerostd"].wires
    size = dist.get_world_size()
    everyone = [torch.randn(size * 640, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(size)]
    mine = slice(rank * 640, (rank + 1) * 640)
    total = sum(rounded(values[mine].contiguous()).float() for values in everyone)
    failures = []
    land = torch.ones(640)
    wires.reserve(everyone[0].nbytes)
    wires.reduce(everyone[rank].clone(), land, accumulate=True).wait()
    if not torch.allclose(
        land, 1 + total / size, rtol=0.02, atol=0.02
    ):  # the codes of bf16 numbers are rounded once more
        failures.append(f"a reduce differs from the codes by {(land - 1 - total / size).abs().max()}")
    averaged = everyone[rank].clone()
    wires.reduce_everywhere(averaged).wait()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, averaged)
    if not all(torch.equal(averaged, other) for other in gathered):
        failures.append("ranks differ after reduce_everywhere")
    mean = sum(values.float() for values in everyone) / size
    if (averaged.float() - mean).abs().max() > 0.06:
        failures.append(f"reduce_everywhere is off by {(averaged.float() - mean).abs().max()}")
    full = torch.empty(size * 640, dtype=torch.bfloat16)
    wires.gather_weights(full, everyone[rank][mine].contiguous()).wait()
    expected = torch.cat([rounded(everyone[r][r * 640 : (r + 1) * 640].contiguous()) for r in range(size)])
    if not torch.equal(full, expected):
        failures.append("a gather of weights is not what the codes say")
    return failures


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_what_the_codes_say(ranks, world_size):
    agree(ranks(world_size, wires_say_what_the_codes_say))


def forward_rounds_and_rest_stays_exact(rank: int) -> list[str]:
    plain = net()
    exact = {name: value.clone() for name, value in plain.state_dict().items()}
    model, _ = zerostd.prepare(plain, stage=3, groups=["*"], **coded({"gather": "int8"}))
    seen: dict[str, Tensor] = {}
    model[0].register_forward_hook(lambda module, *_: seen.update(weight=module.weight.detach().clone()))
    model(torch.ones(2, 48))
    failures = []
    if torch.equal(seen["weight"], exact["0.weight"]):
        failures.append("forward saw exact weights: nothing was coded")
    worst = float((seen["weight"] - exact["0.weight"]).abs().max() / exact["0.weight"].abs().max())
    if worst > 0.5 / 127 + 1e-6:
        failures.append(f"forward saw weights that are off by {worst} of the largest")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen["weight"])
    if not all(torch.equal(seen["weight"], other) for other in everyone):
        failures.append("ranks computed with different weights")
    if not torch.equal(model[0].weight.detach().clone(), exact["0.weight"]):
        failures.append("a read outside forward is rounded")
    state = zerostd.full_state_dict(model)
    failures += [f"{name} is rounded where it rests" for name in exact if not torch.equal(state[name], exact[name])]
    return failures


def test_forward_computes_with_codes_and_what_rests_stays_exact(ranks):
    agree(ranks(2, forward_rounds_and_rest_stays_exact))


def trains_nearly_alike(rank: int, stage: int) -> list[str]:
    case = MODELS["gpt"]
    failures = []
    for precision in ("fp32", "bf16"):
        recipe = Recipe(precision=precision, steps=STEPS, max_norm=0.5)
        exact = train_zerostd(case, recipe, stage)
        codec = BOTH if stage == 3 else {"reduce": "int8"}
        near = train_zerostd(case, recipe, stage, **coded(codec, optimizer_states="host" if stage == 2 else "device"))
        gaps = [abs(a - b) / abs(b) for a, b in zip(near.losses, exact.losses, strict=True)]
        if max(gaps) > 0.02:
            failures.append(f"stage {stage}, {precision}: losses are off by up to {max(gaps):.4f}")
        if max(gaps) == 0.0:
            failures.append(f"stage {stage}, {precision}: losses are exact, so nothing was coded")
        if not near.losses[-1] < near.losses[0]:
            failures.append(f"stage {stage}, {precision}: the loss does not fall")
    return failures


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_models_train_nearly_as_without(ranks, stage):
    agree(ranks(2, trains_nearly_alike, stage))


def feeds_back(rank: int, stage: int) -> list[str]:
    """With a constant gradient the mean over steps converges to it: nothing is lost for good."""
    numel = 640
    model = nn.Linear(numel, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.zero_()
    model, optimizer = zerostd.prepare(model, optimizer, stage=stage, **coded({"reduce": "int4"}))
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    steps = 20
    errors = []
    for step in range(steps):
        (model(x[None]) * (1.0 + rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        value = zerostd.full_state_dict(model)["weight"].view(-1)
        errors.append(float((value / -(step + 1) - 1.5 * x).abs().max()))
    failures = []
    if not errors[0] > 0.05:
        failures.append(f"stage {stage}: one step is off by {errors[0]} only, so nothing was coded")
    if not errors[-1] < 2 * errors[0] / steps:
        failures.append(f"stage {stage}: the mean of {steps} steps is off by {errors[-1]}, one step by {errors[0]}")
    return failures


@pytest.mark.parametrize("stage", [2, 3])
def test_what_4_bits_lose_comes_with_the_next_gradient(ranks, stage):
    agree(ranks(2, feeds_back, stage))


def counts_what_was_lost(rank: int) -> tuple[int, int]:
    model = seeded(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = coded({"reduce": "int4"}) | {"stage": 3, "precision": "bf16", "groups": ["*"]}
    model, optimizer = zerostd.prepare(model, optimizer, **options)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    peak = zerostd.memory(model).peak["device"]["buffers"]
    return peak, sum(p.numel() for p in model.parameters())


def test_what_is_kept_for_feedback_is_counted(ranks):
    peak, numel = ranks(2, counts_what_was_lost)[0]
    assert peak >= 2 * numel


def sent(rank: int, stage: int, codec: dict[str, str] | None) -> dict[str, int]:
    model = seeded(lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))))
    options = coded(codec) if codec else {"placement": zerostd.Placement()}
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zerostd.prepare(model, optimizer, stage=stage, precision="bf16", groups=["*"], **options)
    ledger = model.__dict__["_zerostd"].ledger
    for step in range(2):
        before = dict(ledger.sent)
        model(torch.ones(2, 128) * (rank + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {verb: ledger.sent[verb] - before.get(verb, 0) for verb in ("gather", "reduce")}


def test_codes_send_53_and_28_hundredths_of_the_bytes(ranks):
    for stage, codec in ((3, BOTH), (2, {"reduce": "int8"}), (0, {"reduce": "int8"})):
        plain = ranks(2, sent, stage, None)[0]
        less = ranks(2, sent, stage, codec)[0]
        for verb in ("gather", "reduce") if stage == 3 else ("reduce",):
            assert less[verb] / plain[verb] == pytest.approx(1.0625 / 2, abs=1e-9), (stage, verb, less, plain)
    fewest = ranks(2, sent, 2, {"reduce": "int4"})[0]
    assert fewest["reduce"] / ranks(2, sent, 2, None)[0]["reduce"] == pytest.approx(0.5625 / 2, abs=1e-9)


def hybrid_trains(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    recipe = Recipe(precision="bf16", steps=6)
    exact = train_zerostd(MODELS["gpt"], recipe, 3, mesh=mesh)
    near = train_zerostd(MODELS["gpt"], recipe, 3, mesh=mesh, **coded())
    gaps = [abs(a - b) / abs(b) for a, b in zip(near.losses, exact.losses, strict=True)]
    return [] if 0 < max(gaps) < 0.02 else [f"losses are off by {max(gaps)}"]


def test_replicas_send_codes_too(ranks):
    agree(ranks(4, hybrid_trains))


def not_finite(rank: int) -> list[str]:
    """An overflow on one rank skips the step on all."""
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zerostd.prepare(model, optimizer, stage=2, precision="fp16", **coded({"reduce": "int8"}))
    x = torch.ones(2, 48) * (float("inf") if rank == 0 else 1.0)
    model(x).square().mean().backward()
    optimizer.step()
    state = zerostd.full_state_dict(model)
    return [f"{name} has changed" for name, value in before.items() if not torch.equal(state[name], value)]


def test_an_overflow_is_seen_behind_the_wire(ranks):
    agree(ranks(2, not_finite))


def clamp_data(module: nn.Module, _: Any) -> None:
    module.weight.data.clamp_(-0.01, 0.01)


@torch.no_grad()
def scale(module: nn.Module, _: Any) -> None:
    module.weight.mul_(0.5)


def edits(rank: int) -> list[str]:
    failures = []
    for edit in (clamp_data, scale):
        model, _ = zerostd.prepare(net(), stage=3, groups=["*"], **coded())
        model[0].register_forward_pre_hook(edit)
        try:
            model(torch.ones(2, 48))
            failures.append(f"{edit.__name__}: an edit of rounded values was kept")
        except zerostd.MisuseError as error:
            if "rounded values" not in str(error) or "write=True" not in str(error):
                failures.append(f"{edit.__name__}: {error}")
    exact, _ = zerostd.prepare(net(), stage=3, groups=["*"], **coded())
    exact(torch.ones(2, 48))
    exact[0].weight.data.mul_(2.0)  # outside forward
    if not torch.equal(zerostd.full_state_dict(exact)["0.weight"], net()[0].weight * 2.0):
        failures.append("an edit outside forward is rounded")
    return failures


def test_edits_of_rounded_values_are_refused(ranks):
    agree(ranks(2, edits))


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ({"reduce": "int3"}, "no codec 'int3' for 'reduce'; use .*'int8', 'int4'"),
        ({"activations": "int8"}, "no codec 'int8' for 'activations'; use .*gather"),
        ("int8", "must be a dict"),
    ],
)
def test_unknown_codecs_are_refused(codec, message):
    with pytest.raises(zerostd.PrepareError, match=message):
        zerostd.prepare(net(), stage=3, **coded(codec))


def test_lossy_codecs_need_a_word(ranks):
    with pytest.raises(zerostd.PrepareError, match="exact=False"):
        zerostd.prepare(net(), placement=zerostd.Placement(codec=BOTH), stage=3)


def test_4_bits_do_not_go_with_a_loss_scale():
    with pytest.raises(zerostd.PrepareError, match="use 'int8' or precision='bf16'"):
        zerostd.prepare(net(), stage=2, precision="fp16", **coded({"reduce": "int4"}))


def test_only_stage_3_gathers_weights():
    with pytest.raises(zerostd.PrepareError, match="stage=3"):
        zerostd.prepare(net(), stage=2, **coded())
