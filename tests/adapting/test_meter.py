"""The meter's own arithmetic: a plan like the one that was seen takes what was seen, and nothing counts twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import zerostd
from zerostd.planning import Plan
from zerostd.policy import Homes, Kind, Tier, Way
from zerostd.replanning.meter import DeviceMeter
from zerostd.replanning.watching import counted_profile

ROWS, WIDTH, DEPTH = 64, 128, 4
ONE = ROWS * WIDTH * 4  # bytes of one activation


class Seen(DeviceMeter):
    """A meter whose allocator has seen `seen` bytes beside model state."""

    seen = 0

    def activation_bytes(self) -> int:
        return self.seen


@pytest.mark.parametrize("way", [Way.DEVICE, Way.RECOMPUTE, Way.RECOMPUTE_HOST])
def test_a_plan_like_the_one_that_was_seen_takes_what_was_seen(way: Way) -> None:
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH))
    model = nn.Sequential(*blocks)
    placement = zerostd.Placement(activations=way.value)
    model, optimizer = zerostd.prepare(model, torch.optim.SGD(model.parameters()), placement=placement, groups=["*"])
    runtime = model.__dict__["_zerostd"]
    runtime.backward.activations.count()
    runtime.hooks.renew()
    model(torch.ones(ROWS, WIDTH, requires_grad=True)).square().mean().backward()
    optimizer.step()
    meter = Seen(runtime)
    meter.seen = 40 * ONE
    profile = counted_profile(runtime)
    assert profile is not None
    plan = Plan({"*": Homes()}, activations={"*": way.in_plan})
    assert meter.activations_of(plan, profile) == meter.seen
    zerostd.release(model)


class Allocator:
    """torch's allocator, as far as it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = 0
        self.reserved = 0
        self.num_emptied = 0
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: self.begin(0))
        monkeypatch.setattr(torch.accelerator, "empty_cache", self.empty)

    def begin(self, peak: int) -> None:
        self.peak = peak

    def empty(self) -> None:
        self.num_emptied += 1


@pytest.fixture
def metered(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DeviceMeter, Allocator]]:
    model, _ = zerostd.prepare(nn.Sequential(nn.Linear(WIDTH, WIDTH)), groups=["*"])
    meter = DeviceMeter(model.__dict__["_zerostd"])
    meter.has_allocator = True
    yield meter, Allocator(monkeypatch)
    zerostd.release(model)


def test_a_peak_that_a_loop_resets_is_remembered(metered: tuple[DeviceMeter, Allocator]) -> None:
    """Loops that report the peak of each step reset it, and activations would look like nothing."""
    meter, allocator = metered
    allocator.begin(10 << 20)
    meter.note_pass(is_first=False)
    allocator.begin(1 << 20)
    assert meter.peak() == 10 << 20
    beside = meter.activation_bytes()
    assert beside is not None and beside > 9 << 20
    meter.reset()
    assert meter.peak() == 0


def test_cached_memory_is_given_back_if_much_of_it_is_unused(metered: tuple[DeviceMeter, Allocator]) -> None:
    meter, allocator = metered
    allocator.begin(1000)
    for reserved, times in ((1000, 0), (1200, 0), (1300, 1)):
        allocator.reserved = reserved
        meter.give_surplus_back()
        assert allocator.num_emptied == times


class Allocating(DeviceMeter):
    """A meter of an allocator that has seen `allocated` bytes at most."""

    allocated = 0

    def peak(self) -> int:
        return self.allocated

    def reset(self) -> None:
        self.has_allocator = False  # there is none to ask
        super().reset()
        self.has_allocator = True
        self.allocated = self._ledger.held[Tier.DEVICE]


@pytest.mark.parametrize("peak_at_end", [False, True])
def test_what_of_the_model_came_after_the_peak_is_late(peak_at_end: bool) -> None:
    model, _ = zerostd.prepare(nn.Sequential(nn.Linear(WIDTH, WIDTH)), groups=["*"])
    runtime = model.__dict__["_zerostd"]
    meter = Allocating(runtime)
    meter.watch_model(is_on=True)
    meter.watch_model(is_on=True)  # as when room is made in the middle of it
    held = runtime.ledger.held[Tier.DEVICE]
    meter.allocated = held + 1000  # when backward begins
    runtime.ledger.enter(Kind.GRADIENTS, 400)
    runtime.ledger.enter(Kind.GRADIENTS, 200)
    runtime.ledger.enter(Kind.GRADIENTS, 5000, Tier.HOST)
    if peak_at_end:
        meter.allocated = held + 600 + 700
    meter.watch_model(is_on=False)
    assert meter.late_bytes() == (300 if peak_at_end else 600)  # 1000 bytes of activations, and 700 or 400 to be seen
    assert not runtime.ledger.watchers
    runtime.ledger.leave(Kind.GRADIENTS, 600)
    meter.watch_model(is_on=False)
    meter.reset()
    assert meter.late_bytes() == 0
    zerostd.release(model)
