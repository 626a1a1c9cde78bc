"""Portions: every element of every region is in one of them, tiers are filled from the front of the model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerostd.policy import Route, Tier
from zerostd.sharding.layout import (
    UNIT,
    assign_tiers,
    cut_by_shares,
    cut_portions,
    cuts_at_shares,
    default_cpu_share,
    shares_off,
)

numels = st.lists(st.integers(0, 20 * UNIT), min_size=1, max_size=6)
weights = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)


def shares_of(weights: list[int]) -> dict[Tier, float]:
    return {tier: weight / sum(weights) for tier, weight in zip(Tier, weights, strict=True)}


@given(numels, weights, st.floats(0.0, 1.0))
def test_portions_cover_each_region_without_gaps_and_nearest_tiers_come_first(numels, weights, cpu_share):
    regions = cut_portions(numels, shares_of(weights), cpu_share=cpu_share)
    tiers = []
    for numel, portions in zip(numels, regions, strict=True):
        ends = [0, *(portion.stop for portion in portions)]
        assert [portion.start for portion in portions] == ends[:-1] and ends[-1] == numel
        assert all(portion.numel > 0 for portion in portions)
        assert all((portion.tier is Tier.DEVICE) == (portion.route is Route.RESIDENT) for portion in portions)
        tiers += [portion.tier for portion in portions]
    assert tiers == sorted(tiers, key=list(Tier).index)


@given(numels, weights)
def test_a_tier_holds_its_share_up_to_rounding(numels, weights):
    shares = shares_of(weights)
    regions = cut_portions(numels, shares, cpu_share=1.0)
    for tier in Tier:
        held = sum(portion.numel for portions in regions for portion in portions if portion.tier is tier)
        assert abs(held - shares[tier] * sum(numels)) <= 2 * UNIT
        assert abs(held - shares[tier] * sum(numels)) <= 0.04 * sum(numels) + 2  # of small models too


@given(st.integers(0, 20 * UNIT), st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any))
def test_shares_of_one_region_are_laid_end_to_end(numel, weights):
    shares = [(Tier.HOST, Route.CPU, weight / sum(weights)) for weight in weights]
    portions = cut_by_shares(numel, shares)
    ends = [0, *(portion.stop for portion in portions)]
    assert [portion.start for portion in portions] == ends[:-1] and ends[-1] == numel


def test_whole_buffers_go_to_the_tier_that_their_middle_is_in():
    shares = {Tier.DEVICE: 0.5, Tier.DISK: 0.5}
    assert assign_tiers([4, 4, 4, 4], shares) == [Tier.DEVICE, Tier.DEVICE, Tier.DISK, Tier.DISK]
    assert assign_tiers([6, 10], shares) == [Tier.DEVICE, Tier.DISK]
    assert assign_tiers([10, 6], shares) == [Tier.DEVICE, Tier.DISK]


def test_buffers_are_cut_between_the_parameters_that_are_nearest_to_the_shares():
    halves = {Tier.DEVICE: 0.5, Tier.HOST: 0.5}
    assert cuts_at_shares([[4, 1, 4, 1]], halves) == [[2]]
    assert cuts_at_shares([[2, 2], [2, 2, 2, 2]], halves) == [[], [1]]
    assert cuts_at_shares([[9, 1]], halves) == [[1]]
    quarters = {Tier.DEVICE: 0.25, Tier.HOST: 0.25, Tier.DISK: 0.5}
    assert cuts_at_shares([[1] * 8], quarters) == [[2, 4]]


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=8), min_size=1, max_size=5), weights)
def test_cut_buffers_miss_a_share_by_a_parameter_at_most(sizes, weights):
    shares = {tier: share for tier, share in shares_of(weights).items() if share}
    cut = []
    for row, ends in zip(sizes, cuts_at_shares(sizes, shares), strict=True):
        cut += [sum(row[start:end]) for start, end in zip([0, *ends], [*ends, len(row)], strict=True)]
    largest = max(map(max, sizes)) / sum(map(sum, sizes))
    off = shares_off(cut, assign_tiers(cut, shares), shares)
    assert all(abs(difference) <= largest + 1e-9 for difference in off.values())


@pytest.mark.parametrize(("num_threads", "off", "share"), [(14, 0.0, 0.55), (14, 1.0, 0.75)])
def test_default_share_of_the_cpu_is_the_fastest_that_was_measured(num_threads, off, share):
    found = default_cpu_share(num_threads, has_link=True, parameters_off=off, gradients_off=off)
    assert found == pytest.approx(share, abs=0.02)


def test_without_a_link_the_cpu_takes_all():
    assert default_cpu_share(1, has_link=False) == 1.0
