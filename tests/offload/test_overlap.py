"""Updates that go on beside the loop: in any order and at any pace they give the same bits, and misuse is loud.

Early updates inside backward, updates on trial before the norm is known, the worker that does them, and the arithmetic
that says which stretch of the states goes by which route.
"""

from __future__ import annotations

import functools
import gc
import re
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate as running_sums
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zerostd
from offload.jobs import (
    HALF,
    PLACEMENTS,
    Job,
    Trained,
    assert_same,
    debugging,
    every,
    hold_up,
    loss_of,
    prepared,
    run_steps,
    short_tiles,
    train,
)
from support.agreement import agree
from support.compare import assert_bitwise
from support.processes import doing
from zerostd import MisuseError, Placement, PrepareError
from zerostd.errors import StorageError
from zerostd.policy import Route, Tier
from zerostd.sharding.layout import UNIT, assign_tiers, cut_portions, default_cpu_share
from zerostd.tiers import AllOf, Done, Work, Worker

every_placement = pytest.mark.parametrize("name", PLACEMENTS)
DELAY_S = 0.02
PATIENCE_S = 20.0  # for what should happen at once
BIG, SMALL, BETWEEN = 1e6, 1e-3, 10.0  # norms that never bite, always, and in the bumps only


@pytest.fixture(autouse=True)
def tiles() -> Iterator[None]:
    with short_tiles():
        yield


@functools.cache
def on_device(job: Job) -> Trained:
    return train(job, None, None)


# -- overlap --


@every(3, 0)
def test_overlap_changes_no_bit(name: str, tmp_path: Path) -> None:
    """Serial, overlapped, held up, with memory poisoned behind each use; early in backward and late after step()."""
    jobs = [
        Job(accumulate=1, steps=3),
        Job(steps=3, max_grad_norm=0.3, precision="bf16"),
        Job(passes=2, accumulate=2, steps=3, precision="bf16", rules="rmsprop"),
    ]
    for job in jobs:
        reference = on_device(job)
        slow = replace(job, delay_s=DELAY_S)
        for label, what, options in (
            ("serial", job, {"is_serial": True}),
            ("poisoned", job, {"poisons": True}),
            ("held up and poisoned", slow, {"poisons": True}),
            ("late", job, {"is_late": True}),
        ):
            with debugging(**options):
                assert_same(train(what, PLACEMENTS[name], tmp_path), reference, f"{name}, {label}, {job}")
    early, late = (on_device(replace(jobs[0], accumulate=accumulate)) for accumulate in (1, None))
    assert_same(early, late, "on the device")
    assert_same(train(replace(slow, accumulate=None), PLACEMENTS[name], tmp_path), on_device(jobs[2]), "late")


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [
        pytest.param(name, (1, None)[(index + part) % 2], marks=pytest.mark.full if part else ())
        for index, name in enumerate(PLACEMENTS)
        for part in (0, 1)
    ],
)
def test_calls_right_after_a_step_see_its_end(name: str, accumulate: int | None, tmp_path: Path) -> None:
    """Zeroed gradients, edits, saved weights and states, a forward: all while the update is held up."""

    def run(placement: Placement | None) -> tuple[list[dict[str, Tensor]], list[Any]]:
        job = Job(accumulate=accumulate, precision="bf16")
        model, optimizer = prepared(job, placement, tmp_path)
        weights, others = [], []
        for number in range(5):
            loss_of(job, model, number).backward()
            hold_up(optimizer, DELAY_S)
            optimizer.step()
            if number == 0:
                optimizer.zero_grad(set_to_none=False)  # the update still reads what this overwrites
                continue
            if number == 1:
                with zerostd.gathered(model, write=True), torch.no_grad():
                    model.blocks[1].qkv.weight[3].fill_(0.25)
            elif number == 2:
                weights.append(zerostd.full_state_dict(model))
            elif number == 3:
                others.append(optimizer.state_dict()["state"][2])
            elif number == 4:
                model.eval()
                others.append({"loss": loss_of(job, model, 9).detach()})
            optimizer.zero_grad()
        weights.append(zerostd.full_state_dict(model))
        zerostd.release(model)
        return weights, others

    (mine, my_others), (reference, others) = run(PLACEMENTS[name]), run(None)
    for one, other in zip([*mine, *my_others], [*reference, *others], strict=True):
        assert_bitwise(one, other, name)


# -- early --


def after_backward(placement: Placement, folder: Any, **options: Any) -> tuple[Any, Any, Job]:
    """A model with one step behind it and a backward pass since."""
    job = Job(accumulate=1, **options)
    model, optimizer = prepared(job, placement, folder)
    run_steps(job, model, optimizer, range(1))
    loss_of(job, model, 1).backward()
    return model, optimizer, job


@every_placement
def test_updates_begin_inside_backward(name: str, tmp_path: Path) -> None:
    """The blocks are updated when backward ends, step() adds the rest and nothing twice."""
    model, optimizer, _ = after_backward(PLACEMENTS[name], tmp_path)
    done = {group.name for group in optimizer.backward_updates._done}
    assert done == {"blocks.0", "blocks.1"}
    optimizer.synchronize()
    before, after = on_device(Job(steps=1)).weights, on_device(Job(steps=2)).weights
    with zerostd.gathered(model):
        shown = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter, value in shown.items():
        expected = after if parameter.startswith("blocks") else before
        assert torch.equal(value, expected[parameter]), f"{parameter} after backward"
        assert not torch.equal(before[parameter], after[parameter]), f"{parameter} does not train"
    optimizer.step()
    assert_bitwise(zerostd.full_state_dict(model), after, "after step")
    assert not optimizer.backward_updates._done
    zerostd.release(model)


def test_updates_wait_where_the_end_is_not_known(tmp_path: Path) -> None:
    host = PLACEMENTS["states on host"]
    for options in (
        {"accumulate": None},
        {"accumulate": 1, "max_grad_norm": 1.0},
        {"accumulate": 1, "precision": "fp16"},
    ):
        model, optimizer = prepared(Job(**options), host, tmp_path)
        assert optimizer.backward_updates is None, options
        zerostd.release(model)
    model, optimizer = prepared(Job(accumulate=1), None, tmp_path)
    assert optimizer.backward_updates is None
    zerostd.release(model)


def test_of_several_passes_the_last_one_updates(tmp_path: Path) -> None:
    job = Job(accumulate=3, passes=3)
    model, optimizer = prepared(job, HALF, tmp_path)
    seen = []
    for number in range(6):
        loss_of(job, model, number).backward()
        seen.append(len(optimizer.backward_updates._done))
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [0, 0, 0, 0, 0, 2]  # the first step shows that it has three
    assert_bitwise(zerostd.full_state_dict(model), on_device(replace(job, steps=2)).weights)
    zerostd.release(model)


# -- misuse --


def test_options_changed_between_backward_and_step(tmp_path: Path) -> None:
    model, optimizer, _ = after_backward(HALF, tmp_path)
    group = optimizer.param_groups[1]
    earlier, group["lr"] = group["lr"], 0.5
    with pytest.raises(MisuseError, match=r"param_groups\[1\]\['lr'\].*from 0\.02 to 0\.5.*change options after step"):
        optimizer.step()
    group["lr"] = earlier
    optimizer.step()  # as if nothing had been
    assert_bitwise(zerostd.full_state_dict(model), on_device(Job(steps=2)).weights)
    zerostd.release(model)


@pytest.mark.parametrize(
    "call",
    ["clip_grad_norm_", "zero_grad", "zero_grad to zeros", "mul_", "backward", "None", "state_dict", "full_state_dict"],
)
def test_gradients_touched_between_backward_and_step(call: str, tmp_path: Path) -> None:
    model, optimizer, job = after_backward(HALF, tmp_path)
    weight = model.blocks[0].qkv.weight
    touch = {
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "zero_grad": optimizer.zero_grad,
        "zero_grad to zeros": lambda: optimizer.zero_grad(set_to_none=False),
        "mul_": lambda: weight.grad.mul_(0.5),
        "backward": lambda: loss_of(job, model, 2).backward(),
        "None": lambda: setattr(weight, "grad", None),
        "state_dict": optimizer.state_dict,
        "full_state_dict": lambda: zerostd.full_state_dict(model),
    }[call]
    with pytest.raises(MisuseError, match=r"accumulate") as raised:
        touch()
    if call != "backward":
        assert re.search(r"between backward and optimizer\.step\(\).*call step\(\) first", str(raised.value))
    optimizer.step()
    if call != "backward":
        assert_bitwise(zerostd.full_state_dict(model), on_device(Job(steps=2)).weights, "the step after it")
        optimizer.zero_grad()  # now it may
    zerostd.release(model)


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no gradient today")


def fail_half_way(job: Job, model: Any, number: int) -> None:
    """A backward pass that comes to an end between the two blocks."""
    hook = model.blocks[0].register_forward_hook(lambda module, inputs, output: Fails.apply(output))
    with pytest.raises(ValueError, match="no gradient today"):
        loss_of(job, model, number).backward()
    hook.remove()


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("call", ["backward", "step", "zero_grad"])
def test_a_backward_pass_that_fails_after_updates_began(call: str, speculates: bool, tmp_path: Path) -> None:
    """Half of the model is a step ahead: no call goes on as if nothing had been."""
    job = Job(accumulate=1, max_grad_norm=BIG if speculates else None)
    model, optimizer = prepared(job, replace(HALF, speculate=speculates), tmp_path)
    run_steps(job, model, optimizer, range(2))
    fail_half_way(job, model, 2)
    assert [group.name for group in optimizer.backward_updates._done] == ["blocks.1"]
    with pytest.raises(MisuseError, match="accumulate"):
        loss_of(job, model, 2).backward() if call == "backward" else getattr(optimizer, call)()
    with pytest.raises(MisuseError, match="only a part of the model is updated"):
        zerostd.release(model)


def test_a_backward_pass_that_fails_where_updates_wait(tmp_path: Path) -> None:
    """It can be done again."""
    job = Job(steps=5)
    model, optimizer = prepared(job, HALF, tmp_path)
    run_steps(job, model, optimizer, range(3))
    fail_half_way(job, model, 3)
    optimizer.zero_grad()
    run_steps(job, model, optimizer, range(3, 5))
    assert_bitwise(zerostd.full_state_dict(model), on_device(job).weights)
    zerostd.release(model)


def test_without_accumulate_the_same_calls_are_fine(tmp_path: Path) -> None:
    def run(placement: Placement | None) -> dict[str, Tensor]:
        job = Job()
        model, optimizer = prepared(job, placement, tmp_path)
        for number in range(3):
            loss_of(job, model, number).backward()
            optimizer.zero_grad()
            loss_of(job, model, number).backward()
            loss_of(job, model, number + 1).backward()
            model.blocks[0].qkv.weight.grad.mul_(0.5)
            model.blocks[1].proj.weight.grad = None
            optimizer.clip_grad_norm_(0.3)
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step()
            optimizer.zero_grad()
        weights = zerostd.full_state_dict(model)
        zerostd.release(model)
        return weights

    reference = run(None)
    for name, placement in PLACEMENTS.items():
        assert_bitwise(run(placement), reference, name)


# -- on trial --


@pytest.mark.parametrize("cpu_share", [0.0, 0.5, 1.0])
def test_speculation_changes_no_bit(cpu_share: float, tmp_path: Path) -> None:
    placement = Placement(optimizer_states="host", cpu_share=cpu_share, speculate=True)
    for rules, precision in (("adamw", None), ("rmsprop", None), ("nesterov", "bf16")):
        for max_norm in (BIG, SMALL, BETWEEN):
            job = Job(case="bumpy", rules=rules, precision=precision, accumulate=1, max_grad_norm=max_norm, steps=13)
            reference = on_device(job)
            with debugging(poisons=True):
                trained = train(job, placement, tmp_path)
            assert_same(trained, reference, str(job))
            tried, kept = trained.num_speculated, trained.num_committed
            if max_norm == BIG:
                assert tried == kept == job.steps - 2, "two steps that do not clip, then it is tried every time"
            elif max_norm == SMALL:
                assert tried == 0, "steps that clip are followed by others: nothing to try"
            else:
                bites = [norm > max_norm for norm in reference.norms]
                assert 0 < sum(bites) < job.steps
                assert 0 < kept < tried, f"{kept} of {tried} trials kept"


@pytest.mark.parametrize("home", [{"device": 0.4, "host": 0.6}, {"host": 0.5, "disk": 0.5}], ids=str)
def test_speculation_beside_states_that_have_no_second_copy(home: dict[str, float], tmp_path: Path) -> None:
    job = Job(case="bumpy", accumulate=1, max_grad_norm=BETWEEN, steps=13, delay_s=0.005)
    trained = train(job, Placement(optimizer_states=home, cpu_share=0.5, speculate=True), tmp_path)
    assert_same(trained, on_device(job), str(home))
    assert 0 < trained.num_committed < trained.num_speculated


def test_speculation_saves_and_loads_what_was_kept(tmp_path: Path) -> None:
    """States right after a trial that was kept, and right after one that was not."""
    placement = Placement(optimizer_states="host", cpu_share=0.5, speculate=True)
    for at in (4, 5):
        job = Job(case="bumpy", accumulate=1, max_grad_norm=BETWEEN, steps=9, rules="rmsprop")
        model, optimizer = prepared(job, placement, tmp_path)
        run_steps(job, model, optimizer, range(at))
        weights, states = zerostd.full_state_dict(model), optimizer.state_dict()
        zerostd.release(model)
        model, optimizer = prepared(job, placement, tmp_path, seed=3)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        losses, _ = run_steps(job, model, optimizer, range(at, 9))
        assert losses == on_device(job).losses[at:]
        assert_bitwise(zerostd.full_state_dict(model), on_device(job).weights)
        zerostd.release(model)


def test_speculation_needs_to_know_the_norm_and_the_passes(tmp_path: Path) -> None:
    speculating = Placement(optimizer_states="host", speculate=True)
    for job in (Job(accumulate=1), Job(max_grad_norm=1.0), Job(accumulate=1, max_grad_norm=1.0, precision="fp16")):
        with pytest.raises(PrepareError, match="speculate"):
            prepared(job, speculating, tmp_path)


def speculate_on_ranks(rank: int, folder: str) -> list[str]:
    """On every rank: what speculation changes, in words."""
    failures = []
    with short_tiles():
        for stage in (0, 1, 2, 3):
            job = Job(case="bumpy", accumulate=1, max_grad_norm=BETWEEN, steps=8, stage=stage)
            doing(str(job))
            placement = Placement(optimizer_states="host", cpu_share=0.5, speculate=True)
            trained = train(job, placement, folder, rank)
            try:
                assert_same(trained, train(job, None, folder, rank), f"rank {rank}, {job}")
                assert stage in (1, 2) or 0 < trained.num_committed < trained.num_speculated, (
                    f"stage {stage} did not speculate"
                )
            except AssertionError as error:
                failures.append(str(error))
    return failures


def test_speculation_on_two_ranks(ranks: Any, tmp_path: Path) -> None:
    agree(ranks(2, speculate_on_ranks, str(tmp_path)))


# -- the worker --


@pytest.fixture
def worker() -> Worker:
    return Worker("the work of this test", torch.device("cpu"))


def held(worker: Worker) -> threading.Event:
    """Keep the worker busy until the event is set."""
    gate, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)

    worker.submit(wait)
    assert begun.wait(PATIENCE_S)
    return gate


def test_a_worker_does_first_what_is_needed_first(worker: Worker) -> None:
    gate, seen = held(worker), []
    for place, label in ((3, "d"), (1, "b1"), (2, "c"), (1, "b2"), (0, "a"), (1, "b3")):
        worker.submit(functools.partial(seen.append, label), place=place)
    gate.set()
    worker.drain()
    assert seen == ["a", "b1", "b2", "b3", "c", "d"]


def test_a_worker_does_what_has_arrived_and_then_what_was_given_first(worker: Worker) -> None:
    gate, seen, on_the_way, also = held(worker), [], Work(), Work()
    worker.submit(functools.partial(seen.append, "late"), place=5, ready=also)
    worker.submit(functools.partial(seen.append, "later"), place=0, ready=on_the_way)
    worker.submit(functools.partial(seen.append, "here"), place=9)
    also_arrived = Work()
    also_arrived.finish()
    worker.submit(functools.partial(seen.append, "arrived"), place=7, ready=also_arrived)
    gate.set()
    worker.drain()
    assert seen == ["arrived", "here", "late", "later"]


def test_a_worker_waits_for_all_that_a_job_needs(worker: Worker) -> None:
    """What has arrived in part would hold up what could be done meanwhile."""
    gate, seen, on_the_way = held(worker), [], Work()
    worker.submit(functools.partial(seen.append, "given first"), place=5, ready=AllOf(Work(), Work()))
    worker.submit(functools.partial(seen.append, "in part"), place=0, ready=AllOf(Done(), on_the_way))
    worker.submit(functools.partial(seen.append, "all of it"), place=9, ready=AllOf(Done(), Done()))
    gate.set()
    worker.drain()
    assert seen == ["all of it", "given first", "in part"]


def test_what_is_needed_sooner_comes_between_the_parts_of_a_job(worker: Worker) -> None:
    gate, seen = held(worker), []

    def second() -> None:
        seen.append("b2")
        worker.submit(lambda: seen.append("sooner"), place=0)
        worker.submit(lambda: seen.append("later"), place=2)

    long = worker.submit(lambda: seen.append("b1"), second, lambda: seen.append("b3"), place=1)
    behind = worker.submit(lambda: seen.append("b4"), lambda: seen.append("b5"), place=1)
    assert not long.is_done()
    gate.set()
    worker.drain()
    assert seen == ["b1", "b2", "sooner", "b3", "b4", "b5", "later"]
    assert long.is_done() and behind.is_done()


@pytest.mark.timeout(60)
def test_parts_behind_one_that_fails_are_not_done(worker: Worker) -> None:
    gate, seen = held(worker), []
    failed = worker.submit(lambda: seen.append("first"), lambda: 1 // 0, lambda: seen.append("third"))
    behind = worker.submit(lambda: seen.append("behind"), lambda: seen.append("behind"))
    gate.set()
    for work in (failed, behind):
        with pytest.raises(StorageError, match="ZeroDivisionError"):
            work.wait()
    with pytest.raises(StorageError, match="stopped"):
        worker.drain()
    assert seen == ["first"]


def test_several_transfers_are_over_when_all_are() -> None:
    first, second = Work(), Work()
    both = AllOf(first, second)
    first.finish()
    assert not both.is_done() and not both.has_arrived()
    second.finish()
    assert both.is_done() and both.has_arrived()
    both.wait()
    both.synchronize()
    failed = Work()
    failed.finish(StorageError("the disk is gone"))
    with pytest.raises(StorageError, match="the disk is gone"):
        AllOf(first, failed).wait()


def test_drain_waits_for_what_runs_and_what_waits(worker: Worker) -> None:
    seen = []

    def slow(label: str) -> None:
        time.sleep(0.05)
        seen.append(label)

    works = [worker.submit(functools.partial(slow, label)) for label in "abc"]
    worker.drain()
    assert seen == ["a", "b", "c"] and all(work.is_done() for work in works)
    worker.drain()  # nothing to wait for


@pytest.mark.timeout(60)
def test_a_job_that_fails_stops_the_worker_loudly(worker: Worker) -> None:
    gate, seen = held(worker), []
    worker.submit(lambda: seen.append("before"), place=0)
    failed = worker.submit(lambda: 1 // 0, place=1)
    behind = worker.submit(lambda: seen.append("behind"), place=2)
    gate.set()
    for _ in range(2):  # every time it is asked
        with pytest.raises(StorageError, match=r"the work of this test failed: ZeroDivisionError") as raised:
            failed.wait()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(StorageError, match="ZeroDivisionError"):
        behind.wait()
    for call in (worker.check, worker.drain, functools.partial(worker.submit, lambda: seen.append("after"))):
        with pytest.raises(StorageError, match=r"stopped: ZeroDivisionError.*last checkpoint") as raised:
            call()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert seen == ["before"]


def test_a_worker_ends_with_its_object() -> None:
    worker = Worker("the work that ends", torch.device("cpu"))
    worker.submit(lambda: None).wait()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "the work that ends"]
    del worker
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_failed_update_is_heard_of(tmp_path: Path) -> None:
    """The user's optimizer raises in the thread: the next use of the group says so, and nothing hangs."""
    job = Job(rules="own")
    model, optimizer = prepared(job, PLACEMENTS["states on host"], tmp_path)
    run_steps(job, model, optimizer, range(1))
    optimizer.updater.offload.updaters["cpu"].clone.pace = "fast"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of works that nobody waits for any more
        with pytest.raises(StorageError, match=r"TypeError"):
            run_steps(job, model, optimizer, range(1, 3))
        with pytest.raises(StorageError, match=r"TypeError"):
            optimizer.synchronize()
        del model, optimizer
        gc.collect()


# -- which stretch goes where --

numels = st.lists(st.integers(0, 20 * UNIT), min_size=1, max_size=8)
weights = st.tuples(*[st.integers(0, 10)] * 3).filter(any)
cpu_shares = st.sampled_from([0.0, 0.3, 0.5, 1.0])


def shares_of(parts: tuple[int, int, int]) -> dict[Tier, float]:
    return {tier: part / sum(parts) for tier, part in zip(Tier, parts, strict=True) if part}


@given(numels, weights, cpu_shares)
@settings(max_examples=200, deadline=None)
def test_portions_cover_every_region_in_order(numels: list[int], parts: Any, cpu_share: float) -> None:
    found = cut_portions(numels, shares_of(parts), cpu_share=cpu_share)
    assert len(found) == len(numels)
    for numel, portions in zip(numels, found, strict=True):
        edges = [0, *(portion.stop for portion in portions)]
        assert [portion.start for portion in portions] == edges[:-1] and edges[-1] == numel
        unit = UNIT if sum(numels) >= 50 * UNIT else 64 if sum(numels) >= 50 * 64 else 1
        assert all(portion.numel > 0 and portion.start % unit == 0 for portion in portions)
        routes = [portion.route for portion in portions if portion.tier is not Tier.DEVICE]
        assert all((p.route is Route.RESIDENT) == (p.tier is Tier.DEVICE) for p in portions)
        assert {0.0: Route.CPU, 1.0: Route.STREAMED}.get(cpu_share) not in routes
    tiers = [list(Tier).index(portion.tier) for portions in found for portion in portions]
    assert tiers == sorted(tiers), "nearest tiers first"


@given(numels, weights, cpu_shares)
@settings(max_examples=200, deadline=None)
def test_portions_keep_shares_within_a_unit(numels: list[int], parts: Any, cpu_share: float) -> None:
    shares = shares_of(parts)
    found = cut_portions(numels, shares, cpu_share=cpu_share)
    portions = [portion for region in found for portion in region]
    in_tier = [sum(p.numel for p in portions if p.tier is tier) for tier in Tier]
    wanted = [shares.get(tier, 0.0) * sum(numels) for tier in Tier]
    for mine, theirs in zip(running_sums(in_tier), running_sums(wanted), strict=True):
        assert abs(mine - theirs) <= UNIT
    assert all(not mine for mine, tier in zip(in_tier, Tier, strict=True) if tier not in shares)
    for region in found:
        for tier in (Tier.HOST, Tier.DISK):
            there = [p for p in region if p.tier is tier]
            by_cpu = sum(p.numel for p in there if p.route is Route.CPU)
            assert abs(by_cpu - cpu_share * sum(p.numel for p in there)) <= UNIT / 2
            assert [p.route for p in there] == sorted((p.route for p in there), key=[Route.CPU, Route.STREAMED].index)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=12), weights)
@settings(max_examples=200, deadline=None)
def test_whole_things_go_to_the_nearest_tier_that_has_room(sizes: list[int], parts: Any) -> None:
    shares = shares_of(parts)
    found = assign_tiers(sizes, shares)
    assert len(found) == len(sizes) and set(found) <= set(shares)
    assert all(list(Tier).index(a) <= list(Tier).index(b) for a, b in pairwise(found))
    filled, total = 0.0, sum(sizes)
    for tier in Tier:
        filled += shares.get(tier, 0.0)
        upto = sum(
            size for size, home in zip(sizes, found, strict=True) if list(Tier).index(home) <= list(Tier).index(tier)
        )
        assert abs(upto - filled * total) <= max(sizes) / 2 + 1e-6 * total


def test_the_processor_takes_more_the_more_threads_it_has() -> None:
    assert default_cpu_share(1, has_link=False) == default_cpu_share(64, has_link=False) == 1.0
    shares = [default_cpu_share(threads, has_link=True) for threads in (1, 2, 4, 8, 16, 64)]
    assert shares == sorted(shares) and 0.0 < shares[0] < 0.2 < shares[-1] < 1.0


def test_the_processor_takes_more_the_busier_the_link_is() -> None:
    options = [{}, {"gradients_off": 0.5}, {"gradients_off": 1.0}, {"gradients_off": 1.0, "parameters_off": 1.0}]
    shares = [default_cpu_share(14, has_link=True, **option) for option in options]
    assert shares == sorted(shares) and shares[0] == 0.55 and 0.7 <= shares[-1] <= 0.8
    assert default_cpu_share(1000, has_link=True, parameters_off=1.0) <= 1.0
