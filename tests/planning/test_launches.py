"""Models whose steps wait for launches: the CPU launches and updates, and each does less beside the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from planning.machines import GIB, H200, gpt, request_of
from planning.test_obeying import WIDE, for_a_device, wide
from zerostd.measuring.model import HOOKS, TimedPass, _as_timed, profile_model
from zerostd.planning import PlanRequest
from zerostd.planning.demands import GroupShares
from zerostd.planning.planner import solve
from zerostd.planning.program import SLACK, optimise
from zerostd.planning.request import LAUNCHED_AGAIN
from zerostd.planning.simulation import LAUNCH_S, TILE, simulate
from zerostd.policy import Tier
from zerostd.preparing.proposing import PlanSearch

BY_CPU = GroupShares(resident=0.0, cpu=1.0)
STREAMED = GroupShares(resident=0.0, streamed=1.0)
LIMITS = {Tier.DEVICE: 5 * GIB, Tier.HOST: 100 * GIB}


def request(launches: float, compute_s: float = 0.3, **options: object) -> PlanRequest:
    """A model of 0.6 B parameters, whose updates take the CPU 0.12 s."""
    model = replace(gpt(1600, 18, compute_s), launches=launches)
    return request_of(model, machine=H200, limits=LIMITS, **options)


def test_updates_lengthen_a_step_that_waits_for_launches() -> None:
    steps = {}
    for launches in (0.0, 0.5, 1.0):
        asked = request(launches)
        steps[launches] = [simulate(asked, [share] * len(asked.costs)).step_s for share in (BY_CPU, STREAMED)]
    cpu_s = sum(cost.updated for cost in asked.costs) * asked.cpu_s
    assert steps[0.0][0] < steps[0.5][0] < steps[1.0][0]
    assert steps[1.0][0] == pytest.approx(0.3 + cpu_s, rel=0.02)
    tiles = sum(cost.updated for cost in asked.costs) / TILE
    assert steps[0.0][1] == steps[0.5][1]
    assert steps[1.0][1] == pytest.approx(steps[0.0][1] + tiles * LAUNCH_S, rel=0.01)


def test_the_program_knows_it_too() -> None:
    """Where launches take the CPU, less is updated there, and no step is shorter than both one after the other."""
    parts = []
    for launches in (0.0, 1.0):
        asked = request(launches)
        seconds, shares = optimise(asked)
        cpu_s = sum(cost.updated * share.cpu for cost, share in zip(asked.costs, shares, strict=True)) * asked.cpu_s
        assert seconds * (1 + SLACK) >= launches * 0.3 + cpu_s - 1e-6
        parts.append(cpu_s)
    assert parts[1] < parts[0]


def test_what_is_off_the_device_must_bring_more_where_groups_wait_for_launches() -> None:
    limits = {Tier.DEVICE: int(2.6 * GIB), Tier.HOST: 100 * GIB}
    off = {}
    for launches in (0.0, 1.0):
        solution = solve(replace(request(launches, compute_s=0.05), limits=limits))
        off[launches] = sum(share.parameters_off + share.gradients_host for share in solution.shares)
    assert off[1.0] < off[0.0]


def test_recomputing_takes_the_launches_of_a_forward_again() -> None:
    """Up to the last saved tensor it may be little arithmetic, but it is most of the launches."""
    longer = {}
    for launches in (0.0, 0.2, 1.0):
        model = replace(gpt(1600, 18, 0.3, samples=4), launches=launches)
        sizes = {"forward_flops": 2e9, "again_flops": 1e9, "kept_bytes": 1e6}
        groups = tuple(replace(group, **sizes) for group in model.groups)
        model = replace(model, groups=groups)
        asked = request_of(model, machine=H200, limits=LIMITS, activations=frozenset({"keep", "recompute"}))
        assert asked.chooses
        recomputed = [GroupShares(activations_recomputed=1.0)] * len(asked.costs)
        kept = [GroupShares()] * len(asked.costs)
        forward_s = sum(cost.forward_s for cost in asked.costs)
        longer[launches] = (simulate(asked, recomputed).step_s - simulate(asked, kept).step_s) / forward_s
    assert longer[0.0] == longer[0.2] == pytest.approx(0.5, rel=0.01)
    assert longer[1.0] == pytest.approx(LAUNCHED_AGAIN, rel=0.01)


def test_hooks_lengthen_a_pass_that_waits_for_launches() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    profile = profile_model(model, batch=torch.randn(2, 8), probe=False)
    seconds = {}
    for launches in (0.0, 0.5, 1.0):
        timed = TimedPass(0.1, 0.2, None, launches, {})
        seconds[launches] = _as_timed(profile, timed)
    assert seconds[0.0].forward_s == seconds[0.5].forward_s == 0.1 and seconds[0.5].backward_s == 0.2
    assert seconds[1.0].forward_s == pytest.approx(0.1 * (1 + HOOKS))
    assert seconds[1.0].backward_s == pytest.approx(0.2 * (1 + HOOKS))


def test_twice_the_samples_take_as_many_launches() -> None:
    model = replace(gpt(1600, 18, 0.3, samples=4), launches=0.8)
    assert model.with_twice_the_samples().launches == 0.4


def test_a_cpu_that_is_the_device_has_no_launches() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    assert profile_model(model, batch=torch.randn(2, 8), probe=True).launches == 0.0


def test_a_plan_says_that_the_device_waits_for_launches() -> None:
    settings, found, world = for_a_device(WIDE, 8)
    limits = {Tier.DEVICE: 40 * GIB, Tier.HOST: 64 * GIB}
    for launches, says in ((0.9, True), (0.5, False)):
        profile = replace(wide(found), launches=launches)
        plan = PlanSearch(settings, found, world).propose(limits, profile, H200)
        assert any("launches for 90 % of forward" in note for note in plan.notes) is says
