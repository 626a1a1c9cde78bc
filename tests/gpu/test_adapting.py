"""Plans that follow what happens: another process takes the device's memory, a batch does not fit, cores are busy."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from zerostd import Plan
from zerostd.measuring import load_or_measure
from zerostd.measuring.identity import free_bytes
from zerostd.measuring.model import profile_model
from zerostd.policy import Homes, Kind, Route, Tier
from zerostd.preparing.proposing import PlanSearch
from zerostd.replanning.adapting import NUM_FIRST, Adapter
from zerostd.replanning.moving import HomeMove
from zerostd.replanning.watching import EVERY, NUM_WATCHED

pytestmark = pytest.mark.gpu

WIDTH, DEPTH = 2048, 16  # 67 million parameters, 1 GiB with their states
MIB, GIB = 2**20, 2**30
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Measured once for all of these tests, and nothing left of others on the device."""
    caplog.set_level(logging.INFO, "zerostd")  # why a plan was kept
    monkeypatch.setenv("ZEROSTD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    for kept in (tmp_path_factory.getbasetemp() / "cache").glob("plan-*"):  # what another test has learnt
        kept.unlink()
    for name in ("last_exc", "last_value", "last_traceback"):  # of a test that failed: they keep its model
        vars(sys).pop(name, None)
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def prepared(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return zerostd.prepare(model, optimizer, precision="bf16", accumulate=1, groups=["*"], **options)


def train(model: nn.Module, optimizer: Any, steps: int, rows: int = 64) -> None:
    for _ in range(steps):
        model(torch.ones(rows, WIDTH, device=DEVICE, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_until_revised(model: nn.Module, optimizer: Any) -> None:
    """Train until trials have chosen another plan: candidates are ranked in a thread, and steps take milliseconds."""
    for _ in range(500):
        train(model, optimizer, EVERY)
        if adapter_of(model).revisions:
            return


def adapter_of(model: nn.Module) -> Adapter:
    adapter = next((one for one in model.__dict__["_zerostd"].observers if isinstance(one, Adapter)), None)
    assert isinstance(adapter, Adapter)
    return adapter


def held(model: nn.Module, tier: str) -> int:
    return zerostd.memory(model).now.get(tier, {}).get("optimizer_states", 0)


@contextmanager
def another_process(left: int) -> Iterator[None]:
    """That takes the device's memory but for so many bytes and a segment of torch's."""
    code = f"""
import torch
kept = []
while (more := torch.cuda.mem_get_info()[0] - {left}) > 24 << 20:
    kept.append(torch.empty(max(20 << 20, more * 9 // 10), dtype=torch.uint8, device="cuda"))
print("has", flush=True)
input()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "has\n"
    try:
        yield
    finally:
        with suppress(OSError):
            process.stdin.write("\n")
            process.stdin.close()
        process.wait(60)


def test_memory_that_another_process_takes_is_left_to_it() -> None:
    load_or_measure(DEVICE)  # there will be no room for that
    model, optimizer = prepared()
    train(model, optimizer, EVERY + 1)
    assert adapter_of(model).revisions == [] and held(model, "host") == 0
    torch.cuda.empty_cache()
    states = held(model, "device")
    with another_process(60 * MIB):
        ours = fill(32 * MIB)  # what torch keeps for us would be room enough
        train(model, optimizer, 4 * EVERY)
        adapter = adapter_of(model)
        room, needs = adapter.meter.room()[Tier.DEVICE], adapter.meter.needs(Tier.DEVICE)
    assert adapter.revisions, f"{needs / MIB:.1f} of {room / MIB:.1f} MiB are needed; {torch.cuda.memory_summary()}"
    (revision,) = adapter.revisions
    assert "other programs took memory" in revision.reason
    assert held(model, "host") > 50 * MIB and held(model, "device") < states - 50 * MIB
    del ours


def fill(left: int) -> list[torch.Tensor]:
    """Tensors that leave so many bytes of what torch keeps and of the device together. They fit into what is left over
    where a tensor is a little larger than whole 2 MiB."""
    found = []
    while free_bytes(DEVICE, None)["device"] > left:
        found.append(torch.empty(19 * MIB // 10, dtype=torch.uint8, device=DEVICE))
    return found


def test_gradients_that_land_after_the_peak_are_known() -> None:
    """The device holds most when backward begins, since activations are larger than gradients."""
    model, optimizer = prepared()
    train(model, optimizer, EVERY + 1, rows=32 * 1024)
    meter = adapter_of(model).meter
    meter.watch_model(is_on=True)
    train(model, optimizer, 1, rows=32 * 1024)
    meter.watch_model(is_on=False)
    gradients = zerostd.memory(model).peak["device"]["gradients"]
    buffers = zerostd.memory(model).peak["device"]["buffers"]
    assert 0.8 * gradients <= meter.late_bytes() <= gradients + buffers
    assert meter.activation_bytes() + meter.late_bytes() > DEPTH * 32 * 1024 * WIDTH * 2
    assert not model.__dict__["_zerostd"].ledger.watchers


def test_a_loop_that_resets_the_peak_hides_nothing() -> None:
    """Many loops read torch's peak for each step, and reset it."""
    limits = {Tier.DEVICE: 6 * GIB, Tier.HOST: 8 * GIB}
    homes = Homes(states=((Tier.HOST, Route.CPU, 0.5), (Tier.HOST, Route.STREAMED, 0.5)))
    model, optimizer = prepared(plan=Plan({"*": homes}, limits=limits))
    for _ in range(NUM_FIRST + NUM_WATCHED + 1):
        torch.cuda.reset_peak_memory_stats()
        train(model, optimizer, 1, rows=32 * 1024)
    seen = adapter_of(model)._seen
    assert seen is not None and seen.activation_bytes is not None
    assert seen.activation_bytes + seen.late_bytes > DEPTH * 32 * 1024 * WIDTH * 2


def test_the_device_holds_what_the_account_says_after_gradients_have_moved() -> None:
    """Buffers that gradients of the host pass through go with them."""
    on_host = Homes(gradients=Tier.HOST, states=((Tier.HOST, Route.CPU, 0.5), (Tier.HOST, Route.STREAMED, 0.5)))
    half = {str(index): on_host if index % 2 else Homes() for index in range(DEPTH)}
    model, optimizer = prepared(plan=Plan({"*": on_host}))
    runtime = model.__dict__["_zerostd"]
    gradient_here = Homes(states=on_host.states)  # what the CPU updates has a copy of its gradient
    plans = [Plan({**half, "*": on_host}), Plan({"*": gradient_here}), Plan({"*": on_host}), Plan({"*": Homes()})]
    for plan in (*plans, Plan({"*": gradient_here}), Plan({"*": on_host})):
        train(model, optimizer, 2)
        change = HomeMove(runtime, plan)
        change.most_bytes = 0
        while not change.is_done:  # between two groups, some have moved and others have not
            change.advance()
            train(model, optimizer, 1)
        change.finish()
        runtime.ledger.most[Tier.DEVICE] = 0
        train(model, optimizer, 2)
        account = PlanSearch(runtime.settings, runtime.blueprints, runtime.world).account(plan)
        assert runtime.ledger.most[Tier.DEVICE] <= sum(account[Tier.DEVICE].values()), zerostd.memory(model)


def test_a_batch_that_does_not_fit_makes_room_for_the_next() -> None:
    model, optimizer = prepared()
    train(model, optimizer, 2)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1.4 * GIB / total)
    rows = 600 * MIB // (2 * WIDTH * DEPTH)  # activations beside 1.1 GiB; the loss takes a quarter of that again
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, 1, rows)
    optimizer.zero_grad()
    gc.collect()
    num_done = 0  # one after the other
    for _ in range(10):  # a loop that tries again: what is missing is not known, so each time more room is made
        try:
            train(model, optimizer, 1, rows)
            num_done += 1
        except torch.OutOfMemoryError:
            num_done = 0
            optimizer.zero_grad()
            gc.collect()
    assert num_done >= 4, f"{adapter_of(model).revisions}\n{zerostd.memory(model)}"
    assert adapter_of(model).revisions[0].reason == "the device ran out of memory"
    assert len(adapter_of(model).revisions) <= 5
    assert held(model, "host") > 0


def test_a_processor_that_others_use_gets_less_to_do() -> None:
    """Every core is busy with something else: the device takes over what the processor was to update."""
    homes = Homes(states=((Tier.HOST, Route.CPU, 0.9), (Tier.HOST, Route.STREAMED, 0.1)))
    limits = {Tier.DEVICE: 700 * MIB, Tier.HOST: 8 * GIB}
    burn = "import torch; torch.set_num_threads(1); x = torch.rand(4096, 4096)\nwhile True: x.copy_(x + 1)"
    others = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        model, optimizer = prepared(plan=Plan({"*": homes}, limits=limits))
        train_until_revised(model, optimizer)
        adapter = adapter_of(model)
        assert len(adapter.revisions) == 1, (adapter._seen, adapter.revisions)
        assert adapter.revisions[0].step > NUM_FIRST + NUM_WATCHED
        parts = {route: part for _, route, part in adapter.revisions[0].plan.homes_of("8").states}
        assert parts.get(Route.CPU, 0.0) < 0.85
        optimizer.synchronize()  # an update that goes on would hold the model beside the next test's
    finally:
        for other in others:
            other.kill()


@pytest.mark.parametrize("part", [0.4, 0.6])
def test_no_step_passes_the_budget_by_the_allocator(part: float) -> None:
    """Nobody shows a batch, and activations take more than half of what the first run had."""

    def run(**options: Any) -> tuple[int, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH // 2))
        model = nn.Sequential(*blocks).to(DEVICE, torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model, prepared_optimizer = zerostd.prepare(
            model, optimizer, precision="bf16", accumulate=1, groups=["*"], **options
        )
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        peak = 0
        for _ in range(6 * EVERY):
            train(model, prepared_optimizer, 1, rows=32_768)
            peak = max(peak, torch.cuda.max_memory_allocated())  # the meter resets it between steps
        values = zerostd.full_state_dict(model)
        zerostd.release(model)
        assert torch.cuda.get_per_process_memory_fraction() == 1.0
        return peak, values

    most, expected = run(placement=zerostd.Placement())
    budget = int(part * most)
    peak, values = run(budget=zerostd.Budget(device=budget))
    assert peak <= budget
    for name, value in values.items():
        assert torch.allclose(value.float(), expected[name].float(), atol=1e-2), name


def test_what_a_plan_leaves_for_activations_is_used_once_they_are_known() -> None:
    torch.cuda.set_per_process_memory_fraction(1.45 * GIB / torch.cuda.mem_get_info()[1])
    model, optimizer = prepared()
    assert held(model, "host") > 160 * MIB, "a good part of the device is kept for activations"
    train_until_revised(model, optimizer)
    (revision,) = adapter_of(model).revisions
    assert revision.reason == "the first steps were measured"
    assert held(model, "host") == 0
    assert revision.plan.predicted.bytes[Tier.DEVICE][Kind.ACTIVATIONS] > 0


def test_a_probe_knows_what_passes_take_and_hold() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))).to(DEVICE)
    before = torch.cuda.memory_allocated()
    profile = profile_model(model, precision="fp32", batch=torch.randn(4096, 1024, device=DEVICE), probe=True)
    kept = 8 * 2 * 4096 * 1024 * 4  # the input of every linear and every GELU
    assert profile.activation_bytes is not None and 0.9 * kept < profile.activation_bytes < 1.3 * kept + 64 * MIB
    assert profile.forward_s is not None and profile.backward_s is not None
    assert profile.forward_s < profile.backward_s < 4 * profile.forward_s
    assert torch.cuda.memory_allocated() - before < 64 * MIB
    assert all(parameter.grad is None for parameter in model.parameters())


def test_adapting_costs_nothing_that_can_be_seen(tmp_path: Path) -> None:
    """The same steps with and without somebody looking: no host synchronization in between looks."""
    model, optimizer = prepared()
    train(model, optimizer, NUM_FIRST)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, optimizer, EVERY // 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
