"""Plans whose first answer is over a limit by what the program does not know: working memory, or what it rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planning.machines import GIB, H200, closed_form, gpt, request_of
from zerostd.errors import PrepareError
from zerostd.planning import PlanRequest
from zerostd.planning.planner import Bytes, fitting, total
from zerostd.planning.searching import search
from zerostd.planning.solution import Solution
from zerostd.policy import Kind, Tier

MODEL = gpt(4096, 32, 0.7)  # 6.6 billion parameters
WORKING = 2 * GIB


def with_buffers(solution: Solution) -> Bytes:
    """Count working memory beside the closed form, which does not know it."""
    held = {tier: dict(kinds) for tier, kinds in closed_form(solution).items()}
    device = held.setdefault(Tier.DEVICE, {})
    device[Kind.BUFFERS] = device.get(Kind.BUFFERS, 0) + WORKING
    return held


def request(gibibytes: float, **options: object) -> PlanRequest:
    """Return a request for a device of this many GiB and a host, without a disk."""
    limits = {Tier.DEVICE: int(gibibytes * GIB), Tier.HOST: 100 * GIB}
    return request_of(MODEL, limits, machine=replace(H200, disk=None), waits_for_norm=True, **options)


@pytest.mark.parametrize("size", [24, 40, 60])
def test_without_a_disk_the_device_is_used_up_to_its_limit(size: int) -> None:
    best = fitting(request(size), with_buffers)[0]
    assert 0.95 * size * GIB < total(best.held, Tier.DEVICE) <= size * GIB


def test_working_memory_costs_no_more_than_its_bytes() -> None:
    seconds = [fitting(request(size), with_buffers)[0].seconds for size in (24, 32, 40, 60)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 0.8 * seconds[0]
    without = fitting(request(40 - WORKING / GIB), closed_form)[0].seconds
    assert seconds[2] == pytest.approx(without, rel=0.05)


def test_an_answer_that_the_program_counts_too_low_is_corrected() -> None:
    """Of each byte that the program sees on the device there is a hundredth more."""

    def count(solution: Solution) -> Bytes:
        held = {tier: dict(kinds) for tier, kinds in closed_form(solution).items()}
        for kind, size in held.get(Tier.DEVICE, {}).items():
            held[Tier.DEVICE][kind] = int(1.01 * size)
        return held

    best = fitting(request(40), count)[0]
    assert 0.9 * 40 * GIB < total(best.held, Tier.DEVICE) <= 40 * GIB


# Gradients that are not kept


def early(gibibytes: float, host: int) -> PlanRequest:
    limits = {Tier.DEVICE: int(gibibytes * GIB), Tier.HOST: host * GIB}
    return request_of(MODEL, limits)


def test_gradients_are_freed_only_where_nothing_else_fits() -> None:
    assert search(
        [early(45, 65)], closed_form, may_speculate=False, may_free=True
    ).best.solution.request.keeps_gradients
    with pytest.raises(PrepareError):
        search([early(30, 64)], closed_form, may_speculate=False)
    freed = search([early(30, 64)], closed_form, may_speculate=False, may_free=True).best
    assert not freed.solution.request.keeps_gradients
    assert Kind.GRADIENTS not in freed.held[Tier.DEVICE]


def test_gradients_are_freed_where_a_step_would_need_the_disk() -> None:
    asked = early(30, 64)
    asked = replace(asked, limits={**asked.limits, Tier.DISK: 60 * GIB})
    kept = search([asked], closed_form, may_speculate=False).best
    assert kept.solution.request.keeps_gradients and total(kept.held, Tier.DISK)
    freed = search([asked], closed_form, may_speculate=False, may_free=True).best
    assert not freed.solution.request.keeps_gradients and freed.seconds < kept.seconds


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"waits_for_norm": True}])
def test_several_passes_and_norms_keep_gradients(options: dict[str, object]) -> None:
    with pytest.raises(PrepareError):
        search([replace(early(30, 64), **options)], closed_form, may_speculate=False, may_free=True)


def test_updates_keep_pace_with_backward_where_gradients_are_freed() -> None:
    """States of all groups have the same shares: in the program's usual order, backward would wait for the groups that
    are streamed, and the link be idle while it is in the others."""
    freed = fitting(replace(early(30, 64), keeps_gradients=False), closed_form)[0]
    shares = [share.resident for share in freed.solution.shares]
    assert max(shares) - min(shares) < 1e-6
    usual = fitting(early(30, 80), closed_form)[0]  # with room for the gradients
    placed = [replace(share, gradients_host=0.0) for share in usual.solution.shares]
    assert max(share.resident for share in placed) - min(share.resident for share in placed) > 0.5
    assert freed.seconds < Solution(replace(usual.solution.request, keeps_gradients=False), placed).timeline.step_s
