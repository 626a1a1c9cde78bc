"""Masters of bf16 parameters are kept as two halves, and nothing shows it but the bytes.

The oracle does not use the library: a bf16 model in plain torch, fp32 masters beside it, torch's own optimizer on
these, and weights that are masters as torch rounds them. Ties with an even upper half move by one unit of fp32, as the
contract says. Some first values are ties. Norms are summed in another order by the library, so the oracle clips by
those of the run that it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zerostd
from offload.jobs import PLACEMENTS, Drift, every, short_tiles
from support.agreement import agree
from support.compare import assert_bitwise
from support.halves import moved_from_ties
from support.processes import doing
from support.side_by_side import data, seeded
from zerostd import Placement, policy
from zerostd.policy import Kind, Route, Tier

STEPS = 4
Rules = Callable[[Any], torch.optim.Optimizer]
RULES: dict[str, Rules] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=5e-3, weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "own": lambda params: Drift(params, lr=5e-3),
}


class Net(nn.Module):
    """Four layers, one of them frozen; every 50th number of the first weight is a tie between two bf16 numbers."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.layers[2].requires_grad_(False)
        with torch.no_grad():
            bits = self.layers[0].weight.view(-1)[::50].view(torch.int32)
            bits.copy_((bits & -0x10000) | 0x8000)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def loss_of(model: nn.Module, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    batch = data(6, 48, number=number).to(dtype)
    return F.mse_loss(model(batch).float(), data(6, 48, number=number + 50))


def trained_params(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@dataclass(frozen=True)
class Loop:
    """How a step goes."""

    passes: int = 1
    max_norm: float | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"accumulate": 1})


def by_hand(rules: str, loop: Loop = Loop(), norms: Sequence[float] = ()) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and fp32 masters by name."""
    model = seeded(Net)
    masters = {name: moved_from_ties(p.detach()) for name, p in model.named_parameters() if p.requires_grad}
    model.bfloat16()
    shown = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = {name: nn.Parameter(master) for name, master in masters.items()}
    optimizer = RULES[rules](list(kept.values()))
    losses = []
    for number in range(STEPS):
        with torch.no_grad():
            for name, p in shown.items():
                p.copy_(kept[name])
                kept[name].grad = torch.zeros_like(kept[name])
        for part in range(loop.passes):
            loss = loss_of(model, number * loop.passes + part, torch.bfloat16)
            loss.backward()
            losses.append(loss.item())
            for name, p in shown.items():
                kept[name].grad += p.grad.float()
                p.grad = None
        if loop.max_norm is not None:
            norm = torch.cat([p.grad.flatten() for p in kept.values()]).norm()
            torch.testing.assert_close(torch.tensor(norms[number]), norm, rtol=1e-4, atol=0.0)
            for p in kept.values():
                p.grad *= torch.clamp(loop.max_norm / (torch.tensor(norms[number]) + 1e-6), max=1.0)
        optimizer.step()
        with torch.no_grad():
            for p in kept.values():
                p.copy_(moved_from_ties(p.detach()))
    return losses, {name: p.detach() for name, p in kept.items()}


def prepared(rules: str, placement: Placement | None, folder: Any, **options: Any) -> tuple[Any, Any]:
    model = seeded(Net)
    budget = zerostd.Budget(disk_path=str(folder))
    options = {"precision": "bf16", "groups": ["layers.*"], **options}
    return zerostd.prepare(model, RULES[rules](trained_params(model)), placement=placement, budget=budget, **options)


def run_steps(model: Any, optimizer: Any, numbers: range, passes: int = 1) -> tuple[list[float], list[float]]:
    """Losses of passes, and norms of steps that take one."""
    losses = []
    norms = []
    for number in numbers:
        for part in range(passes):
            loss = loss_of(model, number * passes + part)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.grad_norm is not None:
            norms.append(optimizer.grad_norm.item())
    return losses, norms


def masters_of(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in zerostd.full_state_dict(model).items() if not name.startswith("layers.2")}


def shards_of(model: Any) -> list[Any]:
    groups = model.__dict__["_zerostd"].groups
    return [(flat, shard) for group in groups for flat in group.flats for shard in flat.state_shards]


@pytest.fixture(autouse=True)
def tiles() -> Iterator[None]:
    with short_tiles():
        yield


# -- against fp32 masters --


@every(2, 0, [None, *PLACEMENTS])
def test_training_has_the_bits_of_fp32_masters(name: str | None, tmp_path: Path) -> None:
    placement = None if name is None else PLACEMENTS[name]
    for rules in RULES:
        losses, masters = by_hand(rules)
        model, optimizer = prepared(rules, placement, tmp_path, accumulate=1)
        assert all(shard.is_split for _, shard in shards_of(model))
        assert run_steps(model, optimizer, range(STEPS))[0] == losses, f"{name}, {rules}"
        assert_bitwise(masters_of(model), masters, f"{name}, {rules}")
        for flat, shard in shards_of(model):
            at_rest = flat.rest.read(shard.region) if flat.gives_back else flat.full[flat.region][shard.region]
            assert torch.equal(at_rest, shard.read_master().bfloat16()), f"{name}, {rules}"
        zerostd.release(model)


def on_ranks(rank: int, stage: int, placements: list[str | None], folder: str) -> list[str]:
    """Every rank has the same data, so the mean of gradients is the gradient of one."""
    failures = []
    for rules in ("adamw", "own"):
        losses, masters = by_hand(rules)
        for name in placements:
            doing(f"stage {stage}, {name}, {rules}")
            placement = None if name is None else PLACEMENTS[name]
            model, optimizer = prepared(rules, placement, folder, stage=stage, accumulate=1)
            if run_steps(model, optimizer, range(STEPS))[0] != losses:
                failures.append(f"rank {rank}, stage {stage}, {name}, {rules}: other losses")
            found = masters_of(model)
            failures += [
                f"rank {rank}, stage {stage}, {name}, {rules}: {key}"
                for key, master in masters.items()
                if not torch.equal(found[key], master)
            ]
            zerostd.release(model)
    return failures


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_have_the_bits_of_fp32_masters(ranks: Any, stage: int, tmp_path: Path) -> None:
    names: list[str | None] = [None, "states on host, half streamed", "states on disk", "states on all tiers"]
    if stage == 3:
        names += ["everything on host", "different shares"]
    agree(ranks(2, on_ranks, stage, names, str(tmp_path)))


LOOPS = [
    Loop(max_norm=0.2),
    Loop(passes=2, max_norm=1e6, options={"accumulate": 2}),
    Loop(passes=2, options={"accumulate": 2}),
    Loop(passes=2, max_norm=1.0, options={}),
]
SPECULATING = Placement(optimizer_states="host", cpu_share=0.5, speculate=True)


@every(2, 1, ["speculating", None, *PLACEMENTS])
def test_clipped_and_accumulated_steps_have_the_bits_of_fp32_masters(name: str | None, tmp_path: Path) -> None:
    placement = SPECULATING if name == "speculating" else None if name is None else PLACEMENTS[name]
    num_clipped = 0
    for number, loop in enumerate(LOOPS):
        if name == "speculating" and not (loop.max_norm and loop.options):
            continue  # refused
        for rules in ("adamw", list(RULES)[1 + number]):
            label = f"{name}, {rules}, {loop}"
            model, optimizer = prepared(rules, placement, tmp_path, max_grad_norm=loop.max_norm, **loop.options)
            losses, norms = run_steps(model, optimizer, range(STEPS), loop.passes)
            expected = by_hand(rules, loop, norms)
            num_clipped += sum(norm > loop.max_norm for norm in norms if loop.max_norm is not None)
            assert losses == expected[0], label
            assert_bitwise(masters_of(model), expected[1], label)
            if name == "speculating" and loop.max_norm == 1e6:
                assert optimizer.backward_updates.num_committed, "no step has speculated, so nothing is shown"
            zerostd.release(model)
    assert num_clipped, "no step was clipped, so nothing is shown"


# -- bytes --


@pytest.mark.parametrize("name", [None, *PLACEMENTS])
def test_states_take_ten_bytes_where_the_parameter_is_at_hand(name: str | None, tmp_path: Path) -> None:
    model, optimizer = prepared("adamw", None if name is None else PLACEMENTS[name], tmp_path)
    run_steps(model, optimizer, range(2))
    for flat, shard in shards_of(model):
        is_beside = flat.rest.tier is not Tier.DISK and (not shard.is_resident or flat.rest.tier is Tier.DEVICE)
        assert shard.holds_parameters == is_beside, f"{name}: {shard.portion}, parameters on the {flat.rest.tier}"
        own = sum(tensor.dtype.itemsize for key, tensor in shard.tensors.items() if key != "high" or not is_beside)
        assert own == (2 if is_beside else 4) + (0 if shard.is_resident else 8)
    if name in (None, "states on host", "states on host, streamed"):
        numel = sum(shard.numel for _, shard in shards_of(model))
        padding = 8 * (numel - sum(p.numel() for p in trained_params(model))) if name is None else 0  # has no moments
        held = zerostd.memory(model).now["device" if name is None else "host"][Kind.OPTIMIZER_STATES.value]
        pages = 3 * 4096 * len(shards_of(model)) if name is not None else 0
        assert 10 * numel - padding <= held <= 10 * numel + pages, f"{held} bytes for {numel} elements"
    zerostd.release(model)


def test_only_bf16_masters_are_split(tmp_path: Path) -> None:
    for precision in ("fp32", "fp16"):
        model, _ = prepared("adamw", PLACEMENTS["states on all tiers"], tmp_path, precision=precision)
        assert not any(shard.is_split for _, shard in shards_of(model))
        zerostd.release(model)


def test_an_accelerator_has_halves_of_its_own_only_where_the_cpu_needs_them() -> None:
    at_hand = {
        (parameters, route)
        for parameters in Tier
        for route in Route
        if policy.is_at_hand(parameters, route, has_own_memory=True)
    }
    device, host = Tier.DEVICE, Tier.HOST
    assert at_hand == {(device, Route.RESIDENT), (device, Route.STREAMED), (host, Route.STREAMED), (host, Route.CPU)}


# -- beside the loop --


@pytest.mark.parametrize("name", [None, "states on all tiers", "everything on host"])
def test_checkpoints_of_whole_masters_load_and_the_other_way(name: str | None, tmp_path: Path) -> None:
    placement = None if name is None else PLACEMENTS[name]
    _, masters = by_hand("adamw")
    for number, (first, second) in enumerate(((None, torch.bfloat16), (torch.bfloat16, None))):
        path = tmp_path / f"checkpoint {number}"
        with mock.patch.object(policy, "SPLIT_DTYPE", first):
            model, optimizer = prepared("adamw", placement, tmp_path)
        model.load_state_dict(masters, strict=False)
        run_steps(model, optimizer, range(1))
        saved = masters_of(model)
        zerostd.save(path, model, optimizer)
        losses = run_steps(model, optimizer, range(1, 3))
        expected = masters_of(model)
        zerostd.release(model)
        with mock.patch.object(policy, "SPLIT_DTYPE", second):
            model, optimizer = prepared("adamw", placement, tmp_path)
        zerostd.load(path, model, optimizer)
        kept = saved if second is None else {name: moved_from_ties(master) for name, master in saved.items()}
        assert_bitwise(masters_of(model), kept, f"{name}, from {first}")
        assert run_steps(model, optimizer, range(1, 3)) == losses
        for key, master in masters_of(model).items():  # whole masters are not moved from ties
            torch.testing.assert_close(master, expected[key], rtol=2.0**-23, atol=0.0, msg=f"{name}, {key}")
        zerostd.release(model)


@pytest.mark.parametrize("name", [None, *PLACEMENTS])
def test_what_is_written_to_data_changes_no_other_bits(name: str | None, tmp_path: Path) -> None:
    model, optimizer = prepared("adamw", None if name is None else PLACEMENTS[name], tmp_path)
    run_steps(model, optimizer, range(2))
    expected = masters_of(model)
    weight = "layers.1.weight"
    model.layers[1].weight.data[3].fill_(0.25)
    model.layers[1].weight.data.view(-1)[7] = -0.0
    expected[weight] = expected[weight].clone()
    expected[weight][3] = 0.25
    expected[weight].view(-1)[7] = -0.0
    assert_bitwise(masters_of(model), expected, f"{name}, data")
    with zerostd.gathered(model, write=True), torch.no_grad():
        model.layers[0].bias.mul_(2)
    shown = expected["layers.0.bias"].bfloat16()
    expected["layers.0.bias"] = torch.where(shown == 0, expected["layers.0.bias"], (shown * 2).float())
    assert_bitwise(masters_of(model), expected, f"{name}, gathered")
    run_steps(model, optimizer, range(2, 3))
    assert all(master.isfinite().all() for master in masters_of(model).values())
    zerostd.release(model)


WRITES_IN_PLACE: dict[str, Callable[[nn.Parameter], Any]] = {
    "item": lambda p: p.__setitem__(3, 0.25),
    "view": lambda p: p[3].fill_(0.25),
    "view of a view": lambda p: p.view(-1)[7].fill_(-0.0),
    "method": lambda p: p.clamp_(-0.05, 0.05),
    "operator": lambda p: p.__imul__(torch.arange(48) % 2 + 1),
    "init": lambda p: nn.init.uniform_(p, -0.1, 0.1),
    "data": lambda p: p.data[3].zero_(),
    "detached": lambda p: p.detach()[5].zero_(),
    "nothing": lambda p: p.clamp_(-10, 10),
}


@pytest.mark.parametrize("name", [None, *PLACEMENTS])
def test_a_write_in_place_changes_no_other_bits(name: str | None, tmp_path: Path) -> None:
    model, optimizer = prepared("adamw", None if name is None else PLACEMENTS[name], tmp_path)
    for number, (kind, write) in enumerate(WRITES_IN_PLACE.items()):
        run_steps(model, optimizer, range(number, number + 1))
        expected = masters_of(model)
        master = expected["layers.1.weight"]
        assert (master.view(torch.int32) & 0xFFFF != 0).any(), "nothing to lose"
        plain = nn.Parameter(master.bfloat16())
        for written in (plain, model.layers[1].weight):
            torch.manual_seed(1)
            with torch.inference_mode() if kind == "data" else torch.no_grad():
                write(written)
        is_new = plain.detach().view(torch.int16) != master.bfloat16().view(torch.int16)
        assert (kind == "nothing") != bool(is_new.any())
        expected["layers.1.weight"] = torch.where(is_new, plain.detach().float(), master)
        assert_bitwise(masters_of(model), expected, f"{name}, {kind}")
    run_steps(model, optimizer, range(1))
    assert not any(flat._edits.copies for flat, _ in shards_of(model)), "copies stay for writes that were seen"
    zerostd.release(model)


def test_a_write_that_no_method_makes_is_the_master(tmp_path: Path) -> None:
    """On the device the whole parameter counts as written the first time; later writes are told apart by element."""
    model, optimizer = prepared("adamw", None, tmp_path)
    for number in range(4):
        run_steps(model, optimizer, range(number, number + 1))
        expected = masters_of(model)
        master = expected["layers.1.weight"]
        written = master.bfloat16().clamp(-0.05 / (number + 1), 0.05 / (number + 1)).float()
        is_new = torch.full_like(master, number == 0, dtype=torch.bool) | (written != master.bfloat16())
        expected["layers.1.weight"] = torch.where(is_new, written, master)
        with torch.no_grad():
            torch._foreach_clamp_max_([model.layers[1].weight], 0.05 / (number + 1))
            torch._foreach_clamp_min_([model.layers[1].weight], -0.05 / (number + 1))
        assert_bitwise(masters_of(model), expected, f"write {number}")
    zerostd.release(model)
