"""Backward passes: which one is the last of a step, and how far the running one has come."""

from __future__ import annotations

import pytest
import torch

from scheduling.small_groups import SHAPE, Bench
from scheduling.test_reducing import trained
from zerostd.errors import MisuseError
from zerostd.parameters import Group
from zerostd.scheduling.backward import BackwardPass, PassCounter


def groups_of(num: int) -> list[Group]:
    bench = Bench()
    return [bench.group(f"g{index}", trains=True) for index in range(num)]


def complete(running: BackwardPass, group: Group) -> None:
    running.gradients[group].take(trained(group), torch.ones(SHAPE), adds=False)


def test_the_last_pass_is_guessed_from_the_step_before() -> None:
    passes = PassCounter(None)
    assert passes.is_last
    for _ in range(3):
        passes.num_done += 1
    passes.step()
    found = []
    for _ in range(4):
        found.append(passes.is_last)
        passes.num_done += 1
    assert found == [False, False, True, False] and passes.num_steps == 1


def test_the_last_pass_is_known_where_the_user_has_said_so() -> None:
    passes = PassCounter(2)
    assert not passes.is_last
    passes.num_done += 1
    assert passes.is_last
    passes.step()
    assert not passes.is_last and passes.num_done == 0


def test_a_step_without_a_pass_counts_as_one_of_one() -> None:
    passes = PassCounter(None)
    passes.step()
    assert passes.num_before == 1 and passes.is_last


def test_a_pass_after_updates_have_begun_is_refused() -> None:
    passes = PassCounter(2)
    passes.num_done = 2
    passes.check(updates_began=False)
    with pytest.raises(MisuseError, match=r"backward pass 3 since the last step, but prepare\(accumulate=2\)"):
        passes.check(updates_began=True)


def test_the_number_of_passes_is_certain_when_a_step_has_had_it() -> None:
    passes = PassCounter(2)
    assert not passes.is_certain
    for num_done in (1, 2, 3, 2):
        passes.num_done = num_done
        passes.step()
        assert passes.is_certain == (num_done == 2)
    assert not PassCounter(None).is_certain


def test_groups_are_sent_in_the_shared_order_as_far_as_they_are_complete() -> None:
    first, second, third = order = groups_of(3)
    running = BackwardPass(order)
    complete(running, second)
    assert running.next_to_send(only_complete=True) is None  # the first one is not complete
    complete(running, first)
    sent = [running.next_to_send(only_complete=True) for _ in range(3)]
    assert [gradients and gradients.group for gradients in sent] == [first, second, None]
    last = running.next_to_send(only_complete=False)
    assert last is not None and last.group is third and last.num_missing == 1
    assert running.next_to_send(only_complete=False) is None


def test_a_group_is_ready_once_when_it_has_landed_and_backward_has_passed_it() -> None:
    (group,) = order = groups_of(1)
    running = BackwardPass(order)
    running.landed.add(group)
    assert not running.report(group) and group not in running.reported
    running.passed.add(group)
    assert running.report(group) and not running.report(group) and group in running.reported


def test_a_group_in_which_nothing_trains_is_complete() -> None:
    running = BackwardPass(groups_of(1))
    assert running.is_complete(Bench().group()) and not running.is_complete(next(iter(running.gradients)))
