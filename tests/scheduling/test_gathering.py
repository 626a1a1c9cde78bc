"""The gatherer: what it learns of the order of groups, and what it starts ahead."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zerostd
from scheduling.small_groups import Bench, Update
from zerostd.communication import Control
from zerostd.errors import MisuseError
from zerostd.monitoring.events import LoopPhase
from zerostd.parameters import Flat, Group, GroupState
from zerostd.policy import Tier
from zerostd.scheduling.gathering import Gatherer, largest_neighbours


def made(names: str, bench: Bench | None = None) -> tuple[Gatherer, list[Group]]:
    bench = bench or Bench()
    groups = [bench.group(name) for name in names]
    return Gatherer(tuple(groups), bench.wires, Control(bench.world)), groups


def forward(gatherer: Gatherer, order: list[Group]) -> list[list[str]]:
    """One pass; by group, which ones were on the device or on their way while it was needed."""
    seen = []
    gatherer.begin(LoopPhase.FORWARD)
    for group in order:
        gatherer.need(group, LoopPhase.FORWARD)
        assert group.state is GroupState.GATHERED
        seen.append([other.name for other in gatherer.groups if other.state is not GroupState.RELEASED])
        gatherer.release(group)
    gatherer.release_all(is_backward=False)
    return seen


def states(groups: list[Group]) -> list[GroupState]:
    return [group.state for group in groups]


def test_the_first_pass_gathers_on_demand_and_the_second_one_ahead() -> None:
    gatherer, groups = made("abc")
    assert forward(gatherer, groups) == [["a"], ["b"], ["c"]]
    assert forward(gatherer, groups) == [["a", "b"], ["b", "c"], ["c"]]
    assert states(groups) == [GroupState.RELEASED] * 3


def test_a_pass_begins_with_the_group_that_was_first_last_time() -> None:
    gatherer, groups = made("ab")
    gatherer.begin(LoopPhase.FORWARD)
    assert states(groups) == [GroupState.RELEASED] * 2
    forward(gatherer, [groups[1], groups[0]])
    gatherer.begin(LoopPhase.FORWARD)
    assert states(groups) == [GroupState.RELEASED, GroupState.GATHERING]


def test_nothing_is_started_ahead_if_groups_are_gathered_on_demand() -> None:
    gatherer, groups = made("abc")
    gatherer.gather_on_demand()
    forward(gatherer, groups)
    assert forward(gatherer, groups) == [["a"], ["b"], ["c"]]


def of_sizes(sizes: Sequence[int]) -> tuple[Gatherer, list[Group]]:
    """A root, which no forward here needs, and groups of these sizes; 0: one that stays on the device."""
    bench = Bench()
    groups = [bench.group("root")]
    for index, size in enumerate(sizes):
        tier = Tier.HOST if size else Tier.DEVICE
        groups.append(bench.group(str(index), rests_on=tier, shape=(max(1, size), 64)))
    return Gatherer(tuple(groups), bench.wires, Control(bench.world)), groups[1:]


def test_small_groups_are_gathered_as_far_ahead_as_large_neighbours_take() -> None:
    gatherer, groups = of_sizes([1, 1, 1, 1, 1, 4, 4, 1])  # the largest neighbours take 9
    forward(gatherer, groups)
    seen = ["".join(names) for names in forward(gatherer, groups)]
    assert seen == ["01234", "12345", "2345", "345", "45", "56", "67", "7"]


def test_equal_groups_are_gathered_one_ahead_and_two_in_a_forward_without_gradients() -> None:
    gatherer, groups = of_sizes([2] * 6)
    forward(gatherer, groups)
    assert [len(names) - 1 for names in forward(gatherer, groups)] == [1, 1, 1, 1, 1, 0]
    with torch.no_grad():
        forward(gatherer, groups)
        assert [len(names) - 1 for names in forward(gatherer, groups)] == [2] * 6


def test_groups_that_stay_on_the_device_do_not_hide_the_one_behind_them() -> None:
    gatherer, groups = of_sizes([1, 0, 0, 1])
    forward(gatherer, groups)
    assert forward(gatherer, groups)[0] == ["0", "1", "2", "3"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.booleans())
def test_gathered_groups_fit_into_the_buffers_that_are_counted(sizes: list[int], reverses: bool) -> None:
    gatherer, groups = of_sizes(sizes)
    order = groups[::-1] if reverses else groups
    room = largest_neighbours([group.gathered_bytes for group in groups], repeats=False)
    for _ in range(2):
        gatherer.begin(LoopPhase.FORWARD)
        for group, before in zip(order, [None, *order], strict=False):
            gatherer.need(group, LoopPhase.FORWARD)
            if before is not None:  # it is there until its last gradients are
                gatherer.release(before)
            assert sum(each.gathered_bytes for each in groups if each.state is not GroupState.RELEASED) <= room
        gatherer.release_all(is_backward=False)


def test_a_group_expected_wrongly_is_released_at_the_end_of_the_pass() -> None:
    gatherer, groups = made("abc")
    forward(gatherer, groups)
    a, b, c = groups
    assert forward(gatherer, [a, c]) == [["a", "b"], ["b", "c"]]
    assert states(groups) == [GroupState.RELEASED] * 3
    assert forward(gatherer, [a, c]) == [["a", "c"], ["c"]]  # learnt
    assert gatherer.order.in_forward(groups) == [a, c, b]


def test_forward_and_backward_have_orders_of_their_own() -> None:
    gatherer, groups = made("ab")
    forward(gatherer, groups)
    gatherer.begin(LoopPhase.BACKWARD)
    assert states(groups) == [GroupState.RELEASED] * 2  # nothing is known of backward
    for group in reversed(groups):
        gatherer.need(group, LoopPhase.BACKWARD)
    assert gatherer.order.in_forward(groups) == groups


def test_a_group_whose_update_is_not_done_is_not_started_ahead() -> None:
    gatherer, groups = made("ab")
    forward(gatherer, groups)
    update = Update()
    groups[1].add_update(update)
    gatherer.need(groups[0], LoopPhase.FORWARD)
    assert groups[1].state is GroupState.RELEASED and update.num_waits == 0
    gatherer.need(groups[1], LoopPhase.FORWARD)
    assert update.num_waits == 1


def test_borrowed_groups_are_gathered_with_the_one_that_reads_them() -> None:
    gatherer, groups = made("ab")
    groups[0].borrowed[groups[1].name] = groups[1]
    gatherer.need(groups[0], LoopPhase.FORWARD)
    assert states(groups) == [GroupState.GATHERED] * 2


def test_every_gather_that_was_started_is_in_the_sequence_ranks_compare() -> None:
    gatherer, groups = made("ab")
    forward(gatherer, groups)
    gatherer.gather(groups[0])
    gatherer.gather(groups[0])  # it is: nothing to do
    assert gatherer.sequence == ["a", "b", "a"]


def test_a_pinned_group_refuses_an_update() -> None:
    gatherer, groups = made("a")
    gatherer.gather(groups[0])
    with groups[0].pinned(), pytest.raises(MisuseError, match="leave the context before the step"):
        gatherer.renew(groups[0])
    gatherer.renew(groups[0])
    assert groups[0].state is GroupState.RELEASED


def test_renewing_a_group_that_stays_on_the_device_waits_for_its_updates_at_the_next_use() -> None:
    bench = Bench()
    group = bench.group("a", rests_on=Tier.DEVICE)
    gatherer = Gatherer((group,), bench.wires, Control(bench.world))
    gatherer.renew(group)
    assert group.state is GroupState.GATHERED  # nothing was updated
    update = Update()
    group.add_update(update)
    gatherer.renew(group)
    assert group.state is GroupState.GATHERING and update.num_waits == 0
    gatherer.wait_all()
    assert group.state is GroupState.GATHERED and update.num_waits == 1


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device with room for so many gathered groups, the only entry; all others raise what CUDA's allocator does."""
    left = [100]
    allocate = Flat.allocate
    free = Flat.free

    def take(flat: Flat) -> None:
        if flat.full.untyped_storage().nbytes() == 0:
            if left[0] == 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            left[0] -= 1
        allocate(flat)

    def give(flat: Flat) -> None:
        left[0] += flat.full.untyped_storage().nbytes() > 0
        free(flat)

    monkeypatch.setattr(Flat, "allocate", take)
    monkeypatch.setattr(Flat, "free", give)
    return left


def test_a_gather_ahead_that_does_not_fit_is_left_and_none_is_tried_again(room: list[int]) -> None:
    gatherer, groups = made("abc")
    forward(gatherer, groups)
    room[0] = 1
    assert forward(gatherer, groups) == [["a"], ["b"], ["c"]]
    assert not gatherer.gathers_ahead
    assert gatherer.wires.ledger.retries.counts == {"gathering: out of device memory": 1}
    assert states(groups) == [GroupState.RELEASED] * 3 and room == [1]


def test_a_group_that_is_needed_takes_the_room_of_those_gathered_ahead(room: list[int]) -> None:
    gatherer, groups = made("abc")
    forward(gatherer, groups)
    room[0] = 2
    gatherer.begin(LoopPhase.FORWARD)
    gatherer.need(groups[0], LoopPhase.FORWARD)
    assert states(groups) == [GroupState.GATHERED, GroupState.GATHERING, GroupState.RELEASED]
    gatherer.gather(groups[2])  # another one than expected
    assert states(groups) == [GroupState.GATHERED, GroupState.RELEASED, GroupState.GATHERED]
    assert not gatherer.gathers_ahead


def test_a_group_that_never_fits_is_an_error_that_says_what_is_held(room: list[int]) -> None:
    gatherer, groups = made("ab")
    room[0] = 0
    with pytest.raises(torch.OutOfMemoryError, match="zerostd held at that moment"):
        gatherer.gather(groups[0])
    room[0] = 1
    gatherer.gather(groups[0])
    assert groups[0].state is GroupState.GATHERED


def short_on_rank_0(rank: int, short_at: int | None) -> tuple[list[float], bool, dict[str, int]]:
    """Train at stage 3; in step 2 the device of rank 0 refuses one gather."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), stage=3, groups=["*"])
    allocate = Flat.allocate
    count = itertools.count()

    def refuse(flat: Flat) -> None:
        if next(count) == short_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        allocate(flat)

    losses = []
    for step in range(5):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0 and step == 2:
                patch.setattr(Flat, "allocate", refuse)
            loss = model(torch.ones(2, 8) * (step + rank)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    runtime = model.__dict__["_zerostd"]
    result = (losses, runtime.gatherer.gathers_ahead, zerostd.memory(model).retries)
    zerostd.release(model)
    return result


@pytest.mark.parametrize("short_at", [1, 5])
def test_ranks_stop_gathering_ahead_together(ranks: Any, short_at: int) -> None:
    plain = ranks(2, short_on_rank_0, None)
    short = ranks(2, short_on_rank_0, short_at)
    assert [losses for losses, _, _ in short] == [losses for losses, _, _ in plain]
    assert [ahead for _, ahead, _ in plain] == [True] * 2 and [ahead for _, ahead, _ in short] == [False] * 2
    assert [retries for _, _, retries in short] == [{"gathering: out of device memory": 1}, {}]
