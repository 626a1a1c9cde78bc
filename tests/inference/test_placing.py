"""Which groups stay on the device: as many bytes as fit, spread over the model. Pure arithmetic."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from zerostd.planning.streaming import place_groups, spread
from zerostd.policy import Tier

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(SIZES, st.integers(0, 800))
def test_what_is_taken_fits_and_nothing_else_would(sizes: list[int], room: int) -> None:
    groups = {str(index): size for index, size in enumerate(sizes)}
    taken = spread(groups, room)
    left = room - sum(groups[name] for name in taken)
    assert left >= 0
    assert all(groups[name] > left for name in groups.keys() - taken)


def test_groups_are_spread_over_the_model() -> None:
    groups = {str(index): 10 for index in range(32)}
    taken = sorted(int(name) for name in spread(groups, 80))
    assert len(taken) == 8
    assert max(b - a for a, b in itertools.pairwise(taken)) <= 5


@given(SIZES, st.integers(0, 300), st.integers(0, 300))
def test_near_tiers_are_filled_first(sizes: list[int], device: int, host: int) -> None:
    groups = {"root": 1} | {str(index): size for index, size in enumerate(sizes)}
    tiers = place_groups(groups, {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: 0})
    held = {tier: sum(size for name, size in groups.items() if tiers[name] is tier) for tier in Tier}
    assert tiers["root"] is Tier.DEVICE
    assert held[Tier.DEVICE] <= max(1, device) and held[Tier.HOST] <= host
    on_disk = [size for name, size in groups.items() if tiers[name] is Tier.DISK]
    assert all(size > host - held[Tier.HOST] and size > device - held[Tier.DEVICE] for size in on_disk)
