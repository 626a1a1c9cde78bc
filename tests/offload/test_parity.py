"""Where states rest changes no bit of a training: every placement against the device, on one rank and on two.

Losses, gradient norms, weights, optimizer states and options are compared, all of them for equality. What is beside the
loop - schedulers, edits, saving and loading, release - is done under every placement as well.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zerostd
from offload.jobs import (
    CASES,
    HALF,
    PLACEMENTS,
    RULES,
    THIRDS,
    Job,
    Trained,
    assert_same,
    every,
    loss_of,
    prepared,
    run_steps,
    short_tiles,
    tensors_of,
    train,
)
from support.agreement import agree
from support.compare import assert_bitwise, relative_error
from support.models import GPT
from support.processes import doing
from support.side_by_side import seeded
from zerostd import Placement, PrepareError

MAX_NORM = 0.3
Item = TypeVar("Item")
LOOPS = [  # (passes, accumulate, max_grad_norm)
    (1, 1, None),
    (1, None, None),
    (2, 2, None),
    (1, 1, MAX_NORM),
    (2, None, MAX_NORM),
    (2, 2, MAX_NORM),
]
OTHERS = ("cnn", "experts", "adapted")  # models
WAYS: list[tuple[int | None, float | None, str | None]] = [(1, None, None), (None, MAX_NORM, "bf16")]
# Half of a matrix, such that every value occurs with every other placement; the rest in `make test-all`, and so are
# both halves of every second placement.
by_halves = pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.full)], ids=["", "rest"])


def half_of(items: Iterable[Item], name: str, part: int) -> list[Item]:
    """Every second one, beginning with the first or the second by the placement and the part: in turn among those with
    even numbers, and among those with odd ones."""
    return list(items)[(list(PLACEMENTS).index(name) // 2 + part) % 2 :: 2]


@pytest.fixture(autouse=True)
def tiles() -> Iterator[None]:
    with short_tiles():
        yield


@functools.cache
def on_device(job: Job) -> Trained:
    return train(job, None, None)


def compare(job: Job, name: str, folder: Any) -> None:
    assert_same(train(job, PLACEMENTS[name], folder), on_device(job), f"{name}, {job}")


# -- the loop --


@by_halves
@every(2, 0)
def test_every_optimizer_and_loop(name: str, part: int, tmp_path: Path) -> None:
    """AdamW in all loops; every other optimizer in one, another for each placement."""
    for passes, accumulate, max_norm in half_of(LOOPS, name, part):
        compare(Job(passes=passes, accumulate=accumulate, max_grad_norm=max_norm), name, tmp_path)
    shift = list(PLACEMENTS).index(name)
    for number, rules in half_of(enumerate(rules for rules in RULES if rules != "adamw"), name, part):
        passes, accumulate, max_norm = LOOPS[(shift + number) % len(LOOPS)]
        job = Job(rules=rules, passes=passes, accumulate=accumulate, max_grad_norm=max_norm, steps=3)
        compare(job, name, tmp_path)


@by_halves
@every(2, 1)
def test_16_bit_runs(name: str, part: int, tmp_path: Path) -> None:
    runs = zip(("adamw", "sgd", "rmsprop", "adamw"), LOOPS[:4], strict=True)
    for rules, (passes, accumulate, max_norm) in half_of(runs, name, part):
        job = Job(rules=rules, precision="bf16", passes=passes, accumulate=accumulate, max_grad_norm=max_norm)
        compare(job, name, tmp_path)
    for accumulate, max_norm in half_of([(1, None), (None, MAX_NORM)], name, part):
        job = Job(precision="fp16", accumulate=accumulate, max_grad_norm=max_norm, steps=5, overflows=True)
        compare(job, name, tmp_path)


@by_halves
@every(2, 0)
def test_other_models(name: str, part: int, tmp_path: Path) -> None:
    """Batch-norm; experts and layers without gradient in some steps, where runs are cut; frozen layers."""
    for case, (accumulate, max_norm, precision) in half_of(product(OTHERS, WAYS), name, part):
        steps = 8 if CASES[case].some_unused else 3
        job = Job(case=case, accumulate=accumulate, max_grad_norm=max_norm, precision=precision, steps=steps)
        compare(job, name, tmp_path)


@every(3, 0)
def test_each_step_uses_its_own_options(name: str, tmp_path: Path) -> None:
    """Schedulers change options while updates of the step before still run."""
    for accumulate, schedule in ((1, one_cycle), (None, falling)):
        job = Job(accumulate=accumulate, steps=5, schedule=schedule, delay_s=0.005)
        compare(job, name, tmp_path)
        constant = Job(accumulate=accumulate, steps=5)
        assert on_device(job).losses != on_device(constant).losses, "the schedule has no effect, so nothing is shown"


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[3e-2, 5e-2], total_steps=6)  # betas too


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.3**step)


@every(3, 1)
def test_no_sync_and_passes_without_gradient(name: str, tmp_path: Path) -> None:
    """In a world of one no_sync changes nothing, and the gradients of an empty pass stay as they are."""

    def run(placement: Placement | None) -> dict[str, Tensor]:
        job = Job(case="adapted")
        model, optimizer = prepared(job, placement, tmp_path)
        for number in range(3):
            with zerostd.no_sync(model):
                loss_of(job, model, 3 * number).backward()
            loss_of(job, model, 3 * number + 1).backward()  # without the layer that is used sometimes
            optimizer.step()
            optimizer.zero_grad(set_to_none=number != 1)
        weights = zerostd.full_state_dict(model)
        zerostd.release(model)
        return weights

    assert_bitwise(run(PLACEMENTS[name]), run(None), name)


# -- beside the loop --


@every(3, 2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_edits_and_loaded_weights_are_kept(name: str, precision: str, tmp_path: Path) -> None:
    def run(placement: Placement | None) -> list[dict[str, Tensor]]:
        job = Job(precision=precision, accumulate=1)
        model, optimizer = prepared(job, placement, tmp_path)
        run_steps(job, model, optimizer, range(2))
        with zerostd.gathered(model, write=True), torch.no_grad():
            for part in (model.tokens, model.blocks[0].qkv, model.blocks[1].mlp[2]):
                part.weight[3].fill_(0.25)
        edited = zerostd.full_state_dict(model)
        run_steps(job, model, optimizer, range(2, 4))
        model.load_state_dict(CASES["gpt"].make(5).state_dict())
        loaded = zerostd.full_state_dict(model)
        run_steps(job, model, optimizer, range(4, 6))
        found = [edited, loaded, zerostd.full_state_dict(model)]
        zerostd.release(model)
        return found

    edited, loaded, trained = run(PLACEMENTS[name])
    assert edited["blocks.1.mlp.2.weight"][3].eq(0.25).all() and edited["head.weight"][3].eq(0.25).all()
    assert_bitwise(loaded, CASES["gpt"].make(5).state_dict(), "loaded")
    for mine, reference in zip((edited, loaded, trained), run(None), strict=True):
        assert_bitwise(mine, reference, name)


@every(3, 0)
@pytest.mark.parametrize(
    "job", [Job(accumulate=1), Job(case="adapted", rules="nadam", precision="bf16")], ids=["fp32", "bf16"]
)
def test_states_saved_under_one_placement_load_under_another(job: Job, name: str, tmp_path: Path) -> None:
    """To the device and from a mixture; parameters that were not used in some steps count their own."""
    job = replace(job, steps=5)
    expected = on_device(job)
    for first, second in ((PLACEMENTS[name], None), (PLACEMENTS["states on all tiers"], PLACEMENTS[name])):
        model, optimizer = prepared(job, first, tmp_path)
        run_steps(job, model, optimizer, range(2))
        weights, states = zerostd.full_state_dict(model), copy.deepcopy(optimizer.state_dict())
        zerostd.release(model)
        model, optimizer = prepared(job, second, tmp_path, seed=7)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        losses, _ = run_steps(job, model, optimizer, range(2, 5))
        assert losses == expected.losses[2:], f"from {first} to {second}"
        assert_bitwise(zerostd.full_state_dict(model), expected.weights)
        assert_bitwise(tensors_of(optimizer.state_dict()), tensors_of(expected.states))
        zerostd.release(model)


@every(3, 1)
def test_torchs_own_states_go_on(name: str, tmp_path: Path) -> None:
    """An optimizer that has trained already is taken over with its states, and gives them back in torch's format."""
    for rules in ("adamw", "nesterov", "adagrad"):
        plain = CASES["gpt"].make(0)
        optimizer = RULES[rules](plain)
        run_steps(Job(), plain, optimizer, range(2))
        model, mine = copy.deepcopy((plain, optimizer))
        model, mine = zerostd.prepare(
            model,
            mine,
            placement=PLACEMENTS[name],
            groups=["blocks.*"],
            budget=zerostd.Budget(disk_path=str(tmp_path)),
        )
        run_steps(Job(), plain, optimizer, range(2, 4))
        run_steps(Job(), model, mine, range(2, 4))
        assert_bitwise(zerostd.full_state_dict(model), plain.state_dict(), rules)
        assert_bitwise(tensors_of(mine.state_dict()), tensors_of(optimizer.state_dict()), rules)
        zerostd.release(model)


@every(3, 2)
def test_release_gives_an_ordinary_model_back(name: str, tmp_path: Path) -> None:
    job = Job(accumulate=1, precision="bf16")
    model, optimizer = prepared(job, PLACEMENTS[name], tmp_path)
    run_steps(job, model, optimizer, range(2))
    expected = zerostd.full_state_dict(model)
    loss_of(job, model, 2).backward()
    optimizer.step()
    stepped = zerostd.full_state_dict(model)
    assert zerostd.release(model) is model
    assert_bitwise(model.state_dict(), stepped, name)
    assert not torch.equal(stepped["norm.weight"], expected["norm.weight"])
    assert all(p.grad is None and p.is_leaf and p.dtype == torch.float32 for p in model.parameters())
    twin = copy.deepcopy(model)
    for one in (model, twin):
        run_steps(Job(), one, RULES["adamw"](one), range(2))
    assert_bitwise(model.state_dict(), twin.state_dict(), "after release")


def test_an_optimizer_made_afterwards_still_works() -> None:
    model = zerostd.apply_to_device(CASES["gpt"].make(0), "cpu")
    losses, _ = run_steps(Job(), model, RULES["adamw"](model), range(3))
    assert losses == on_device(Job(steps=3)).losses
    assert_bitwise(zerostd.full_state_dict(model), on_device(Job(steps=3)).weights)
    zerostd.release(model)


def test_states_need_the_optimizer() -> None:
    with pytest.raises(PrepareError, match="needs the optimizer"):
        zerostd.prepare(CASES["gpt"].make(0), placement=Placement(optimizer_states="host"))


# -- against plain torch --


def test_a_hundred_steps_on_text_end_where_torch_ends(tmp_path: Path) -> None:
    """A GPT on the bytes of a source file, states half by the processor and half streamed, clipped. fp32 sums and
    updates have torch's own bits; only the norm is summed in another order, so losses stay within 1e-5 relative."""
    text = torch.frombuffer(bytearray(Path(zerostd.__file__).with_name("api.py").read_bytes()), dtype=torch.uint8)

    def run(placement: Placement | None) -> list[float]:
        model = seeded(lambda: GPT(vocabulary=256, length=24, width=32, depth=2))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if placement is not None:
            model, optimizer = zerostd.prepare(
                model,
                optimizer,
                placement=placement,
                max_grad_norm=1.0,
                groups=["blocks.*"],
            )
        generator, losses = torch.Generator().manual_seed(3), []
        for _ in range(100):
            starts = torch.randint(len(text) - 25, (8,), generator=generator)
            tokens = torch.stack([text[start : start + 25] for start in starts]).long()
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            if placement is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if placement is not None:
            zerostd.release(model)
        return losses

    plain, mine = run(None), run(HALF)
    assert plain[-1] < 0.7 * plain[0], "nothing was learnt, so nothing is shown"
    assert relative_error(torch.tensor(mine), torch.tensor(plain)) < 1e-5


# -- two ranks --

ON_TWO_RANKS: dict[str, tuple[tuple[int, ...], Placement]] = {
    "states on host": ((0, 1, 2, 3), PLACEMENTS["states on host"]),
    "states on host, half streamed": ((0, 1, 2, 3), HALF),
    "states on disk": ((0, 1, 2, 3), PLACEMENTS["states on disk"]),
    "states on all tiers": ((0, 1, 2, 3), PLACEMENTS["states on all tiers"]),
    "gradients on host": ((2, 3), Placement(gradients="host", optimizer_states="host", cpu_share=0.5)),
    "everything on host": ((3,), PLACEMENTS["everything on host"]),
    "gradients on disk": ((2, 3), PLACEMENTS["gradients on disk"]),
    "everything off the device": ((3,), Placement(parameters="disk", gradients="host", optimizer_states="disk")),
    "different shares": ((3,), PLACEMENTS["different shares"]),
}
TWO_RANK_JOBS = [
    Job(accumulate=1, steps=3),
    Job(passes=2, accumulate=None, max_grad_norm=MAX_NORM, steps=3, precision="bf16"),
    Job(case="adapted", accumulate=1, steps=4, rules="nesterov"),
    Job(accumulate=1, steps=3, precision="fp16", rules="own", overflows=True),
]


def compare_on_ranks(rank: int, name: str, part: int, folder: str) -> list[str]:
    """On every rank: the jobs that a placement changes, in words. The first part has every fourth one, in turn by stage
    and placement, so that every stage has every job; the second part has the others."""
    stages, placement = ON_TWO_RANKS[name]
    failures = []
    with short_tiles():
        for stage, (number, job) in product(stages, enumerate(TWO_RANK_JOBS, list(ON_TWO_RANKS).index(name))):
            if min(1, (stage + number) % 4) != part or (
                job.overflows and stage in (0, 2)
            ):  # those are as stages 1 and 3
                continue
            job = replace(job, stage=stage)
            doing(f"{name}, {job}")
            reference = on_ranks(job, rank)
            try:
                assert_same(train(job, placement, folder, rank), reference, f"rank {rank}, {name}, {job}")
            except AssertionError as error:
                failures.append(str(error))
    return failures


@functools.cache
def on_ranks(job: Job, rank: int) -> Trained:
    return train(job, None, None, rank)


@by_halves
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_on_two_ranks(ranks: Any, name: str, part: int, tmp_path: Path) -> None:
    agree(ranks(2, compare_on_ranks, name, part, str(tmp_path), timeout=200))


def passes_under_no_sync(rank: int, folder: str) -> list[str]:
    """Gradients that no rank has sent are added to what rests off the device."""
    failures = []
    for stage, kind, gradients in product((2, 3), ("fp32", "bf16"), ("host", "disk")):
        job = Job(accumulate=None, stage=stage, precision=kind)
        weights = []
        for placement in (None, Placement(gradients=gradients, optimizer_states="host")):
            model, optimizer = prepared(job, placement, folder)
            for number in range(3):
                with zerostd.no_sync(model):
                    loss_of(job, model, 2 * number, rank).backward()
                loss_of(job, model, 2 * number + 1, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(zerostd.full_state_dict(model))
            zerostd.release(model)
        try:
            assert_bitwise(weights[1], weights[0], f"rank {rank}, stage {stage}, {kind}, gradients on {gradients}")
        except AssertionError as error:
            failures.append(str(error))
    return failures


def test_no_sync_on_two_ranks_with_gradients_off_the_device(ranks: Any, tmp_path: Path) -> None:
    agree(ranks(2, passes_under_no_sync, str(tmp_path)))


def parts_of_the_model_rest_on_some_ranks(rank: int) -> list[str]:
    """Ranks that use different layers in a step: their updates begin in different orders, and end the same."""
    failures = []
    with short_tiles():
        for stage in (0, 1, 2):
            states = []
            for placement in (None, PLACEMENTS["states on host"], PLACEMENTS["states on all tiers"]):
                model = seeded(Skipping)
                model, optimizer = zerostd.prepare(
                    model, RULES["adamw"](model), stage=stage, placement=placement, accumulate=1, groups=["blocks.*"]
                )
                for number in range(6):
                    skipped = 1 + number % 2 if rank == number % 3 % 2 else None
                    inputs = torch.full((4, 64), 0.1 * number + 0.2 * rank)
                    model(inputs, skipped).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                states.append(zerostd.full_state_dict(model))
                zerostd.release(model)
            for placed in states[1:]:
                try:
                    assert_bitwise(placed, states[0], f"stage {stage}, rank {rank}")
                except AssertionError as error:
                    failures.append(str(error))
    return failures


class Skipping(nn.Module):
    """May leave one of its layers out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: Tensor, skipped: int | None) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = x + block(x).tanh()
        return x


def test_ranks_that_use_different_layers(ranks: Any) -> None:
    agree(ranks(2, parts_of_the_model_rest_on_some_ranks))


def refused(rank: int) -> list[str]:
    """On every rank: what should be refused and was not, or left something changed."""
    failures = []
    wrong = [(stage, "parameters") for stage in (0, 1, 2)] + [(stage, "gradients") for stage in (0, 1)]
    for stage, kind in wrong:
        for home in ("host", "disk", {"device": 0.5, "host": 0.5}):
            model = CASES["gpt"].make(0)
            before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
            optimizer = RULES["adamw"](model)
            try:
                zerostd.prepare(model, optimizer, stage=stage, placement=Placement(**{kind: home}))
                failures.append(f"{kind} on {home} at stage {stage} was taken")
            except PrepareError as error:
                if f"stage={stage}" not in str(error) or f"stage={3 if kind == 'parameters' else 2}" not in str(error):
                    failures.append(f"the message does not name both stages: {error}")
            for name, parameter in model.named_parameters():
                one, place, values = before[name]
                if parameter is not one or parameter.data_ptr() != place or not torch.equal(parameter, values):
                    failures.append(f"stage {stage}, {kind}: {name} was changed")
            hooks = [module._forward_pre_hooks or module._forward_hooks for module in model.modules()]
            if any(hooks) or "zerostd" in str(vars(model)):
                failures.append(f"stage {stage}, {kind}: something hangs on the model")
            run_steps(Job(), model, optimizer, range(1))  # as ever
    return failures


def test_homes_that_need_sharding_are_refused_below_it(ranks: Any) -> None:
    agree(ranks(2, refused))


def test_in_a_world_of_one_every_stage_takes_every_placement(tmp_path: Path) -> None:
    reference = on_device(Job())
    for stage in (0, 1, 2):
        for name in ("everything on host", "different shares"):
            trained = train(Job(stage=stage), PLACEMENTS[name], tmp_path)
            assert_same(trained, reference, f"stage {stage}, {name}")


def test_parameters_on_disk_are_written_wherever_the_states_are(tmp_path: Path) -> None:
    """New parameters go to the disk from the host, so nothing is streamed, whatever `cpu_share` says."""
    for states in ("device", "host", "disk", THIRDS):
        for job in (Job(), Job(precision="bf16", accumulate=1), Job(rules="rmsprop", max_grad_norm=MAX_NORM)):
            placement = Placement(parameters="disk", optimizer_states=states, cpu_share=0.0)
            assert_same(train(job, placement, tmp_path), on_device(job), f"states on {states}, {job}")


def test_homes_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="not a way for activations"):
        Placement(activations="tape")
    with pytest.raises(PrepareError, match="sum to 1"):
        Placement(optimizer_states={**THIRDS, "disk": 0.1})
    with pytest.raises(PrepareError, match="not a tier"):
        Placement(optimizer_states="tape")
    with pytest.raises(PrepareError, match="cpu_share"):
        Placement(cpu_share=1.5)
