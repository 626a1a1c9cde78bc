"""A group by itself: its states, the moves that are refused, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from scheduling.small_groups import SHAPE, Bench, Update, parameter_of, write
from zerostd.parameters import Group, GroupState
from zerostd.parameters.lending import get_data
from zerostd.policy import Kind, Tier


def gather(group: Group) -> None:
    group.start_gather()
    group.wait_gather()


def test_released_group_holds_no_device_memory() -> None:
    bench = Bench()
    group = bench.group()
    assert group.state is GroupState.RELEASED
    assert group.flats[0].full.untyped_storage().nbytes() == 0 and bench.ledger.now[Tier.DEVICE, Kind.BUFFERS] == 0
    assert parameter_of(group).shape == SHAPE and get_data(parameter_of(group)).isnan().all()
    gather(group)
    assert bench.ledger.now[Tier.DEVICE, Kind.BUFFERS] == group.flats[0].full.nbytes
    assert torch.equal(parameter_of(group), torch.ones(SHAPE))
    group.release()
    assert bench.ledger.now[Tier.DEVICE, Kind.BUFFERS] == 0 and get_data(parameter_of(group)).isnan().all()


def test_parameters_show_values_only_when_the_gather_was_waited_for() -> None:
    group = Bench().group()
    group.start_gather()
    assert group.state is GroupState.GATHERING and group.gathers and get_data(parameter_of(group)).isnan().all()
    group.wait_gather()
    assert group.state is GroupState.GATHERED and not group.gathers and not get_data(parameter_of(group)).isnan().any()


REFUSED: list[tuple[GroupState, Callable[[Group], None]]] = [
    (GroupState.RELEASED, Group.wait_gather),
    (GroupState.RELEASED, Group.release),
    (GroupState.GATHERING, Group.start_gather),
    (GroupState.GATHERING, Group.release),
    (GroupState.GATHERED, Group.start_gather),
    (GroupState.GATHERED, Group.wait_gather),
    (GroupState.GATHERED, Group.expire),
]


@pytest.mark.parametrize(("state", "move"), REFUSED)
def test_illegal_move_is_refused_and_changes_nothing(state: GroupState, move: Callable[[Group], None]) -> None:
    group = Bench().group("blocks.3")
    if state is not GroupState.RELEASED:
        group.start_gather()
    if state is GroupState.GATHERED:
        group.wait_gather()
    with pytest.raises(AssertionError, match=r"blocks\.3"):
        move(group)
    assert group.state is state and not group.num_pins


def test_group_that_rests_on_the_device_has_nothing_to_release() -> None:
    group = Bench().group(rests_on=Tier.DEVICE)
    assert group.state is GroupState.GATHERED and not group.is_releasable
    with pytest.raises(AssertionError, match="nothing to give back"):
        group.release()


def test_gather_waits_for_updates_and_sees_their_values() -> None:
    group = Bench().group()
    update = Update(lambda: write(group, 7.0))
    group.add_update(update)
    group.start_gather()
    assert update.num_waits == 1 and not group.updates
    group.wait_gather()
    assert torch.equal(parameter_of(group), torch.full(SHAPE, 7.0))


def test_expired_group_shows_nan_until_its_update_is_done() -> None:
    group = Bench().group(rests_on=Tier.DEVICE)
    group.add_update(Update(lambda: write(group, 5.0)))
    group.expire()
    assert group.state is GroupState.GATHERING and not group.gathers and get_data(parameter_of(group)).isnan().all()
    group.wait_gather()
    assert torch.equal(parameter_of(group), torch.full(SHAPE, 5.0))


def test_pins_nest_and_end_with_an_exception() -> None:
    group = Bench().group()
    gather(group)
    with pytest.raises(ZeroDivisionError), group.pinned():
        with group.pinned():
            pass
        assert group.num_pins
        raise ZeroDivisionError
    assert not group.num_pins


def test_group_waits_for_whoever_reads_its_masters() -> None:
    group = Bench().group()
    group.wait_readers()  # nobody reads
    readers = [Update(), Update()]
    for reader in readers:
        group.add_reader(reader)
    group.wait_readers()
    assert [reader.num_waits for reader in readers] == [1, 1]


def test_backward_has_passed_when_the_inputs_of_every_forward_have_gradients() -> None:
    group = Bench().group()
    assert not group.is_passed  # no forward had inputs that get one: there is no sign
    forwards = [Update(), Update(), Update()]
    for forward in forwards:
        group.await_inputs(forward)
    group.inputs_arrived(forwards[0])
    assert not group.is_passed
    group.inputs_arrived(forwards[1])
    assert not group.is_passed
    group.end_pass(is_backward=False)
    assert not group.is_passed  # the end of a forward changes nothing
    del forward, forwards  # the graph of the third one is gone: it gets no backward
    assert group.is_passed
    group.begin_backward()
    group.end_pass(is_backward=True)
    assert not group.is_passed and not group.in_backward


def test_borrowed_groups_are_needed_once_each() -> None:
    bench = Bench()
    group, lender = bench.group("reader"), bench.group("lender")
    group.borrowed[lender.name] = lender
    group.borrowed[lender.name] = lender
    assert group.needed == (group, lender) and lender.needed == (lender,)
