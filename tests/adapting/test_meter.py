"""The meter's own arithmetic: a plan like the one that was seen takes what was seen, and nothing counts twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerostd
from zerostd.planning import Plan
from zerostd.policy import Homes, Way
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
